"""What sharing saves: a prompt found in the prefix cache, samples and beams that hold their common blocks once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from kvledger.bench.common import exactly, run_to_end
from kvledger.build import Loaded
from kvledger.engine import Engine, StepReport
from kvledger.sched.events import Event
from kvledger.sched.sequence import Request


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Time to the first token of the same prompt, the first time and the second."""

    prompt: int
    cold_s: float
    hit_s: float
    num_cached: int

    @property
    def times(self) -> float:
        return self.cold_s / self.hit_s


def measure_prefix_hit(loaded: Loaded, prompt: int = 2000, repeats: int = 3) -> PrefixHit:
    """The median of `repeats` cold and hit requests. The engine must run with a prefix cache."""
    cold: list[float] = []
    hit: list[float] = []
    cached = 0
    for index in range(repeats):
        text = tuple((7919 * index + 31 * i) % loaded.model.vocab_size for i in range(prompt))
        for found, name in ((cold, "cold"), (hit, "hit")):
            request = Request(f"{name}-{index}", text, exactly(1))
            times = run_to_end(loaded.engine, [request]).done[request.request_id]
            found.append(times.ttft_s or 0.0)
            cached = times.num_cached
    return PrefixHit(prompt, median(cold), median(hit), cached)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Blocks at the peak of `n` choices of one request: as held, and as they would be if each had its own copy."""

    what: str
    n: int
    shared_blocks: int
    copied_blocks: int

    @property
    def saved(self) -> float:
        return 1.0 - self.shared_blocks / self.copied_blocks


class _PeakBlocks:
    """A listener that notes when the live sequences would hold the most if nothing were shared."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.shared, self.copied = engine, 0, 0

    def added(self, request: Request, now_s: float) -> None:
        return

    def stepped(self, report: StepReport, events: Iterable[Event]) -> None:
        scheduler = self.engine.scheduler
        copied = sum(scheduler.ledger.held(seq.tables) for seq in scheduler.running)
        if copied > self.copied:
            self.shared, self.copied = scheduler.pool.num_used, copied


def count_sample_sharing(loaded: Loaded, n: int = 8, prompt: int = 512, output: int = 64) -> Sharing:
    """`n` samples of one prompt."""
    text = tuple(31 * i % loaded.model.vocab_size for i in range(prompt))
    params = replace(exactly(output, n=n), temperature=1.0)
    peak = _PeakBlocks(loaded.engine)
    loaded.engine.listeners.append(peak)
    run_to_end(loaded.engine, [Request("samples", text, params, seed=1)])
    loaded.engine.listeners.remove(peak)
    return Sharing("samples", n, peak.shared, peak.copied)


def count_beam_sharing(loaded: Loaded, width: int = 4, prompt: int = 512, output: int = 64) -> Sharing:
    """A beam search of one prompt."""
    from kvledger.beam import BeamSearch, beam_params

    text = tuple(31 * i % loaded.model.vocab_size for i in range(prompt))
    peak = _PeakBlocks(loaded.engine)
    loaded.engine.listeners.append(peak)
    request = Request("beams", text, beam_params(width, output), stepwise=True)
    search = BeamSearch(loaded.engine, request, width)
    while not search.is_done:
        search.take(loaded.engine.step())
    search.best(loaded.tokenizer)  # raises where it failed
    search.close()
    loaded.engine.step()
    loaded.engine.listeners.remove(peak)
    return Sharing("beams", width, peak.shared, peak.copied)
