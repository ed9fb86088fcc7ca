"""Beam search over the engine's forks: beams share the blocks of what they have in common. Knows no text but ids.

Each beam is a stepwise sequence: it computes one token's logits and waits. When all beams wait, the best
continuations are chosen; a beam with two of them is forked, one with none is ended (as in vLLM's first paper,
SOSP 2023, section 4.4: no copying but of the last, partly filled block).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING

from kvledger.engine import Engine
from kvledger.errors import BadRequest
from kvledger.sched.events import Event, Finished, TokenEvent
from kvledger.sched.sequence import Request, Sequence
from kvledger.sched.step import Sample
from kvledger.spec.sampling import SamplingParams

if TYPE_CHECKING:
    from kvledger.text.tokenizer import Tokenizer

MAX_PENALTY = 100.0
MAX_WIDTH = 64  # 2 × width alternatives are asked of the sampler


@dataclass(frozen=True, slots=True)
class Beam:
    """One continuation. `score` is its logprob divided by its length to the power of the length penalty."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    text: str = ""


@dataclass(slots=True)
class _Live:
    """A beam that still grows: its sequence and what it has so far."""

    seq: Sequence
    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    sample: Sample | None = None  # of the newest step, until it is used


@dataclass(order=True, slots=True)
class _Candidate:
    """A beam and the token to follow; sorts best first, equals by beam and token."""

    negative_logprob: float
    beam: int
    token_id: int = field(compare=True)


def beam_params(width: int, max_tokens: int, length_penalty: float = 1.0) -> SamplingParams:
    """What the sampler is asked: twice as many alternatives as beams, so that `width` are left when some end the text.

    Raises BadRequest.
    """
    if not isinstance(width, int) or not 1 <= width <= MAX_WIDTH:
        raise BadRequest(f"beam width must be 1 … {MAX_WIDTH}, got {width}", "width")
    if not isinstance(length_penalty, Real) or not abs(length_penalty) <= MAX_PENALTY:
        raise BadRequest(
            f"length_penalty must be at most {MAX_PENALTY} either way, got {length_penalty}", "length_penalty"
        )
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=2 * width, ignore_eos=True)


class BeamSearch:
    """One prompt's search: a stepwise request with `beam_params`. Feed it every step's events.

    It forks, resumes and ends sequences of the engine.
    """

    def __init__(self, engine: Engine, request: Request, width: int, length_penalty: float = 1.0) -> None:
        self.engine, self.request, self.width, self.length_penalty = engine, request, width, length_penalty
        self._root = engine.add(request)
        self._beams = [_Live(self._root)]
        self._complete: list[Beam] = []
        self._choices = itertools.count(1)
        self._failure: BadRequest | None = None
        self.is_done = False

    @property
    def num_cached(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return self._root.num_cached

    def take(self, events: Iterable[Event]) -> None:
        """Book the tokens of this request; choose anew when every beam has one.

        Raises nothing where the request fails: whoever takes the step may be waiting for another one.
        """
        by_seq = {beam.seq.seq_id: beam for beam in self._beams}
        for event in events:
            beam = by_seq.get(event.seq_id)
            if beam is None or event.request_id != self.request.request_id:
                continue
            if isinstance(event, TokenEvent):
                beam.sample = event.sample
            elif isinstance(event, Finished) and beam.sample is None:
                self._lose(beam, event)
        if self._beams and not self.is_done and all(beam.sample for beam in self._beams):
            self._choose()

    def close(self) -> None:
        """End whatever still runs. Idempotent."""
        self.is_done = True
        self.engine.abort(self.request.request_id)

    def best(self, tokenizer: Tokenizer) -> list[Beam]:
        """The best continuations, best first; those that reached the limit count beside those that ended.

        Raises BadRequest where the engine gave the request up.
        """
        if self._failure is not None:
            raise self._failure
        found = sorted(self._complete, key=lambda beam: (-beam.score, beam.token_ids))[: self.width]
        return [Beam(b.token_ids, b.logprob, b.score, tokenizer.decode(b.token_ids)) for b in found]

    def _choose(self) -> None:
        """Rank all continuations, finish those that end the text, go on with the best `width` of the others."""
        kept: list[_Candidate] = []
        for candidate in sorted(self._candidates()):
            if len(kept) == self.width:
                break
            if candidate.token_id in self.request.eos_token_ids:
                self._finish(self._beams[candidate.beam], candidate)
            else:
                kept.append(candidate)
        num_tokens = len(self._beams[0].token_ids) + 1
        if num_tokens == self.request.params.max_tokens or any(beam.seq.is_finished for beam in self._beams):
            for candidate in kept:
                self._finish(self._beams[candidate.beam], candidate)
            self.close()
        elif self._cannot_improve(kept, num_tokens):
            self.close()
        else:
            self._go_on(kept)

    def _candidates(self) -> Iterable[_Candidate]:
        for index, beam in enumerate(self._beams):
            assert beam.sample is not None
            for token_id, logprob in beam.sample.top:
                yield _Candidate(-(beam.logprob + logprob), index, token_id)

    def _finish(self, beam: _Live, candidate: _Candidate) -> None:
        token_ids = (*beam.token_ids, candidate.token_id)
        logprob = -candidate.negative_logprob
        self._complete.append(Beam(token_ids, logprob, self._score(logprob, len(token_ids))))

    def _score(self, logprob: float, num_tokens: int) -> float:
        return logprob / num_tokens**self.length_penalty if num_tokens else logprob

    def _cannot_improve(self, kept: list[_Candidate], num_tokens: int) -> bool:
        """Enough beams have ended, and the best live one, as it stands, would not displace the worst of them."""
        if len(self._complete) < self.width or not kept:
            return not kept
        worst = sorted(beam.score for beam in self._complete)[-self.width]
        return worst >= self._score(-kept[0].negative_logprob, num_tokens)

    def _go_on(self, kept: list[_Candidate]) -> None:
        """The first continuation of a beam stays in its sequence, further ones are forks, beams without one end."""
        grown: list[_Live] = []
        for index, beam in enumerate(self._beams):
            own = [candidate for candidate in kept if candidate.beam == index]
            for candidate in own[1:]:
                grown.append(self._grow(beam, self._fork(beam.seq, candidate.token_id), candidate))
            if own:
                grown.append(self._grow(beam, beam.seq, own[0]))
            else:
                self.engine.abort(self.request.request_id, beam.seq.choice)
        self._beams = grown
        for beam in grown:
            self.engine.scheduler.resume(beam.seq, beam.token_ids[-1])

    def _fork(self, seq: Sequence, token_id: int) -> Sequence:
        return self.engine.scheduler.fork(seq, next(self._choices), token_id)

    @staticmethod
    def _grow(beam: _Live, seq: Sequence, candidate: _Candidate) -> _Live:
        return _Live(seq, (*beam.token_ids, candidate.token_id), -candidate.negative_logprob)

    def _lose(self, beam: _Live, event: Finished) -> None:
        """A beam that outgrew the pool counts with what it has; one that failed fails the search."""
        if event.finish_reason == "error":
            self._failure = BadRequest(event.message or "the engine gave this request up")
            self.close()
            return
        self._complete.append(Beam(beam.token_ids, beam.logprob, self._score(beam.logprob, len(beam.token_ids))))
        self._beams.remove(beam)
        self.is_done = not self._beams
