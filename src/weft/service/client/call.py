"""Requests, errors and event streams, shared by both clients. No I/O here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from uuid import uuid4

from ... import errors
from ..._core.error_mapping import ERROR_MAPPINGS
from ...errors import ConfigError, WeftError

T = TypeVar("T")
# The name and the data of an event.
ServerEvent = tuple[str, dict[str, Any]]
_MAX_PAUSE_S = 5.0
_TRIES = 6  # consecutive attempts to resume a stream


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[T]):
    """One request to the server's API, built but not sent: method, path, body, and how to parse the
    response.

    The functions of `calls` return it; `Client.call` sends it and returns a T.

    Args:
        read: converts the response (parsed JSON, or bytes) to the caller's result.
        params: query parameters; None values are left out.
        rev: revision of the loom that the caller has read, sent as If-Match. None means no check.
        is_json: the response is JSON; otherwise `read` receives bytes.
    """

    method: str
    path: str
    read: Callable[[Any], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    rev: int | None = None
    is_json: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments for the HTTP client: headers, query parameters and body."""
        options: dict[str, Any] = {"headers": {}}
        if self.method == "POST":  # a retry must not execute it twice
            options["headers"]["idempotency-key"] = uuid4().hex
        if query := given(**self.params):
            options["params"] = query
        if self.rev is not None:
            options["headers"]["if-match"] = f'"{self.rev}"'
        if self.body is not None:
            is_raw = isinstance(self.body, bytes)
            options["content"] = (
                self.body if is_raw else json.dumps(self.body, allow_nan=False).encode()
            )
            options["headers"]["content-type"] = "application/json"
        return options


def given(**fields: Any) -> dict[str, Any]:
    """Return the keyword arguments whose values are not None."""
    return {name: value for name, value in fields.items() if value is not None}


# A route that every Weft server answers at once; clients call it first.
SERVER_PATH = "/api/v1/server"
RETRY_S = 1.0  # seconds before retrying a request whose first attempt is still running


def in_progress(status: int, body: bytes) -> bool:
    """Return True if the response says that the first attempt of this request is still running.

    status, body: of the response to a retry with the same idempotency key.
    """
    return status == 409 and b'"idempotency_in_progress"' in body


# Errors ----------------------------------------------------------------------------------------

_BY_CODE: dict[str, type[BaseException]] = {}
for _kind, _outcome in ERROR_MAPPINGS.items():
    # Of two classes with one code the first is the more general.
    _BY_CODE.setdefault(_outcome.code, _kind)
_BY_STATUS: dict[int, type[WeftError]] = {
    404: errors.NotFound,
    409: errors.Conflict,
    429: errors.QueueFull,
}
# Hints for missing objects: the server's hints name routes, these name commands.
_SHOWN = {"loom": "weft ls lists them all", "node": "weft tree shows them"}
_KEY = "set WEFT_API_KEY to the server's key"


def error_from_response(
    status: int, content: bytes, headers: Mapping[str, str], base: str
) -> WeftError:
    """Return the exception for an error response: the class that the library itself would raise.

    base: the server's URL, for the message about a program that is not a Weft server.
    """
    try:
        data = json.loads(content)["error"]
        message, code = str(data["message"]), str(data.get("code") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return not_weft_error(base, f"{status}, ")
    return (
        error_from_object(data, status, headers)
        if message or code
        else not_weft_error(base, f"{status}, ")
    )


def not_weft_error(base: str, what: str = "") -> errors.Unreachable:
    """Return the error for an address at which another program responds.

    what: the part of its response to quote, such as "404, ".
    """
    return errors.Unreachable(
        f"{base} answers {what}but is not a Weft server",
        hint="another program uses that address; set WEFT_HOST to the server's",
    )


def error_from_object(
    data: Mapping[str, Any], status: int = 0, headers: Mapping[str, str] | None = None
) -> WeftError:
    """Return the exception for an error object, which responses and events contain.

    status, headers: those of the response; an event has none.
    """
    message, code = str(data.get("message", "")), str(data.get("code") or "")
    hint, details = str(data.get("hint") or ""), data.get("details") or {}
    if status in (401, 403):
        return ConfigError(
            f"the server rejects the request: {message}", hint=_KEY if status == 401 else hint
        )
    if code.endswith("_not_found"):
        what = code.removesuffix("_not_found")
        hint = _SHOWN.get(what, hint) if hint.startswith("GET ") else hint
        return errors.NotFound(message, what=what, hint=hint)
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if kind is None:
        kind = ConfigError if 400 <= status < 500 else WeftError
    if kind is errors.ContextOverflow:
        n_tokens, n_ctx = details.get("n_prompt_tokens", 0), details.get("n_ctx", 0)
        return errors.ContextOverflow(message, n_tokens=n_tokens, n_ctx=n_ctx, hint=hint)
    if kind is errors.KVFull:
        needed, capacity = details.get("needed_tokens", 0), details.get("capacity_tokens", 0)
        return errors.KVFull(message, needed=needed, capacity=capacity, hint=hint)
    if kind is errors.Conflict:
        return errors.Conflict(
            message, rev=details.get("rev"), code=code or "revision_mismatch", hint=hint
        )
    if kind is errors.QueueFull:
        after = _retry_after_s((headers or {}).get("retry-after"))
        return errors.QueueFull(message, retry_after_s=after, hint=hint)
    if not issubclass(kind, WeftError):
        kind = errors.CapacityError
    return kind(message, hint=hint)


def _retry_after_s(given: str | None) -> float:
    """Return the seconds of a Retry-After header; a default for a missing or invalid one."""
    try:
        return max(float(given or 1), 0)
    except ValueError:
        return 1.0


# Streams ---------------------------------------------------------------------------------------


class EventStreamCursor:
    """Resumes an event stream after a broken connection, by the id of the last event."""

    def __init__(self, path: str, base: str) -> None:
        self.path = path
        self.base = base
        self.is_over = False
        self._last = ""
        self._n_failed = 0

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the next request; after an interruption they name the last event."""
        last = {"last-event-id": self._last} if self._last else {}
        return {"accept": "text/event-stream", **last}

    def take(self, event: str, data: str, event_id: str) -> ServerEvent:
        """Convert a server-sent event to its name and its parsed data; store its id for resuming.

        Raises: WeftError for an error event.
        """
        self._last, self._n_failed = event_id or self._last, 0
        decoded = json.loads(data) if data else {}
        if event == "error":
            raise error_from_object(decoded)
        self.is_over = event == "done"
        return event, decoded

    def pause_s(self, error: Exception | None) -> float:
        """Return the seconds to wait before the next attempt.

        error: the error that broke the stream; None if the stream ended before its last event.
        Raises: Unreachable after too many consecutive failures.
        """
        self._n_failed += 1
        if self._n_failed > _TRIES:
            reason = error or "the stream ended before its end"
            raise errors.Unreachable(
                f"{self.base} no longer responds: {reason}",
                hint="the server saves generated nodes in its looms",
            ) from error
        pause: float = min(0.1 * 2**self._n_failed, _MAX_PAUSE_S)
        return pause * random.uniform(0.5, 1.0)
