"""Forward a request to another process: ASGI messages in batches over a streaming call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..server.asgi import App, Message, Receive, Scope

GONE_S = 5.0  # seconds for an app to end after its client disconnects
_PLAIN = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string",
    "root_path", "headers", "client", "server",
)  # fmt: skip


def plain(scope: Scope) -> dict[str, Any]:
    """Return the entries of an ASGI scope that can be pickled for another process."""
    return {name: scope[name] for name in _PLAIN if name in scope}


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects. The body of its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(app: App, scope: Scope, body: bytes) -> AsyncGenerator[list[Message]]:
    """Run an ASGI app on one request, and yield its response in batches.

    Each batch has the messages that were ready together. Closing the generator reports a
    disconnected client to the app, and cancels the app after `GONE_S` seconds.
    Raises: the app's error, after the messages sent before.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    disconnected = asyncio.Event()
    request = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in request:
            return message
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(scope, receive, sent.put)
        finally:
            sent.put_nowait(None)

    running = asyncio.create_task(run())
    try:
        async for messages in _batches(sent):
            yield messages
        await running
    finally:
        disconnected.set()
        await asyncio.wait([running], timeout=GONE_S)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait([running])


async def _batches(sent: asyncio.Queue[Message | None]) -> AsyncIterator[list[Message]]:
    """Yield the queued messages, those ready together in one batch. None ends the queue."""
    while True:
        batch = [await sent.get()]
        while not sent.empty():
            batch.append(sent.get_nowait())
        messages = [message for message in batch if message is not None]
        if messages:
            yield messages
        if len(messages) < len(batch):
            return
