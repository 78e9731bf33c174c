"""Runs a planned call and returns its answer, complete or as a stream.

OpenAI's streams are `data:` lines that end with `[DONE]`; chunks with a `type` are named events.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from starlette.responses import Response

from ....errors import Cancelled, WeftError
from ...api.base import ResponseModel
from ..error_bodies import error_body
from ..errors import serialize_error
from ..events import PING, EventStream, json_of, run_until_disconnect
from ..service import exit_callback
from ..shutdown import CancelScope
from .protocol import to_response

if TYPE_CHECKING:
    from fastapi import Request

    from ....lm.lm import LM
    from ..service import Service
    from .runs import Runs

_log = logging.getLogger(__name__)
Json = dict[str, Any]


class PlannedCall(Protocol):
    """A call that was checked and planned, but has not run yet.

    Either `answer` or `chunks` is used, and only once.
    """

    def answer(self) -> Awaitable[ResponseModel | Json]:
        """Run the call and return the answer."""
        ...

    def chunks(self) -> AsyncGenerator[Json, None]:
        """Run the call and yield the stream's chunks. Closing the generator cancels the call."""
        ...

    def release(self) -> None:
        """Cancel choices that are still running. It is called once, at the end of the call."""
        ...

    @property
    def runs(self) -> Runs:
        """The choices of the call, for metrics."""
        ...


def sse_line(chunk: Json) -> bytes:
    """Return a chunk as a server-sent event; its `type` names the event."""
    name = chunk.get("type")
    head = f"event: {name}\n" if isinstance(name, str) else ""
    return f"{head}data: {json_of(chunk)}\n\n".encode("utf-8", "replace")


class StreamFormat(NamedTuple):
    """The encoding of chunks as bytes.

    ping: sent when nothing else was sent for a while. end: sent after a stream of unnamed chunks.
    """

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
    format: StreamFormat = SSE,
) -> Response | Json:
    """Plan a call on a model, run it, and return its answer or its stream.

    A client that disconnects cancels it.

    Args:
        kind: label of the call in the metrics.
        model: name of the model; None means the default one.
        is_streamed: return a stream of chunks instead of the complete answer.
        plan: called with the LM and the model's name; returns the planned call.
        format: encoding of the stream.

    Raises: QueueFull; the errors of `plan`; the call's own errors if it is not streamed;
    ServerStopping.
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
                answer = await run_until_disconnect(request, call.answer())
                return to_response(answer) if isinstance(answer, ResponseModel) else answer
        streamed = StreamedCall(call.chunks(), ending, request, format)
        end = exit_callback(stack.pop_all())
        return EventStream(
            streamed.lines(),
            media_type=format.media_type,
            ping=format.ping,
            on_end=lambda: end(streamed.error),
        )


class StreamedCall:
    """The encoded stream of a planned call, for an `EventStream`.

    error: the error that ended the stream early, or prevented its start; None without one.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[Json, None],
        scope: CancelScope,
        request: Request,
        format: StreamFormat,
    ) -> None:
        self.error: Exception | None = Cancelled("the client has disconnected")
        self._chunks = chunks
        self._cancel_scope = scope
        self._request_id: str = request.scope.get("weft.request_id", "")
        self._path: str = request.scope["path"]
        self._format = format

    async def lines(self) -> AsyncGenerator[bytes]:
        """Yield the encoded chunks. An error becomes a last chunk in the form that SDKs expect."""
        is_named = False
        try:
            with self._cancel_scope.scope():  # entered by the sending task, not the route's
                async with aclosing(self._chunks) as chunks:
                    async for chunk in chunks:
                        is_named = "type" in chunk
                        yield self._format.line(chunk)
            self.error = None
        except Exception as error:
            self.error = error
            if not isinstance(error, WeftError):
                _log.error("request %s failed in its stream", self._request_id, exc_info=error)
            status, error_object, _ = serialize_error(error, self._request_id)
            body = error_body(self._path, status, error_object)
            is_named = is_named or "type" in body
            yield self._format.line(body)
        if not is_named:
            yield self._format.end
