"""The seam between deciding and doing: `run(step) -> StepResult`. Nothing else crosses it."""

from __future__ import annotations

from typing import Protocol

from kvledger.sched.step import Step, StepResult


class Executor(Protocol):
    """Computes or predicts a step. Owns the KV tensors (if any), never the bookkeeping."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool it has allocated (or pretends to have)."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of that pool."""

    def run(self, step: Step) -> StepResult:
        """Do the step's swaps, copies and chunks. Does not change any sequence."""

    def close(self) -> None:
        """Give the memory back. Idempotent."""
