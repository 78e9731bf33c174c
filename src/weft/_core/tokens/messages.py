"""Convert chat messages to the form that a model's chat template reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from .chat import REASONING
from .tool_call_format import INDEX, Calls, ChatForm


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], form: ChatForm
) -> list[dict[str, Any]]:
    """Return copies of the messages, with calls and reasoning in the form that the template reads.

    Arguments may be a mapping or JSON text. Missing ids are created, and assigned to the tool
    results in order.

    form: the template's form, see `chat_form`.

    Raises: ConfigError for an invalid call, or one that the template would leave out.
    """
    out: list[dict[str, Any]] = []
    pending: list[tuple[str, str]] = []  # ids and names of calls without an answer
    ids: dict[str, str] = {}  # as given, to as written
    n_calls = 0
    for index, given in enumerate(messages):
        message = dict(given)
        if message.get("tool_calls"):
            calls = []
            for entry in message["tool_calls"]:
                call, known = _normalize_call(index, entry, form, n_calls)
                ids[known] = call["id"]
                pending.append((call["id"], call["function"]["name"]))
                calls.append(call)
                n_calls += 1
            message = _with_calls(index, message, calls, form)
        elif message.get("role") == "tool":
            _link_to_call(message, ids, pending)
        out.append(_with_reasoning(message, form))
    return out


def describe_tools_in_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], form: ChatForm
) -> list[dict[str, Any]]:
    """Return a chat that describes tools in a message, for templates without support for tools.

    The first message describes the tools and the format of calls. That is a system message if the
    template writes one, else a user message. Tool results become user messages.

    Args:
        messages: the chat, from `normalize_messages`.
        tools: the tools' JSON descriptions; [] describes none.
        form: the template's form.
    """
    out: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result:
            content = f"<tool_response>\n{_text_content(message)}\n</tool_response>"
            message = {"role": "user", "content": content}
        if follows_result and message["role"] == "user":  # many templates reject two in a row
            out[-1] = _merge_messages(out[-1], message)
        else:
            out.append(dict(message))
            follows_result = is_result
    if tools:
        described = {
            "role": "system" if form.has_system else "user",
            "content": _tools_description(tools),
        }
        if out[0]["role"] == "system":
            out[0] = _merge_messages(out[0], described)
        elif out[0]["role"] == described["role"]:
            out[0] = _merge_messages(described, out[0])
        else:
            out.insert(0, described)
    return out


def _tools_description(tools: Sequence[Any]) -> str:
    """Return the text that describes the tools and the format of calls."""
    functions = (
        tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in tools
    )
    try:
        listed = "\n".join(json.dumps(each, ensure_ascii=False) for each in functions)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the tools are not JSON: {error}") from error
    return (
        f"You can call these functions:\n{listed}\n\nTo call a function, write its name and"
        " arguments as JSON, and nothing else:\n<tool_call>\n"
        '{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>\n'
        "The results follow in <tool_response> tags. If you need no function, answer the user."
    )


def _merge_messages(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return one message with the contents of two, as text."""
    return {**first, "content": f"{_text_content(first)}\n\n{_text_content(second)}"}


def _text_content(message: Mapping[str, Any]) -> str:
    """Return the content of a message as text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)


def _normalize_call(
    index: int, given: Any, form: ChatForm, number: int
) -> tuple[dict[str, Any], str]:
    """Return one call in the form that the template reads, and its original id ("" for none).

    Args:
        index: the index of the message, for errors.
        given: an entry of the message's `tool_calls`.
        form: the template's form.
        number: how many calls the chat has before this one; a new id contains it.
    """
    inner = given.get("function", given) if isinstance(given, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(name, str) or not name:
        raise ConfigError(
            f"message {index} has the tool call {given!r:.80}; allowed is a mapping like"
            ' {"type": "function", "function": {"name": "f", "arguments": {}}}, or a ToolCall'
        )
    arguments = _normalize_arguments(index, name, inner.get("arguments", {}), form)
    known = str(given.get("id") or "")
    written = known
    if form.shape.ids == "functions" and name not in known:
        written = f"functions.{name}:{number}"
    elif not known:
        written = f"call{number:05d}"  # nine alphanumeric characters, which some templates require
    rest = {key: value for key, value in inner.items() if key in ("name", "arguments")}
    function = {**rest, "name": name, "arguments": arguments}
    more = {key: value for key, value in given.items() if key not in inner}
    return {**more, "id": written, "type": "function", "function": function}, known


def _normalize_arguments(index: int, name: str, given: Any, form: ChatForm) -> Any:
    """Return a call's arguments as the mapping or JSON text that the template reads."""
    if isinstance(given, str):
        try:
            read = json.loads(given or "{}")
        except (ValueError, RecursionError):
            read = None
    else:
        read = given
    if not isinstance(read, Mapping):
        raise ConfigError(
            f"message {index} calls {name!r} with the arguments {given!r:.60}; allowed is a"
            " mapping, or the JSON text of an object"
        )
    wanted = form.shape.arguments
    if wanted == "text" or form.shape.as_content:
        return given if isinstance(given, str) and given else json.dumps(read, ensure_ascii=False)
    return given if wanted == "either" and given else dict(read)


def _with_calls(
    index: int, message: dict[str, Any], calls: list[dict[str, Any]], form: ChatForm
) -> dict[str, Any]:
    """Return the message with its calls, and with a content that the template allows."""
    assert form.calls is not None, "every template has a form of calls"
    content = message.get("content")
    if form.shape.as_content:
        del message["tool_calls"]
        text = f"{content}\n" if isinstance(content, str) and content else ""
        return {**message, "content": text + _calls_as_text(calls, form.calls)}
    if not content:
        content = form.shape.content
    elif not form.shape.keeps_both:
        raise ConfigError(
            f"message {index} has content and tool calls, and this chat template leaves the calls"
            " out then; set its content to None"
        )
    return {**message, "content": content, "tool_calls": calls}


def _calls_as_text(calls: Sequence[Mapping[str, Any]], format: Calls) -> str:
    """Return calls as text in a format, for a template that does not write calls itself."""
    parts = []
    for number, call in enumerate(calls):
        function = call["function"]
        before = format.head if number == 0 else format.join or ""
        text = before + function["name"] + format.mids[0] + function["arguments"] + format.close
        parts.append(text.replace(INDEX, str(number)))
    return "".join(parts) + format.tail


def _link_to_call(
    message: dict[str, Any], ids: Mapping[str, str], pending: list[tuple[str, str]]
) -> None:
    """Set the id and the name of the call that a tool's message answers, in the message.

    Args:
        message: the tool's message; modified.
        ids: original id → id in the prompt.
        pending: (id, name) of calls without an answer; the answered one is removed. A message
            without an id answers the first of them.
    """
    known = message.get("tool_call_id")
    if known:
        message["tool_call_id"] = ids.get(known, known)
        at = next(
            (i for i, (each, _) in enumerate(pending) if each == message["tool_call_id"]), None
        )
    else:
        at = 0 if pending else None
    if at is not None:
        written, name = pending.pop(at)
        message["tool_call_id"] = written
        message.setdefault("name", name)


def _with_reasoning(message: dict[str, Any], form: ChatForm) -> dict[str, Any]:
    """Return a copy of the message with its reasoning under the key that the template reads.

    The message itself if it has no reasoning, or the template reads none.
    """
    wanted = form.shape.reasoning
    reasoning = next((message[name] for name in REASONING if message.get(name)), None)
    if not isinstance(reasoning, str) or wanted is None or message.get(wanted):
        return message
    if wanted != "part":
        return {**message, wanted: reasoning}
    content = message.get("content")
    if not isinstance(content, str):
        return message
    texts = [{"type": "text", "text": content}] if content else []
    return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *texts]}
