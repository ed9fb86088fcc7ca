"""The loop: schedule, run, update, tell. Token ids only; knows no text, no HTTP and no kernels.

Not for several threads: whoever owns an engine calls it from one, between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from kvledger.clock import Clock, WallClock
from kvledger.errors import EngineDead
from kvledger.exec.base import Executor
from kvledger.sched.events import Event
from kvledger.sched.scheduler import Scheduler
from kvledger.sched.sequence import Request, Sequence
from kvledger.sched.step import Sample, Step, StepResult
from kvledger.spec.step import StepShape


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: when it began and ended by the engine's clock, how much of that the executor took, and its size.

    `num_running` and `num_waiting` are the sequences left in either state after it; `shape` is what each of its
    sequences computed.
    """

    started_s: float
    ended_s: float
    exec_s: float
    num_tokens: int
    num_seqs: int
    num_running: int
    num_waiting: int
    shape: StepShape = ()


class Listener(Protocol):
    """Someone who is told; never in the way."""

    def added(self, request: Request, now_s: float) -> None: ...

    def stepped(self, report: StepReport, events: Iterable[Event]) -> None: ...


class Engine:
    """A scheduler, an executor with the same blocks, and a clock."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock | None = None,
        listeners: Iterable[Listener] = (),
    ) -> None:
        planned, built = scheduler.plan.num_blocks, executor.num_blocks
        assert planned == built, f"the plan has {planned} blocks, the executor {built}"
        self.scheduler, self.executor, self.clock = scheduler, executor, clock or WallClock()
        self.listeners = list(listeners)
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        """A request is unanswered or an event undelivered."""
        return self.scheduler.has_work

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises BadRequest, ContextTooLong, EngineDead once closed."""
        self._check_open()
        seq = self.scheduler.add(request)
        for listener in self.listeners:
            listener.added(request, self.clock.now())
        return seq

    def abort(
        self,
        request_id: str,
        choice: int | None = None,
        reason: str = "abort",
        stop_reason: int | str | None = None,
    ) -> None:
        """End a request, or one choice; its blocks are free at once, its Finished event comes with the next step."""
        self.scheduler.abort(request_id, choice, reason, stop_reason)

    def step(self) -> list[Event]:
        """One forward pass; everything that happened since the last. Raises EngineDead once closed."""
        self._check_open()
        started_s = self.clock.now()
        step = self.scheduler.schedule()
        result = self._run(step)
        events = self.scheduler.update(step, result)
        self.clock.advance(result.seconds)
        self._tell(step, result, started_s, events)
        return events

    def close(self) -> None:
        """Save what is to be saved, then give memory and files back. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            if (moves := self.scheduler.last_saves()).has_moves:
                with contextlib.suppress(Exception):
                    self.executor.run(moves)
            self.executor.close()
            self.scheduler.tiers.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDead("the engine is closed; nothing more is answered")

    def _run(self, step: Step) -> StepResult:
        """The executor's result; if it raises, the sequences at fault fail and the others go on."""
        if not step.chunks and not step.has_moves:
            return StepResult({}, 0.0)
        try:
            return self.executor.run(step)
        except Exception:
            return self._isolate(step)

    def _isolate(self, step: Step) -> StepResult:
        """Run the chunks one by one to find which of them cannot be computed.

        Writing K/V again is harmless: the same positions get the same values.
        """
        samples: dict[int, Sample] = {}
        scores: dict[int, tuple[Sample, ...]] = {}
        failed: dict[int, str] = {}
        seconds = 0.0
        try:
            if step.has_moves:
                seconds = self.executor.run(replace(step, chunks=())).seconds
        except Exception as error:
            self.scheduler.fail_holders(f"blocks could not be moved: {_said(error)}")
            return StepResult({}, seconds)
        for chunk in step.chunks:
            try:
                result = self.executor.run(Step((chunk,)))
            except Exception as alone:
                failed[chunk.seq.seq_id] = _said(alone)
                continue
            samples |= result.samples
            scores |= result.prompt_logprobs
            failed |= result.failed
            seconds += result.seconds
        return StepResult(samples, seconds, scores, failed)

    def _tell(self, step: Step, result: StepResult, started_s: float, events: list[Event]) -> None:
        if not self.listeners:
            return
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        now, size = self.clock.now(), (step.num_tokens, len(step.chunks))
        report = StepReport(started_s, now, result.seconds, *size, running, waiting, step.shape)
        for listener in self.listeners:
            listener.stepped(report, events)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
