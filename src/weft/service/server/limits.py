"""Limits on the size and the numbers of a request."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from .errors import RequestError

if TYPE_CHECKING:
    from .asgi import App, Message, Receive, Scope, Send
    from .config import ServerLimits

# Routes whose body is a complete loom.
IMPORTS = ("/api/v1/import", "/looms/import")
# Bytes of a rejected body that are still read, and the wait for each piece: if the connection is
# closed while data is in flight, the client may never see the response.
_LINGER_BYTES = 1 << 20
_LINGER_S = 2.0


class MaxBodySizeMiddleware:
    """Rejects bodies that are too large, by Content-Length or once more bytes have arrived."""

    def __init__(self, app: App, limits: ServerLimits) -> None:
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        is_import = scope["path"] in IMPORTS
        limit = self.limits.import_bytes if is_import else self.limits.body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length" and (not value.isdigit() or int(value[:20]) > limit):
                if value.isdigit() and int(value[:20]) <= limit + _LINGER_BYTES:
                    await _drain_body(receive, int(value))
                raise _too_large_error(limit)
        n_received = 0

        async def count() -> Message:
            nonlocal n_received
            message = await receive()
            if message["type"] == "http.request":
                n_received += len(message.get("body", b""))
                if n_received > limit:
                    if message.get("more_body"):
                        await _drain_body(receive, 2 * _LINGER_BYTES)
                    raise _too_large_error(limit)
            return message

        await self.app(scope, count, send)


async def _drain_body(receive: Receive, n_bytes: int) -> None:
    """Read and discard a rejected body, up to its end or `n_bytes`.

    Stops early if the client sends nothing for `_LINGER_S` seconds.
    """
    with suppress(TimeoutError):
        while n_bytes > 0:
            async with asyncio.timeout(_LINGER_S):
                message = await receive()
            if message["type"] != "http.request" or not message.get("more_body"):
                return
            n_bytes -= len(message.get("body", b""))


def _too_large_error(limit: int) -> HTTPException:
    """Return the error 413 for a body above `limit` bytes."""
    # NOTE: FastAPI reads the body and passes on no other class. The rest of the body is not read.
    detail = f"the body is larger than the limit of {limit} bytes"
    return HTTPException(413, detail, {"Connection": "close"})


def check_limit(name: str, value: int, maximum: int, code: str = "invalid_parameter") -> None:
    """Raise RequestError if a number exceeds a limit of the server.

    name: the parameter, for the message. code: error code of the response.
    """
    if value > maximum:
        raise RequestError(
            400, code, f"{name} is {value}; this server allows at most {maximum}", param=name
        )
