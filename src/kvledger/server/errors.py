"""From an exception to what a client reads: status, `{"error": {...}}`, and whether repeating can help.

OpenAI's clients repeat 408, 409, 429 and every 5xx by themselves, so each 5xx says with `Retry-After` when, or with
`x-should-retry: false` that it cannot be mended. Knows no routes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvledger.errors import BadRequest, EngineDead, KvledgerError, UnknownName

NO_RETRY = {"x-should-retry": "false"}
RETRY_AFTER_S = 1


class QueueFull(KvledgerError):
    """More requests wait than `--max-queue` allows."""

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(
            f"The engine is currently busy and cannot accept new requests: {waiting} are waiting, --max-queue is "
            f"{limit}; try again after Retry-After seconds"
        )


class NotReady(KvledgerError):
    """The engine is still loading, or the server is draining."""


class DeadlineExceeded(KvledgerError):
    """The request ran longer than `--request-timeout`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the request was not finished within --request-timeout {seconds:g} s and has been ended")


class RequestFailed(KvledgerError):
    """The engine gave this one request up (a poison request); the others live on."""


class BodyTooLarge(KvledgerError):
    """The body is larger than `--max-body`."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request body is larger than the {limit} bytes that --max-body allows")


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """One error as it goes over the wire."""

    status: int
    type: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The body that OpenAI's clients read."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.status}}

    def encoded(self) -> bytes:
        return json.dumps(self.body(), ensure_ascii=False).encode()


_RETRY = {"Retry-After": str(RETRY_AFTER_S)}
# first match wins, so subclasses stand before their bases
_TABLE: tuple[tuple[type[Exception], int, str, Mapping[str, str]], ...] = (
    (QueueFull, 503, "Service Unavailable", _RETRY),
    (NotReady, 503, "ServiceUnavailableError", _RETRY),
    (EngineDead, 503, "ServiceUnavailableError", NO_RETRY),
    (DeadlineExceeded, 504, "DeadlineExceededError", NO_RETRY),
    (BodyTooLarge, 413, "BadRequestError", {}),
    (UnknownName, 404, "NotFoundError", {}),
    (BadRequest, 400, "BadRequestError", {}),
    (RequestFailed, 500, "InternalServerError", NO_RETRY),
    (KvledgerError, 400, "BadRequestError", {}),
)


def reply_for(error: BaseException) -> ErrorReply:
    """The reply that `error` becomes. What is not ours says its class only: messages of strangers may carry text."""
    for kind, status, name, headers in _TABLE:
        if isinstance(error, kind):
            return ErrorReply(status, name, str(error), getattr(error, "param", None), headers)
    return ErrorReply(500, "InternalServerError", f"internal error ({type(error).__name__})", None, NO_RETRY)
