"""Parsing of responses, in the formats of different servers, into `ChoiceDelta`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

_DONE = b"[DONE]"
_OVERFLOWS = ("context_length_exceeded", "exceed_context_size_error")
_TOO_LONG = re.compile(
    r"(?:maximum|max|available|exceeds?(?: the)?) (?:model )?context (?:length|size|window)"
    r"|exceeds? (?:the )?(?:model's )?(?:max\w* )?context|longer than the (?:model's )?context",
    re.IGNORECASE,
)
_N_CTX = re.compile(
    r"context (?:length|size|window)(?: is only| is| of)? \(?(\d{1,12})", re.IGNORECASE
)
_N_TOKENS = re.compile(
    r"requested (?:tokens )?\(?(\d{1,12})|(?:request|prompt|input) \((\d{1,12}) tokens",
    re.IGNORECASE,
)
MAX_BYTES = 64 << 20  # size of one message


class ProtocolError(Exception):
    """A response that violates the protocol, or that contains an error instead of text.

    Args:
        is_transient: a retry may succeed.
        overflow: the error is a path that is too long.
    """

    def __init__(
        self, message: str, *, is_transient: bool = True, overflow: Overflow | None = None
    ) -> None:
        super().__init__(message)
        self.is_transient = is_transient
        self.overflow = overflow


class Overflow(NamedTuple):
    """Length and maximum length of a path, in the server's tokens; 0 if the server does not report
    it.
    """

    n_tokens: int
    n_ctx: int


@dataclass(slots=True)
class ChoiceDelta:
    """New content of one choice in one message."""

    # Index of the choice.
    index: int
    # New text.
    text: str
    # Text of each new token; None if not reported.
    names: list[bytes] | None = None
    # Id of each new token; None if not reported.
    ids: list[int] | None = None
    # Natural log-probability of each new token, None for a prompt's first; None if not reported.
    logprobs: list[float | None] | None = None
    # Finish reason; None while the choice continues.
    finish: str | None = None
    # Id of the end token, if it is reported separately.
    ended_by: int | None = None
    # A stop string ended the choice.
    is_stopped: bool = False


def read_deltas(data: Any) -> Iterator[ChoiceDelta]:
    """Yield the content of a message, one choice at a time.

    Raises:
        ProtocolError: the message is invalid, or an error.
    """
    if not isinstance(data, dict):
        raise ProtocolError(f"a message is {data!r:.60}; it must be an object")
    if data.get("error"):
        overflow = overflow_of(data)
        is_final = overflow is not None or _is_client_error(data["error"])
        raise ProtocolError(
            f"the server says: {error_text(data)}", is_transient=not is_final, overflow=overflow
        )
    choices = data.get("choices")
    if not isinstance(choices, list):
        raise ProtocolError("a message has no list of choices")
    for choice in choices:
        try:
            yield _parse_choice(choice)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ProtocolError(f"a choice cannot be read: {error!r}") from error


def _parse_choice(choice: dict[str, Any]) -> ChoiceDelta:
    """Parse one choice of a message, in the completions or chat format."""
    message = choice.get("delta") or choice.get("message")
    text = choice.get("text") if message is None else message.get("content")
    ids = choice.get("token_ids")
    if ids is None:
        ids = choice.get("response_token_ids")
    names, logprobs = None, None
    entry = choice.get("logprobs")
    if entry and isinstance(entry.get("content"), list):
        names, logprobs, own = _parse_chat_logprobs(entry["content"])
        ids = own if ids is None else ids
    elif entry and isinstance(entry.get("tokens"), list):
        names = [str(name).encode() for name in entry["tokens"]]
        logprobs = [_parse_logprob(value) for value in entry.get("token_logprobs") or ()]
    if names is not None and (logprobs is None or len(logprobs) != len(names)):
        logprobs = None
    reason = choice.get("stop_reason", choice.get("matched_stop"))
    return ChoiceDelta(
        index=int(choice.get("index") or 0),
        text=text or "",
        names=names,
        ids=None if ids is None else [int(each) for each in ids],
        logprobs=logprobs,
        finish=choice.get("finish_reason"),
        ended_by=reason if type(reason) is int else None,
        is_stopped=isinstance(reason, str),
    )


def _parse_chat_logprobs(
    content: list[dict[str, Any]],
) -> tuple[list[bytes], list[float | None], list[int] | None]:
    """Return (names, logprobs, ids) of tokens from a chat response.

    The ids are None unless all tokens have one. content: `logprobs.content` of a choice.
    """
    names = [
        bytes(each["bytes"]) if each.get("bytes") is not None else str(each["token"]).encode()
        for each in content
    ]
    ids = [number for each in content if type(number := each.get("id")) is int]
    logprobs = [_parse_logprob(each.get("logprob")) for each in content]
    return names, logprobs, ids if len(ids) == len(content) else None


def top_logprobs(data: Any) -> list[dict[str, float]]:
    """Return the likeliest tokens at the end of each choice, as far as they are present."""
    result = []
    for choice in data.get("choices") or ():
        entry = choice.get("logprobs") or {}
        content, tops = entry.get("content"), entry.get("top_logprobs")
        try:
            if content:
                top = content[-1].get("top_logprobs") or ()
                result.append({str(each["token"]): float(each["logprob"]) for each in top})
            elif tops and tops[-1]:
                result.append({str(name): float(value) for name, value in tops[-1].items()})
        except (TypeError, ValueError, KeyError, AttributeError):
            continue
    return result


def _parse_logprob(value: Any) -> float | None:
    """Return a number; None for null and NaN."""
    number = math.nan if value is None else float(value)
    return None if math.isnan(number) else number


def error_text(data: Any) -> str:
    """Return the text of an error in any format."""
    error = data.get("error") if isinstance(data, dict) and data.get("error") else data
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("msg") or error
    text = error if isinstance(error, str) else json.dumps(error, default=str)
    return " ".join(text.split())[:300]


def overflow_of(data: Any) -> Overflow | None:
    """Return the lengths in an error about a path that is too long; None for other errors."""
    error = data.get("error", data) if isinstance(data, dict) else data
    fields = error if isinstance(error, dict) else {}
    text = error_text(data)
    codes = (str(fields.get("code")), str(fields.get("type")))
    if not any(code in _OVERFLOWS for code in codes) and not _TOO_LONG.search(text):
        return None
    return Overflow(
        _parse_count(fields.get("n_prompt_tokens"), _N_TOKENS, text),
        _parse_count(fields.get("n_ctx"), _N_CTX, text),
    )


def _parse_count(value: Any, pattern: re.Pattern[str], text: str) -> int:
    """Return `value` if it is an integer, else the number that `pattern` matches, else 0."""
    match = pattern.search(text)
    if type(value) is int:
        return value
    return int(next(filter(None, match.groups()))) if match else 0


def _is_client_error(error: Any) -> bool:
    """Return True for an error with a 4xx code that a retry cannot change."""
    code = error.get("code") if isinstance(error, dict) else None
    return type(code) is int and 400 <= code < 500 and code not in (408, 425, 429)


class EventStreamParser:
    """Parses server-sent events from chunks of any size.

    Attributes:
        is_done: the final message has been received. A stream without it ends early; the caller
            detects missing content.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._rest = b""

    def feed(self, chunk: bytes) -> list[Any]:
        """Return the messages that a chunk completes.

        Raises:
            ProtocolError: a message is not valid JSON, or a line is too long.
        """
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_BYTES:
            raise ProtocolError(f"a line of more than {MAX_BYTES >> 20} MiB")
        messages: list[Any] = []
        for line in lines:
            # NOTE: all servers send one message per line; comments keep a connection open.
            if not line.startswith(b"data:") or self.is_done:
                continue
            content = line[5:].strip()
            if content == _DONE:
                self.is_done = True
            elif content:
                messages.append(parse_json(content))
        return messages


def parse_json(text: bytes) -> Any:
    """Parse a message.

    Raises:
        ProtocolError: the message is not valid JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{text[:60]!r} is not JSON: {error}") from None
