"""The order of sequences: a list that stays sorted by (priority, arrival, choice). Used for who waits and who runs.

A preempted sequence keeps its arrival number, so it stands before everyone who has not run yet.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kvledger.sched.sequence import Sequence
from kvledger.spec.config import Queueing

Rank = tuple[int, int, int]


class SequenceList:
    """Sequences, first the one to serve first. Priorities count only with `priority` queueing."""

    def __init__(self, queueing: Queueing) -> None:
        self._by_priority = queueing == "priority"
        self._items: list[Sequence] = []

    def rank(self, seq: Sequence) -> Rank:
        """Sorting key; unique, because (arrival, choice) is."""
        return (seq.priority if self._by_priority else 0, seq.arrival, seq.choice)

    def add(self, seq: Sequence) -> None:
        insort(self._items, seq, key=self.rank)

    def remove(self, seq: Sequence) -> None:
        """Take out a sequence that is in the list."""
        index = bisect_left(self._items, self.rank(seq), key=self.rank)
        assert self._items[index] is seq, f"sequence {seq.seq_id} is not in the list"
        del self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __getitem__(self, index: int) -> Sequence:
        return self._items[index]
