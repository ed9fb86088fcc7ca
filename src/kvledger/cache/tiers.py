"""Where blocks go beyond the pool: host slots for preempted sequences, disk records for prefixes. Bookkeeping only.

Slots of both are numbered in one row, host first, so that a Step's moves need no third number. The executor holds the
bytes of host slots; disk records are `cache.disk`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvledger.cache.block_pool import BlockPool
from kvledger.cache.ledger import Tables
from kvledger.cache.prefix_cache import Key

if TYPE_CHECKING:
    from kvledger.cache.disk import DiskTier

PrefersSwap = Callable[[int, int], bool]  # (tokens to recompute, blocks to move twice) → moving is cheaper


@dataclass(frozen=True, slots=True)
class TierPlan:
    """What tiers there are. `prefers_swap` chooses between moving and recomputing a preempted sequence."""

    num_host_slots: int = 0
    disk: DiskTier | None = None
    prefers_swap: PrefersSwap = lambda tokens, blocks: True


class Tiers:
    """Free host slots, and the way from a content key to a disk slot."""

    def __init__(self, plan: TierPlan) -> None:
        self.plan, self.disk = plan, plan.disk
        self._host = BlockPool(plan.num_host_slots) if plan.num_host_slots else None
        self._first_disk_slot = plan.num_host_slots

    @property
    def num_host_used(self) -> int:
        """Host slots that preempted sequences hold."""
        return 0 if self._host is None else self._host.num_used

    def can_swap(self, num_tokens: int, num_blocks: int) -> bool:
        """There is room for the blocks, and moving them costs less than recomputing the tokens."""
        has_room = self._host is not None and self._host.num_free >= num_blocks > 0
        return has_room and self.plan.prefers_swap(num_tokens, num_blocks)

    def take_slots(self, tables: Tables) -> Tables:
        """Host slots in the shape of the tables, −1 where there is no block."""
        host = self._host
        assert host is not None
        return tuple([host.take() if block >= 0 else -1 for block in table] for table in tables)

    def release_slots(self, slots: Tables) -> None:
        """The host slots are free again."""
        for table in slots:
            for slot in table:
                if slot >= 0 and self._host is not None:
                    self._host.release(slot)

    def find(self, key: Key) -> int | None:
        """The slot of a prefix block on disk."""
        found = None if self.disk is None else self.disk.find(key)
        return None if found is None else self._first_disk_slot + found

    def claim(self, key: Key) -> int | None:
        """A slot to save a prefix block to, if it is not on disk yet."""
        found = None if self.disk is None else self.disk.claim(key)
        return None if found is None else self._first_disk_slot + found

    def close(self) -> None:
        """Give up the disk's file."""
        if self.disk is not None:
            self.disk.close()

    def check(self, held: list[Tables]) -> None:
        """Recount the host slots. AssertionError when one is lost."""
        if self._host is not None:
            self._host.check(table for tables in held for table in tables)
