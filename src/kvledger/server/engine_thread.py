"""The bridge between the event loop and the engine, which lives in a thread of its own where nobody else touches it.

Inward go closures, run between two steps; outward go events, one wake-up of the loop per step. Everything public here
is called from the event loop's thread. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import queue
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from kvledger.engine import Engine, StepReport
from kvledger.errors import BadRequest, EngineDead, KvledgerError
from kvledger.sched.events import Admitted, Event, Finished
from kvledger.sched.sequence import Request
from kvledger.server.errors import NotReady, QueueFull, RequestFailed
from kvledger.server.mailbox import Mailbox

T = TypeVar("T")
TICK_S = 0.1  # between two looks at who has waited long enough
IDLE_S = 0.02  # between two looks at work that cannot go on by itself
MAX_DEATHS = 3  # restarts without a single finished request in between


class Listener(Protocol):
    """Who is told of every step, in the loop's thread, before the clients are."""

    def stepped(self, report: StepReport, events: Sequence[Event]) -> None: ...

    def died(self) -> None:
        """All requests that were open have ended without another event."""


class State(enum.Enum):
    """Where the engine stands."""

    LOADING = "loading"
    READY = "ready"
    DEAD = "dead"
    CLOSED = "closed"


@dataclass(slots=True)
class _Open:
    """A request that the engine has or will get."""

    mailbox: Mailbox
    choices_left: int
    step_at_submit: int
    is_private: bool = False  # its events are for its own listener in the engine's thread


class EngineThread:
    """Runs `build()` and then the engine it returns.

    `on_ready` is called in this thread when the engine begins to answer; `on_end` in the loop's thread once, when the
    thread has ended for good, with the error or None.
    """

    def __init__(
        self,
        build: Callable[[Callable[[str], None]], Engine],
        *,
        max_queue: int | None = None,
        max_num_seqs: int = 64,
        restart: bool = False,
        on_ready: Callable[[], None] = lambda: None,
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self._build, self._max_queue, self._max_num_seqs, self._restart = build, max_queue, max_num_seqs, restart
        self._on_ready, self._on_end = on_ready, on_end
        self.listeners: list[Listener] = []
        self.state, self.reason = State.LOADING, "starting"
        self.num_restarts = 0
        self.num_steps = 0
        self._open: dict[str, _Open] = {}
        self._waiting: dict[str, _Open] = {}  # in order of arrival
        self._calls: set[asyncio.Future[Any]] = set()  # questions not answered yet
        self._deaths_in_a_row = 0
        self._commands: queue.SimpleQueue[Callable[[Engine], None]] = queue.SimpleQueue()
        self._stopping = False
        self.engine: Engine | None = None  # for reading single counters; everything else through `call`
        self._report: StepReport | None = None
        self._ticker: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="kvledger-engine", daemon=True)

    # --- called from the event loop ---

    def start(self) -> None:
        """Begin to load, in the background."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._tick()

    def _tick(self) -> None:
        """Wake those who have waited long enough: they look at their deadline, or break a silence."""
        now_s = self._loop.time()
        for entry in self._open.values():
            if entry.mailbox.wake_at_s <= now_s:
                entry.mailbox.wake()
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    @property
    def num_waiting(self) -> int:
        """Requests that have not been scheduled yet."""
        return len(self._waiting)

    @property
    def num_open(self) -> int:
        """Requests that are not answered yet."""
        return len(self._open)

    def check_ready(self) -> None:
        """Raises NotReady while loading, EngineDead when the engine is gone."""
        if self.state is State.LOADING:
            raise NotReady(f"the engine is not ready: {self.reason}")
        if self.state is not State.READY:
            raise EngineDead(f"the engine has stopped: {self.reason}")

    def check_room(self, num_requests: int = 1) -> None:
        """Raises QueueFull when `num_requests` more would make the queue longer than allowed."""
        if self._max_queue is None:
            return
        oldest = next(iter(self._waiting.values()), None)
        is_blocked = oldest is not None and self.num_steps >= oldest.step_at_submit + 2
        spare = 0 if is_blocked else max(0, self._max_num_seqs - (self.num_open - self.num_waiting))
        if self.num_waiting + num_requests > self._max_queue + spare:
            raise QueueFull(self.num_waiting, self._max_queue)

    def submit(self, requests: Sequence[Request]) -> Mailbox:
        """Hand over all requests of one HTTP request. Raises NotReady, EngineDead, QueueFull, BadRequest."""
        self.check_ready()
        self.check_room(len(requests))
        for request in requests:
            if request.request_id in self._open:
                raise BadRequest(f"request id {request.request_id!r} is already running", "request_id")
        mailbox = Mailbox(self._loop, len(requests))
        for request in requests:
            entry = _Open(mailbox, request.params.n, self.num_steps)
            self._open[request.request_id] = self._waiting[request.request_id] = entry
            self._commands.put(partial(self._add, request))
        return mailbox

    def run(self, request_id: str, start: Callable[[Engine], None]) -> Mailbox:
        """As `submit`, for work that adds its own request: `start(engine)` runs between two steps, once.

        What it raises arrives in the mailbox; `post` wakes it; `release` must follow. Raises NotReady, EngineDead,
        QueueFull.
        """
        self.check_ready()
        self.check_room()
        mailbox = Mailbox(self._loop)
        self._open[request_id] = _Open(mailbox, 1 << 30, self.num_steps, is_private=True)
        self._commands.put(partial(self._start, request_id, start))
        return mailbox

    def release(self, request_id: str, stop: Callable[[Engine], None]) -> None:
        """The end of `run`: `stop(engine)` runs before the next step."""
        self._forget(request_id)
        self._commands.put(stop)

    def post(self, request_id: str) -> None:
        """From the engine's thread: wake whoever waits for the result of `run`."""
        self._tell(self._finished, request_id)

    def abort(self, request_id: str) -> None:
        """The client is gone: give the request's blocks back before the next step. Unknown ids are ignored."""
        self._forget(request_id)
        self._commands.put(lambda engine: engine.abort(request_id))

    def finish(self, request_id: str, choice: int, stop_reason: str) -> None:
        """A stop string was found in the choice's text: end it before the next step."""
        self._commands.put(lambda engine: engine.abort(request_id, choice, "stop", stop_reason))

    async def call(self, ask: Callable[[Any], T]) -> T:
        """`ask(engine)`, run in the engine's thread between two steps. Raises NotReady, EngineDead."""
        self.check_ready()
        answer: asyncio.Future[T] = self._loop.create_future()
        self._calls.add(answer)
        answer.add_done_callback(self._calls.discard)
        self._commands.put(lambda engine: self._answer(answer, ask, engine))
        return await answer

    def give_up(self, reason: str) -> None:
        """End every open request with an error: the server leaves."""
        for request_id, entry in list(self._open.items()):
            entry.mailbox.fail(EngineDead(reason))
            self.abort(request_id)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End the thread after its current step. False when it did not end in time; loading is not waited for."""
        self._stopping = True
        if self._ticker is None:
            return True
        self._ticker.cancel()
        self._commands.put(lambda engine: None)
        self._thread.join(timeout_s if self.state is not State.LOADING else 0.1)
        return not self._thread.is_alive()

    # --- the engine's thread ---

    def _run(self) -> None:
        error: BaseException | None = None
        while not self._stopping:
            try:
                self._live()
            except BaseException as death:
                error = death
                if self._lives_again(death):
                    continue
            break
        if error is None:
            self.state, self.reason = State.CLOSED, "shut down"
        self._tell(self._on_end, error if not self._stopping else None)

    def _lives_again(self, death: BaseException) -> bool:
        """Note the death; True when the engine is to be built anew."""
        again = self._restart and self.state is State.READY and self._deaths_in_a_row < MAX_DEATHS
        self._deaths_in_a_row += 1
        self.num_restarts += again
        self.state = State.LOADING if again else State.DEAD
        self.reason = str(death) if isinstance(death, KvledgerError) else f"{type(death).__name__}: {death}"
        if not isinstance(death, KvledgerError):
            traceback.print_exception(death)
        self._tell(self._died, self.reason)
        return again

    def _live(self) -> None:
        """One life of the engine: build it, serve until told to stop."""
        engine = self._build(self._progress)
        engine.listeners.append(self)
        self.engine = engine
        try:
            self.state, self.reason = State.READY, ""
            self._on_ready()
            is_idle = True
            while not self._stopping:
                self._obey(engine, IDLE_S if is_idle and engine.has_work else None)
                is_idle = not (engine.has_work and self._step(engine))
        finally:
            self.engine = None
            engine.close()

    def _obey(self, engine: Engine, idle_s: float | None) -> None:
        """Run what was asked for. Sleep until then while there is no work, or `idle_s` when work cannot go on."""
        if not engine.has_work or idle_s is not None:
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=idle_s)(engine)
        while not self._commands.empty():
            self._commands.get()(engine)

    def _step(self, engine: Engine) -> bool:
        """One step; False when there was nothing to do (all that is left is held by somebody)."""
        events = engine.step()
        assert self._report is not None, "the engine tells its listeners of every step"
        if not events and not self._report.num_seqs:
            return False
        self._tell(self._deliver, events, self._report)
        return True

    def added(self, request: Request, now_s: float) -> None:
        """The engine's own word that it has queued a request: not needed here."""

    def stepped(self, report: StepReport, events: Iterable[Event]) -> None:
        """The engine tells of a step; what it says goes out together with the events."""
        self._report = report

    def _progress(self, text: str) -> None:
        self.reason = text

    def _add(self, request: Request, engine: Engine) -> None:
        self._start(request.request_id, lambda engine: engine.add(request), engine)

    def _start(self, request_id: str, start: Callable[[Engine], object], engine: Engine) -> None:
        """An error at admission ends this request alone; one that was given up meanwhile is not begun."""
        if request_id not in self._open:
            return
        try:
            start(engine)
        except KvledgerError as error:
            self._tell(self._refused, request_id, error)
        except Exception as error:
            failure = RequestFailed(f"the request could not be started ({type(error).__name__})")
            self._tell(self._refused, request_id, failure)
        else:
            self._tell(self._accepted, request_id)

    def _answer(self, answer: asyncio.Future[T], ask: Callable[[Any], T], engine: Engine) -> None:
        try:
            value = ask(engine)
        except Exception as error:
            self._tell(_settle, answer, None, error)
        else:
            self._tell(_settle, answer, value, None)

    def _tell(self, heard: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(heard, *args)
        except RuntimeError:
            self._stopping = True  # the loop is closed: nobody listens any more

    # --- back in the loop's thread ---

    def _deliver(self, events: Sequence[Event], report: StepReport) -> None:
        self.num_steps += 1
        for listener in self.listeners:
            listener.stepped(report, events)
        for event in events:
            entry = self._open.get(event.request_id)
            if entry is None or entry.is_private:
                continue
            if isinstance(event, Admitted | Finished):
                self._note(event, entry)
            entry.mailbox.put(event)

    def _note(self, event: Event, entry: _Open) -> None:
        self._waiting.pop(event.request_id, None)
        if isinstance(event, Finished):
            self._deaths_in_a_row = 0
            entry.choices_left -= 1
            if entry.choices_left <= 0:
                self._forget(event.request_id)

    def _forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def _accepted(self, request_id: str) -> None:
        if (entry := self._open.get(request_id)) is not None:
            entry.mailbox.accept()

    def _finished(self, request_id: str) -> None:
        if (entry := self._open.get(request_id)) is not None:
            entry.mailbox.ring()

    def _refused(self, request_id: str, error: KvledgerError) -> None:
        entry = self._open.get(request_id)
        self._forget(request_id)
        if entry is not None:
            entry.mailbox.fail(error)

    def _died(self, reason: str) -> None:
        """Tell everybody who waits. What was still to be added is forgotten, so a new engine will skip it."""
        for answer in list(self._calls):
            _settle(answer, None, EngineDead(f"the engine died before it could answer: {reason}"))
        for entry in self._open.values():
            entry.mailbox.fail(EngineDead(f"the engine died while this request ran: {reason}"))
        self._open.clear()
        self._waiting.clear()
        for listener in self.listeners:
            listener.died()


def _settle(answer: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
