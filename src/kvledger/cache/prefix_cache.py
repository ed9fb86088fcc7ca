"""The prefix cache: which block holds which tokens, found by a chain of hashes. Knows no sequences and no tensors.

Digest i stands for tokens [0, (i + 1) × block_size) of a sequence:

    digest[i] = SHA-256(digest[i − 1] + tokens of block i),    digest[−1] = SHA-256(namespace + salt)

SHA-256 is collision resistant, so an equal digest means equal tokens and a hit needs no second look; a salt keeps the
prefixes of one tenant from another (and from being probed by timing). Only full blocks are entered. A block is keyed
by (digest, layer group): groups keep different layers of the same tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvledger.cache.block_pool import BlockPool
from kvledger.spec.kv import LayerGroup

Key = tuple[bytes, int]  # digest, index of the layer group


def root_digest(salt: bytes = b"", namespace: bytes = b"") -> bytes:
    """The digest before the first block. Lengths are hashed too, so that (`ab`, `c`) and (`a`, `bc`) differ."""
    return hashlib.sha256(b"%d:%d:" % (len(namespace), len(salt)) + namespace + salt).digest()


def extend_chain(digests: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append to `digests` until there is one for every full block of `token_ids`."""
    for index in range(len(digests), len(token_ids) // block_size):
        tokens = array("q", token_ids[index * block_size : (index + 1) * block_size])
        parent = digests[-1] if index else root
        digests.append(hashlib.sha256(parent + tokens.tobytes()).digest())


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest usable prefix: `tables` per group (−1 where a window needs no block), nothing taken yet."""

    tables: tuple[list[int], ...]
    num_idle: int = 0  # of the blocks found, those without a holder: sharing them uses free blocks up
    loads: tuple[tuple[int, int, int], ...] = ()  # (group, index in its table, slot) of blocks found in another tier

    @property
    def num_blocks(self) -> int:
        """Blocks of tokens found: positions [0, num_blocks × block_size) need not be computed."""
        return len(self.tables[0])

    @property
    def num_held(self) -> int:
        """Blocks found over all groups."""
        return sum(block >= 0 for table in self.tables for block in table)


class PrefixCache:
    """Finds blocks by content. `elsewhere(key)` is asked for the slot of a block that the pool does not have."""

    def __init__(
        self,
        pool: BlockPool,
        groups: Sequence[LayerGroup],
        enabled: bool = True,
        elsewhere: Callable[[Key], int | None] = lambda key: None,
    ) -> None:
        self.pool, self.groups, self.enabled, self.elsewhere = pool, tuple(groups), enabled, elsewhere
        self._keeping_all = [i for i, g in enumerate(self.groups) if g.spec.first_kept(1 << 40) == 0]
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, digests: Sequence[bytes]) -> PrefixMatch:
        """The longest prefix of which every group still has the blocks that later queries read. Takes nothing."""
        length = self._longest(digests) if self.enabled else 0
        tables = tuple(self._table(g, digests, length) for g in range(len(self.groups)))
        idle = {block for table in tables for block in table if block >= 0 and self.pool.is_idle(block)}
        return PrefixMatch(tables, len(idle), tuple(self._loads(tables, digests)) if length else ())

    def count(self, queried_tokens: int, hit_tokens: int) -> None:
        """Book one look-up; the caller leaves out what a preempted sequence finds again."""
        self.num_queried_tokens += queried_tokens
        self.num_hit_tokens += hit_tokens

    def enter(self, digest: bytes, group: int, block: int) -> None:
        """A full, computed, used block may be found from now on. Equal content entered earlier stays the entry."""
        key = (digest, group)
        if not self.enabled or key in self._block_of or block in self._key_of:
            return
        self._block_of[key] = block
        self._key_of[block] = key
        self.pool.keep_when_free(block)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Meanwhile nothing is found, entered or counted: for requests that nobody sent."""
        enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = enabled

    def clear(self) -> None:
        """Forget everything; blocks in use stay in use."""
        for block in self._key_of:
            self.pool.forget(block)
        self._block_of.clear()
        self._key_of.clear()

    def check(self) -> None:
        """Both directions agree. AssertionError otherwise."""
        assert len(self._block_of) == len(self._key_of), (len(self._block_of), len(self._key_of))
        for key, block in self._block_of.items():
            assert self._key_of.get(block) == key, f"block {block} is entered under two keys"
            assert self.pool.refs(block) or self.pool.is_idle(block), f"entered block {block} is blank"

    def _longest(self, digests: Sequence[bytes]) -> int:
        """Largest n such that each group has all blocks of [first_kept(n tokens), n tokens).

        One pass: `runs[g]` counts the blocks found in a row up to here.
        """
        best, runs = 0, [0] * len(self.groups)
        for index, digest in enumerate(digests):
            for g in range(len(self.groups)):
                runs[g] = runs[g] + 1 if self._has((digest, g)) else 0
            if any(runs[g] <= index for g in self._keeping_all):
                break  # these need every block; the others only their last ones
            if all(runs[g] >= index + 1 - self._first_block(g, index + 1) for g in range(len(self.groups))):
                best = index + 1
        return best

    def _first_block(self, group: int, num_blocks: int) -> int:
        """First block that a query after `num_blocks` blocks may read."""
        g = self.groups[group]
        return g.spec.first_kept(num_blocks * g.block_size) // g.block_size

    def _table(self, group: int, digests: Sequence[bytes], length: int) -> list[int]:
        first = self._first_block(group, length) if length else 0
        return [-1] * first + [self._block_of.get((digests[i], group), -1) for i in range(first, length)]

    def _has(self, key: Key) -> bool:
        return key in self._block_of or self.elsewhere(key) is not None

    def _loads(self, tables: tuple[list[int], ...], digests: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
        """Blocks that are needed and only elsewhere."""
        for group, table in enumerate(tables):
            for index in range(self._first_block(group, len(table)), len(table)):
                if table[index] < 0 and (slot := self.elsewhere((digests[index], group))) is not None:
                    yield group, index, slot

    def _evicted(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
