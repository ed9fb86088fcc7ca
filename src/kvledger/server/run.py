"""Runs the application on a socket: binds before anything is loaded, drains on a first signal, leaves on a second."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn

from kvledger.errors import ConfigError
from kvledger.server.app import make_app
from kvledger.server.state import Loader, ServerState, Settings

DRAIN_S = 30
LAST_WORDS_S = 0.5  # for the error that ends an answer to reach its client
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ConfigError in one clear sentence."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(_bind_message(host, port, error)) from None
    except OverflowError:
        sock.close()
        raise ConfigError(f"port {port} is not between 0 and 65535") from None
    return sock


def allow_many_connections() -> None:
    """Raise the soft limit of open files to the hard one: a queue of thousands of clients is a file each."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _bind_message(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is already in use: stop what listens there or give another --port"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """A request that is cut off because the server leaves is no fault to be logged with a traceback."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


class HttpServer(uvicorn.Server):
    """uvicorn with our manners about signals, and an exit code."""

    def __init__(self, settings: Settings, load: Loader, sock: socket.socket, drain_s: int = DRAIN_S) -> None:
        self.state = ServerState(settings, load, self._engine_ended)
        self.sock, self.exit_code = sock, 0
        self.engine_error: BaseException | None = None  # why the engine ended, if it did not end well
        self.is_stuck = False  # the engine's thread still loads or computes: the process can only be left by force
        self._num_signals, self._drain_s = 0, drain_s
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
        config = uvicorn.Config(
            make_app(self.state),
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            server_header=False,
            timeout_keep_alive=75,
        )
        super().__init__(config)

    def serve_until_done(self) -> int:
        """Run until a signal or the engine's end; the process' exit code."""
        self.run(sockets=[self.sock])
        self.is_stuck = not self.state.link.stop(2.0)
        return self.exit_code

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the running requests, within limits."""
        limit = asyncio.create_task(self._limit_drain())
        await super().shutdown(sockets)
        limit.cancel()
        if self.force_exit:  # uvicorn leaves this out then, and the application would be cut off with a traceback
            await self.lifespan.shutdown()

    async def _limit_drain(self) -> None:
        """After the drain time or a second signal, tell who still waits; then leave whoever does not listen."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._drain_s
        while self._num_signals < 2 and loop.time() < end_s:
            await asyncio.sleep(0.05)
        self.state.link.give_up("the server is shutting down before this answer was complete")
        await asyncio.sleep(LAST_WORDS_S)
        self.force_exit = True

    def _engine_ended(self, error: BaseException | None) -> None:
        """The engine is gone: tell whoever started us, after the clients have had their errors."""
        if error is not None:
            self.engine_error, self.exit_code = error, 1
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Our handlers while we serve; nothing is raised again afterwards."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in _SIGNALS}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: no new connections, the running requests end. Second: leave now."""
        self._num_signals += 1
        if sig == signal.SIGINT:
            self.exit_code = 130
        self.should_exit = True
        if self._num_signals == 1:
            self.state.log("draining", signal=signal.Signals(sig).name, open_requests=self.state.link.num_open)
