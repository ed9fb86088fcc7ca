"""The books of the pool at one moment: where every block is and what is wasted. Frozen; computed, never kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvledger.cache.block_pool import BlockPool
from kvledger.plan.pool import PoolPlan
from kvledger.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Books:
    """Blocks by state, and token places taken against tokens stored.

    `num_used` blocks have a holder (a shared one counts once), `num_reserved` more are promised to running sequences
    by a reserving policy, `num_idle` hold prefixes nobody uses now, `num_blank` hold nothing. `num_places` are token
    places in used and reserved blocks of one group, `num_stored` of them hold a token of a running sequence.
    """

    num_blocks: int
    block_bytes: int
    num_used: int
    num_reserved: int
    num_idle: int
    num_blank: int
    num_shared: int
    num_places: int
    num_stored: int

    @property
    def waste(self) -> float:
        """Share of the memory taken that no running sequence can read: 0 with nothing taken."""
        return 1.0 - self.num_stored / self.num_places if self.num_places else 0.0

    @property
    def usage(self) -> float:
        """Share of the pool's blocks that are used."""
        return self.num_used / self.num_blocks

    @staticmethod
    def of(plan: PoolPlan, pool: BlockPool, holders: Iterable[Sequence], num_reserved: int) -> Books:
        """Count. A shared block's tokens count once, as its places do."""
        size, groups = plan.layout.block_size, len(plan.layout.groups)
        is_simple = groups == 1 and not pool.num_shared and not plan.layout.groups[0].spec.first_kept(1 << 40)
        stored = sum(s.num_computed for s in holders) if is_simple else _stored(holders, size) // groups
        return Books(
            plan.num_blocks, plan.layout.block_bytes, pool.num_used, num_reserved, pool.num_idle,
            pool.num_free - pool.num_idle, pool.num_shared, (pool.num_used + num_reserved) * size // groups, stored,
        )  # fmt: skip


def _stored(holders: Iterable[Sequence], block_size: int) -> int:
    """Tokens in the blocks of all groups, each block counted once."""
    stored: dict[int, int] = {}
    for seq in holders:
        for table in seq.tables:
            for index, block in enumerate(table):
                filled = min(block_size, max(0, seq.num_computed - index * block_size))
                stored[block] = max(stored.get(block, 0), filled)
    stored.pop(-1, None)
    return sum(stored.values())
