"""What goes where: data to stdout, everything said about it to stderr. Formatting only; knows no engine."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def say(text: str = "") -> None:
    """A line for the person at the terminal (stderr), so that stdout stays clean data."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def emit(text: str = "") -> None:
    """A line of data (stdout)."""
    sys.stdout.write(text + "\n")


def emit_json(value: Any) -> None:
    """One JSON document on stdout."""
    emit(json.dumps(value, ensure_ascii=False, indent=2))


def columns(rows: Iterable[Sequence[object]], indent: str = "") -> list[str]:
    """Rows as aligned text: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not cells:
        return []
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in range(max(map(len, cells)))]
    return [indent + "  ".join(_pad(cell, widths[i], i) for i, cell in enumerate(row)).rstrip() for row in cells]


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)


class StatusLine:
    """What is being done right now, on stderr: one line rewritten in a terminal, elsewhere a line per activity."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._length = 0
        self._activity = ""

    def show(self, text: str) -> None:
        """Say `text`; outside a terminal without its figures, and once."""
        if not self._is_terminal:
            activity = re.sub(r"\s\d.*", "", text)
            if activity != self._activity:
                say(activity)
            self._activity = activity
            return
        sys.stderr.write("\r" + text.ljust(self._length))
        sys.stderr.flush()
        self._length = len(text)

    def clear(self) -> None:
        """Wipe the line, so that something else can be said."""
        if self._is_terminal and self._length:
            sys.stderr.write("\r" + " " * self._length + "\r")
            self._length = 0
