"""The ledger of blocks: block tables over one pool, for every group of layers. Knows no sequences, only their tables.

A *table* lists a sequence's blocks of one group: block i holds positions [i × block_size, (i + 1) × block_size), −1
where a window has passed and the block was given back. All tables of a sequence have the same length.
"""

from __future__ import annotations

from kvledger.cache.block_pool import BlockPool
from kvledger.errors import UnsupportedModel
from kvledger.spec.kv import KVLayout, StateKV
from kvledger.units import cdiv

Tables = tuple[list[int], ...]


class BlockLedger:
    """Takes, shares, copies and returns the blocks of tables. Raises UnsupportedModel for state groups."""

    def __init__(self, layout: KVLayout, pool: BlockPool) -> None:
        if any(isinstance(g.spec, StateKV) for g in layout.groups):
            raise UnsupportedModel("state-space layers can be planned but not run: their state is not kept in blocks")
        self.layout, self.pool, self.block_size = layout, pool, layout.block_size
        assert all(g.block_size == self.block_size for g in layout.groups)
        self._moving = [g for g in range(len(layout.groups)) if layout.groups[g].spec.first_kept(1 << 40)]

    @property
    def num_groups(self) -> int:
        return len(self.layout.groups)

    def empty(self) -> Tables:
        """Tables of a sequence that holds nothing."""
        return tuple([] for _ in self.layout.groups)

    def held(self, tables: Tables) -> int:
        """Blocks in the tables; shared ones count in full."""
        if not self._moving:
            return len(tables) * len(tables[0]) if tables else 0
        return sum(block >= 0 for table in tables for block in table)

    def room(self, tables: Tables, start: int) -> int:
        """How many positions from `start` on could be written with the blocks that are free now."""
        free = self.pool.num_free - self.copies_needed(tables, start)
        if free < 0:
            return 0
        return (len(tables[0]) + free // self.num_groups) * self.block_size - start

    def is_writable(self, tables: Tables, position: int) -> bool:
        """The block of `position` is there and nobody else holds it."""
        index = position // self.block_size
        return index < len(tables[0]) and all(self.pool.refs(table[index]) == 1 for table in tables)

    def copies_needed(self, tables: Tables, start: int) -> int:
        """Blocks that must be copied before position `start` may be written, because others hold them too."""
        index = start // self.block_size
        if index >= len(tables[0]):
            return 0
        return sum(self.pool.refs(table[index]) > 1 for table in tables)

    def still_needed(self, tables: Tables, start: int, num_tokens: int, in_flight: int) -> int:
        """Blocks that a sequence computed up to `start` may yet take while it grows to `num_tokens`."""
        more = self.layout.blocks_for(num_tokens, in_flight) - self.held(tables)
        return max(0, more) + self.copies_needed(tables, start)

    def extend(self, tables: Tables, start: int, end: int) -> list[tuple[int, int]]:
        """Make positions [start, end) writable: copy what is shared, take what is missing; there must be `room`.

        Returns the copies (source, destination) to be made before anything is written.
        """
        copies = self._unshare(tables, start)
        for table in tables:
            table.extend(self.pool.take() for _ in range(len(table), cdiv(end, self.block_size)))
        return copies

    def _unshare(self, tables: Tables, start: int) -> list[tuple[int, int]]:
        index, copies = start // self.block_size, []
        for table in tables:
            if index < len(table) and self.pool.refs(table[index]) > 1:
                source, table[index] = table[index], self.pool.take()
                self.pool.release(source)
                copies.append((source, table[index]))
        return copies

    def share(self, tables: Tables, num_tokens: int) -> Tables:
        """Tables of a fork that has positions [0, num_tokens) in common with `tables`, so far as it reads them.

        A long prompt's last chunk may hold more than that, and whoever is swapped out takes again all that it held.
        """
        shared = self.head(tables, num_tokens)
        self.adopt(shared)
        self.pass_by(shared, num_tokens)
        return shared

    def adopt(self, tables: Tables) -> None:
        """Become one more holder of every block in the tables."""
        for table in tables:
            for block in table:
                if block >= 0:
                    self.pool.share(block)

    def head(self, tables: Tables, num_tokens: int) -> Tables:
        """The part of the tables that holds positions [0, num_tokens)."""
        return tuple(table[: cdiv(num_tokens, self.block_size)] for table in tables)

    def take_like(self, shape: Tables) -> Tables:
        """Fresh blocks wherever `shape` has an entry, −1 elsewhere."""
        return tuple([self.pool.take() if entry >= 0 else -1 for entry in table] for table in shape)

    def fill(self, tables: Tables, loads: tuple[tuple[int, int, int], ...]) -> list[tuple[int, int]]:
        """Take a block for each (group, index, slot) and put it into the tables → what to load: (slot, block)."""
        found = []
        for group, index, slot in loads:
            tables[group][index] = self.pool.take()
            found.append((slot, tables[group][index]))
        return found

    def pass_by(self, tables: Tables, num_computed: int) -> None:
        """Give back the blocks that no query at `num_computed` or later reads."""
        for g in self._moving:
            table, first = tables[g], self.layout.groups[g].spec.first_kept(num_computed) // self.block_size
            for index in range(min(first, len(table)) - 1, -1, -1):
                if table[index] < 0:
                    break
                self.pool.release(table[index])
                table[index] = -1

    def release(self, tables: Tables) -> None:
        """Give everything back, last blocks first, so that eviction takes the tail of a prefix before its head."""
        for index in range(len(tables[0]) - 1 if tables else -1, -1, -1):
            for table in tables:
                if table[index] >= 0:
                    self.pool.release(table[index])
        for table in tables:
            table.clear()


def moves(sources: Tables, destinations: Tables) -> list[tuple[int, int]]:
    """(source, destination) of every entry of two tables of the same shape."""
    return [
        (source, destination)
        for a, b in zip(sources, destinations, strict=True)
        for source, destination in zip(a, b, strict=True)
        if source >= 0
    ]
