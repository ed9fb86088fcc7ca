"""The pool: equal blocks, who holds them, and which one is given away next. Knows no tokens and no tensors.

A block is *used* (one or more holders), *idle* (no holder, but its content is still in the prefix cache and may be
found again) or *blank* (no holder, nothing worth keeping). Blank blocks are handed out first, then idle ones, the
least recently used first. Every operation is O(1).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """`num_blocks` blocks with reference counts. `on_evict(block)` is called before an idle block changes hands."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block: None) -> None:
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self.on_evict = on_evict
        self._refs = [0] * num_blocks
        self._num_shared = 0
        self._is_cached = bytearray(num_blocks)
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is still in the CPU's caches
        self._idle: OrderedDict[int, None] = OrderedDict()  # oldest first

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out: blank and idle."""
        return len(self._blank) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Blocks without a holder whose content may still be found."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks with at least one holder; shared ones count once."""
        return self.num_blocks - self.num_free

    @property
    def num_shared(self) -> int:
        """Blocks with more than one holder."""
        return self._num_shared

    def refs(self, block: int) -> int:
        """How many hold the block."""
        return self._refs[block]

    def is_idle(self, block: int) -> bool:
        return block in self._idle

    def take(self) -> int:
        """A block with one holder; there must be a free one. With none blank, the least recently used idle one goes."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self.on_evict(block)
            self._is_cached[block] = 0
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder; an idle block becomes used again. The block must be used or idle."""
        if not self._refs[block]:
            del self._idle[block]
        self._refs[block] += 1
        self._num_shared += self._refs[block] == 2

    def release(self, block: int) -> None:
        """One holder fewer. With the last one the block becomes idle if cached (as the newest), else blank."""
        assert self._refs[block] > 0, f"block {block} has no holder"
        self._refs[block] -= 1
        self._num_shared -= self._refs[block] == 1
        if self._refs[block]:
            return
        if self._is_cached[block]:
            self._idle[block] = None
        else:
            self._blank.append(block)

    def keep_when_free(self, block: int) -> None:
        """The block's content is now in the prefix cache. It must be used."""
        assert self._refs[block] > 0, f"block {block} has no holder"
        self._is_cached[block] = 1

    def forget(self, block: int) -> None:
        """The block's content is no longer in the prefix cache."""
        self._is_cached[block] = 0
        if block in self._idle:
            del self._idle[block]
            self._blank.append(block)

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Recount from `tables`, the block lists of all holders (−1: no block). AssertionError when one is lost."""
        held = Counter(block for table in tables for block in table if block >= 0)
        blank, idle = set(self._blank), set(self._idle)
        assert len(blank) == len(self._blank), "a block is twice in the blank list"
        assert not blank & idle, f"blocks both blank and idle: {sorted(blank & idle)[:5]}"
        for block in range(self.num_blocks):
            assert self._refs[block] == held[block], f"block {block}: {self._refs[block]} ≠ {held[block]} holders"
            is_free = block in blank or block in idle
            assert is_free == (held[block] == 0), f"block {block}: free is {is_free} with {held[block]} holders"
            assert block not in blank or not self._is_cached[block], f"blank block {block} is marked cached"
        assert all(self._is_cached[block] for block in idle), "an idle block is not marked cached"
        assert self._num_shared == sum(count > 1 for count in held.values()), "miscounted shared blocks"
