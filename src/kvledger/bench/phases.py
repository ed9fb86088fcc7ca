"""The two phases measured: a decode step's time by context and by batch, beside the roofline's bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvledger.bench.engine import ceiling, run_batch
from kvledger.build import Loaded
from kvledger.data.devices import local_device
from kvledger.spec.step import Work


@dataclass(frozen=True, slots=True)
class Point:
    """A decode step of `batch` sequences at `context` tokens: measured seconds, and the roofline's bound.

    `ceiling_measured` is False where the machine's peaks are assumed: a step may then be faster than its bound.
    """

    batch: int
    context: int
    step_s: float
    bound_s: float
    bound: str
    ceiling_measured: bool = True

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s


def decode_by_context(loaded: Loaded, contexts: Sequence[int] = (128, 512, 1024, 2048)) -> tuple[Point, ...]:
    """Time per step grows with the context only by its KV."""
    return tuple(_decode_point(loaded, 1, context) for context in contexts)


def decode_by_batch(
    loaded: Loaded, batches: Sequence[int] = (1, 2, 4, 8, 16, 32), context: int = 128
) -> tuple[Point, ...]:
    """Tokens per second grow with the batch until arithmetic binds."""
    return tuple(_decode_point(loaded, batch, context) for batch in batches)


def _decode_point(loaded: Loaded, batch: int, context: int, output: int = 12) -> Point:
    steps = run_batch(loaded, batch, context, output)
    decode = [s.ended_s - s.started_s for s in steps if s.num_seqs == s.num_tokens == batch]
    device = local_device()
    cost = ceiling(loaded, device).cost((Work(context + output // 2, 1),) * batch)
    return Point(batch, context, median(decode), cost.seconds, cost.bound, device.measured)
