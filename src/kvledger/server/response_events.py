"""The items and events of a `/v1/responses` answer, numbered and in OpenAI's order. Pure: pieces in, bytes out."""

from __future__ import annotations

import secrets
from typing import Any

from kvledger.server.errors import ErrorReply
from kvledger.server.protocol import ResponsesRequest
from kvledger.server.responses import Envelope
from kvledger.server.sse import event
from kvledger.server.tools import Piece, new_call_id


class ResponseEvents:
    """Builds the answer piece by piece: `start`, `add` …, `end`, `final`. At most one item is open at a time."""

    def __init__(self, body: ResponsesRequest, envelope: Envelope) -> None:
        self._body, self._envelope = body, envelope
        self._number = 0
        self._output: list[dict[str, Any]] = []
        self._is_open = False
        self._call: int | None = None
        self._status = "in_progress"
        self._incomplete: dict[str, str] | None = None
        self._error: dict[str, Any] | None = None

    def start(self) -> bytes:
        """The first two events."""
        body = self.response(None)
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def add(self, piece: Piece) -> bytes:
        """A piece of text, the beginning of a call, or more of its arguments."""
        if piece.call is None:
            return self._add_text(piece.content)
        data = b""
        if piece.name is not None:
            data += self._close() + self._open_call(piece.name)
        return data + self._add_arguments(piece.arguments)

    def end(self, finish_reason: str | None) -> bytes:
        """Close what is open and settle the status."""
        data = self._close()
        self._status = "completed"
        if finish_reason == "length":
            self._status, self._incomplete = "incomplete", {"reason": "max_output_tokens"}
        return data

    def final(self, usage: dict[str, Any]) -> bytes:
        """The last event, with everything."""
        return self._event(f"response.{self._status}", response=self.response(usage))

    def failed(self, reply: ErrorReply) -> bytes:
        """An error in mid-stream."""
        self._status, self._error = "failed", {"code": reply.type, "message": reply.message}
        told = self._event("error", code=reply.type, message=reply.message, param=reply.param)
        return told + self._event("response.failed", response=self.response(None))

    def response(self, usage: dict[str, Any] | None) -> dict[str, Any]:
        """The `response` object as it stands."""
        body = self._body
        return {
            "id": self._envelope.id,
            "object": "response",
            "created_at": self._envelope.created,
            "status": self._status,
            "error": self._error,
            "incomplete_details": self._incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._envelope.model,
            "output": list(self._output),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "usage": usage,
        }

    def _add_text(self, text: str) -> bytes:
        data = b""
        if not self._is_open or self._call is not None:
            data += self._close() + self._open_message()
        self._part["text"] += text
        return data + self._event("response.output_text.delta", **self._at_part, delta=text, logprobs=[])

    def _open_message(self) -> bytes:
        item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "status": "in_progress"}
        data = self._open(item | {"role": "assistant", "content": []}, None)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._item["content"].append(part)
        return data + self._event("response.content_part.added", **self._at_part, part=dict(part))

    def _open_call(self, name: str) -> bytes:
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress"}
        return self._open(item | {"call_id": new_call_id(), "name": name, "arguments": ""}, len(self._output))

    def _open(self, item: dict[str, Any], call: int | None) -> bytes:
        self._output.append(item)
        self._is_open, self._call = True, call
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=dict(item))

    def _add_arguments(self, text: str) -> bytes:
        if not text:
            return b""
        self._item["arguments"] += text
        return self._event("response.function_call_arguments.delta", **self._at_item, delta=text)

    def _close(self) -> bytes:
        """Finish the open item, if there is one."""
        if not self._is_open:
            return b""
        item, self._is_open = self._item, False
        item["status"] = "completed"
        if self._call is None:
            text = self._part["text"]
            data = self._event("response.output_text.done", **self._at_part, text=text, logprobs=[])
            data += self._event("response.content_part.done", **self._at_part, part=self._part)
        else:
            data = self._event("response.function_call_arguments.done", **self._at_item, arguments=item["arguments"])
        return data + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    @property
    def _item(self) -> dict[str, Any]:
        return self._output[-1]

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self._item["content"][0]
        return part

    @property
    def _at_item(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._output) - 1}

    @property
    def _at_part(self) -> dict[str, Any]:
        return {**self._at_item, "content_index": 0}

    def _event(self, name: str, **fields: Any) -> bytes:
        data = event({"type": name, "sequence_number": self._number, **fields}, name)
        self._number += 1
        return data
