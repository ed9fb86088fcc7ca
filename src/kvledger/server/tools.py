"""Function calling: what the model is told, what it may say, and how its text becomes `tool_calls`, piece by piece.

A forced call (`required`, or one named function) is text that a JSON schema allows. With `auto` the model may answer
in plain text or open with `<tool_call>`, after which a grammar holds it to a function's schema. Knows no HTTP.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvledger.errors import BadRequest
from kvledger.server.protocol import FunctionSpec, NamedTool, Tool, ToolChoice

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 8  # parallel calls in one answer: a small model does not stop by itself
_HEAD = re.compile(r'\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_ANY_OBJECT: dict[str, Any] = {"type": "object"}

Mode = Literal["auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How a request calls functions: `mode`, the functions, and the one that is named."""

    mode: Mode
    functions: tuple[FunctionSpec, ...]
    parallel: bool = True
    name: str | None = None


def plan_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolPlan | None:
    """What `tools` and `tool_choice` ask for; None: no calls. Raises BadRequest when they do not go together."""
    if not tools:
        if choice not in (None, "none"):
            raise BadRequest("tool_choice needs tools", "tool_choice")
        return None
    if choice == "none":
        return None
    functions = tuple(tool.function for tool in tools)
    if isinstance(choice, NamedTool):
        return ToolPlan("named", (_find(functions, choice.function.name),), False, choice.function.name)
    return ToolPlan("required" if choice == "required" else "auto", functions, parallel is not False)


def _find(functions: Sequence[FunctionSpec], name: str) -> FunctionSpec:
    for function in functions:
        if function.name == name:
            return function
    known = ", ".join(function.name for function in functions)
    raise BadRequest(f"tool_choice names {name!r}, which is not among the tools: {known}", "tool_choice")


def instructions(plan: ToolPlan) -> str:
    """The system text that tells a model of its functions, for chat templates that have no place for them."""
    listed = "\n".join(json.dumps(_described(function), ensure_ascii=False) for function in plan.functions)
    return (
        f"You can call these functions, one JSON description per line:\n{listed}\n"
        f'To call one, answer with {OPEN}{{"name": "the function", "arguments": {{...}}}}{CLOSE} and nothing else. '
        "If no function helps, answer in plain text."
    )


def _described(function: FunctionSpec) -> dict[str, Any]:
    parameters = function.parameters or _ANY_OBJECT
    return {"name": function.name, "description": function.description or "", "parameters": parameters}


def arguments_schema(function: FunctionSpec) -> dict[str, Any]:
    """A function's parameters. Where they do not say, no others are allowed: a small model invents without end."""
    parameters = function.parameters or _ANY_OBJECT
    is_listed = "properties" in parameters and "additionalProperties" not in parameters
    return {**parameters, "additionalProperties": False} if is_listed else parameters


def call_schema(function: FunctionSpec) -> dict[str, Any]:
    """JSON schema of one call, its name before its arguments."""
    properties = {"name": {"const": function.name}, "arguments": arguments_schema(function)}
    return {
        "type": "object",
        "properties": properties,
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def forced_schema(plan: ToolPlan) -> dict[str, Any]:
    """JSON schema of the whole answer when a call is forced: a named function's arguments, or a list of calls."""
    if plan.mode == "named":
        return arguments_schema(plan.functions[0])
    most = MAX_CALLS if plan.parallel else 1
    return {"type": "array", "minItems": 1, "maxItems": most, "items": _any_call(plan)}


def _any_call(plan: ToolPlan) -> dict[str, Any]:
    calls = [call_schema(function) for function in plan.functions]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def auto_grammar(plan: ToolPlan) -> str:
    """Lark grammar of an answer that is either plain text or calls, each held to its function's schema."""
    more = f" (BREAK? call){{0,{MAX_CALLS - 1}}}" if plan.parallel else ""
    return (
        f"start: calls | TEXT\n"
        f"calls: call{more}\n"
        f'call: "{OPEN}" BREAK? body BREAK? "{CLOSE}"\n'
        f'BREAK: "\\n"\n'
        f"body: %json {json.dumps(_any_call(plan))}\n"
        f"TEXT: /{_not_beginning_with(OPEN)}/\n"
    )


def _not_beginning_with(start: str) -> str:
    """Regular expression of every text, the empty one too, that does not begin with `start`."""
    ways = [f"{re.escape(start[:i])}([^{re.escape(start[i])}](?s:.*))?" for i in range(len(start))]
    return "|".join(ways)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer: plain content, the opening of call `call` (with its name), or more of its arguments."""

    content: str = ""
    call: int | None = None
    name: str | None = None
    arguments: str = ""

    def delta(self) -> dict[str, Any]:
        """As `delta` of a chat chunk."""
        if self.call is None:
            return {"content": self.content}
        function: dict[str, Any] = {"arguments": self.arguments}
        if self.name is None:
            return {"tool_calls": [{"index": self.call, "function": function}]}
        call = {
            "index": self.call,
            "id": new_call_id(),
            "type": "function",
            "function": {"name": self.name, **function},
        }
        return {"tool_calls": [call]}


def new_call_id() -> str:
    """An id for a call, as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class CallReader:
    """Turns an answer's text, as it grows, into pieces. `feed` gives what is sure; `finish` gives the rest."""

    def __init__(self, plan: ToolPlan) -> None:
        self._mode: Mode = plan.mode
        self._held = ""  # text that may still become something else
        self._is_content = False
        self._inside = False  # within a call's arguments
        self._scan = _ObjectScan()
        self.num_calls = 0
        self._name = plan.name

    def feed(self, text: str) -> list[Piece]:
        """Pieces that `text` completes."""
        if self._mode == "named":
            return self._feed_named(text)
        if self._mode == "auto" and self.num_calls == 0 and not self._inside and self._may_be_content(text):
            return self._feed_content(text)
        self._held += text
        return self._read_calls()

    def finish(self) -> list[Piece]:
        """What is left when the answer ends: held text that never became a call is content."""
        held, self._held = self._held, ""
        is_plain = self._mode == "auto" and self.num_calls == 0 and held
        return [Piece(content=held)] if is_plain else []

    def _feed_named(self, text: str) -> list[Piece]:
        name, self._name = self._name, None
        self.num_calls = 1
        return [Piece(call=0, name=name, arguments=text)] if name or text else []

    def _may_be_content(self, text: str) -> bool:
        start = (self._held + text).lstrip()
        self._is_content = self._is_content or not (start.startswith(OPEN) or OPEN.startswith(start))
        return self._is_content

    def _feed_content(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        return [Piece(content=text)] if text else []

    def _read_calls(self) -> list[Piece]:
        pieces: list[Piece] = []
        while self._held:
            if not self._inside:
                head = _HEAD.search(self._held)
                if head is None:
                    break
                pieces.append(Piece(call=self.num_calls, name=json.loads(f'"{head[1]}"')))
                self._held, self._inside, self._scan = self._held[head.end() :], True, _ObjectScan()
                self.num_calls += 1
            length = self._scan.take(self._held)
            if length:
                pieces.append(Piece(call=self.num_calls - 1, arguments=self._held[:length]))
            self._held, self._inside = self._held[length:], not self._scan.is_closed
        return pieces


class _ObjectScan:
    """Finds where a JSON object ends in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False
        self.is_closed = False

    def take(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for position, char in enumerate(text):
            self._step(char)
            if self.is_closed:
                return position + 1
        return len(text)

    def _step(self, char: str) -> None:
        if self._in_string:
            self._in_string = char != '"' or self._escaped
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.is_closed = self._depth == 0


def read_all(plan: ToolPlan, text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """A whole answer → (content, tool_calls)."""
    reader = CallReader(plan)
    content = ""
    calls: list[dict[str, Any]] = []
    for piece in [*reader.feed(text), *reader.finish()]:
        if piece.call is None:
            content += piece.content
        elif piece.name is not None:
            function = {"name": piece.name, "arguments": piece.arguments}
            calls.append({"id": new_call_id(), "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += piece.arguments
    return content or None, calls
