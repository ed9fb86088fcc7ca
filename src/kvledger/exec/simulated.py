"""An executor that predicts a step's seconds instead of spending them, and reads its tokens from a script.

Holds no tensors. The scheduler above cannot tell it from a real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import Protocol

from kvledger.plan.pool import PoolPlan
from kvledger.plan.roofline import Roofline
from kvledger.sched.sequence import Sequence
from kvledger.sched.step import Chunk, Sample, Step, StepResult
from kvledger.spec.step import StepShape

TokenSource = Callable[[Sequence], int]  # the next token of a sequence


class StepTimer(Protocol):
    """Seconds of a step by its shape: a roofline, or a table of measurements."""

    def seconds(self, shape: StepShape) -> float: ...


class SimulatedExecutor:
    """Says how long a step takes (`timer`) and what it samples (`tokens`).

    Block copies and tier moves cost two passes over the block's bytes at `copy_bytes_per_s`.
    """

    def __init__(
        self,
        pool: PoolPlan,
        timer: StepTimer,
        tokens: TokenSource | None = None,
        copy_bytes_per_s: float | None = None,
    ) -> None:
        self.pool, self.timer, self.tokens = pool, timer, tokens or running_number
        if copy_bytes_per_s is None and isinstance(timer, Roofline):
            copy_bytes_per_s = timer.device.bandwidth_bytes_per_s
        self._copy_bytes_per_s = copy_bytes_per_s

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def kv_bytes(self) -> int:
        return self.pool.pool_bytes

    def run(self, step: Step) -> StepResult:
        """Predicted seconds and scripted samples; logprobs are 0."""
        samples = {c.seq.seq_id: Sample(self.tokens(c.seq)) for c in step.chunks if c.samples}
        scores = {c.seq.seq_id: _scores(c) for c in step.chunks if c.seq.params.prompt_logprobs is not None}
        seconds = self.timer.seconds(step.shape) if step.chunks else 0.0
        return StepResult(samples, seconds + self._move_seconds(step), scores)

    def close(self) -> None:
        """Nothing to give back."""

    def _move_seconds(self, step: Step) -> float:
        moves = len(step.copies) + len(step.swaps_in) + len(step.swaps_out)
        if not moves or not self._copy_bytes_per_s:
            return 0.0
        return 2 * moves * self.pool.layout.block_bytes / self._copy_bytes_per_s


def _scores(chunk: Chunk) -> tuple[Sample, ...]:
    seq = chunk.seq
    last = min(chunk.start + chunk.num_tokens, seq.num_prompt_tokens - 1)
    return tuple(Sample(seq.token_ids[position + 1]) for position in range(chunk.start, last))


def running_number(seq: Sequence) -> int:
    """Token ids that stand for nothing: they differ by position, so that no two texts look alike by accident."""
    return 1 + (seq.num_tokens + 31 * seq.arrival + 17 * seq.choice) % 997


class Script:
    """Replays recorded outputs: `texts[request_id, choice]` are the ids in order. KeyError for an unknown one."""

    def __init__(self, texts: Mapping[tuple[str, int], Items[int]]) -> None:
        self.texts = texts

    def __call__(self, seq: Sequence) -> int:
        return self.texts[seq.request_id, seq.choice][seq.num_output_tokens]
