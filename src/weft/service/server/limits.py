"""How much one request may bring and ask for."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from .errors import RequestError

if TYPE_CHECKING:
    from .asgi import App, Message, Receive, Scope, Send
    from .config import ServerLimits

# Where a request brings a whole loom.
IMPORTS = ("/api/v1/import", "/looms/import")
# What beyond the limit is let come of a refused body, and how long the next piece is waited for:
# where a connection is closed while some is on its way, the client may never see the answer.
_LINGER_BYTES = 1 << 20
_LINGER_S = 2.0


class MaxBodySizeMiddleware:
    """Refuses a body that is too large: by what it says of itself, at the latest while it comes."""

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
                raise _too_large(limit)
        n_came = 0

        async def count() -> Message:
            nonlocal n_came
            message = await receive()
            if message["type"] == "http.request":
                n_came += len(message.get("body", b""))
                if n_came > limit:
                    if message.get("more_body"):
                        await _drain_body(receive, 2 * _LINGER_BYTES)
                    raise _too_large(limit)
            return message

        await self.app(scope, count, send)


async def _drain_body(receive: Receive, n_bytes: int) -> None:
    """Read on in a refused body, to its end or so many bytes."""
    with suppress(TimeoutError):
        while n_bytes > 0:
            async with asyncio.timeout(_LINGER_S):
                message = await receive()
            if message["type"] != "http.request" or not message.get("more_body"):
                return
            n_bytes -= len(message.get("body", b""))


def _too_large(limit: int) -> HTTPException:
    # NOTE: FastAPI, which reads the body, lets no other class through. What is left is not read.
    detail = f"the body is larger than the {limit} bytes that are taken here"
    return HTTPException(413, detail, {"Connection": "close"})


def check_limit(name: str, value: int, most: int, code: str = "invalid_parameter") -> None:
    """Refuse a number above the server's limit. Raises: Refused."""
    if value > most:
        raise RequestError(
            400, code, f"{name} is {value}; this server takes at most {most}", param=name
        )
