"""Chat messages → prompt text, by the model's own Jinja template, run in a bounded sandbox.

A template comes with a model file and is not trusted: no attribute of Python objects, no mutation, and bounds on
loop rounds, calls, sizes and time (see `template_sandbox`). Knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvledger.errors import BadRequest, UnsupportedModel

if TYPE_CHECKING:
    import jinja2

    from kvledger.text.tokenizer import Tokenizer

MAX_TEMPLATE_CHARS = 1 << 20
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A compiled template. `note` says so where it was not the model's own."""

    template: jinja2.Template
    tool_template: jinja2.Template | None
    names: Mapping[str, str]  # bos_token, eos_token: the names of these tokens, as templates expect them
    note: str = ""

    @staticmethod
    def from_metadata(metadata: Mapping[str, object], tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a GGUF file; ChatML (with a note) where the vocabulary has its tokens; else None.

        Raises UnsupportedModel if the template cannot be compiled.
        """
        source, note = metadata.get("tokenizer.chat_template"), ""
        if not isinstance(source, str) or not source.strip():
            if b"<|im_start|>" not in (tokenizer.token_bytes(i) for i in tokenizer.special_ids):
                return None
            source, note = CHATML, "the model has no chat template; its vocabulary has <|im_start|>, so ChatML is used"
        tools = metadata.get("tokenizer.chat_template.tool_use")
        return compile_template(source, tools if isinstance(tools, str) else None, _names(tokenizer), note)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text; encode it without adding special tokens, the template writes them itself.

        `variables` are handed to the template (`enable_thinking` …). Raises BadRequest where messages are malformed,
        the template refuses them, or a bound is passed.
        """
        from kvledger.text.template_sandbox import render_bounded

        template = self.tool_template if tools and self.tool_template else self.template
        given = {**variables, **self.names, "tools": tools, "add_generation_prompt": add_generation_prompt}
        plain = [plain_message(m) for m in messages]
        try:
            return render_bounded(template, {**given, "messages": plain})
        except BadRequest:
            if not any("tool_calls" in m for m in plain):
                raise
            # some templates (DeepSeek's) put the arguments of calls into the text as they come, others take them apart
            as_text = [m | {"tool_calls": n["tool_calls"]} if "tool_calls" in m else m
                       for m, n in zip(plain, messages, strict=True)]  # fmt: skip
            return render_bounded(template, {**given, "messages": as_text})


def compile_template(
    source: str, tool_source: str | None = None, names: Mapping[str, str] | None = None, note: str = ""
) -> ChatTemplate:
    """Raises UnsupportedModel, saying where the template is wrong."""
    from kvledger.text.template_sandbox import compile_bounded

    if len(source) > MAX_TEMPLATE_CHARS:
        raise UnsupportedModel(f"the chat template has {len(source):,} characters; {MAX_TEMPLATE_CHARS:,} are read")
    tool_template = compile_bounded(tool_source) if tool_source else None
    return ChatTemplate(compile_bounded(source), tool_template, names or {}, note)


def require_template(template: ChatTemplate | None) -> ChatTemplate:
    """Raises BadRequest with a way out where a model has no template."""
    if template is None:
        raise BadRequest("this model has no chat template; send a plain prompt to /v1/completions instead", "messages")
    return template


def plain_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text content, arguments of tool calls as objects. Raises BadRequest."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise BadRequest("every message needs a role: system, user, assistant or tool", "messages")
    plain = {**message, "content": _flat_content(message.get("content"))}
    calls = message.get("tool_calls")
    if isinstance(calls, Sequence) and calls and not isinstance(calls, str):
        return plain | {"tool_calls": [_plain_call(call) for call in calls]}
    plain.pop("tool_calls", None)  # templates ask whether there are calls by asking for the key
    return plain


def _flat_content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise BadRequest(f"content must be text or a list of parts, not {type(content).__name__}", "messages")
    return "".join(_part_text(part) for part in content)


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise BadRequest(f"content part of type {kind!r} is not supported; this engine reads text", "messages")


def _plain_call(call: Any) -> Any:
    """Clients send arguments as a JSON string; templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):
        return call


def _names(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": next(iter(tokenizer.eos_token_ids), None)}
    return {name: "" if i is None else tokenizer.token_bytes(i).decode("utf-8", "replace") for name, i in ids.items()}
