"""One HTTP request's way through the engine: requests go in, deltas of text come out, and nothing is left behind.

Whatever ends an answer (done, stop string, deadline, client gone, engine dead), `close` gives back what still runs.
Knows no HTTP and no response shapes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from kvledger.metrics import RequestTimes
from kvledger.sched.events import Admitted, Event, Finished, PromptScored, TokenEvent
from kvledger.sched.sequence import Request
from kvledger.server.engine_thread import EngineThread, Mailbox
from kvledger.server.errors import DeadlineExceeded, RequestFailed
from kvledger.server.observer import Observer
from kvledger.server.responses import Choice, Delta
from kvledger.server.served import Served, TextStream

KEEP_ALIVE_S = 15.0


class Answer:
    """The choices of all prompts of one HTTP request; choice c of prompt p has index p × n + c."""

    def __init__(
        self,
        link: EngineThread,
        served: Served,
        observer: Observer,
        requests: Sequence[Request],
        arrival_s: float,
        timeout_s: float | None = None,
    ) -> None:
        self._link, self._served, self._observer = link, served, observer
        self.requests = requests
        self._timeout_s = timeout_s
        self._deadline_s = None if timeout_s is None else arrival_s + timeout_s
        self._arrival_s = arrival_s
        self._number = {request.request_id: i for i, request in enumerate(requests)}
        self.n = requests[0].params.n
        self.choices = [
            Choice(i * self.n + c, request.prompt_token_ids)
            for i, request in enumerate(requests)
            for c in range(self.n)
        ]
        self._streams: list[TextStream | None] = [served.open_stream(requests[0].params) for _ in self.choices]
        self.num_cached = [0] * len(requests)
        self.timings: list[RequestTimes] = []
        self._mailbox: Mailbox | None = None

    async def open(self) -> None:
        """Submit; returns when the engine has taken every request into its queue.

        Raises NotReady, EngineDead, QueueFull, BadRequest, DeadlineExceeded; nothing is left running then.
        """
        try:
            self._mailbox = self._link.submit(self.requests)
            self.timings = [self._observer.opened(request, self._arrival_s) for request in self.requests]
            while not await self._mailbox.accepted(self._patience_s()):
                pass
        except BaseException:
            self.close("error")
            raise

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason for choice in self.choices)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What each step brings, until every choice has ended; an empty list after a long silence."""
        assert self._mailbox is not None, "open() first"
        while not self.is_done:
            events = await self._mailbox.take(self._patience_s())
            deltas = self._read(events)
            for delta in deltas:
                self.choices[delta.index].add(delta)
            if deltas or not events:
                yield deltas

    def close(self, reason: str = "abort") -> None:
        """Abort what has not ended. Idempotent."""
        for request in self.requests:
            if self._mailbox is not None and not self._has_ended(request):
                self._link.abort(request.request_id)
                self._observer.dropped(request.request_id, reason)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(choice.samples) for choice in self.choices)

    def _patience_s(self) -> float:
        """How long to wait for the next event. Raises DeadlineExceeded."""
        if self._deadline_s is None or self._timeout_s is None:
            return KEEP_ALIVE_S
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(self._timeout_s)
        return min(KEEP_ALIVE_S, left_s)

    def _has_ended(self, request: Request) -> bool:
        first = self._number[request.request_id] * self.n
        return all(choice.finish_reason for choice in self.choices[first : first + self.n])

    def _read(self, events: Sequence[Event]) -> list[Delta]:
        """Events → one delta per choice that moved, in order of first appearance."""
        moved: dict[int, Delta] = {}
        last: dict[int, Finished] = {self._index(e): e for e in events if isinstance(e, Finished)}
        for event in events:
            index = self._index(event)
            if isinstance(event, TokenEvent) and self._streams[index] is not None:
                self._token(event, moved.setdefault(index, Delta(index)), last.get(index))
            elif isinstance(event, Finished) and self._streams[index] is not None:
                self._finished(event, moved.setdefault(index, Delta(index)))
            elif isinstance(event, Admitted) and event.is_first:
                self.num_cached[self._number[event.request_id]] = event.num_cached
            elif isinstance(event, PromptScored):
                self._scored(event)
        return list(moved.values())

    def _index(self, event: Event) -> int:
        return self._number[event.request_id] * self.n + event.choice

    def _token(self, event: TokenEvent, delta: Delta, end: Finished | None) -> None:
        """One more token; its text is left out when it only ends the answer."""
        delta.samples = [*delta.samples, event.sample]
        if end is not None and event.num_output == end.num_output and self._is_silent(event, end):
            return
        stream = self._streams[delta.index]
        assert stream is not None
        delta.text += stream.push(event.sample.token_id)
        if stream.stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stream.stop
            self._streams[delta.index] = None
            self._link.finish(event.request_id, event.choice, stream.stop)

    def _is_silent(self, event: TokenEvent, end: Finished) -> bool:
        token, params = event.sample.token_id, self.requests[self._number[event.request_id]].params
        is_end = end.finish_reason == "stop" and (token == end.stop_reason or token in self._served.eos_token_ids)
        return is_end and not params.include_stop_str_in_output

    def _finished(self, event: Finished, delta: Delta) -> None:
        if event.finish_reason == "error":
            raise RequestFailed(event.message or "the engine gave this request up")
        stream = self._streams[delta.index]
        assert stream is not None
        self._streams[delta.index] = None
        delta.text += stream.finish()
        delta.finish_reason, delta.stop_reason = event.finish_reason, event.stop_reason
        if stream.stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stream.stop

    def _scored(self, event: PromptScored) -> None:
        first = self._number[event.request_id] * self.n
        for choice in self.choices[first : first + self.n]:
            choice.prompt_samples += event.samples
