"""Running a server until it is told to stop: its socket, and what SIGTERM and Ctrl-C do."""

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
_LAST_S = 5.0  # for answers that are on their way when everything has ended
_KEEP_ALIVE_S = 65  # longer than clients do: they would send into a connection that is being closed


def serve(config: ServerConfig, announce: Callable[[str, list[str]], None]) -> None:
    """Serve until SIGTERM or SIGINT; the first lets jobs end, the second ends at once.

    announce: called with the address and the names of the loaded models, once every model of the
    start is loaded or has failed. Raises: ConfigError for an address that cannot be bound; as
    `Service.open`; the error of the models, if none of the start can be loaded.
    """
    listener = bound(config.host, config.port)
    with listener:
        port: int = listener.getsockname()[1]
        config = config.on(port)
        app = create_app(config)
        service: Service = app.state.service
        service.open()
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,  # ours leaves queries out
            server_header=False,
            proxy_headers=False,
            http=TimedProtocol,
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_LAST_S,  # type: ignore[arg-type]
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        service.when_loaded = partial(announce, f"http://{host}:{port}")
        server = Stoppable(settings, service)
        url = ServerAddress(config.host.strip("[]"), port).url
        with runtime_file(url, port, service.token, config.db):
            server.run(sockets=[listener])
    if server.error is not None:
        raise server.error


class Stoppable(uvicorn.Server):
    """Drains its service before it exits.

    error: why it stopped by itself: its models could not be loaded. None where it was told to.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.service.when_hopeless = self._give_up
        self.error: WeftError | None = None
        self.was_told = False
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Note the loop that signals talk to."""
        self.loop = asyncio.get_running_loop()
        # What was imported, some 120,000 objects, stays. Looked through again and again it would
        # hold up all streams, for 0.1 s each time. Models come later: what goes again is looked at.
        gc.collect()
        gc.freeze()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop; the second time stop at once, as if the signal had no handler."""
        if self.was_told or self.loop is None:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
            return
        self.was_told = True
        self.loop.call_soon_threadsafe(self._stop)

    def _give_up(self, error: WeftError) -> None:
        if not self.was_told:
            self.error = error
            self._stop()

    def _stop(self) -> None:
        self._stopping = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        try:
            await self.service.drain()
        finally:
            self.should_exit = True


def bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; port 0 takes any free one.

    Raises: ConfigError where it is taken or not this machine's.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, _, _, _, address = found[0]
        # asyncio lets small writes go at once (TCP_NODELAY) on sockets that say they are TCP. Else
        # a body would wait, 40 ms, for the client to acknowledge its headers.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            if os.name == "posix":  # elsewhere it would let two servers share a port
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
            made.listen(BACKLOG)
        except BaseException:
            made.close()
            raise
        return made
    except (OSError, UnicodeError) as error:
        raise _cannot_bind(host, port, error) from error


def _cannot_bind(host: str, port: int, error: Exception) -> ConfigError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} of {host} is taken: another server runs there",
            hint="weft serve --port 0 takes any free port",
        )
    if number == errno.EACCES:
        return ConfigError(f"port {port} may not be used by this user; take one above 1023")
    return ConfigError(f"{host}:{port} is no address that can be served on: {error}")
