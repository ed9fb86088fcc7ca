"""What a request asks of sampling. Frozen; checks itself. The names are vLLM's and OpenAI's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Protocol

from kvledger.errors import BadRequest

MAX_CHOICES = 128  # n: one request may not fill the server
MAX_LOGPROBS = 128


class Constraint(Protocol):
    """A grammar that follows one sequence: which tokens may come next. Mutable; `fork` gives an independent copy."""

    def mask(self) -> bytes | None:
        """Bitmask of allowed tokens, bit i of byte i // 8 for token i; None: all are allowed. Does not mutate."""

    def accept(self, token_id: int) -> None:
        """The sequence has grown by `token_id`."""

    @property
    def is_finished(self) -> bool:
        """Nothing but the end of text may follow."""

    def fork(self) -> Constraint: ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. `temperature` 0 is greedy; `seed` None draws one per request.

    Raises BadRequest, naming the field, when a value cannot be meant.
    """

    max_tokens: int | None = 16  # None: to the end of the context
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # top alternatives besides the sampled token's own; 0: only its own
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        self._check_numbers()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} must be True or False, got {getattr(self, name)!r}", name)
        _check_each("stop", self.stop, str, "a text")
        _check_each("stop_token_ids", self.stop_token_ids, Integral, "a token id")
        if self.allowed_token_ids is not None:
            _check_each("allowed_token_ids", self.allowed_token_ids, Integral, "a token id")
            if not self.allowed_token_ids:
                raise BadRequest("allowed_token_ids is empty: no token could ever be chosen", "allowed_token_ids")
        if not isinstance(self.logit_bias, Mapping):
            raise BadRequest(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}", "logit_bias")
        _check_each("logit_bias", self.logit_bias, Integral, "a token id")
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -1e9, 1e9)

    def _check_numbers(self) -> None:
        _check_count("n", self.n, 1, MAX_CHOICES)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_count("top_k", self.top_k, -1, 1 << 31)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_count("min_tokens", self.min_tokens, 0, 1 << 31)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _check_count("max_tokens", self.max_tokens, 1, 1 << 31)
            if self.min_tokens > self.max_tokens:
                raise BadRequest(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}", "min_tokens")
        if self.seed is not None and not isinstance(self.seed, Integral):
            raise BadRequest(f"seed must be a whole number, got {self.seed!r}", "seed")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    if not isinstance(value, Real):
        raise BadRequest(f"{name} must be a number, got {value!r}", name)
    if not math.isfinite(value) or value < low or value > high or (low_open and value == low):
        raise BadRequest(f"{name} must be {'above' if low_open else 'at least'} {low} and at most {high}, got {value}",
                         name)  # fmt: skip


def _check_count(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, Integral):
        raise BadRequest(f"{name} must be a whole number, got {value!r}", name)
    _check_range(name, value, low, high)


def _check_each(name: str, values: Iterable[object], kind: type, what: str) -> None:
    if not isinstance(values, Iterable):
        raise BadRequest(f"{name} must be a list, got {values!r}", name)
    for value in values:
        if not isinstance(value, kind):
            raise BadRequest(f"{name}: {value!r} is not {what}", name)
