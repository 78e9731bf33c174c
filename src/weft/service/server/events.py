"""Events for one reader or many: a bounded log that is read from any point, and SSE from it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from fastapi import Request
from starlette.responses import StreamingResponse

from ...errors import Cancelled

Json = dict[str, Any]
Value = TypeVar("Value")
PING_S = 15.0
PING = b": ping\n\n"  # a comment
_PIECE = 1 << 18  # bytes that one reader is sent at once, about
_TOKEN = 256  # bytes that a token of a "tok" event takes here


class SentEvent(NamedTuple):
    """One event: `id` rises by one in its log; None where it cannot be resumed from."""

    name: str
    data: Json
    id: int | None = None


class EventLog:
    """The last events of a job or a loom, for any number of readers; used from the loop only.

    Who comes too late for what it asks gets a "snapshot" first: the state as it is now, after which
    the events go on. most, most_bytes: of events that are kept, as they lie in memory. also: is
    told of each, too, and may be taken away. begin: the id before the first one; a log that takes
    the place of another one begins beyond all that one's ids, so that nobody goes on in the wrong
    log.
    """

    def __init__(
        self,
        snapshot: Callable[[], Json],
        *,
        most: int = 2048,
        most_bytes: int = 1 << 20,
        also: Callable[[str, Json], object] | None = None,
        begin: int = 0,
    ) -> None:
        self.also = also
        self._snapshot = snapshot
        self._most, self._most_bytes = most, most_bytes
        self._kept: deque[tuple[SentEvent, int]] = deque()
        self._n_bytes = 0
        self._last = begin
        self._waiting: dict[asyncio.Future[None], None] = {}
        self.n_readers = 0
        self.is_over = False

    @property
    def last(self) -> int:
        """The id of the last event; that before the first where there is none."""
        return self._last

    def put(self, name: str, data: Json) -> None:
        """Add an event and wake the readers."""
        self._last += 1
        size = _TOKEN * len(data["t"]) if name == "tok" else weight(data)
        self._kept.append((SentEvent(name, data, self._last), size))
        self._n_bytes += size
        # The last one is there, however large: who waits for it is told it, and not all anew.
        while len(self._kept) > 1 and self._is_full:
            self._n_bytes -= self._kept.popleft()[1]
        self._wake()
        if self.also is not None:
            self.also(name, data)

    @property
    def _is_full(self) -> bool:
        return len(self._kept) > self._most or self._n_bytes > self._most_bytes

    def skip(self) -> None:
        """Note that something happened that nobody listened to: who comes back gets a snapshot."""
        self._last += 1
        self._kept.clear()
        self._n_bytes = 0

    def end(self) -> None:
        """No event comes any more: readers end after the last one."""
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for reader in waiting:
            if not reader.done():
                reader.set_result(None)

    async def frames(self, after: int | None = 0) -> AsyncGenerator[bytes]:
        """Yield the events after one as they are sent, those that there are at once as one piece.

        Who reads more slowly than they come holds one such piece, and is told the state anew where
        the log has gone on without him. after: None for a snapshot first. Ends when the log does.
        """
        loop = asyncio.get_running_loop()
        self.n_readers += 1
        try:
            if after is None:
                after = self._last
                yield frame(SentEvent("snapshot", self._snapshot(), after))
            at = after
            while True:
                if events := self._since(at):
                    yield b"".join(map(frame, events))
                    at = events[-1].id or at
                elif self.is_over:
                    return
                else:
                    news = loop.create_future()
                    self._waiting[news] = None
                    try:
                        await news
                    finally:
                        self._waiting.pop(news, None)
        finally:
            self.n_readers -= 1

    def _since(self, at: int) -> list[SentEvent]:
        first = self._last - len(self._kept) + 1
        if at > self._last or at < first - 1:  # of another log, or forgotten
            return [SentEvent("snapshot", self._snapshot(), self._last)]
        # Only the new ones are looked at: of many readers each would walk all of the log.
        n_new = self._last - at
        found, n_bytes = [], 0
        for i in range(len(self._kept) - n_new, len(self._kept)):
            event, size = self._kept[i]
            found.append(event)
            n_bytes += size
            if n_bytes > _PIECE:  # the rest waits here, once, and not with each slow reader
                break
        return found


def weight(value: object) -> int:
    """Return the bytes that what an event tells takes in memory, about."""
    if isinstance(value, dict):
        return 64 + sum(weight(key) + weight(each) for key, each in value.items())
    if isinstance(value, list):
        return 56 + sum(map(weight, value))
    return 50 + len(value) if isinstance(value, str) else 32


class EventStream(StreamingResponse):
    """Sends pieces of a stream as they come, and `ping` where none comes for `ping_s` seconds.

    ping: None sends nothing. on_end: called once, however it ends: when the client vanishes, too,
    even before anything was sent. The iterator is closed then.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        *,
        media_type: str = "text/event-stream",
        ping: bytes | None = PING,
        ping_s: float = PING_S,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._pieces = pieces
        self._ping = ping
        self._ping_s = ping_s
        self._on_end = on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send everything, or as much as the client waits for."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if (close := getattr(self._pieces, "aclose", None)) is not None:
                await close()
            if self._on_end is not None:
                self._on_end()

    async def stream_response(self, send: Any) -> None:
        """Send the pieces, and pings between them."""
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        pings = None if self._ping is None else Pings(send, self._ping, self._ping_s)
        try:
            async for piece in self._pieces:
                await send(_body(piece))
                if pings is not None:
                    pings.put_off()
        finally:
            if pings is not None:
                pings.end()
        await send(_body(b"", more=False))


class Pings:
    """Sends `ping` whenever nothing else was sent for `ping_s` seconds.

    Its timer is not moved by what is sent, only looked at when it fires: it costs a stream nothing.
    """

    def __init__(
        self, send: Callable[[Json], Awaitable[None]], piece: bytes, ping_s: float
    ) -> None:
        self._send = send
        self._piece = piece
        self._ping_s = ping_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(ping_s, self._look)
        self._ping: asyncio.Task[None] | None = None

    def put_off(self) -> None:
        """Something was sent just now."""
        self._last = self._loop.time()

    def end(self) -> None:
        """Send none any more."""
        self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        if now >= self._last + self._ping_s:
            self._last = now
            if self._ping is None or self._ping.done():  # the last one may wait for the client
                self._ping = self._loop.create_task(self._one())
        self._timer = self._loop.call_at(self._last + self._ping_s, self._look)

    async def _one(self) -> None:
        with suppress(OSError):  # the client is gone: who sends the pieces hears of it
            await self._send(_body(self._piece))


def _body(piece: bytes, *, more: bool = True) -> Json:
    return {"type": "http.response.body", "body": piece, "more_body": more}


def frame(event: SentEvent) -> bytes:
    """Return an event as it is sent."""
    head = (
        f"event: {event.name}\n" if event.id is None else f"id: {event.id}\nevent: {event.name}\n"
    )
    return f"{head}data: {json_of(event.data)}\n\n".encode("utf-8", "replace")


# Made once: `json.dumps` makes one for every call.
json_of = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


async def until_gone(request: Request, work: Awaitable[Value]) -> Value:
    """Await work for a client; when that vanishes, cancel it and raise Cancelled.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client is gone")
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
