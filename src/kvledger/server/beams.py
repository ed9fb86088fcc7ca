"""Beam search for HTTP requests: the search lives in the engine's thread as a listener, its result comes by mailbox."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvledger.beam import Beam, BeamSearch, beam_params
from kvledger.engine import Engine, StepReport
from kvledger.errors import BadRequest
from kvledger.sched.events import Event
from kvledger.sched.sequence import Request
from kvledger.sched.step import Sample
from kvledger.server.engine_thread import EngineThread
from kvledger.server.errors import DeadlineExceeded
from kvledger.server.protocol import Sampling
from kvledger.server.responses import Choice
from kvledger.server.served import Served

PATIENCE_S = 3600.0


@dataclass(frozen=True, slots=True)
class BeamAsked:
    """A search: how many beams, and how length is weighed."""

    width: int
    length_penalty: float


def beams_of(body: Sampling, wants_logprobs: bool, has_constraint: bool) -> BeamAsked | None:
    """What the request asks of beam search; None: ordinary sampling. Raises BadRequest on what does not go together."""
    if not body.use_beam_search:
        return None
    refused = {"stream": body.stream, "logprobs": wants_logprobs, "response_format": has_constraint, "stop": body.stop}
    for name, is_asked in refused.items():
        if is_asked:
            raise BadRequest(f"use_beam_search does not go with {name}", name)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return BeamAsked(max(body.n or 1, body.best_of or 1), penalty)


class BeamRun:
    """One prompt's search. `start`, `stop` and the listener's methods run in the engine's thread."""

    def __init__(self, link: EngineThread, request: Request, asked: BeamAsked) -> None:
        limit = request.params.max_tokens
        if limit is None:
            raise BadRequest("use_beam_search needs max_tokens", "max_tokens")
        params = beam_params(asked.width, limit)
        self.request = replace(request, params=params, stepwise=True)
        self._link, self._asked = link, asked
        self._search: BeamSearch | None = None
        self._failure: Exception | None = None

    async def beams(self, served: Served, timeout_s: float | None) -> list[Beam]:
        """The best continuations, best first. Raises what admission raises, EngineDead, DeadlineExceeded."""
        mailbox = self._link.run(self.request.request_id, self.start)
        try:
            await mailbox.take(PATIENCE_S if timeout_s is None else timeout_s)
            if self._failure is not None:
                raise self._failure
            if self._search is None or not self._search.is_done:
                raise DeadlineExceeded(timeout_s or PATIENCE_S)
            return self._search.best(served.tokenizer)
        finally:
            self._link.release(self.request.request_id, self.stop)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return 0 if self._search is None else self._search.num_cached

    def start(self, engine: Engine) -> None:
        """Add the request and begin to listen. Raises BadRequest, ContextTooLong."""
        self._search = BeamSearch(engine, self.request, self._asked.width, self._asked.length_penalty)
        engine.listeners.append(self)

    def stop(self, engine: Engine) -> None:
        """End what still runs and listen no more."""
        if self in engine.listeners:
            engine.listeners.remove(self)
        if self._search is not None:
            self._search.close()

    def added(self, request: Request, now_s: float) -> None:
        """Not needed: the search adds its own request."""

    def stepped(self, report: StepReport, events: Iterable[Event]) -> None:
        """Let the search go on; an error in it ends this request alone."""
        if self._search is None or self._search.is_done:
            return
        try:
            self._search.take(events)
        except Exception as error:
            self._failure = error
            self._search.close()
        if self._search.is_done:
            self._link.post(self.request.request_id)


@dataclass(slots=True)
class _Said:
    """A finished beam, looking like a choice's stream."""

    request: Request
    text: str
    samples: list[Sample]
    finish_reason: str
    stop_reason: None = None


def beam_choices(run: BeamRun, beams: list[Beam], n: int, first_index: int, served: Served) -> list[Choice]:
    """The best `n` beams as choices."""
    return [Choice(first_index + i, _said(run.request, beam, served)) for i, beam in enumerate(beams[:n])]


def _said(request: Request, beam: Beam, served: Served) -> Any:
    ended = bool(beam.token_ids) and beam.token_ids[-1] in served.eos_token_ids
    samples = [Sample(token_id) for token_id in beam.token_ids]
    return _Said(request, beam.text, samples, "stop" if ended else "length")
