"""Where requests come in: checked as the server checks them, then sent to their replica."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from ...errors import ConfigError, StoreError
from ..server.asgi import read_body
from ..server.errors import RequestError
from ..store.library import Library
from .asgi_proxy import plain, until_gone
from .routing_key import PromptRouter, RoutingKey, repeated_key, routing_key

if TYPE_CHECKING:
    from ..server.asgi import Message, Receive, Scope, Send

READS = ("GET", "HEAD", "OPTIONS")
TRIES = 3
_LOST = (RayActorError, ActorUnavailableError, DeploymentUnavailableError)
_OWN_HEADERS = (b"x-request-id", b"x-content-type-options")


class Ingress:
    """An ASGI application that sends each request to the replica that its key belongs to.

    A replica that dies takes with it what it was answering. A request that only reads is asked
    again of another. Any other gets 503 and when to try again: whether it may be done twice is
    known to its client alone. An answer that has begun breaks off, as with any server that dies.
    """

    def __init__(self, replicas: DeploymentHandle, library: Library) -> None:
        self.replicas = replicas.options(stream=True)
        self.library = library
        self._prompts = PromptRouter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (body := await read_body(receive)) is None:
            return
        call = asyncio.create_task(self._send_on(scope, body, send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait([call, gone], return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                await call
        finally:
            for task in (call, gone):
                task.cancel()
            await asyncio.gather(call, gone, return_exceptions=True)

    async def _send_on(self, scope: Scope, body: bytes, send: Send) -> None:
        tries = TRIES if scope["method"] in READS else 1
        for left in reversed(range(tries)):
            try:
                await self._answered(scope, body, send)
                return
            except _LOST as error:
                if scope.get("weft.began"):
                    raise
                if not left:
                    raise RequestError(
                        503,
                        "replica_lost",
                        "the replica that had this request is gone, another takes its place",
                        hint="send it again; what was grown so far is in the loom",
                        headers={"Retry-After": "1"},
                    ) from error

    async def _loom_key(self, key: RoutingKey) -> str:
        """Return the key with a loom's id for its name."""
        if key.is_name:
            try:
                return (await asyncio.to_thread(self.library.row, key.key)).id
            except (ConfigError, StoreError):  # the replica says what is wrong with it
                pass
        return key.key

    async def _answered(self, scope: Scope, body: bytes, send: Send) -> None:
        asked = plain(scope)
        asked["headers"] = [
            *(each for each in asked["headers"] if each[0] != b"x-request-id"),
            (b"x-request-id", scope["weft.request_id"].encode()),
        ]
        key = routing_key(scope["path"], body)
        if key.heads:
            with self._prompts.routed(key.heads) as head:
                await self._relay(scope, asked, body, send, head)
        else:
            found = await self._loom_key(key) or repeated_key(asked["headers"])
            await self._relay(scope, asked, body, send, found)

    async def _relay(
        self, scope: Scope, asked: dict[str, Any], body: bytes, send: Send, key: str
    ) -> None:
        response = self.replicas.options(session_id=key).answer.remote(asked, body)
        is_over = False
        try:
            async for piece in response:
                for message in pickle.loads(piece):
                    scope["weft.began"] = True
                    await send(_without_double(message))
            is_over = True
        finally:
            if not is_over:
                response.cancel()


def _without_double(message: Message) -> Message:
    """Leave out the headers that are said here, too."""
    if message["type"] == "http.response.start":
        headers = message.get("headers", ())
        message["headers"] = [each for each in headers if each[0].lower() not in _OWN_HEADERS]
    return message
