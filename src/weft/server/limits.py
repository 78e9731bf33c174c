"""How much one request may bring and ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException

from .errors import Refused

if TYPE_CHECKING:
    from .config import ServerLimits
    from .messages import App, Message, Receive, Scope, Send

# Where a request brings a whole loom.
IMPORTS = ("/api/v1/import", "/looms/import")


class BodyLimit:
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
                raise _too_large(limit)
        n_came = 0

        async def count() -> Message:
            nonlocal n_came
            message = await receive()
            if message["type"] == "http.request":
                n_came += len(message.get("body", b""))
                if n_came > limit:
                    raise _too_large(limit)
            return message

        await self.app(scope, count, send)


def _too_large(limit: int) -> HTTPException:
    # NOTE: FastAPI, which reads the body, lets no other class through. What is left is not read.
    detail = f"the body is larger than the {limit} bytes that are taken here"
    return HTTPException(413, detail, {"Connection": "close"})


def check_most(name: str, value: int, most: int, code: str = "invalid_parameter") -> None:
    """Refuse a number above the server's limit. Raises: Refused."""
    if value > most:
        raise Refused(400, code, f"{name} is {value}; this server takes at most {most}", param=name)
