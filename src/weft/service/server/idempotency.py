"""`Idempotency-Key`: a request that is sent again is answered again, and not done again.

As the IETF's draft "The Idempotency-Key HTTP Header Field" has it. What was answered is kept in
memory, for an hour: a server that is started anew has none of it.
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
MAX_RESPONSES = 1024  # answers that are kept, the latest ones
MAX_BYTES = 16 << 20  # of all of them
ANSWER_BYTES = 1 << 20  # of one; a larger one is not kept
HEADER = "Idempotency-Key"
_SAFE = ("GET", "HEAD", "OPTIONS")
_WHERE = ("/api/v1/", "/v1/")
_KEY = re.compile(rb"[!-~](?:[ -~]{0,253}[!-~])?")


class RecordedResponse:
    """What the first request with a key was, and what it was answered; None: it runs still."""

    def __init__(self, mark: bytes) -> None:
        self.mark = mark
        self.messages: list[Message] | None = None
        self.n_bytes = 0
        self.is_gone = False  # it was too large to be kept
        self.at = 0.0


class IdempotencyStore:
    """The answers that are kept, by their keys, the oldest first; bounded in time, number and size.

    What was refused, or failed, has changed nothing: it is not kept, and its key is free.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[bytes, RecordedResponse] = OrderedDict()
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def begin(self, key: bytes, mark: bytes) -> tuple[RecordedResponse, bool]:
        """Return what is known of a key, and whether that is nothing yet: then it runs from now on.

        Raises: Refused for another request under the same key, and for one that runs still.
        """
        self._forget()
        first = self._kept.get(key)
        if first is None:
            first = self._kept[key] = RecordedResponse(mark)
            return first, True
        if first.mark != mark:
            raise _refused(
                422,
                "idempotency_key_reused",
                "this key came with another request",
                "take a new one",
            )
        if first.messages is None:
            raise RequestError(
                409,
                "idempotency_in_progress",
                "the first request with this key is not answered yet",
                param=HEADER,
                hint="send it again a little later",
                headers={"Retry-After": "1"},
            )
        if first.is_gone:
            raise _refused(
                409,
                "idempotency_answer_gone",
                "this was done, and its answer was too large to be kept",
                "look for what it made",
            )
        return first, False

    def end(self, key: bytes, first: RecordedResponse, messages: list[Message]) -> None:
        """Keep what a request was answered, if that is a success."""
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
        self._forget()

    def drop(self, key: bytes, first: RecordedResponse) -> None:
        """Forget a key whose request was not answered."""
        if self._kept.get(key) is first:
            del self._kept[key]

    def _forget(self) -> None:
        """Let the oldest go, but those that run."""
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
    """The layer around the routes that answers requests again by their keys.

    A request with a key is done to its end, whether its client stays or not; it may come back.
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
        if body is None:  # its client went before it had said all
            return
        asked = _asked(body)
        _check_not_streamed(scope, asked)
        first, is_new = self.answers.begin(key, _mark(scope, body))
        if not is_new:
            await _replay(first, send)
            return
        # Told of a client that is gone is only who wants to end then.
        told = receive if asked.get("on_disconnect") == "cancel" else _never
        work = scope["app"].state.service.spawn(self._do(key, first, scope, body, told))
        for message in await asyncio.shield(work):
            await send(message)

    async def _do(
        self, key: bytes, first: RecordedResponse, scope: Scope, body: bytes, told: Receive
    ) -> list[Message]:
        messages: list[Message] = []
        left = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            for message in left:
                return message
            return await told()

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
    """Return a request's key, apart for each caller; None where it has none. Raises: Refused."""
    found = [value for name, value in scope["headers"] if name == b"idempotency-key"]
    if not found:
        return None
    if len(found) > 1 or not _KEY.fullmatch(found[0]):
        raise _refused(
            400, "invalid_parameter", "the key is not 1 to 255 characters of ASCII", "take a UUID"
        )
    if not scope["path"].startswith(_WHERE):
        raise _refused(
            400,
            "idempotency_unsupported",
            "keys are taken below /api/v1 and /v1 alone",
            "leave it out",
        )
    caller = [value for name, value in scope["headers"] if name == b"authorization"]
    return hashlib.sha256(b"\0".join([*caller, b"", found[0]])).digest()


def add_idempotency_header(schema: dict[str, Any]) -> None:
    """Say in an OpenAPI schema which routes take a key. Changes the schema."""
    told = {
        "name": HEADER,
        "in": "header",
        "required": False,
        "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
        "description": "Sent again with the same key, a request is answered again and not done"
        " again. No streams. The IETF's draft draft-ietf-httpapi-idempotency-key-header.",
    }
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            if path.startswith(_WHERE) and method.upper() not in _SAFE:
                operation.setdefault("parameters", []).append(told)


def _mark(scope: Scope, body: bytes) -> bytes:
    """Return what makes two requests the same one."""
    parts = (scope["method"].encode(), scope["path"].encode(), scope["query_string"], body)
    return hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()


def _asked(body: bytes) -> dict[str, Any]:
    """Return the fields of a body; none where it is wrong, which its route says."""
    try:
        asked = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return {}
    return asked if isinstance(asked, dict) else {}


def _check_not_streamed(scope: Scope, asked: dict[str, Any]) -> None:
    accepts = b",".join(value for name, value in scope["headers"] if name == b"accept")
    if asked.get("stream") or b"text/event-stream" in accepts:
        raise _refused(
            400,
            "idempotency_unsupported",
            "a stream cannot be answered again by its key",
            "leave the key out, or begin a job with it, and follow that job's events",
        )


def _refused(status: int, code: str, message: str, hint: str) -> RequestError:
    return RequestError(status, code, message, param=HEADER, hint=hint)


async def _never() -> Message:
    """Wait for a client that is not waited for."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody ends this wait")


async def _replay(first: RecordedResponse, send: Send) -> None:
    assert first.messages is not None
    for message in first.messages:
        again = dict(message)
        if message["type"] == "http.response.start":
            again["headers"] = [*message.get("headers", ()), (b"idempotent-replayed", b"true")]
        await send(again)
