"""Parse the responses of servers, in their several forms, into `ChoiceDelta`."""

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
MOST_BYTES = 64 << 20  # of one message


class ProtocolError(Exception):
    """What came is not what the protocol says, or an error in the place of text.

    may_pass: it may be otherwise next time. overflow: the error is that a path is too long.
    """

    def __init__(
        self, message: str, *, may_pass: bool = True, overflow: Overflow | None = None
    ) -> None:
        super().__init__(message)
        self.may_pass = may_pass
        self.overflow = overflow


class Overflow(NamedTuple):
    """How long a path is, and may be, in the server's tokens; 0 where it does not say."""

    n_tokens: int
    n_ctx: int


@dataclass(slots=True)
class ChoiceDelta:
    """What one message says of one choice.

    names: each new token's text; ids: its id; logprobs: its natural log-probability, None for a
    prompt's first. Each is None where it is not told. finish: why the choice is over. ended_by: the
    id of the end token, where it is told apart. is_stopped: a stop string ended it.
    """

    index: int
    text: str
    names: list[bytes] | None = None
    ids: list[int] | None = None
    logprobs: list[float | None] | None = None
    finish: str | None = None
    ended_by: int | None = None
    is_stopped: bool = False


def read_deltas(data: Any) -> Iterator[ChoiceDelta]:
    """Yield what a message says, a choice at a time. Raises: Garbled."""
    if not isinstance(data, dict):
        raise ProtocolError(f"a message is {data!r:.60}; an object belongs there")
    if data.get("error"):
        told = overflow_of(data)
        is_final = told is not None or _is_refusal(data["error"])
        raise ProtocolError(
            f"the server says: {error_text(data)}", may_pass=not is_final, overflow=told
        )
    choices = data.get("choices")
    if not isinstance(choices, list):
        raise ProtocolError("a message has no list of choices")
    for choice in choices:
        try:
            yield _choice(choice)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ProtocolError(f"a choice cannot be read: {error!r}") from error


def _choice(choice: dict[str, Any]) -> ChoiceDelta:
    message = choice.get("delta") or choice.get("message")
    text = choice.get("text") if message is None else message.get("content")
    ids = choice.get("token_ids")
    if ids is None:
        ids = choice.get("response_token_ids")
    names, logprobs = None, None
    figures = choice.get("logprobs")
    if figures and isinstance(figures.get("content"), list):
        names, logprobs, own = _content(figures["content"])
        ids = own if ids is None else ids
    elif figures and isinstance(figures.get("tokens"), list):
        names = [str(name).encode() for name in figures["tokens"]]
        logprobs = [_number(value) for value in figures.get("token_logprobs") or ()]
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


def _content(
    content: list[dict[str, Any]],
) -> tuple[list[bytes], list[float | None], list[int] | None]:
    """Return names, logprobs and ids of the form that chats have."""
    names = [
        bytes(each["bytes"]) if each.get("bytes") is not None else str(each["token"]).encode()
        for each in content
    ]
    ids = [each.get("id") for each in content]
    known = [each for each in ids if type(each) is int]
    logprobs = [_number(each.get("logprob")) for each in content]
    return names, logprobs, known if len(known) == len(ids) else None


def likeliest(data: Any) -> list[dict[str, float]]:
    """Return the likeliest tokens at the end of each choice, as far as they are told."""
    found = []
    for choice in data.get("choices") or ():
        figures = choice.get("logprobs") or {}
        content, tops = figures.get("content"), figures.get("top_logprobs")
        try:
            if content:
                top = content[-1].get("top_logprobs") or ()
                found.append({str(each["token"]): float(each["logprob"]) for each in top})
            elif tops and tops[-1]:
                found.append({str(name): float(value) for name, value in tops[-1].items()})
        except (TypeError, ValueError, KeyError, AttributeError):
            continue
    return found


def _number(value: Any) -> float | None:
    found = math.nan if value is None else float(value)
    return None if math.isnan(found) else found


def error_text(data: Any) -> str:
    """Return the words of an error, whatever form it has."""
    told = data.get("error") if isinstance(data, dict) and data.get("error") else data
    if isinstance(told, dict):
        told = told.get("message") or told.get("detail") or told.get("msg") or told
    text = told if isinstance(told, str) else json.dumps(told, default=str)
    return " ".join(text.split())[:300]


def overflow_of(data: Any) -> Overflow | None:
    """Return what an error says of a path that is too long; None for any other error."""
    error = data.get("error", data) if isinstance(data, dict) else data
    fields = error if isinstance(error, dict) else {}
    text = error_text(data)
    marks = (str(fields.get("code")), str(fields.get("type")))
    if not any(mark in _OVERFLOWS for mark in marks) and not _TOO_LONG.search(text):
        return None
    return Overflow(
        _figure(fields.get("n_prompt_tokens"), _N_TOKENS, text),
        _figure(fields.get("n_ctx"), _N_CTX, text),
    )


def _figure(told: Any, pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    if type(told) is int:
        return told
    return int(next(filter(None, found.groups()))) if found else 0


def _is_refusal(error: Any) -> bool:
    code = error.get("code") if isinstance(error, dict) else None
    return type(code) is int and 400 <= code < 500 and code not in (408, 425, 429)


class Events:
    """Messages out of a stream of server-sent events, whatever pieces it comes in.

    is_done: the one that says so has come. A stream that ends without it just ends: whoever reads
    knows what is missing.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._rest = b""

    def take(self, chunk: bytes) -> list[Any]:
        """Return the messages that a piece completes. Raises: Garbled."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MOST_BYTES:
            raise ProtocolError(f"a line of more than {MOST_BYTES >> 20} MiB")
        found: list[Any] = []
        for line in lines:
            # NOTE: one message a line is what all servers send; comments keep a connection open.
            if not line.startswith(b"data:") or self.is_done:
                continue
            told = line[5:].strip()
            if told == _DONE:
                self.is_done = True
            elif told:
                found.append(parsed(told))
        return found


def parsed(text: bytes) -> Any:
    """Return what a message holds. Raises: Garbled."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{text[:60]!r} is no JSON: {error}") from None
