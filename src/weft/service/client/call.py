"""What a client asks and how answers are read: said once, for both clients. No I/O here."""

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
# An event: its name and its object.
ServerEvent = tuple[str, dict[str, Any]]
_MAX_PAUSE_S = 5.0
_TRIES = 6  # in a row to take up a stream that broke


@dataclass(frozen=True, slots=True)
class ApiCall(Generic[T]):
    """One request. read: makes of the answer, JSON or bytes, what the caller gets."""

    method: str
    path: str
    read: Callable[[Any], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    rev: int | None = None
    is_json: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Return the request as an HTTP client takes it."""
        options: dict[str, Any] = {"headers": {}}
        if self.method == "POST":  # it may have to be sent again, and is done once
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
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


# What each server of Weft answers at once, and a client asks it first.
SERVER_PATH = "/api/v1/server"
RETRY_S = 1.0  # before a request is sent again whose first one runs still


def in_progress(status: int, body: bytes) -> bool:
    """Whether an answer says that the request is being done, as it was sent before."""
    return status == 409 and b'"idempotency_in_progress"' in body


# Errors ----------------------------------------------------------------------------------------

_BY_CODE: dict[str, type[BaseException]] = {}
for _kind, _outcome in ERROR_MAPPINGS.items():
    # Of two with one code, the one that stands first: it is the more general.
    _BY_CODE.setdefault(_outcome.code, _kind)
_BY_STATUS: dict[int, type[WeftError]] = {
    404: errors.NotFound,
    409: errors.Conflict,
    429: errors.QueueFull,
}
# What is not there, and what shows what is: a server tells of requests, to those who write them.
_SHOWN = {"loom": "weft ls lists them all", "node": "weft tree shows them"}
_KEY = "set WEFT_API_KEY to the server's key"


def error_from_response(
    status: int, content: bytes, headers: Mapping[str, str], base: str
) -> WeftError:
    """Return the error that an answer tells of: the one that would be raised in this process."""
    try:
        told = json.loads(content)["error"]
        message, code = str(told["message"]), str(told.get("code") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return not_weft_error(base, f"{status}, ")
    return (
        error_from_object(told, status, headers)
        if message or code
        else not_weft_error(base, f"{status}, ")
    )


def not_weft_error(base: str, what: str = "") -> errors.Unreachable:
    """Return the error of an answer that another program gave. what: that it says, if anything."""
    return errors.Unreachable(
        f"{base} answers {what}and not as Weft does",
        hint="another program is there; WEFT_HOST says where the server is",
    )


def error_from_object(
    told: Mapping[str, Any], status: int = 0, headers: Mapping[str, str] | None = None
) -> WeftError:
    """Return the error of an error object, as events have it too."""
    message, code = str(told.get("message", "")), str(told.get("code") or "")
    hint, details = str(told.get("hint") or ""), told.get("details") or {}
    if status in (401, 403):
        return ConfigError(f"the server refuses: {message}", hint=_KEY if status == 401 else hint)
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
        after = _seconds((headers or {}).get("retry-after"))
        return errors.QueueFull(message, retry_after_s=after, hint=hint)
    if not issubclass(kind, WeftError):
        kind = errors.CapacityError
    return kind(message, hint=hint)


def _seconds(given: str | None) -> float:
    try:
        return max(float(given or 1), 0)
    except ValueError:
        return 1.0


# Streams ---------------------------------------------------------------------------------------


class EventStreamCursor:
    """A stream of events that is taken up where it broke, by the id of the last event seen."""

    def __init__(self, path: str, base: str) -> None:
        self.path = path
        self.base = base
        self.is_over = False
        self._last = ""
        self._n_failed = 0

    @property
    def headers(self) -> dict[str, str]:
        """The headers to ask with."""
        last = {"last-event-id": self._last} if self._last else {}
        return {"accept": "text/event-stream", **last}

    def take(self, event: str, data: str, event_id: str) -> ServerEvent:
        """Return an event's name and object. Raises: WeftError where it tells of a failure."""
        self._last, self._n_failed = event_id or self._last, 0
        told = json.loads(data) if data else {}
        if event == "error":
            raise error_from_object(told)
        self.is_over = event == "done"
        return event, told

    def pause_s(self, error: Exception | None) -> float:
        """Return how long to wait before it is asked for again. Raises: Unreachable.

        error: why it broke; None where it ended before its end.
        """
        self._n_failed += 1
        if self._n_failed > _TRIES:
            why = error or "the stream ended before its end"
            raise errors.Unreachable(
                f"{self.base} does not answer any more: {why}",
                hint="what has been grown so far is kept where the server keeps its looms",
            ) from error
        pause: float = min(0.1 * 2**self._n_failed, _MAX_PAUSE_S)
        return pause * random.uniform(0.5, 1.0)
