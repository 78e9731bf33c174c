"""Run a server until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from types import FrameType

import uvicorn

from ...errors import ConfigError, WeftError
from ..api.address import ServerAddress
from ..api.runtime_file import runtime_file
from .app import create_app
from .config import ServerConfig
from .service import Service
from .timeouts import TimedProtocol

_log = logging.getLogger(__name__)
BACKLOG = 2048
_LAST_S = 5.0  # seconds for responses still being sent at the end
_KEEP_ALIVE_S = 65  # longer than clients keep it, so that none sends into a closing connection


def serve(config: ServerConfig, announce: Callable[[str, list[str]], None]) -> None:
    """Serve until SIGTERM or SIGINT. The first signal lets jobs finish, the second exits at once.

    announce: called with the server's address and the names of the loaded models, once all models
        given at start have been loaded or have failed.

    Raises: ConfigError if the address cannot be bound; as `Service.open`; the load error if every
    model given at start fails.
    """
    listener = bind(config.host, config.port)
    with listener:
        port: int = listener.getsockname()[1]
        config = config.on(port)
        app = create_app(config)
        service: Service = app.state.service
        service.open()
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,  # SecurityMiddleware logs requests without their queries
            server_header=False,
            proxy_headers=False,
            http=TimedProtocol,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_S,  # type: ignore[arg-type]
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        service.when_loaded = partial(announce, f"http://{host}:{port}")
        server = GracefulServer(settings, service)
        url = ServerAddress(config.host.strip("[]"), port).url
        with runtime_file(url, port, service.token, config.db):
            server.run(sockets=[listener])
    if server.error is not None:
        raise server.error


class GracefulServer(uvicorn.Server):
    """uvicorn's server, but on SIGTERM it lets the service's jobs finish before it exits.

    error: the load error if all models failed; None if it was stopped by a signal.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.service.when_hopeless = self._stop_with_error
        self.error: WeftError | None = None
        self.is_stopping = False
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Store the event loop for the signal handlers."""
        self.loop = asyncio.get_running_loop()
        # Exempt the 120,000 objects of imported modules from garbage collection: each full
        # collection would stall all streams for 0.1 s. Models are loaded later and still collected.
        gc.collect()
        gc.freeze()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let running jobs finish, then exit. A second signal exits at once."""
        if self.is_stopping or self.loop is None:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
            return
        self.is_stopping = True
        self.loop.call_soon_threadsafe(self._start_draining)

    def _stop_with_error(self, error: WeftError) -> None:
        """Exit because no model could be loaded."""
        if not self.is_stopping:
            self.error = error
            self._start_draining()

    def _start_draining(self) -> None:
        """Start `_drain_and_exit` as a task."""
        self._stopping = asyncio.ensure_future(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        """Let running jobs finish, then exit."""
        try:
            await self.service.drain()
        finally:
            self.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes any free one.

    Raises: ConfigError if the address is in use or not local.
    """
    try:
        candidates = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, _, _, _, address = candidates[0]
        # asyncio sets TCP_NODELAY only on sockets with an explicit TCP protocol. Without it a body
        # would wait 40 ms for the client to acknowledge the headers.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            if os.name == "posix":  # on Windows it would let two servers share a port
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener
    except (OSError, UnicodeError) as error:
        raise _bind_error(host, port, error) from error


def _bind_error(host: str, port: int, error: Exception) -> ConfigError:
    """Return the error for an address that cannot be bound, with a hint."""
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} of {host} is in use by another program",
            hint="weft serve --port 0 takes any free port",
        )
    if number == errno.EACCES:
        return ConfigError(f"port {port} may not be used by this user; take one above 1023")
    return ConfigError(f"cannot listen on {host}:{port}: {error}")
