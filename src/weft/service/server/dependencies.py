"""What all routes take alike: headers as arguments, no unknown query, the errors they may give."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Header, Path, Query, Request

from ..api.base import ErrorReply
from .errors import RequestError

if TYPE_CHECKING:
    from fastapi.dependencies.models import Dependant

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
        raise RequestError(
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
        raise RequestError(
            400,
            "invalid_parameter",
            "Last-Event-ID is the id of an event",
            param="Last-Event-ID",
        )
    return int(last_event_id)


async def check_query_names(request: Request) -> None:
    """Refuse a query parameter that the route does not take: a typo would be as good as nothing.

    A dependency of every native route. Raises: Refused.
    """
    if not request.query_params:
        return
    allowed = _queries(request.scope["route"].dependant)
    for name in request.query_params:
        if name not in allowed:
            raise _unknown_query(name, allowed)


def _queries(dependant: Dependant) -> list[str]:
    """Return the query parameters of a route, and of what it depends on, as requests name them."""
    own = [field.alias for field in dependant.query_params]
    below = [name for each in dependant.dependencies for name in _queries(each)]
    return list(dict.fromkeys([*own, *below]))


def _unknown_query(name: str, allowed: list[str]) -> RequestError:
    near = difflib.get_close_matches(name, allowed, n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    takes = f"Allowed are: {', '.join(allowed)}" if allowed else "It takes none"
    return RequestError(
        400,
        "unsupported_parameter",
        f"{name:.80} is not a query parameter of this call. {meant}{takes}",
        param=name[:80],
    )


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
