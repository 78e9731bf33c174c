"""Parser of a model's answers in chats: content, reasoning and tool calls."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any

from .chat import ToolCall
from .tool_call_format import INDEX, Calls, ChatForm, JsonEnvelope

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
# What names a function, and an id.
_NAME, _ID = re.compile(r"[\w.\-/:]+"), re.compile(r"[\w.\-:]+")
# Where gpt-oss writes whom it speaks to: its template puts it before the channel, the model after.
_HARMONY = re.compile(
    r"(?:<\|channel\|>\w+\s*)?to=functions\.(?P<name>[\w.\-]+)\s*(?:<\|channel\|>\w+\s*)?"
    r"(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>"
)
# What opens and closes, and quotes; what follows a backslash is neither.
_NESTING = re.compile(r"""\\.|["'{}()\[\]]""", re.DOTALL)
_CLOSES = {"{": "}", "(": ")", "[": "]"}
_BETWEEN = tuple(", \t\r\n")  # items of a list
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_GENERIC = ChatForm()


@dataclass(frozen=True, slots=True)
class ChatOutput:
    """A parsed answer: content, reasoning and tool calls."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """Return the turn as a message, for the history of the next prompt."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message() for call in self.tool_calls]
        return message


ParsedCalls = tuple[str, list[ToolCall]]


def parse_chat_output(
    text: str,
    *,
    thinking_open: bool = False,
    is_partial: bool = False,
    form: ChatForm | None = None,
    tools: Sequence[Any] = (),
    reads_calls: bool = True,
) -> ChatOutput:
    """Parse an assistant's answer; text without a known format is content.

    Besides the template's format, these are known: `<think>…</think>`, also without its end;
    `<tool_call>{…}</tool_call>` (Hermes, Qwen). Also a JSON call, bare or after `<|python_tag|>`
    (Llama 3), and `[TOOL_CALLS][…]` (Mistral).

    Args:
        text: the output.
        form: the format of the model's template, see `chat_form`.
        thinking_open: the prompt ended inside the reasoning, so the text starts there.
        is_partial: more text will follow. Partial markers and calls without an end are left out of
            the content. Otherwise a call without an end is left out if there are complete ones; if
            there are none, it is content.
        tools: their schemas define which values are strings, if a format does not.
        reads_calls: False leaves calls in the content, for chats without tools.
    """
    form = form or _GENERIC
    reasoning, rest = _split_reasoning(
        text, form.think, thinking_open=thinking_open, is_partial=is_partial
    )
    if form.end and not is_partial:
        rest = rest.removesuffix("\n").removesuffix(form.end) if form.end in rest else rest
    readers: list[Callable[[str], ParsedCalls | None]] = [
        _parse_hermes,
        _parse_mistral,
        _parse_llama,
    ]
    if form.calls is not None:
        readers.insert(0, lambda answer: _parse_by_form(answer, form, tools))
    own = () if form.calls is None or not form.calls.marker else (form.calls.marker,)
    marks = (*own, "<tool_call>", _MISTRAL, _PYTHON_TAG) if is_partial else ()
    if not reads_calls:
        readers, marks = [], ()
    for reader in readers:
        parsed = reader(rest)
        if parsed is not None:
            content, calls = parsed
            content = _before_calls(content, marks)
            return ChatOutput(_without_tags(content, form), reasoning, tuple(calls))
    if is_partial and reads_calls and _may_start_calls(rest, form.calls, tools):
        rest = ""
    return ChatOutput(_without_tags(_before_calls(rest, marks), form), reasoning)


def _split_reasoning(
    text: str, think: tuple[str, str], *, thinking_open: bool, is_partial: bool
) -> tuple[str, str]:
    """Split a text into reasoning and the rest.

    think: the tags around reasoning.
    """
    opens, closes = think
    body = text.lstrip()
    if body.startswith(opens):
        body = body[len(opens) :]
    elif is_partial and body and opens.startswith(body):
        return "", ""
    elif not thinking_open:
        return "", text
    else:
        body = text
    thought, end, rest = body.partition(closes)
    if not end and is_partial:
        thought = thought[: len(thought) - _overlap_length(thought, closes)]
    return thought.strip("\n"), rest.lstrip("\n")


def _without_tags(content: str, form: ChatForm) -> str:
    """Return the content without the tags that the template writes around it."""
    if form.opening and form.opening in content:
        content = content.partition(form.opening)[2]
        if form.closing:
            content = content.removesuffix(form.closing)
    return content


def _parse_by_form(text: str, form: ChatForm, tools: Sequence[Any]) -> ParsedCalls | None:
    """Parse calls in the template's format; return the content and the calls.

    None if the text has no calls in this format.
    """
    format = form.calls
    assert format is not None
    if format.marker == "to=functions.":
        return _parse_harmony(text, form)
    if format.is_python:
        return _parse_python(text, format, tools)
    calls: list[ToolCall] = []
    before, at = "", 0
    while True:
        start = text.find(format.marker, at) if format.marker else (at if not calls else -1)
        if start < 0:
            break
        parsed = _CallsReader(text, start, format, tools).read()
        if parsed is None:
            if not calls or _is_closed(text[start:], format):
                return None
            text = text[:start]
            break
        before += text[at:start]
        more, at = parsed
        calls += more
    rest = _content_after_calls(text[at:], format)
    if rest is None or not calls or (rest.strip() and not format.marker):
        return None
    return (before.rstrip() + rest).strip(), calls


def _content_after_calls(rest: str, format: Calls) -> str | None:
    """Return the content after the calls, without the tail of calls or an incomplete next call.

    None if the next call is complete but invalid.

    rest: the text after the last parsed call.
    """
    answer, join = rest.strip(), (format.join or "").strip()
    if format.tail.strip().startswith(answer):
        return ""
    if join and (answer.startswith(join) or join.startswith(answer)):
        return None if _is_closed(answer, format) else ""
    return rest[: len(rest) - _overlap_length(rest, format.marker)]


def _is_closed(text: str, format: Calls) -> bool:
    """Return True if an invalid call has its end, so that more text cannot make it valid."""
    return format.end in text if format.end else "{" in text and not _is_open(text)


def _is_open(text: str) -> bool:
    """Return True if JSON, or calls in Python syntax, are incomplete at the text's end."""
    return not text.strip() or _scan_brackets(text)[0]


def _scan_brackets(text: str) -> tuple[bool, int]:
    """Return True if a bracket or a quote is open at the text's end; and an index.

    The index is the end of the last complete call in a list of calls; 0 if there is none.
    """
    opened, quote, end = "", "", 0
    for match in _NESTING.finditer(text):
        mark = match[0]
        if quote or mark in ("'", '"'):
            quote = ("" if mark == quote else quote) if quote else mark
        elif mark[0] != "\\":
            if mark in _CLOSES:
                opened += mark
            elif mark != _CLOSES.get(opened[-1:]):
                return False, 0  # broken, not cut
            else:
                opened = opened[:-1]
            end = match.end() if mark == ")" and len(opened) == 1 else end
    return bool(quote or opened), end


def _may_start_calls(rest: str, format: Calls | None, tools: Sequence[Any]) -> bool:
    """Return True if a text may be the start of calls in a format without a marker.

    Args:
        rest: the text after the reasoning.
        format: the format; None means there are no calls.
        tools: the tools; a call may start with their names.
    """
    if format is None or format.marker or not rest.strip():
        return False
    names = _function_names(tools) if format.slots[0] == "name" else []
    begins = [f"{format.head}{name}{format.mids[0]}" for name in names] or [format.head]
    answer = "".join(rest.split())  # blanks may differ from the template's
    return any(
        answer.startswith(begin) or begin.startswith(answer)
        for begin in ("".join(each.split()) for each in begins)
    )


def _function_names(tools: Sequence[Any]) -> list[str]:
    """Return the names of the tools' functions; tools without a name are left out."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    named = [each.get("name") for each in functions if isinstance(each, Mapping)]
    return [name for name in named if isinstance(name, str)]


class _CallsReader:
    """Parser of consecutive calls in one format, from index `at` of a text.

    Whitespace may differ from the template's. An incomplete call at the end of the text is ignored.
    """

    def __init__(self, text: str, at: int, format: Calls, tools: Sequence[Any]) -> None:
        self.text = text
        self.at = at
        self.format = format
        self.tools = tools

    def read(self) -> tuple[list[ToolCall], int] | None:
        """Parse the calls; return them and the index after them. None for another format."""
        calls = self._read_enveloped() if self.format.envelope is not None else self._read_plain()
        return None if calls is None else (calls, self.at)

    def _skip(self, literal: str) -> bool:
        """Skip a literal text of the format if it is next; return True if it was."""
        match = _loose_pattern(literal).match(self.text, self.at)
        if match is not None:
            self.at = match.end()
        return match is not None

    def _value(self) -> Any:
        """Parse one JSON value. Raises: ValueError."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        value, self.at = json.JSONDecoder().raw_decode(self.text, self.at)
        return value

    def _json_values(self) -> list[Any]:
        """Parse consecutive JSON values, separated by a comma, a semicolon or blanks.

        Returns [] if the text has no complete value here.
        """
        values: list[Any] = []
        try:
            values.append(self._value())
            while isinstance(values[-1], dict):
                more = re.compile(r"\s*[,;]?\s*(?=\{)").match(self.text, self.at)
                if more is None:
                    break
                self.at = more.end()
                values.append(self._value())
        except (ValueError, RecursionError):
            rest = self.text[self.at :]
            if values:
                values = values if self._is_end_optional() and _is_open(rest) else []
            elif items := _complete_items(rest):
                values = [items]
            self.at = len(self.text) if values else self.at
        return values

    def _is_end_optional(self) -> bool:
        """Return True if the text that ends a call may be missing at the end of an answer."""
        return self.format.envelope is not None and not self.format.envelope.after.strip()

    def _read_enveloped(self) -> list[ToolCall] | None:
        """Parse calls that are JSON values with name and arguments inside; None for others."""
        assert self.format.envelope is not None
        envelope, calls = self.format.envelope, []
        while True:
            begin = self.at
            more = self._read_envelope(envelope) if self._skip(envelope.before) else []
            if more is None:
                return None
            if not more:
                self.at = begin
                break
            calls += more
            if not envelope.before.strip():
                break
        return calls or None

    def _read_envelope(self, envelope: JsonEnvelope) -> list[ToolCall] | None:
        """Parse the calls of one envelope.

        [] if the envelope has no end; None if it has a value that is no call.
        """
        calls: list[ToolCall] = []
        values = self._json_values()
        lists = [value if isinstance(value, list) else [value] for value in values]
        for item in chain.from_iterable(lists):
            name, arguments = _value_at(item, envelope.name), _value_at(item, envelope.arguments)
            call = _create_call(
                name, arguments, _value_at(item, envelope.id) if envelope.id else ""
            )
            call = call or _call_of_value(item)
            if call is None:
                return None
            calls.append(call)
        after, rest = envelope.after.strip(), self.text[self.at :].strip()
        if not self._skip(envelope.after) and after:
            if not isinstance(next(iter(values), None), list) or not after.startswith(rest):
                return []
            self.at = len(self.text)  # of a list, what closes it may be cut
        return calls

    def _read_plain(self) -> list[ToolCall] | None:
        """Parse calls whose name and arguments are separate texts; None if they do not fit."""
        format = self.format
        calls: list[ToolCall] = []
        if not self._skip(format.head):
            return None
        here = self.at
        while True:
            call = self._read_call()
            if call is None:
                if not calls:
                    return None
                self.at = here
                break
            calls.append(call)
            here = self.at
            if format.join is None or not (self._skip(format.join) and self._may_have_more()):
                self.at = here
                break
        self._skip(format.tail)
        return calls

    def _may_have_more(self) -> bool:
        """Return True if another call may follow."""
        return bool(self.format.join or self.format.marker) and self.at < len(self.text)

    def _read_call(self) -> ToolCall | None:
        """Parse one call and the text that closes it; None if there is none."""
        parts: dict[str, Any] = {}
        is_closed = False
        each = self.format.argument_format
        for number, slot in enumerate(self.format.slots):
            if slot == "arguments" and each is not None and each.empty and self._skip(each.empty):
                parts[slot], is_closed = {}, True
                continue
            if number and not self._skip(self.format.mids[number - 1]):
                return None
            if slot == "arguments":
                parts[slot] = self._arguments(str(parts.get("name", "")))
                is_closed = self.format.argument_format is not None
                if parts[slot] is None:
                    return None
            else:
                match = (_NAME if slot == "name" else _ID).match(self.text, self.at)
                if match is None:
                    return None
                parts[slot], self.at = match[0], match.end()
                if slot == "name" and INDEX in "".join(self.format.mids):
                    # `name:0`, as ids are written; the number belongs to what follows.
                    cut = parts[slot].rstrip("0123456789")
                    if cut.endswith(":"):
                        self.at -= len(parts[slot]) - len(cut) + 1
                        parts[slot] = cut[:-1]
        if not is_closed and not self._skip(self.format.close):
            return None
        return _create_call(parts.get("name"), parts.get("arguments"), parts.get("id", ""))

    def _arguments(self, name: str) -> dict[str, Any] | None:
        """Parse the arguments of the function `name`; None if they do not fit."""
        each = self.format.argument_format
        if each is None:
            try:
                value = self._value()
            except (ValueError, RecursionError):
                return None
            return value if isinstance(value, dict) else None
        types = _argument_types(self.tools, name)
        arguments: dict[str, Any] = {}
        while True:
            argument = self._argument(types)
            if argument is None:
                return None
            key, value, is_last = argument
            arguments[key] = value
            if is_last:
                return arguments

    def _argument(self, types: Mapping[str, Any]) -> tuple[str, Any, bool] | None:
        """Parse one argument of a call; the value ends at the nearest separator or close.

        types: the JSON type of each argument.

        Returns: key, value, and True if it is the call's last argument. None if there is none.
        """
        each = self.format.argument_format
        assert each is not None
        ways = [(True, each.text_mid, each.text_sep, each.text_close)]
        ways.append((False, each.json_mid, each.json_sep, each.json_close))
        for is_text, mid, sep, close in ways:
            match = re.compile(rf"([\w.\-]+){_loose_pattern(mid).pattern}").match(
                self.text, self.at
            )
            if match is None:
                continue
            begin, ends = match.end(), []
            if each.is_typed and not is_text:
                try:
                    _, begin_of_rest = json.JSONDecoder().raw_decode(self.text, begin)
                except (ValueError, RecursionError):
                    continue
            else:
                begin_of_rest = begin
            for literal, is_last in ((sep, False), (close, True)):
                # NOTE: a value keeps its blanks but those that the template puts around it.
                end = re.compile(_strict_pattern(literal)).search(self.text, begin_of_rest)
                if end is not None:
                    ends.append((end.start(), is_last, end.end()))
            if not ends:
                continue
            stop, is_last, self.at = min(ends)
            value = self.text[begin:stop]
            kind = "string" if each.is_typed and is_text else types.get(match[1])
            return match[1], _parse_value(value, kind), is_last
        return None


@lru_cache(maxsize=256)
def _loose_pattern(literal: str) -> re.Pattern[str]:
    """Return a pattern of a literal in which any whitespace may replace whitespace, or none."""
    parts = [_escape_word(part) for part in literal.split()]
    around = r"\s*" if literal[:1].isspace() or not literal else ""
    return re.compile(around + r"\s*".join(parts) + (r"\s*" if literal[-1:].isspace() else ""))


def _strict_pattern(literal: str) -> str:
    """Return a pattern of a literal in which whitespace may differ, except at its start.

    At the start, the pattern matches one line end or nothing.
    """
    head = literal[: len(literal) - len(literal.lstrip())]
    return (r"\n?" if head else "") + _loose_pattern(literal.lstrip()).pattern


def _escape_word(part: str) -> str:
    """Return a part of a literal as a pattern."""
    return re.escape(part).replace(INDEX, r"\d+")


def _parse_value(value: str, kind: Any) -> Any:
    """Convert an argument's text to its value.

    The text itself if `kind` is "string" or if it is neither JSON nor Python.

    kind: the JSON type in the function's schema; None if unknown.
    """
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        if value[:1] in ("{", "["):  # templates that write Python's notation
            try:
                return _literal_value(_parse_expression(value))
            except (ValueError, RecursionError):
                return value
        return _CONSTANTS.get(value.strip().lower(), value)


def _argument_types(tools: Sequence[Any], name: str) -> dict[str, Any]:
    """Return the JSON types of a function's arguments, by name, as far as its schema has them.

    {} for an unknown function.
    """
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            known = schema.get("properties") if isinstance(schema, Mapping) else None
            if isinstance(known, Mapping):
                return {
                    key: each.get("type")
                    for key, each in known.items()
                    if isinstance(each, Mapping)
                }
    return {}


def _value_at(item: Any, path: Sequence[str | None]) -> Any:
    """Return the value at a path of keys in nested mappings; None if there is none.

    A last key of None means the call is `{name: arguments}`; that is returned as `_OnlyKey`.
    """
    for number, key in enumerate(path):
        if not isinstance(item, dict):
            return None
        if key is None:
            if len(item) != 1:
                return None
            (only,) = item
            if number == len(path) - 1 and isinstance(item[only], dict):
                return _OnlyKey(only, item[only])
            return None
        item = item.get(key)
    return item


@dataclass(frozen=True, slots=True)
class _OnlyKey:
    """A call that is written as the JSON object `{name: arguments}`."""

    name: str
    arguments: dict[str, Any]


def _create_call(name: Any, arguments: Any, known: Any) -> ToolCall | None:
    """Create a ToolCall from parsed parts; None if they are invalid.

    known: the id, or None.
    """
    if isinstance(name, _OnlyKey):
        name = name.name
    if isinstance(arguments, _OnlyKey):
        arguments = arguments.arguments
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):  # some models write the object as a text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # NaN and the infinities are no JSON
        return None
    return ToolCall(name, written, "" if known is None else str(known))


def _parse_harmony(text: str, form: ChatForm) -> ParsedCalls | None:
    """Parse a text in the Harmony format of gpt-oss: return content and calls, or None."""
    calls: list[ToolCall] = []
    at, content = 0, ""
    for match in _HARMONY.finditer(text):
        if match.start() < at:
            continue
        try:
            value, end = json.JSONDecoder().raw_decode(text, match.end())
        except (ValueError, RecursionError):
            if not calls or not _is_open(text[match.end() :]):
                return None
            text = text[: match.start()]
            break
        call = _create_call(match["name"], value, "")
        if call is None:
            return None
        calls.append(call)
        content += text[at : match.start()]
        at = end
    content = (content + text[at:]).replace("<|call|>", "").replace("<|start|>assistant", "")
    return (content.strip(), calls) if calls else None


def _parse_python(text: str, format: Calls, tools: Sequence[Any]) -> ParsedCalls | None:
    """Parse calls in Python syntax, `[name(key="text")]`: return content and calls, or None.

    An incomplete last call is left out.
    """
    before, mark, body = text.partition(format.marker) if format.marker else ("", "", text)
    body = body.strip()
    if format.marker:
        if not mark:
            return None
        # What closes is a tag; the list itself ends in a bracket.
        body = body[: body.rfind("]") + 1] or body
    is_cut, end = _scan_brackets(body)
    try:
        listed = _parse_expression(f"{body[:end]}]" if is_cut and end else body)
    except (ValueError, RecursionError):
        return None
    nodes = listed.elts if isinstance(listed, ast.List) else []
    calls = []
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args:
            return None
        try:
            arguments = {each.arg: _literal_value(each.value) for each in node.keywords if each.arg}
        except (ValueError, RecursionError):
            return None
        name = ast.unparse(node.func)
        for key, kind in _argument_types(tools, name).items():
            # What some templates write without quotes, or with too many.
            value = arguments.get(key)
            if isinstance(value, str) != (kind == "string") and value is not None:
                arguments[key] = str(value) if kind == "string" else _parse_value(str(value), kind)
        call = _create_call(name, arguments, "")
        if call is None:
            return None
        calls.append(call)
    return (before.strip(), calls) if calls else None


def _parse_expression(text: str) -> ast.expr:
    """Return the syntax tree of a Python expression. Raises: ValueError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        try:
            return ast.parse(text, mode="eval").body
        except (SyntaxError, MemoryError) as error:
            raise ValueError("no expression") from error


def _literal_value(node: ast.expr) -> Any:
    """Return the value of a literal of Python or JSON; other bare names are strings.

    Raises: ValueError for other expressions.
    """
    if isinstance(node, ast.Name):
        return _CONSTANTS.get(node.id, node.id)
    if isinstance(node, ast.List):
        return [_literal_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal_value(key) for key in node.keys if key is not None]
        return dict(zip(map(str, keys), map(_literal_value, node.values), strict=False))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no JSON")
    return value


def _parse_hermes(text: str) -> ParsedCalls | None:
    """Parse `<tool_call>{…}</tool_call>`: return content and calls, or None."""
    parts = [_calls_of_json(match[1]) for match in _HERMES.finditer(text)]
    if not parts or any(calls is None for calls in parts):
        return None
    content = _before_calls(_HERMES.sub("", text), ("<tool_call>",)).strip()
    return content, [call for calls in parts for call in calls or ()]


def _parse_mistral(text: str) -> ParsedCalls | None:
    """Parse `[TOOL_CALLS][…]`: return content and calls, or None."""
    content, mark, payload = text.partition(_MISTRAL)
    calls = (
        (_calls_of_json(payload) or _calls_of_values(_complete_items(payload.strip())))
        if mark
        else None
    )
    return None if calls is None else (content.strip(), calls)


def _parse_llama(text: str) -> ParsedCalls | None:
    """Parse JSON calls, bare or after `<|python_tag|>`: return content and calls, or None."""
    content, mark, payload = text.partition(_PYTHON_TAG)
    if not mark:
        content, payload = "", text
    calls: list[ToolCall] = []
    # Several calls stand one after another, with a semicolon between.
    for part in _json_values(payload):
        call = _call_of_value(part)
        if call is None:
            return None
        calls.append(call)
    return (content.strip(), calls) if calls else None


def _json_values(text: str) -> list[Any]:
    """Parse JSON objects that are separated by semicolons; [] if the text has anything else.

    An incomplete last object is left out.
    """
    out: list[Any] = []
    decoder, at = json.JSONDecoder(), 0
    text = text.strip()
    while at < len(text):
        if text[at] != "{":
            return []
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return out if _is_open(text) else []
        out.append(value)
        rest = text[at:].lstrip()
        if rest and not rest.startswith(";"):
            return []
        text, at = rest[1:].lstrip(), 0
    return out


def _calls_of_json(payload: str) -> list[ToolCall] | None:
    """Parse a JSON text that is one call or a list of calls; None if it is not."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return _calls_of_values(value if isinstance(value, list) else [value])


def _calls_of_values(items: Sequence[Any]) -> list[ToolCall] | None:
    """Convert JSON values to calls; None if a value is no call, or there is none."""
    parts = [_call_of_value(item) for item in items]
    calls = [call for call in parts if call is not None]
    return calls if calls and len(calls) == len(parts) else None


def _complete_items(text: str) -> list[Any]:
    """Parse a JSON list whose end is missing: return its complete items.

    [] for a complete list or any other text.
    """
    items: list[Any] = []
    at, decoder = 1, json.JSONDecoder()
    if text[:1] != "[" or not _is_open(text):
        return items
    while True:
        while text[at : at + 1] in _BETWEEN:
            at += 1
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return items
        items.append(value)


def _call_of_value(value: object) -> ToolCall | None:
    """Convert a JSON value in one of the most common forms to a call; None for others.

    These are `{"name": …, "arguments": …}`, with "parameters" instead, or inside "function".
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {"id": value.get("id"), **value["function"]}
    if not isinstance(value, dict):
        return None
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    return _create_call(value.get("name"), arguments, value.get("id") or "")


def _before_calls(text: str, marks: Sequence[str]) -> str:
    """Return a text up to the first mark, or up to the start of a mark at its end.

    marks: texts with which calls start.
    """
    for mark in marks:
        if mark in text:
            return text.partition(mark)[0].rstrip()
        begun = _overlap_length(text, mark)
        if begun:
            return text[:-begun].rstrip()
    return text


def _overlap_length(text: str, mark: str) -> int:
    """Return the length of the longest start of `mark` with which `text` ends."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in sizes if text.endswith(mark[:n])), 0)
