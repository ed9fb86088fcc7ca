"""Time as an argument: a clock that runs by itself, and one that a simulation moves. Knows no engine."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment."""

    def now(self) -> float: ...

    def advance(self, seconds: float) -> None:
        """A step took this long; a wall clock knows already."""


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        return


class VirtualClock:
    """Stands still until it is told that time has passed."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

    def advance_to(self, moment_s: float) -> None:
        """Wait until `moment_s`; a moment in the past changes nothing."""
        self._now_s = max(self._now_s, moment_s)
