"""A real server on a free port, in a thread of the test's process, and what asks it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import uvicorn

import warm
from weft.service.server import ServerConfig, create_app
from weft.service.server.run import bind
from weft.service.server.service import Service
from weft.service.server.timeouts import TimedProtocol

if TYPE_CHECKING:
    import pytest

KEY = "a-key-of-enough-characters"


Event = tuple[int | None, str, dict[str, Any]]  # id, name, data


def events(lines: Iterator[str]) -> Iterator[Event]:
    """Read server-sent events as a browser does."""
    number, name = None, ""
    for line in lines:
        key, _, value = line.partition(": ")
        if key == "id":
            number = int(value)
        elif key == "event":
            name = value
        elif key == "data":
            yield number, name, json.loads(value)


@dataclass
class Served:
    """A server that runs: `client` asks it, `service` is its inside."""

    url: str
    client: httpx.Client
    service: Service
    loop: asyncio.AbstractEventLoop

    def on_loop(self, coroutine: Any) -> Any:
        """Run something in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()


@contextmanager
def model_paused(
    monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Block model calls of the NumPy engine until the end of the block. when: a call is blocked."""
    from weft.engines.numpy import NumpyEngine

    resumed, forward = threading.Event(), NumpyEngine.forward

    def waits(self: Any, rows: Any) -> Any:
        if when():
            assert resumed.wait()
        return forward(self, rows)

    monkeypatch.setattr(NumpyEngine, "forward", waits)
    try:
        yield
    finally:
        resumed.set()


@contextmanager
def serving(
    config: ServerConfig | None = None, *, wait: bool = True, port: int = 0
) -> Iterator[Served]:
    """Serve until the end of the block. wait: until a model is loaded. port: 0 for any."""
    config = ServerConfig(port=0) if config is None else config
    with TemporaryDirectory() as folder:
        if config.db is None:  # never the looms of who runs the tests
            config = replace(config, db=warm.new_database(Path(folder) / "looms.db"))
        with _serving(config, wait=wait, port=port) as server:
            yield server


@cache
def openapi() -> dict[str, Any]:
    """Return the OpenAPI document, which is equal for all servers and takes a second."""
    return create_app().openapi()


@contextmanager
def _serving(config: ServerConfig, *, wait: bool, port: int) -> Iterator[Served]:
    listener = bind(config.host, port)
    app = create_app(config)
    app.openapi = openapi  # type: ignore[method-assign]
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http=TimedProtocol,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=65,  # as ours
        )
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(
        target=loop.run_until_complete, args=(server.serve(sockets=[listener]),)
    )
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    headers = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key}"}
    try:
        # Without `verify` the client would load the certificates, which plain HTTP does not use.
        with httpx.Client(base_url=url, headers=headers, timeout=None, verify=False) as client:
            while not server.started:
                time.sleep(0.01)
            while wait and client.get("/readyz").status_code != 200:
                time.sleep(0.02)
            yield Served(url, client, app.state.service, loop)
    finally:
        server.should_exit = True
        thread.join()
        loop.close()
        listener.close()
