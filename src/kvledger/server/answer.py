"""One HTTP request's way through the engine: requests go in, deltas of text come out, and nothing is left behind.

Whatever ends an answer (done, stop string, deadline, client gone, engine dead), `close` gives back what still runs.
Knows no HTTP and no response shapes.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from kvledger.frontend import ChoiceStream
from kvledger.metrics import RequestTimes
from kvledger.sched.events import Admitted, Event, Finished, PromptScored, TokenEvent
from kvledger.sched.sequence import Request
from kvledger.server.engine_thread import EngineThread
from kvledger.server.errors import DeadlineExceeded, RequestFailed
from kvledger.server.mailbox import Mailbox
from kvledger.server.observer import Observer
from kvledger.server.responses import Choice, Delta
from kvledger.server.served import Served

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
            Choice(i * self.n + c, ChoiceStream(served.tokenizer, request, c))
            for i, request in enumerate(requests)
            for c in range(self.n)
        ]
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
        return all(choice.stream.finish_reason for choice in self.choices)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What each step brings, until every choice has ended; an empty list after a long silence."""
        assert self._mailbox is not None, "open() first"
        while not self.is_done:
            events = await self._mailbox.take(self._patience_s())
            deltas = self._read(events)
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
        return sum(len(choice.stream.samples) for choice in self.choices)

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
        return all(choice.stream.finish_reason for choice in self.choices[first : first + self.n])

    def _read(self, events: Sequence[Event]) -> list[Delta]:
        """Events → one delta per choice that moved, in order of first appearance."""
        moved: dict[int, Delta] = {}
        for event in events:
            index = self._number[event.request_id] * self.n + event.choice
            if isinstance(event, TokenEvent):
                self._token(event, moved.setdefault(index, Delta(index)))
            elif isinstance(event, Finished):
                self._finished(event, moved.setdefault(index, Delta(index)))
            elif isinstance(event, Admitted) and event.is_first:
                self.num_cached[self._number[event.request_id]] = event.num_cached
            elif isinstance(event, PromptScored):
                self._scored(event)
        return [delta for delta in moved.values() if delta.samples or delta.finish_reason]

    def _token(self, event: TokenEvent, delta: Delta) -> None:
        """One more token; where it completes a stop string the engine is told to end the choice."""
        stream = self.choices[delta.index].stream
        if stream.finish_reason is not None:
            return
        delta.text += stream.token(event)
        delta.samples.append(event.sample)
        if stream.must_stop:
            delta.finish_reason, delta.stop_reason = stream.finish_reason, stream.stop_reason
            self._link.finish(event.request_id, event.choice, str(stream.stop_reason))

    def _finished(self, event: Finished, delta: Delta) -> None:
        if event.finish_reason == "error":
            raise RequestFailed(event.message or "the engine gave this request up")
        stream = self.choices[delta.index].stream
        if stream.finish_reason is None:
            delta.text += stream.finish(event)
            delta.finish_reason, delta.stop_reason = stream.finish_reason, stream.stop_reason

    def _scored(self, event: PromptScored) -> None:
        first = self._number[event.request_id] * self.n
        for choice in self.choices[first : first + self.n]:
            choice.prompt_samples += event.samples
