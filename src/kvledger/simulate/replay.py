"""Requests that arrive at given times, played through an engine with either clock. Knows no distribution's source.

A request's true length is the trace's, not the engine's: the scheduler knows only `max_tokens`, as in life, and the
answer ends when it has said what it had to say.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from kvledger.clock import VirtualClock
from kvledger.engine import Engine, StepReport
from kvledger.metrics import Metrics, RequestTimes
from kvledger.plan.workload import Lengths, Workload
from kvledger.sched.events import Event, TokenEvent
from kvledger.sched.sequence import Request
from kvledger.spec.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it comes, what it asks, and how many tokens it will turn out to need."""

    at_s: float
    request: Request
    num_output: int


def poisson(
    workload: Workload,
    count: int,
    rate_per_s: float,
    max_tokens: int | None,
    *,
    max_prompt: int,
    max_output: int,
    vocab_size: int,
    seed: int = 0,
) -> tuple[Arrival, ...]:
    """`count` requests with exponential gaps (all at once where the rate is 0) and lengths drawn from the workload.

    Prompts are cut to `max_prompt` tokens and outputs to `max_tokens` (None: `max_output`), which is all that the
    engine is told.
    """
    rng, now, arrivals = Random(seed), 0.0, []
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for index in range(count):
        now += rng.expovariate(rate_per_s) if rate_per_s else 0.0
        length = min(_draw(workload.prompt, rng), max_prompt)
        prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
        output = min(_draw(workload.output, rng), max_tokens or max_output)
        arrivals.append(Arrival(now, Request(f"arrival-{index}", prompt, params), output))
    return tuple(arrivals)


def _draw(lengths: Lengths, rng: Random) -> int:
    return max(1, round(lengths.quantile(rng.random())))


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a trace. Means over time are weighted by the seconds of each step."""

    seconds: float
    num_output_tokens: int
    num_steps: int
    mean_batch: float
    mean_waste: float  # of the memory taken or reserved
    mean_usage: float  # of the pool, reserved blocks included
    num_preemptions: int
    num_recomputed_tokens: int
    requests: tuple[RequestTimes, ...]

    def gap_s(self, percentile: float) -> float:
        """The time between two tokens of a request at a percentile (0 to 100)."""
        return _at([gap for times in self.requests for gap in times.gaps_s], percentile)

    def ttft_s(self, percentile: float) -> float:
        """The time to the first token at a percentile (0 to 100)."""
        return _at([times.ttft_s for times in self.requests if times.ttft_s is not None], percentile)

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0


def _at(values: Sequence[float], percentile: float) -> float:
    """The value at a percentile, nearest rank; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(len(values) * percentile / 100))] if values else 0.0


class _Watch:
    """A listener that weighs the books by time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seconds = self.batch = self.waste = self.usage = 0.0

    def added(self, request: Request, now_s: float) -> None:
        return

    def stepped(self, report: StepReport, events: Iterable[Event]) -> None:
        if not report.num_seqs:
            return
        seconds, books = report.ended_s - report.started_s, self.engine.scheduler.books()
        self.seconds += seconds
        self.batch += seconds * report.num_seqs
        self.waste += seconds * books.waste
        self.usage += seconds * (books.num_used + books.num_reserved) / books.num_blocks

    def mean(self, total: float) -> float:
        return total / self.seconds if self.seconds else 0.0


def replay(engine: Engine, arrivals: Sequence[Arrival]) -> Replay:
    """Play the trace to its end. Raises BadRequest or ContextTooLong if the engine refuses a request."""
    metrics, watch = Metrics(), _Watch(engine)
    engine.listeners += [metrics, watch]
    lengths = {arrival.request.request_id: arrival.num_output for arrival in arrivals}
    pending, start_s, index = sorted(arrivals, key=lambda a: a.at_s), engine.clock.now(), 0
    while index < len(pending) or engine.has_work:
        while index < len(pending) and pending[index].at_s <= engine.clock.now() - start_s:
            engine.add(pending[index].request)
            index += 1
        if engine.has_work:
            _end_those_who_are_done(engine, engine.step(), lengths)
        elif index < len(pending):
            _wait(engine, start_s + pending[index].at_s)
    engine.listeners = [x for x in engine.listeners if x not in (metrics, watch)]
    totals = metrics.totals
    return Replay(
        engine.clock.now() - start_s, totals.num_output_tokens, totals.num_steps, watch.mean(watch.batch),
        watch.mean(watch.waste), watch.mean(watch.usage), totals.num_preemptions, totals.num_recomputed_tokens,
        tuple(metrics.done.values()),
    )  # fmt: skip


def _end_those_who_are_done(engine: Engine, events: Iterable[Event], lengths: dict[str, int]) -> None:
    for event in events:
        if isinstance(event, TokenEvent) and event.num_output == lengths[event.request_id]:
            engine.abort(event.request_id, event.choice, "stop")


def _wait(engine: Engine, until_s: float) -> None:
    if isinstance(engine.clock, VirtualClock):
        engine.clock.advance_to(until_s)
    else:
        time.sleep(max(0.0, until_s - engine.clock.now()))
