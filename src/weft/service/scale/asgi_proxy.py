"""A request on its way to another process: ASGI messages, in pieces, through a streaming call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..server.asgi import App, Message, Receive, Scope

GONE_S = 5.0  # what an app gets to end when its client is gone
_PLAIN = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
    "root_path", "headers", "client", "server",
)  # fmt: skip


def plain(scope: Scope) -> dict[str, Any]:
    """Return what of a request's scope can be sent: no objects of the server that took it."""
    return {name: scope[name] for name in _PLAIN if name in scope}


async def until_gone(receive: Receive) -> None:
    """Return when the client of a request, whose body was read, is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(app: App, scope: Scope, body: bytes) -> AsyncGenerator[list[Message]]:
    """Yield what an app answers; messages that are there at once come together.

    When the generator is closed, the app is told that the client is gone, and cancelled where it
    takes longer than `GONE_S` to end. Raises: what the app raises, after what it sent before.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    asked = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in asked:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(scope, receive, sent.put)
        finally:
            sent.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        async for messages in _together(sent):
            yield messages
        await running
    finally:
        gone.set()
        await asyncio.wait([running], timeout=GONE_S)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait([running])


async def _together(sent: asyncio.Queue[Message | None]) -> AsyncIterator[list[Message]]:
    while True:
        found = [await sent.get()]
        while not sent.empty():
            found.append(sent.get_nowait())
        messages = [each for each in found if each is not None]
        if messages:
            yield messages
        if len(messages) < len(found):
            return
