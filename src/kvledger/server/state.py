"""What the routes share: settings, the model once it is loaded, the bridge to the engine, metrics and the log."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvledger.engine import Engine, StepReport
from kvledger.errors import ConfigError
from kvledger.sched.events import Event
from kvledger.server.engine_thread import EngineThread, State
from kvledger.server.errors import NotReady
from kvledger.server.logs import Log, make_log
from kvledger.server.observer import Observer
from kvledger.server.prometheus import Metrics
from kvledger.server.served import Served

MIB = 1 << 20
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")  # no path, no slash at the end
Progress = Callable[[str], None]
Loader = Callable[[Progress], tuple[Served, Engine]]  # slow: fetches, reads, compiles; tells how far it is


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator decides about the HTTP side. CLI defaults are read from here."""

    api_keys: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    max_body_bytes: int = 8 * MIB
    max_queue: int | None = None
    max_num_seqs: int = 64
    request_timeout_s: float | None = None
    restart: bool = False
    log_json: bool = False
    log_prompts: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise ConfigError(f"the largest request body must have at least 1 byte, got {self.max_body_bytes}")
        if self.request_timeout_s is not None and self.request_timeout_s <= 0:
            raise ConfigError(f"a request must be given some time, got {self.request_timeout_s:g} s")
        for key in self.api_keys:  # never shown
            if not key or key.strip() != key or not (key.isascii() and key.isprintable()):
                raise ConfigError("an API key is empty, or has more than printable ASCII without spaces around it")
        for origin in self.allow_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"{origin!r} is not an origin as browsers send it; write https://host:port or *")


@dataclass(slots=True)
class ServerState:
    """One server's state. `on_end` is called in the event loop when the engine has ended for good."""

    settings: Settings
    load: Loader
    on_end: Callable[[BaseException | None], None] = lambda error: None
    log: Log = field(init=False)
    link: EngineThread = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    _served: Served | None = None
    _observer: Observer | None = None
    _disk_failure: str = ""  # already told

    def __post_init__(self) -> None:
        s = self.settings
        self.log = (lambda event, **fields: None) if s.quiet else make_log(s.log_json)
        self.link = EngineThread(
            self._build, max_queue=s.max_queue, max_num_seqs=s.max_num_seqs, restart=s.restart,
            on_ready=self._ready, on_end=self.on_end,
        )  # fmt: skip
        self.link.listeners.append(self)

    def _build(self, progress: Progress) -> Engine:
        """Runs in the engine's thread; counters survive a restart."""
        served, engine = self.load(progress)
        if self._observer is None:
            self._observer = Observer(Metrics(served.name, served.max_model_len, served.cache_info), served.step_cost)
        self._served = served
        return engine

    def _ready(self) -> None:
        """Runs in the engine's thread."""
        if self._served is not None:
            self._served.on_ready()

    def stepped(self, report: StepReport, events: Sequence[Event]) -> None:
        """Passed on to the metrics."""
        if self._observer is not None:
            self._observer.stepped(report, events)
        self._look_at_disk()

    def _look_at_disk(self) -> None:
        """A disk that fails is told once; serving goes on without it."""
        disk = self.link.engine.scheduler.tiers.disk if self.link.engine is not None else None
        if disk is not None and disk.failure and disk.failure != self._disk_failure:
            self._disk_failure = disk.failure
            self.log("disk tier saves nothing more", reason=disk.failure)

    def died(self) -> None:
        """Passed on to the metrics."""
        if self._observer is not None:
            self._observer.died()

    @property
    def served(self) -> Served:
        """The model. Raises NotReady while it loads, EngineDead when the engine is gone."""
        self.link.check_ready()
        if self._served is None:
            raise NotReady("the engine is not ready: loading")
        return self._served

    @property
    def observer(self) -> Observer:
        """Metrics. Raises NotReady before the model is known."""
        if self._observer is None:
            raise NotReady("there are no metrics before the model is loaded")
        return self._observer

    @property
    def metrics(self) -> Metrics | None:
        """The metrics, gauges brought up to date; None before the model is known."""
        if self._observer is None:
            return None
        if self.link.engine is not None:
            self._observer.measure(self.link.engine.scheduler)
        self._observer.metrics.counters["kvledger:engine_restarts"][()] = float(self.link.num_restarts)
        return self._observer.metrics

    def count(self, name: str, *labels: str) -> None:
        """One more of something; nothing before the model is known."""
        if self._observer is not None:
            self._observer.metrics.inc(name, 1, *labels)

    @property
    def is_healthy(self) -> bool:
        return self.link.state is State.READY
