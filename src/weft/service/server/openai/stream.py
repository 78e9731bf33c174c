"""How a call is answered: all at once, or streamed as OpenAI does.

OpenAI's streams are `data:` lines, and `[DONE]` at the end; chunks with a `type` are named events.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from starlette.responses import Response

from ....errors import Cancelled, WeftError
from ..error_bodies import error_body
from ..errors import serialize_error
from ..events import PING, EventStream, json_of, until_gone
from ..service import exit_callback
from ..shutdown import CancelScope

if TYPE_CHECKING:
    from fastapi import Request

    from ....lm.lm import LM
    from ..service import Service
    from .runs import Runs

_log = logging.getLogger(__name__)
Json = dict[str, Any]


class PlannedCall(Protocol):
    """A call that is planned: exactly one of the two is used, once."""

    def answer(self) -> Awaitable[Json]:
        """Run it and return the answer."""
        ...

    def chunks(self) -> AsyncGenerator[Json, None]:
        """Run it and yield the answer in pieces; closing the generator ends the runs."""
        ...

    def release(self) -> None:
        """End what has not ended: the call is over, however it went."""
        ...

    @property
    def runs(self) -> Runs:
        """The choices."""
        ...


def sse_line(chunk: Json) -> bytes:
    """Return a chunk as a server-sent event; its `type` names the event."""
    name = chunk.get("type")
    head = f"event: {name}\n" if isinstance(name, str) else ""
    return f"{head}data: {json_of(chunk)}\n\n".encode("utf-8", "replace")


class StreamFormat(NamedTuple):
    """How chunks are written. ping: sent where nothing else is. end: after unnamed chunks."""

    media_type: str
    line: Callable[[Json], bytes]
    ping: bytes | None
    end: bytes


SSE = StreamFormat("text/event-stream", sse_line, PING, b"data: [DONE]\n\n")


async def run_call(
    request: Request,
    service: Service,
    kind: str,
    model: str | None,
    *,
    is_streamed: bool,
    plan: Callable[[LM, str], Awaitable[PlannedCall]],
    written: StreamFormat = SSE,
) -> Response | Json:
    """Plan a call on a model and answer it; a client that vanishes ends its runs.

    kind: for the metrics. plan: takes the LM and the model's name. Raises: QueueFull; what `plan`
    refuses; and the call's own errors, if it is not streamed; Stopped where the server stops.
    """
    await service.models.available(model)
    ending = CancelScope()
    with ExitStack() as stack:
        lm = stack.enter_context(service.work(kind, model, ending))
        with ending.scope():
            name = service.models.get(model).name
            call = await plan(lm, name)
            stack.callback(call.release)
            stack.callback(lambda: service.metrics.observe_first(name, call.runs.first_token_s))
            if not is_streamed:
                return await until_gone(request, call.answer())
        told = StreamedCall(call.chunks(), ending, request, written)
        end = exit_callback(stack.pop_all())
        return EventStream(
            told.lines(),
            media_type=written.media_type,
            ping=written.ping,
            on_end=lambda: end(told.error),
        )


class StreamedCall:
    """A call that is streamed. error: what ended it early, or has not let it begin."""

    def __init__(
        self,
        chunks: AsyncGenerator[Json, None],
        ending: CancelScope,
        request: Request,
        written: StreamFormat,
    ) -> None:
        self.error: Exception | None = Cancelled("the client is gone")
        self._chunks = chunks
        self._ending = ending
        self._request_id: str = request.scope.get("weft.request_id", "")
        self._path: str = request.scope["path"]
        self._written = written

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yield what is sent. An error ends it with a chunk that tells it, as the SDKs read it."""
        is_named = False
        try:
            with self._ending.scope():  # by the task that sends, which is not that of the route
                async with aclosing(self._chunks) as chunks:
                    async for chunk in chunks:
                        is_named = "type" in chunk
                        yield self._written.line(chunk)
            self.error = None
        except Exception as error:
            self.error = error
            if not isinstance(error, WeftError):
                _log.error("request %s failed in its stream", self._request_id, exc_info=error)
            status, told, _ = serialize_error(error, self._request_id)
            body = error_body(self._path, status, told)
            is_named = is_named or "type" in body
            yield self._written.line(body)
        if not is_named:
            yield self._written.end
