"""FastAPI dependencies and parameter types that the routes share, and the errors they may
return.
"""

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
_DESCRIPTIONS = {
    400: "A parameter is invalid or unknown; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "The Host, the Origin or a path is not allowed.",
    404: "The loom, node, job or model does not exist.",
    409: "Another client changed it or is using it; `details.rev` is the current revision.",
    413: "The body is too large.",
    422: "A constraint cannot be satisfied, or tokens are outside the vocabulary.",
    429: "Too many jobs are running; `Retry-After` is the time to wait in seconds.",
    500: "Something failed inside the server.",
    501: "The model's engine does not support this.",
    503: "Temporarily unavailable: the model is loading, memory is full or the server is stopping.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": text} for status, text in _DESCRIPTIONS.items()
}


# All are async: FastAPI runs others in a thread, which competes with the model's thread.
async def _actor_header(
    x_weft_actor: Annotated[
        str | None,
        Header(max_length=64, description="The user, for the loom's log.", pattern=r"^[ -~]*$"),
    ] = None,
) -> str:
    """Return the header `X-Weft-Actor`: the author of edits, for the loom's log; else "http"."""
    return x_weft_actor or "http"


async def _if_match_header(
    if_match: Annotated[
        str | None,
        Header(description="The last revision you have read; 409 if the node changed after it."),
    ] = None,
) -> int | None:
    """Return the revision in the header `If-Match`; None without one. Raises: RequestError."""
    if if_match is None or if_match.strip() == "*":
        return None
    match = _REV.fullmatch(if_match.strip())
    if match is None:
        raise RequestError(
            400,
            "invalid_parameter",
            "If-Match must be a revision, as in the ETag header",
            param="If-Match",
        )
    return int(match[1])


async def _last_event_header(
    last_event_id: Annotated[
        str | None,
        Header(description="The id of the last event received; the stream resumes after it."),
    ] = None,
    after: Annotated[
        int | None,
        Query(ge=0, lt=2**53, description="Like Last-Event-ID, for clients without headers."),
    ] = None,
) -> int | None:
    """Return the event id after which a stream resumes (`Last-Event-ID` or `after`), or None."""
    if last_event_id is None:
        return after
    if not (last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) < 16):
        raise RequestError(
            400,
            "invalid_parameter",
            "Last-Event-ID must be the id of an event",
            param="Last-Event-ID",
        )
    return int(last_event_id)


async def check_query_names(request: Request) -> None:
    """Reject unknown query parameters, so that a typo is not ignored.

    A dependency of every native route. Raises: RequestError.
    """
    if not request.query_params:
        return
    allowed = _queries(request.scope["route"].dependant)
    for name in request.query_params:
        if name not in allowed:
            raise _unknown_query_error(name, allowed)


def _queries(dependant: Dependant) -> list[str]:
    """Return the names of the query parameters that a route and its dependencies declare."""
    own = [field.alias for field in dependant.query_params]
    inherited = [name for dependency in dependant.dependencies for name in _queries(dependency)]
    return list(dict.fromkeys([*own, *inherited]))


def _unknown_query_error(name: str, allowed: list[str]) -> RequestError:
    """Return the error for an unknown query parameter, with the most similar allowed one."""
    matches = difflib.get_close_matches(name, allowed, n=1)
    suggestion = f"Did you mean {matches[0]}? " if matches else ""
    hint = f"Allowed are: {', '.join(allowed)}" if allowed else "This call has none"
    return RequestError(
        400,
        "unsupported_parameter",
        f"{name:.80} is not a query parameter of this call. {suggestion}{hint}",
        param=name[:80],
    )


# Of the routers of the native API.
CHECKS = [Depends(check_query_names)]
Actor = Annotated[str, Depends(_actor_header)]
IfMatch = Annotated[int | None, Depends(_if_match_header)]
LastEvent = Annotated[int | None, Depends(_last_event_header)]
LoomName = Annotated[str, Path(max_length=300, description="A loom's name or id.")]
NodeName = Annotated[str, Path(max_length=64, description="A node's number or id.")]
JobName = Annotated[str, Path(max_length=64, description="A job's id.")]
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events; docs/http.md describes them.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
