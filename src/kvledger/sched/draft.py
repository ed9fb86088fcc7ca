"""A step in the making: chunks and copies so far, and what is left of the step's budget. Thrown away each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvledger.sched.sequence import Sequence
from kvledger.sched.step import Chunk, Step
from kvledger.spec.config import SchedulerConfig

Moves = list[tuple[int, int]]


class Draft:
    """At most `max_num_batched_tokens` tokens and `max_num_seqs` chunks; a prompt that may not be cut can exceed it."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.tokens_left = config.max_num_batched_tokens
        self.seats_left = config.max_num_seqs
        self.swaps_out: Moves = []
        self._loads: dict[int, Moves] = {}
        self._placed: dict[int, tuple[Chunk, Moves]] = {}
        self._has_whole = False
        self.has_preempted = False

    @contextmanager
    def only_share(self) -> Iterator[None]:
        """Inside, only a quarter of the tokens left may be given out: what a long prompt leaves to shorter ones."""
        kept = self.tokens_left - self.tokens_left // 4
        self.tokens_left -= kept
        yield
        self.tokens_left += kept

    def load(self, seq: Sequence, moves: Moves) -> None:
        """The sequence's blocks are filled from tier slots first: (slot, block)."""
        if moves:
            self._loads[seq.seq_id] = moves

    def has(self, seq: Sequence) -> bool:
        """The sequence has its part of the step."""
        return seq.seq_id in self._placed

    def is_settled(self, seq: Sequence) -> bool:
        """All blocks of the sequence hold what they should before the step begins: nothing to load or to copy."""
        return seq.seq_id not in self._loads and not (self.has(seq) and self._placed[seq.seq_id][1])

    @property
    def is_full(self) -> bool:
        return self.seats_left <= 0 or self.tokens_left <= 0

    def wanted(self, seq: Sequence, chunked: bool) -> int:
        """Tokens that this step has room to compute of the sequence; 0 when it must wait for the next step.

        A prompt that is computed whole may pass the budget if it is the first such in the step, or it never ran.
        """
        if self.is_full:
            return 0
        todo = seq.num_uncomputed
        if todo <= self.tokens_left or (not chunked and not self._has_whole):
            return todo
        return self.tokens_left if chunked else 0

    def place(self, seq: Sequence, num_tokens: int, copies: Moves | None = None) -> None:
        """The step computes the sequence's next `num_tokens`, after `copies`."""
        samples = seq.num_computed + num_tokens == seq.num_tokens
        self._placed[seq.seq_id] = (Chunk(seq, seq.num_computed, num_tokens, samples), copies or [])
        self._has_whole |= num_tokens > 1
        self.tokens_left -= num_tokens
        self.seats_left -= 1

    def preempt(self, seq: Sequence) -> None:
        """The sequence loses its blocks: it is not computed after all, and its budget is free again."""
        self.has_preempted = True
        self._loads.pop(seq.seq_id, None)
        if (placed := self._placed.pop(seq.seq_id, None)) is not None:
            self.tokens_left += placed[0].num_tokens
            self.seats_left += 1

    def step(self) -> Step:
        """The finished step."""
        chunks = tuple(chunk for chunk, _ in self._placed.values())
        copies = tuple(copy for _, moves in self._placed.values() for copy in moves)
        loads = tuple(load for moves in self._loads.values() for load in moves)
        return Step(chunks, copies, tuple(self.swaps_out), loads)
