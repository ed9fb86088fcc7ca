"""Events and steps → times of each request and totals. Listens to an engine; no Prometheus, no drawing.

TTFT is arrival to first token; TPOT the mean time between tokens after the first; ITL each such time; E2E arrival to
the last token; queueing is arrival to first admission.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvledger.engine import StepReport
from kvledger.sched.events import Admitted, Event, Finished, Preempted, TokenEvent
from kvledger.sched.sequence import Request


@dataclass(slots=True)
class RequestTimes:
    """One request, all its choices together. Seconds by the engine's clock; None until it has happened."""

    request_id: str
    arrived_s: float
    num_prompt: int
    num_choices: int = 1
    admitted_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    num_cached: int = 0
    num_output: int = 0
    num_preemptions: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between tokens of one choice
    _last_s: dict[int, float] = field(default_factory=dict)

    @property
    def queue_s(self) -> float | None:
        return None if self.admitted_s is None else self.admitted_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        return sum(self.gaps_s) / len(self.gaps_s) if self.gaps_s else None


@dataclass(slots=True)
class Totals:
    """Sums over all steps and requests so far."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_finished: int = 0
    num_chunks: int = 0
    busy_s: float = 0.0  # from the start of a step to its end
    exec_s: float = 0.0  # of which in the executor

    @property
    def mean_batch(self) -> float:
        """Sequences per step."""
        return self.num_chunks / self.num_steps if self.num_steps else 0.0

    @property
    def overhead(self) -> float:
        """Share of the time of steps that was not the executor's."""
        return 1.0 - self.exec_s / self.busy_s if self.busy_s > 0 else 0.0


class Metrics:
    """An engine's listener. `live` are unanswered requests, `done` the ended ones, the last `keep` of them.

    `steps` are the reports of the last `keep_steps` (None: `keep`) steps that computed something.
    """

    def __init__(self, keep: int | None = None, keep_steps: int | None = None) -> None:
        self.keep, keep_steps = keep, keep if keep_steps is None else keep_steps
        self.live: dict[str, RequestTimes] = {}
        self.done: dict[str, RequestTimes] = {}
        self.steps: deque[StepReport] = deque(maxlen=keep_steps)
        self.totals = Totals()

    def added(self, request: Request, now_s: float) -> None:
        """A request has arrived."""
        self.live[request.request_id] = RequestTimes(
            request.request_id, now_s, len(request.prompt_token_ids), request.params.n
        )

    def stepped(self, report: StepReport, events: Iterable[Event]) -> None:
        """A step has ended with these events."""
        self._count(report)
        for event in events:
            if isinstance(event, TokenEvent):
                self.totals.num_output_tokens += 1
            elif isinstance(event, Preempted):
                self.totals.num_preemptions += 1
                self.totals.num_recomputed_tokens += 0 if event.is_swapped else event.num_tokens
            if (times := self.live.get(event.request_id)) is not None:
                self._note(times, event, report)

    def _count(self, report: StepReport) -> None:
        totals = self.totals
        if report.num_seqs:
            totals.num_steps += 1
            self.steps.append(report)
        totals.num_computed_tokens += report.num_tokens
        totals.num_chunks += report.num_seqs
        totals.busy_s += report.ended_s - report.started_s
        totals.exec_s += report.exec_s

    def _note(self, times: RequestTimes, event: Event, report: StepReport) -> None:
        if isinstance(event, TokenEvent):
            self._token(times, event, report.ended_s)
        elif isinstance(event, Admitted) and event.is_first:
            times.admitted_s, times.num_cached = report.started_s, event.num_cached
        elif isinstance(event, Preempted):
            times.num_preemptions += 1
        elif isinstance(event, Finished):
            self._finished(times, event, report.ended_s)

    def _token(self, times: RequestTimes, event: TokenEvent, now_s: float) -> None:
        times.num_output += 1
        if times.first_token_s is None:
            times.first_token_s = now_s
        if event.choice in times._last_s:
            times.gaps_s.append(now_s - times._last_s[event.choice])
        times._last_s[event.choice] = now_s

    def _finished(self, times: RequestTimes, event: Finished, now_s: float) -> None:
        times.finish_reasons.append(event.finish_reason)
        if len(times.finish_reasons) >= times.num_choices:
            times.ended_s = now_s
            self.totals.num_finished += 1
            self.done[times.request_id] = self.live.pop(times.request_id)
            if self.keep is not None and len(self.done) > self.keep:
                del self.done[next(iter(self.done))]
