"""Guards in front of the routes, as one plain ASGI layer: API key and body size. Knows no route but by its path."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Sequence
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvledger.server.errors import BodyTooLarge, reply_for

OPEN_PATHS = frozenset({"/health", "/metrics", "/version", "/ping", "/"})


class Guard:
    """Refuses requests without one of `api_keys` (none: everybody may) and bodies above `max_body_bytes`."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self.app, self.max_body_bytes = app, max_body_bytes
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif not self._may_pass(scope):
            await _answer(send, 401, json.dumps({"error": "Unauthorized"}).encode(), [(b"www-authenticate", b"Bearer")])
        elif _declared_length(scope) > self.max_body_bytes:
            await _drain(receive)
            await self._refuse_body(send)
        else:
            await self.app(scope, self._bounded(receive), send)

    def _may_pass(self, scope: Scope) -> bool:
        if not self._keys or scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return True
        return is_authorised(_header(scope, b"authorization"), self._keys)

    def _bounded(self, receive: Receive) -> Receive:
        """`receive` that stops a body which lies about its length, or gives none."""
        seen = 0

        async def bounded() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.max_body_bytes:
                if message.get("more_body"):
                    await _drain(receive)
                raise BodyTooLarge(self.max_body_bytes)
            return message

        return bounded

    async def _refuse_body(self, send: Send) -> None:
        reply = reply_for(BodyTooLarge(self.max_body_bytes))
        await _answer(send, reply.status, reply.encoded(), [(b"connection", b"close")])


def is_authorised(authorization: bytes, keys: Sequence[bytes]) -> bool:
    """Whether a header `Bearer <key>` holds one of `keys`. Every key is compared, each in constant time."""
    scheme, _, token = authorization.partition(b" ")
    found = False
    for key in keys:
        found |= hmac.compare_digest(token.strip(), key)
    return found and scheme.lower() == b"bearer"


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _declared_length(scope: Scope) -> int:
    try:
        return int(_header(scope, b"content-length") or 0)
    except ValueError:
        return 0


async def _drain(receive: Receive) -> None:
    """Read what is still on its way, up to a MiB and a second.

    A connection that is closed with bytes unread is reset, and the reset can overtake the answer.
    """
    left = 1 << 20
    with suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                left -= len(message.get("body", b""))


async def _answer(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    length = (b"content-length", str(len(body)).encode())
    head = [(b"content-type", b"application/json"), length, *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})
