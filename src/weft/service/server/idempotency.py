"""`Idempotency-Key`: a repeated request gets the stored response of the first one.

Follows the IETF draft "The Idempotency-Key HTTP Header Field". Responses stay in memory for an
hour; a restart loses them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .asgi import read_body
from .errors import RequestError

if TYPE_CHECKING:
    from .asgi import App, Message, Receive, Scope, Send

KEPT_S = 3600.0
MAX_RESPONSES = 1024  # stored responses; the oldest are removed first
MAX_BYTES = 16 << 20  # of all stored bodies
ANSWER_BYTES = 1 << 20  # of one body; a larger one is not stored
HEADER = "Idempotency-Key"
_SAFE = ("GET", "HEAD", "OPTIONS")
_WHERE = ("/api/v1/", "/v1/")
_KEY = re.compile(rb"[!-~](?:[ -~]{0,253}[!-~])?")


class RecordedResponse:
    """The first request with a key, and its response.

    fingerprint: hash of the request, to detect reuse of the key. messages: the ASGI messages of the
    response; `None` while the request runs.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self.messages: list[Message] | None = None
        self.n_bytes = 0
        self.is_gone = False  # the response was too large to be stored
        self.at = 0.0


class IdempotencyStore:
    """Recorded responses by key, oldest first; bounded in time, number and bytes.

    Responses with an error status are not stored. Such requests changed nothing, and their keys can
    be used again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[bytes, RecordedResponse] = OrderedDict()
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, key: bytes, fingerprint: bytes) -> tuple[RecordedResponse, bool]:
        """Look up an idempotency key; record it as running if it is new.

        fingerprint: hash of the request, to detect another request with the same key.

        Returns:
            The record, and True if the caller must now run the request. False: the record has the
            response.

        Raises: RequestError if the key came with another request, or if its first request still
        runs.
        """
        self._evict()
        first = self._kept.get(key)
        if first is None:
            first = self._kept[key] = RecordedResponse(fingerprint)
            return first, True
        if first.fingerprint != fingerprint:
            raise _key_error(
                422,
                "idempotency_key_reused",
                "this key was used for a different request",
                "send a new key",
            )
        if first.messages is None:
            raise RequestError(
                409,
                "idempotency_in_progress",
                "the first request with this key is still running",
                param=HEADER,
                hint="send it again a little later",
                headers={"Retry-After": "1"},
            )
        if first.is_gone:
            raise _key_error(
                409,
                "idempotency_answer_gone",
                "the request was executed, but its response was too large to be stored",
                "look for its result on the server",
            )
        return first, False

    def end(self, key: bytes, first: RecordedResponse, messages: list[Message]) -> None:
        """Store a finished response if its status is 2xx; otherwise free the key.

        first: the record that `begin` returned. messages: the response's ASGI messages.
        """
        if not 200 <= messages[0].get("status", 500) < 300:
            self.drop(key, first)
            return
        n_bytes = sum(len(each.get("body", b"")) for each in messages)
        first.is_gone = n_bytes > ANSWER_BYTES
        first.messages = [] if first.is_gone else messages
        first.n_bytes = 0 if first.is_gone else n_bytes
        first.at = self._clock()
        self._n_bytes += first.n_bytes
        self._kept.move_to_end(key)
        self._evict()

    def drop(self, key: bytes, first: RecordedResponse) -> None:
        """Free the key of a request that ended without a response."""
        if self._kept.get(key) is first:
            del self._kept[key]

    def _evict(self) -> None:
        """Remove expired responses, and the oldest ones above the limits. Running requests stay."""
        until = self._clock() - KEPT_S
        for key, first in list(self._kept.items()):
            is_over = len(self._kept) > MAX_RESPONSES or self._n_bytes > MAX_BYTES
            if first.messages is None:
                continue
            if not is_over and first.at > until:
                return
            del self._kept[key]
            self._n_bytes -= first.n_bytes


class IdempotencyMiddleware:
    """Replays the stored response of a request whose `Idempotency-Key` is known.

    A request with a key runs to its end even if its client disconnects, as the client may retry.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.answers = IdempotencyStore()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = None if scope["type"] != "http" or scope["method"] in _SAFE else key_of(scope)
        body = None if key is None else await read_body(receive)
        if key is None:
            await self.app(scope, receive, send)
            return
        if body is None:  # the client disconnected before the end of the body
            return
        fields = _json_fields(body)
        _check_not_streamed(scope, fields)
        first, is_new = self.answers.begin(key, _fingerprint(scope, body))
        if not is_new:
            await _replay(first, send)
            return
        # Only requests that ask to be cancelled then learn that their client has disconnected.
        after_body = receive if fields.get("on_disconnect") == "cancel" else _wait_forever
        work = scope["app"].state.service.spawn(
            self._run_and_record(key, first, scope, body, after_body)
        )
        for message in await asyncio.shield(work):
            await send(message)

    async def _run_and_record(
        self, key: bytes, first: RecordedResponse, scope: Scope, body: bytes, after_body: Receive
    ) -> list[Message]:
        """Run a request with a new key to its end; record and return the response's messages."""
        messages: list[Message] = []
        request = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            for message in request:
                return message
            return await after_body()

        async def send(message: Message) -> None:
            messages.append(dict(message))

        try:
            await self.app(scope, receive, send)
        finally:
            if messages:
                self.answers.end(key, first, messages)
            else:
                self.answers.drop(key, first)
        return messages


def key_of(scope: Scope) -> bytes | None:
    """Return the lookup key of a request with an `Idempotency-Key`; None without the header.

    The result also contains the API key, so that clients with different API keys do not share keys.

    Raises: RequestError for a malformed key, and for routes that do not support the header.
    """
    values = [value for name, value in scope["headers"] if name == b"idempotency-key"]
    if not values:
        return None
    if len(values) > 1 or not _KEY.fullmatch(values[0]):
        raise _key_error(
            400,
            "invalid_parameter",
            "the key must be 1 to 255 printable ASCII characters",
            "send a UUID",
        )
    if not scope["path"].startswith(_WHERE):
        raise _key_error(
            400,
            "idempotency_unsupported",
            "Idempotency-Key is supported only below /api/v1 and /v1",
            "leave the header out",
        )
    caller = [value for name, value in scope["headers"] if name == b"authorization"]
    return hashlib.sha256(b"\0".join([*caller, b"", values[0]])).digest()


def add_idempotency_header(schema: dict[str, Any]) -> None:
    """Add the header to the routes of an OpenAPI schema that support it. Modifies the schema."""
    header = {
        "name": HEADER,
        "in": "header",
        "required": False,
        "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
        "description": "A request that is repeated with the same key gets the first response and"
        " is not executed again. Not for streams. See the IETF draft"
        " draft-ietf-httpapi-idempotency-key-header.",
    }
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            if path.startswith(_WHERE) and method.upper() not in _SAFE:
                operation.setdefault("parameters", []).append(header)


def _fingerprint(scope: Scope, body: bytes) -> bytes:
    """Return a hash of a request's method, path and body, to recognize repetitions."""
    parts = (scope["method"].encode(), scope["path"].encode(), scope["query_string"], body)
    return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()


def _json_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON body; {} for an invalid one, which its route rejects."""
    try:
        fields = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _check_not_streamed(scope: Scope, fields: dict[str, Any]) -> None:
    """Raise RequestError if the request asks for a stream, which cannot be replayed."""
    accepts = b",".join(value for name, value in scope["headers"] if name == b"accept")
    if fields.get("stream") or b"text/event-stream" in accepts:
        raise _key_error(
            400,
            "idempotency_unsupported",
            "a stream cannot be replayed",
            "leave the key out, or start a job with it and read that job's events",
        )


def _key_error(status: int, code: str, message: str, hint: str) -> RequestError:
    """Return the error about the header `Idempotency-Key`."""
    return RequestError(status, code, message, param=HEADER, hint=hint)


async def _wait_forever() -> Message:
    """Replaces `receive` after the body was read: the client's disconnect is ignored."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("the future is never resolved")


async def _replay(first: RecordedResponse, send: Send) -> None:
    """Send the stored response, with a header that marks it as replayed."""
    assert first.messages is not None
    for message in first.messages:
        copy = dict(message)
        if message["type"] == "http.response.start":
            copy["headers"] = [*message.get("headers", ()), (b"idempotent-replayed", b"true")]
        await send(copy)
