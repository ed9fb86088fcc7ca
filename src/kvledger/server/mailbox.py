"""Where one HTTP request's events wait for it. Lives in the event loop's thread; knows no engine."""

from __future__ import annotations

import asyncio

from kvledger.sched.events import Event


class Mailbox:
    """Where one HTTP request's events arrive. A failure is delivered after the events that came before it.

    It has no timer of its own: its owner looks at `wake_at_s` from time to time and calls `wake`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, num_requests: int = 1) -> None:
        self._loop = loop
        self._num_unaccepted = num_requests
        self._events: list[Event] = []
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._has_rung = self._awaits_acceptance = False
        self.wake_at_s = 0.0

    def put(self, event: Event) -> None:
        self._events.append(event)
        if self._waiter is not None:
            self.wake()

    def ring(self) -> None:
        """Something has come that needs no event to say what."""
        self._has_rung = True
        self.wake()

    def fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self.wake()

    def accept(self) -> None:
        """The engine has admitted one of the requests to its queue."""
        self._num_unaccepted -= 1
        if self._num_unaccepted <= 0 and self._awaits_acceptance:
            self.wake()

    async def accepted(self, patience_s: float) -> bool:
        """Whether all requests are in the engine's queue, after at most `patience_s`. Raises what `fail` was given."""
        until_s, self._awaits_acceptance = self._loop.time() + patience_s, True
        while self._num_unaccepted > 0 and self._error is None and self._loop.time() < until_s:
            await self._wait(until_s)
        self._awaits_acceptance = False
        if self._error is not None:
            raise self._error
        return self._num_unaccepted <= 0

    async def take(self, patience_s: float) -> list[Event]:
        """Everything that has arrived; an empty list after `patience_s` of silence. Raises what `fail` was given."""
        if not self._events and self._error is None and not self._has_rung:
            await self._wait(self._loop.time() + patience_s)
        if self._events:
            events, self._events = self._events, []
            return events
        if self._error is not None:
            raise self._error
        return []

    async def _wait(self, until_s: float) -> None:
        """Sleep until something arrives or its owner finds that it is `until_s`."""
        self.wake_at_s = until_s
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def wake(self) -> None:
        """End the wait, if there is one."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
