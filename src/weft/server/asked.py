"""What requests say in their headers, as arguments of routes, and the errors that all may give."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Query

from ..api.base import ErrorReply
from .errors import Refused

_REV = re.compile(r'(?:W/)?"?(\d{1,15})"?')
_WHAT = {
    400: "A parameter is wrong, or not known: `param` names it.",
    401: "The API key is missing or wrong.",
    403: "Not allowed here: the Host, the Origin, a path.",
    404: "There is no such thing.",
    409: "Somebody else has changed it, or works on it; `details.rev` is its revision now.",
    413: "The body is too large.",
    422: "What was asked cannot be followed: a constraint, tokens outside the vocabulary.",
    429: "Too many jobs run; `Retry-After` says when to try again.",
    500: "Something failed inside the server.",
    501: "The model's engine cannot do it.",
    503: "Not now: the model is being loaded, memory is full, or the server is about to stop.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": what} for status, what in _WHAT.items()
}


# Async, all of them: FastAPI calls others in a thread, which waits for the model's at every turn.
async def _actor(
    x_weft_actor: Annotated[
        str | None,
        Header(max_length=64, description="Who does it, for the loom's log.", pattern=r"^[ -~]*$"),
    ] = None,
) -> str:
    return x_weft_actor or "http"


async def _if_match(
    if_match: Annotated[
        str | None,
        Header(description="The revision that you saw: 409 if the node was changed after it."),
    ] = None,
) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    found = _REV.fullmatch(if_match.strip())
    if found is None:
        raise Refused(
            400, "invalid_parameter", "If-Match is a revision, as the ETag has it", param="If-Match"
        )
    return int(found[1])


async def _last_event(
    last_event_id: Annotated[
        str | None, Header(description="The last event that came; the stream goes on after it.")
    ] = None,
    after: Annotated[
        int | None, Query(ge=0, lt=2**53, description="The same, for who cannot send headers.")
    ] = None,
) -> int | None:
    if last_event_id is None:
        return after
    if not (last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) < 16):
        raise Refused(
            400,
            "invalid_parameter",
            "Last-Event-ID is the id of an event",
            param="Last-Event-ID",
        )
    return int(last_event_id)


Actor = Annotated[str, Depends(_actor)]
IfMatch = Annotated[int | None, Depends(_if_match)]
LastEvent = Annotated[int | None, Depends(_last_event)]
LoomName = Annotated[str, Path(max_length=300, description="A loom's name or id.")]
NodeName = Annotated[str, Path(max_length=64, description="A node's number or id.")]
JobName = Annotated[str, Path(max_length=64, description="A job's id.")]
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events; docs/server.md describes each.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
