"""The server's log: one line per request on stderr, plain or JSON. Never the prompt's text unless it was asked for."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

Log = Callable[..., None]


def make_log(as_json: bool, write: Callable[[str], object] | None = None) -> Log:
    """A function `log(event, **fields)` that writes one line; fields that are None are left out."""
    write = write or _to_stderr

    def log(event: str, **fields: Any) -> None:
        kept = {name: _tidy(value) for name, value in fields.items() if value is not None}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        if as_json:
            write(json.dumps({"time": stamp, "event": event, **kept}, ensure_ascii=False) + "\n")
        else:
            write(" ".join([stamp, event, *(f"{name}={_plain(value)}" for name, value in kept.items())]) + "\n")

    return log


def _to_stderr(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


def _tidy(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def _plain(value: Any) -> str:
    """A value without line breaks, so that one request stays one line whatever it holds."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if any(c.isspace() or not c.isprintable() for c in text) else text
