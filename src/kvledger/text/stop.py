"""Stop strings in a stream of text, wherever token borders fall. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopChecker:
    """Follows one sequence. Holds text back only while it may still become a stop string.

    The stop string that is complete first wins; of two that end at the same character, the longer. Text after it is
    dropped, and the stop string itself, too, unless `include_stop`.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, can_stop: bool = True) -> str:
        """Text that is safe to show now. `matched` is set once a stop string is complete; then nothing follows.

        `can_stop` False (before min_tokens) lets everything pass.
        """
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        if not can_stop:
            self._held = ""
            return text
        if found := self._first_match(text):
            end, start, self.matched = found
            self._held = ""
            return text[: end if self._include_stop else start]
        keep = self._forming(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, at the end of a sequence that no stop string has ended."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int, str] | None:
        """(end, start, stop) of the stop string that ends first."""
        found = ((start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0)
        return min(found, default=None)

    def _forming(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
