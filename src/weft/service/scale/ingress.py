"""The ingress: checks requests as the server does, and forwards each to its replica."""

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
from .asgi_proxy import plain, wait_for_disconnect
from .routing_key import PromptRouter, RoutingKey, repeated_key, routing_key

if TYPE_CHECKING:
    from ..server.asgi import Message, Receive, Scope, Send

READS = ("GET", "HEAD", "OPTIONS")
MAX_ATTEMPTS = 3
_LOST = (RayActorError, ActorUnavailableError, DeploymentUnavailableError)
_SECURITY_HEADERS = (b"x-request-id", b"x-content-type-options")


class Ingress:
    """An ASGI application that forwards each request to the replica of its routing key.

    If a replica dies, its requests fail. Requests that only read are retried on another replica.
    Others get 503 with Retry-After, as only the client knows whether they may be repeated. A
    response that has begun breaks off.
    """

    def __init__(self, replicas: DeploymentHandle, library: Library) -> None:
        """Connect to the replicas.

        replicas: handle of the deployment that answers. library: replaces names of looms by ids.
        """
        self.replicas = replicas.options(stream=True)
        self.library = library
        self._prompts = PromptRouter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (body := await read_body(receive)) is None:
            return
        call = asyncio.create_task(self._forward_with_retries(scope, body, send))
        gone = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait([call, gone], return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                await call
        finally:
            for task in (call, gone):
                task.cancel()
            await asyncio.gather(call, gone, return_exceptions=True)

    async def _forward_with_retries(self, scope: Scope, body: bytes, send: Send) -> None:
        """Forward a request; if it only reads, retry it on another replica after a failure."""
        attempts = MAX_ATTEMPTS if scope["method"] in READS else 1
        for remaining in reversed(range(attempts)):
            try:
                await self._forward(scope, body, send)
                return
            except _LOST as error:
                if scope.get("weft.began"):
                    raise
                if not remaining:
                    raise RequestError(
                        503,
                        "replica_lost",
                        "the replica of this request has died and is being replaced",
                        hint="send the request again; generated nodes are in the loom",
                        headers={"Retry-After": "1"},
                    ) from error

    async def _loom_key(self, key: RoutingKey) -> str:
        """Return the text of a key; a loom's name is replaced by its id, which a rename keeps."""
        if key.is_name:
            try:
                return (await asyncio.to_thread(self.library.row, key.key)).id
            except (ConfigError, StoreError):  # the replica reports the error
                pass
        return key.key

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Choose the replica by the request's routing key, and relay the response once."""
        forwarded = plain(scope)
        forwarded["headers"] = [
            *(header for header in forwarded["headers"] if header[0] != b"x-request-id"),
            (b"x-request-id", scope["weft.request_id"].encode()),
        ]
        key = routing_key(scope["path"], body)
        if key.heads:
            with self._prompts.routed(key.heads) as head:
                await self._relay(scope, forwarded, body, send, head)
        else:
            key_text = await self._loom_key(key) or repeated_key(forwarded["headers"])
            await self._relay(scope, forwarded, body, send, key_text)

    async def _relay(
        self, scope: Scope, forwarded: dict[str, Any], body: bytes, send: Send, key: str
    ) -> None:
        """Send a request to the replica of `key` once, and stream its response to the client.

        Sets `weft.began` in `scope` before the first message. Cancels the call to the replica
        unless the response is complete.

        forwarded: the scope in the form of `asgi_proxy.plain`.
        """
        response = self.replicas.options(session_id=key).answer.remote(forwarded, body)
        is_over = False
        try:
            async for piece in response:
                for message in pickle.loads(piece):
                    scope["weft.began"] = True
                    await send(_without_security_headers(message))
            is_over = True
        finally:
            if not is_over:
                response.cancel()


def _without_security_headers(message: Message) -> Message:
    """Remove the replica's request id and security headers, which the ingress adds again.

    Changes the message in place and returns it. Only the start of a response has headers.
    """
    if message["type"] == "http.response.start":
        headers = message.get("headers", ())
        message["headers"] = [
            header for header in headers if header[0].lower() not in _SECURITY_HEADERS
        ]
    return message
