"""What the HTTP side knows of the model it serves: names, limits, text in and out. No engine, no tensors in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvledger.spec.sampling import Constraint
from kvledger.spec.step import StepShape
from kvledger.text.tokenizer import Tokenizer

StepCosts = Callable[[StepShape], tuple[float, float, float]]  # a step → FLOPs, bytes read, bytes written


@dataclass(frozen=True, slots=True)
class Served:
    """A loaded model as the routes see it.

    `render` makes a prompt of chat messages (keywords as in Hugging Face
    templates) and raises BadRequest when the template refuses; `knows_tools` says whether the template lists tools.
    `on_ready` is called in the engine's thread once requests are answered.
    `compile_constraint` takes a kind (json, json_object, regex, choice, grammar) and what it must match.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    render: Callable[..., str]
    compile_constraint: Callable[[str, Any], Constraint]
    eos_token_ids: tuple[int, ...] = ()
    knows_tools: bool = False
    defaults: Mapping[str, float] = field(default_factory=dict)  # sampling the model's makers recommend
    cache_info: Mapping[str, object] = field(default_factory=dict)
    step_cost: StepCosts = lambda shape: (0.0, 0.0, 0.0)
    books: Callable[[Any], dict[str, Any]] = lambda engine: {}
    on_ready: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        return self.names[0]

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """A token's text and bytes; U+FFFD stands for bytes that are no whole character."""
        raw = self.tokenizer.token_bytes(token_id)
        return raw.decode("utf-8", "replace"), raw
