"""Server-sent events straight over ASGI: little work per event, and a client that leaves is noticed at once.

The source is an async generator of ready-made event bytes; whatever happens to it, `on_close` is called once, also
when the client left before the first event. Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
T = TypeVar("T")


class ClientGone(Exception):
    """The client has hung up; nobody reads the answer."""


def event(payload: Any, name: str | None = None) -> bytes:
    """`data: {json}` as one event, with an `event:` line where the API names its events."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """Sends what `events` yields, each item in one write."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: dict[str, str] | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events, self._on_close = events, on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with contextlib.suppress(ClientGone):
                await unless_gone(self._pump(send), receive)
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._on_close()

    async def _pump(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """The result of `work`; it is cancelled as soon as the client hangs up. Raises ClientGone then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _cancel(watching)
        await _cancel(working)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[Any]) -> None:
    """End a task and wait until its `finally` clauses have run; a finished one is left as it is."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
