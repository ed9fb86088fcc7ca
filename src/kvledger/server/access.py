"""One log line and one count per HTTP request, taken where the answer leaves. Outermost layer; changes nothing."""

from __future__ import annotations

import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvledger.server.answer import Answer
from kvledger.server.state import ServerState

QUIET_PATHS = frozenset({"/health", "/ping", "/metrics", "/load", "/ledger"})  # polled every few seconds


class AccessLog:
    """Wraps the application. Routes leave what they know of a request in `scope["state"]["note"]`.

    Counts go by the `known_paths`; all others are one, so that strangers cannot make series.
    """

    def __init__(self, app: ASGIApp, state: ServerState, known_paths: frozenset[str]) -> None:
        self._app, self._state, self._known_paths = app, state, known_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        note: dict[str, Any] = {}
        scope.setdefault("state", {})["note"] = note
        try:
            await self._app(scope, receive, watched)
        finally:
            self._write(scope, status, time.monotonic() - started_s, note)

    def _write(self, scope: Scope, status: int, seconds: float, note: dict[str, Any]) -> None:
        path = scope["path"] if scope["path"] in self._known_paths else "other"
        self._state.count("kvledger:http_requests", path, str(status))
        if path in QUIET_PATHS and status in (200, 401, 503):
            return
        facts = answer_facts(note.pop("answer", None))
        self._state.log(
            "request", method=scope["method"], path=scope["path"], status=status, seconds=seconds, **note, **facts
        )


def answer_facts(answer: Answer | None) -> dict[str, Any]:
    """Figures of an answer for its log line: tokens, times, how it ended; never its text."""
    if answer is None or not answer.timings:
        return {}
    first = answer.timings[0]
    reasons = sorted({choice.stream.finish_reason or "abort" for choice in answer.choices})
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "cached_tokens": sum(answer.num_cached),
        "completion_tokens": answer.num_output_tokens,
        "finish_reason": ",".join(reasons),
        "queue_s": first.queue_s,
        "ttft_s": first.ttft_s,
        "preemptions": sum(timing.num_preemptions for timing in answer.timings) or None,
    }
