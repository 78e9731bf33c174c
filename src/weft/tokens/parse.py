"""What a model said in a chat, taken apart: content, reasoning and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_OPEN, _CLOSE = "<think>", "</think>"
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model asks for.

    arguments: the JSON text of an object. id: as the model gave it, else "".
    """

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """An assistant's turn: what it says, what it thought, what it wants called."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


def parse_chat_output(
    text: str, *, thinking_open: bool = False, is_partial: bool = False
) -> ChatOutput:
    """Take an assistant's text apart; text that follows no known form is content as it stands.

    Known forms: `<think>…</think>`, also without its end; `<tool_call>{…}</tool_call>` (Hermes,
    Qwen); a JSON call, bare or after `<|python_tag|>` (Llama 3); `[TOOL_CALLS][…]` (Mistral).

    thinking_open: the prompt ended inside `<think>`, so the text starts there.
    is_partial: the text is still coming: a mark that has only begun, and a call without its end,
    are left out of the content.
    """
    reasoning, rest = _split_reasoning(text, thinking_open=thinking_open, is_partial=is_partial)
    for form in _FORMS:
        found = form(rest)
        if found is not None:
            content, calls = found
            return ChatOutput(content, reasoning, tuple(calls))
    return ChatOutput(_without_begun(rest) if is_partial else rest, reasoning)


def _split_reasoning(text: str, *, thinking_open: bool, is_partial: bool) -> tuple[str, str]:
    body = text.lstrip()
    if body.startswith(_OPEN):
        body = body[len(_OPEN) :]
    elif is_partial and body and _OPEN.startswith(body):
        return "", ""
    elif not thinking_open:
        return "", text
    else:
        body = text
    thought, end, rest = body.partition(_CLOSE)
    if not end and is_partial:
        thought = thought[: len(thought) - _overlap(thought, _CLOSE)]
    return thought.strip("\n"), rest.lstrip("\n")


def _hermes(text: str) -> tuple[str, list[ToolCall]] | None:
    found = [_calls(match[1]) for match in _HERMES.finditer(text)]
    if not found or any(calls is None for calls in found):
        return None
    content = _HERMES.sub("", text).strip()
    return content, [call for calls in found for call in calls or ()]


def _mistral(text: str) -> tuple[str, list[ToolCall]] | None:
    content, mark, payload = text.partition(_MISTRAL)
    calls = _calls(payload) if mark else None
    return None if calls is None else (content.strip(), calls)


def _llama(text: str) -> tuple[str, list[ToolCall]] | None:
    content, mark, payload = text.partition(_PYTHON_TAG)
    if not mark:
        content, payload = "", text
    calls: list[ToolCall] = []
    # Several calls stand one after another, with a semicolon between.
    for part in _values(payload):
        call = _call(part)
        if call is None:
            return None
        calls.append(call)
    return (content.strip(), calls) if calls else None


_FORMS: tuple[Callable[[str], tuple[str, list[ToolCall]] | None], ...] = (_hermes, _mistral, _llama)


def _values(text: str) -> list[Any]:
    """Read JSON objects separated by semicolons; none if anything else is there."""
    decoder, at, out = json.JSONDecoder(), 0, []
    text = text.strip()
    while at < len(text):
        if text[at] != "{":
            return []
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        out.append(value)
        rest = text[at:].lstrip()
        if rest and not rest.startswith(";"):
            return []
        text, at = rest[1:].lstrip(), 0
    return out


def _calls(payload: str) -> list[ToolCall] | None:
    """Return the calls of one JSON value: an object or a list of them."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    found = [_call(item) for item in (value if isinstance(value, list) else [value])]
    calls = [call for call in found if call is not None]
    return calls if calls and len(calls) == len(found) else None


def _call(value: object) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    key = "arguments" if "arguments" in value else "parameters"
    arguments = value.get(key)
    if isinstance(arguments, str):  # some models write the object as a text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(
        value["name"], json.dumps(arguments, ensure_ascii=False), str(value.get("id") or "")
    )


def _without_begun(text: str) -> str:
    """Leave out a call that has no end yet, or a mark's beginning at the end of the text."""
    for mark in ("<tool_call>", _MISTRAL, _PYTHON_TAG):
        if mark in text:
            return text.partition(mark)[0].rstrip()
        begun = _overlap(text, mark)
        if begun:
            return text[:-begun].rstrip()
    return text


def _overlap(text: str, mark: str) -> int:
    """Return how many characters of `mark`'s beginning `text` ends with."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(mark[:n])), 0)
