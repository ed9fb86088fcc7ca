"""Runs the application on a socket: binds before anything is loaded, drains on a first signal, leaves on a second."""

from __future__ import annotations

import errno
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


class HttpServer(uvicorn.Server):
    """uvicorn with our manners about signals, and an exit code."""

    def __init__(self, settings: Settings, load: Loader, sock: socket.socket, drain_s: int = DRAIN_S) -> None:
        self.state = ServerState(settings, load, self._engine_ended)
        self.sock, self.exit_code = sock, 0
        self.engine_error: BaseException | None = None  # why the engine ended, if it did not end well
        self.is_stuck = False  # the engine's thread still loads or computes: the process can only be left by force
        self._num_signals = 0
        config = uvicorn.Config(
            make_app(self.state),
            log_config=None,
            access_log=False,
            lifespan="on",
            ws="none",
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=drain_s,
        )
        super().__init__(config)

    def serve_until_done(self) -> int:
        """Run until a signal or the engine's end; the process' exit code."""
        self.run(sockets=[self.sock])
        self.is_stuck = not self.state.link.stop(2.0)
        return self.exit_code

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
        if self._num_signals > 1:
            self.force_exit = True
        else:
            self.state.log("draining", signal=signal.Signals(sig).name, open_requests=self.state.link.num_open)
