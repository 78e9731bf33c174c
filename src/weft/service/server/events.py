"""Bounded event logs for any number of readers, and server-sent events."""

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
_PIECE = 1 << 18  # approximate size of one write to a reader
_TOKEN = 256  # estimated bytes of a token of a "tok" event in memory


class SentEvent(NamedTuple):
    """One event of a log.

    id: higher than that of the event before it; None if a stream cannot resume from this event.
    """

    name: str
    data: Json
    id: int | None = None


class EventLog:
    """The last events of a job or a loom, for any number of readers; used from the loop only.

    A reader that asks for removed events gets a "snapshot" event, the current state, and then the
    events after it.

    Args:
        max_events: maximum number of stored events.
        max_bytes: maximum of their estimated size.
        on_event: called with each event; may be set to None.
        start_id: the id before the first event. A log that replaces another must start above its
            ids, so that no reader resumes in the wrong log.
    """

    def __init__(
        self,
        snapshot: Callable[[], Json],
        *,
        max_events: int = 2048,
        max_bytes: int = 1 << 20,
        on_event: Callable[[str, Json], object] | None = None,
        start_id: int = 0,
    ) -> None:
        self.on_event = on_event
        self._snapshot = snapshot
        self._max_events, self._max_bytes = max_events, max_bytes
        self._kept: deque[tuple[SentEvent, int]] = deque()
        self._n_bytes = 0
        self._last = start_id
        self._waiting: dict[asyncio.Future[None], None] = {}
        self.n_readers = 0
        self.is_over = False

    @property
    def last(self) -> int:
        """The id of the last event, or the id before the first one."""
        return self._last

    def put(self, name: str, data: Json) -> None:
        """Append an event, remove old ones above the limits, and wake the readers."""
        self._last += 1
        size = _TOKEN * len(data["t"]) if name == "tok" else estimate_bytes(data)
        self._kept.append((SentEvent(name, data, self._last), size))
        self._n_bytes += size
        # The last event stays however large it is, so that waiting readers need no snapshot.
        while len(self._kept) > 1 and self._is_full:
            self._n_bytes -= self._kept.popleft()[1]
        self._wake()
        if self.on_event is not None:
            self.on_event(name, data)

    @property
    def _is_full(self) -> bool:
        """True if the log exceeds its number of events or its bytes."""
        return len(self._kept) > self._max_events or self._n_bytes > self._max_bytes

    def skip(self) -> None:
        """Count an event without storing it, because no reader is connected.

        A reader that resumes from an earlier event gets a snapshot.
        """
        self._last += 1
        self._kept.clear()
        self._n_bytes = 0

    def end(self) -> None:
        """End the log: readers stop after the last event."""
        self.is_over = True
        self._wake()

    def _wake(self) -> None:
        """Wake all readers that wait for an event."""
        waiting, self._waiting = self._waiting, {}
        for reader in waiting:
            if not reader.done():
                reader.set_result(None)

    async def frames(self, after: int | None = 0) -> AsyncGenerator[bytes]:
        """Yield the events after an id, encoded as server-sent events.

        after: id of the last event that the reader has; 0 means all. None starts with a snapshot.

        Events that are available together are joined. A slow reader delays only itself. If the log
        has dropped events that a reader needs, the reader gets a snapshot. The generator ends with
        the log.
        """
        loop = asyncio.get_running_loop()
        self.n_readers += 1
        try:
            if after is None:
                after = self._last
                yield frame(SentEvent("snapshot", self._snapshot(), after))
            at = after
            while True:
                if events := self._events_after(at):
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

    def _events_after(self, at: int) -> list[SentEvent]:
        """Return the stored events with ids above `at`; a snapshot if some of them were removed."""
        first = self._last - len(self._kept) + 1
        if at > self._last or at < first - 1:  # from another log, or already dropped
            return [SentEvent("snapshot", self._snapshot(), self._last)]
        # Index only the new events: with many readers, scanning the log would be slow.
        n_new = self._last - at
        events, n_bytes = [], 0
        for i in range(len(self._kept) - n_new, len(self._kept)):
            event, size = self._kept[i]
            events.append(event)
            n_bytes += size
            if n_bytes > _PIECE:  # slow readers share the log instead of holding copies
                break
        return events


def estimate_bytes(value: object) -> int:
    """Return the approximate size of an event's data in memory, in bytes."""
    if isinstance(value, dict):
        return 64 + sum(estimate_bytes(key) + estimate_bytes(item) for key, item in value.items())
    if isinstance(value, list):
        return 56 + sum(map(estimate_bytes, value))
    return 50 + len(value) if isinstance(value, str) else 32


class EventStream(StreamingResponse):
    """A streaming response that sends `ping` if nothing else was sent for `ping_s` seconds.

    Args:
        ping: the bytes to send; None sends no pings.
        on_end: called once, after the iterator was closed. It is also called if the client
            disconnects before the first byte.
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
        """Send the stream until it ends or the client disconnects."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if (close := getattr(self._pieces, "aclose", None)) is not None:
                await close()
            if self._on_end is not None:
                self._on_end()

    async def stream_response(self, send: Any) -> None:
        """Send the pieces of the iterator, with pings between them."""
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(head)
        pings = None if self._ping is None else Pings(send, self._ping, self._ping_s)
        try:
            async for piece in self._pieces:
                await send(_body_message(piece))
                if pings is not None:
                    pings.postpone()
        finally:
            if pings is not None:
                pings.end()
        await send(_body_message(b"", more=False))


class Pings:
    """Sends `ping` whenever nothing else was sent for `ping_s` seconds.

    Sending does not reschedule the timer; the timer checks the time of the last write when it
    fires.
    """

    def __init__(
        self, send: Callable[[Json], Awaitable[None]], piece: bytes, ping_s: float
    ) -> None:
        self._send = send
        self._piece = piece
        self._ping_s = ping_s
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._timer = self._loop.call_later(ping_s, self._check)
        self._ping: asyncio.Task[None] | None = None

    def postpone(self) -> None:
        """Restart the waiting time before the next ping, because something was sent."""
        self._last = self._loop.time()

    def end(self) -> None:
        """Stop the timer."""
        self._timer.cancel()
        if self._ping is not None:
            self._ping.cancel()

    def _check(self) -> None:
        """Send a ping if nothing was sent for `ping_s` seconds, and restart the timer."""
        now = self._loop.time()
        if now >= self._last + self._ping_s:
            self._last = now
            if (
                self._ping is None or self._ping.done()
            ):  # the previous ping may still wait for the client
                self._ping = self._loop.create_task(self._send_ping())
        self._timer = self._loop.call_at(self._last + self._ping_s, self._check)

    async def _send_ping(self) -> None:
        """Send one ping to the client."""
        with suppress(OSError):  # the client has disconnected; the sender of the pieces handles it
            await self._send(_body_message(self._piece))


def _body_message(piece: bytes, *, more: bool = True) -> Json:
    """Return the ASGI message for a part of a body. more: other parts follow."""
    return {"type": "http.response.body", "body": piece, "more_body": more}


def frame(event: SentEvent) -> bytes:
    """Encode an event as a server-sent event: `id`, `event` and `data` lines."""
    head = (
        f"event: {event.name}\n" if event.id is None else f"id: {event.id}\nevent: {event.name}\n"
    )
    return f"{head}data: {json_of(event.data)}\n\n".encode("utf-8", "replace")


# One encoder: `json.dumps` creates one per call.
json_of = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


async def run_until_disconnect(request: Request, work: Awaitable[Value]) -> Value:
    """Await work for a client and return its result. The request's body must have been read.

    If the client disconnects, the work is cancelled and Cancelled is raised.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait([task, disconnected], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client has disconnected")
    finally:
        for future in (task, disconnected):
            future.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
