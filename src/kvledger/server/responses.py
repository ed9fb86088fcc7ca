"""The shapes of OpenAI's answers, whole and in chunks, with vLLM's additions. Pure: deltas and results in, dicts out.

A `Delta` is what one engine step gave to one choice; a `Choice` is all of them together. Knows no engine, no HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvledger.frontend import ChoiceStream
from kvledger.sched.step import Sample

LOWEST_LOGPROB = -9999.0  # JSON has no −inf

TokenText = Callable[[int], tuple[str, bytes]]  # token id → (text, bytes): the text of a broken character is U+FFFD


@dataclass(slots=True)
class Delta:
    """New text and tokens of choice `index`; the last delta of a choice has a finish reason."""

    index: int
    text: str = ""
    samples: list[Sample] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Choice:
    """One choice of one prompt: its stream, and the samples of prompt tokens when they were asked for."""

    index: int
    stream: ChoiceStream
    prompt_samples: list[Sample] = field(default_factory=list)

    @property
    def mean_logprob(self) -> float:
        """Of the generated tokens; what best_of ranks by."""
        samples = self.stream.samples
        return sum(sample.logprob for sample in samples) / max(1, len(samples))

    @property
    def prompt_ids(self) -> Sequence[int]:
        return self.stream.request.prompt_token_ids


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all answers to one request share."""

    id: str
    created: int
    model: str

    def wrap(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """An answer or a chunk around `choices`; without `usage` there is no such key."""
        body: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        body["choices"] = choices
        return body if usage is None else body | {"usage": usage}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The `usage` object. `cached_tokens`: prompt tokens whose K/V came from the prefix cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def finite(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def chat_logprobs(samples: Sequence[Sample], text_of: TokenText, num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    return {"content": [_chat_entry(sample, text_of, num_top) for sample in samples]}


def _chat_entry(sample: Sample, text_of: TokenText, num_top: int) -> dict[str, Any]:
    top = [_chat_token(token_id, logprob, text_of) for token_id, logprob in sample.top[:num_top]]
    return _chat_token(sample.token_id, sample.logprob, text_of) | {"top_logprobs": top}


def _chat_token(token_id: int, logprob: float, text_of: TokenText) -> dict[str, Any]:
    text, raw = text_of(token_id)
    return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}


def completion_logprobs(
    samples: Sequence[Sample | None], token_ids: Sequence[int], text_of: TokenText, num_top: int, offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion; a None sample (the very first prompt token) has no logprob.

    `offset` is where in the choice's text the first token stands, in characters.
    """
    names = [completion_token(token_id, text_of) for token_id in token_ids]
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(text_of(token_id)[0])
    return {
        "text_offset": offsets,
        "token_logprobs": [None if s is None else finite(s.logprob) for s in samples],
        "tokens": names,
        "top_logprobs": [None if s is None else _top_dict(s, text_of, num_top) for s in samples],
    }


def completion_token(token_id: int, text_of: TokenText) -> str:
    """A token's name among a completion's logprobs: its text, or its bytes where they are no whole characters."""
    text, raw = text_of(token_id)
    return text if "�" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _top_dict(sample: Sample, text_of: TokenText, num_top: int) -> dict[str, float]:
    """The most likely tokens, and the chosen one whether or not it is among them."""
    pairs = [(sample.token_id, sample.logprob), *sample.top[:num_top]]
    return {completion_token(token_id, text_of): finite(logprob) for token_id, logprob in reversed(pairs)}


def prompt_logprobs(
    prompt_ids: Sequence[int], samples: Sequence[Sample], text_of: TokenText
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token, candidates by id; null for the first, which nothing predicts."""
    found: list[dict[str, Any] | None] = [None]
    for sample in samples[: len(prompt_ids) - 1]:
        entry = {str(sample.token_id): _candidate(sample.token_id, sample.logprob, sample.rank, text_of)}
        for rank, (token_id, logprob) in enumerate(sample.top, start=1):
            entry.setdefault(str(token_id), _candidate(token_id, logprob, rank, text_of))
        found.append(entry)
    return found


def _candidate(token_id: int, logprob: float, rank: int, text_of: TokenText) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": text_of(token_id)[0]}


def model_list(names: Sequence[str], created: int, max_model_len: int) -> dict[str, Any]:
    """`GET /v1/models`."""
    root = names[0]
    cards = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "kvledger",
            "root": root,
            "parent": None,
            "max_model_len": max_model_len,
        }
        for name in names
    ]
    return {"object": "list", "data": cards}
