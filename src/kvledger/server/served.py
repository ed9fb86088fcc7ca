"""What the HTTP side knows of the model it serves: names, limits, text in and out. No engine, no tensors in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvledger.spec.sampling import Constraint, SamplingParams


class TokenizerLike(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, add_special: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = ...) -> str: ...


class TextStream(Protocol):
    """One choice's tokens on their way to text: whole characters only, cut at a stop string."""

    def push(self, token_id: int) -> str:
        """Text that has become certain with this token."""

    def finish(self) -> str:
        """Text that was held back, when no more tokens come."""

    @property
    def stop(self) -> str | None:
        """The stop string that was found; nothing after it is given out."""


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model as the routes see it.

    `token_text` gives a token's (text, bytes); `render` makes a prompt of chat messages (keywords as in Hugging Face
    templates) and raises BadRequest when the template refuses; `knows_tools` says whether the template lists tools.
    `compile_constraint` takes a kind (json, json_object, regex, choice, grammar) and what it must match.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    tokenizer: TokenizerLike
    token_text: Callable[[int], tuple[str, bytes]]
    render: Callable[..., str]
    open_stream: Callable[[SamplingParams], TextStream]
    compile_constraint: Callable[[str, Any], Constraint]
    eos_token_ids: tuple[int, ...] = ()
    knows_tools: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)  # sampling the model's makers recommend
    cache_info: Mapping[str, object] = field(default_factory=dict)
    books: Callable[[Any], dict[str, Any]] = lambda engine: {}
    info: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names[0]
