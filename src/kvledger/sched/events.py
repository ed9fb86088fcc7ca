"""What happened in a step, told to whoever listens: front ends, metrics. Frozen; ids and numbers only, no times.

The engine's clock dates them; a listener changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.sched.step import Sample


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened to one choice of one request."""

    request_id: str
    choice: int
    seq_id: int


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """The sequence got blocks and runs. `num_cached` tokens need no computing; `is_first` is False after preemption."""

    num_tokens: int
    num_cached: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class PromptScored(Event):
    """Logprobs of prompt tokens, in order; the first of a request belongs to its second token."""

    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent(Event):
    """One more token; `num_output` counts it."""

    sample: Sample
    num_output: int


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """Blocks were taken away; `num_tokens` of K/V are recomputed, or swapped back in, when it runs again."""

    num_tokens: int
    is_swapped: bool


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The choice has ended; its blocks are free. `finish_reason`: stop, length, abort, error.

    `stop_reason` is the stop token id or string that ended it; `message` says what went wrong on error.
    """

    finish_reason: str
    stop_reason: int | str | None
    num_prompt: int
    num_output: int
    num_cached: int
    num_preemptions: int
    message: str = ""
