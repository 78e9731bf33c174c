"""The format in which a chat template writes an assistant's turn, detected by rendering test chats.

A turn with a test call is rendered. The text around the test words is the format: before the first
call, between its parts, between calls, and after the last. So unknown templates work too. The few
things that rendering cannot show are listed below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from ...errors import ConfigError
from .chat import render_chat

Slot = Literal["name", "arguments", "id"]
INDEX = "\ue0f0"  # in a literal: the number of the call

_QUESTION, _ANSWER, _REASONING = "weftasked", "weftsaid", "weftthought"
_NAMES, _IDS = ("weft_fn_a", "weft_fn_b"), ("weftid001", "weftid002")
_KEYS = ("weft_key_a", "weft_key_b")
_TEXTS, _NUMBERS = ("weftvala", "weftvalb"), (710117, 710118)
_TAG = re.compile(r"<[^<>\s]{2,}>|<｜[^<>]+>|\[/?[A-Z_]{2,}\]")
# Templates that only describe calls to the model: calls are written as text, in these formats.
_NAMED = (
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
)
_NUMBERED = (
    '{"tool_call_id": "{{ loop.index0 }}", "tool_name": {{ c.function.name | tojson }},'
    ' "parameters": {{ c.function.arguments | tojson }}}'
)
_DESCRIBED_FORMATS = {
    "<|START_ACTION|>": ("<|START_ACTION|>[", _NUMBERED, ", ", "]<|END_ACTION|>"),
    "<|/tool|>": ("<|tool_call|>[", _NAMED, ", ", "]<|/tool_call|>"),
    "<|tool_call|>": ("<|tool_call|>[", _NAMED, ", ", "]"),
    "<tool_call>": (
        "<tool_call>\n",
        _NAMED,
        "\n</tool_call>\n<tool_call>\n",
        "\n</tool_call>",
    ),
}
GENERIC = "<tool_call>"  # the form for templates that neither write nor describe calls


@dataclass(frozen=True, slots=True)
class ArgumentFormat:
    """Format of arguments that are written one by one, instead of as a JSON object.

    The format of strings (text_…) may differ from that of other values (json_…), in quotes or type
    marks.

    text_mid, json_mid: the text between a key and its value.

    text_sep, json_sep: the text between a value and the next key.

    text_close, json_close: the text from the last value to the end of the call.

    empty: the text of a call without arguments, after the part before them. None if unknown.
    """

    text_mid: str
    json_mid: str
    text_sep: str
    json_sep: str
    text_close: str
    json_close: str
    empty: str | None

    @property
    def is_typed(self) -> bool:
        """True if the format distinguishes strings from other values."""
        return (self.text_mid, self.text_sep) != (self.json_mid, self.json_sep)


@dataclass(frozen=True, slots=True)
class JsonEnvelope:
    """Format of calls inside one JSON value, which is one call or a list of calls.

    before, after: the text before and after the JSON value.

    name, arguments, id: the path of keys to a part of the call. A last key of None stands for the
    only key, in the format `{name: arguments}`. `id` is None if calls have no id.
    """

    before: str
    name: tuple[str | None, ...]
    arguments: tuple[str | None, ...]
    id: tuple[str | None, ...] | None
    after: str


@dataclass(frozen=True, slots=True)
class Calls:
    """The format of the calls in one turn: head, a call, (join, a call)…, tail.

    slots: the parts of a call (name, arguments, id) in order.

    mids: the text between the parts.

    close: the text after the last part of a call.
    """

    head: str
    slots: tuple[Slot, ...]
    mids: tuple[str, ...]
    close: str
    join: str | None  # None: one call a turn
    tail: str
    argument_format: ArgumentFormat | None = None  # None: arguments are a JSON object
    envelope: JsonEnvelope | None = None

    @property
    def marker(self) -> str:
        """The text that starts calls, wherever it occurs in an answer.

        "" if calls have no such text, so that only a complete answer can be a call.
        """
        before = self.head if self.envelope is None else self.envelope.before
        tag = _TAG.match(before)
        if tag is not None:
            return tag[0]
        return "" if before[:1] in "{[" else before.strip()

    @property
    def end(self) -> str:
        """The tag that ends a call; "" if there is none."""
        closes = self.close if self.argument_format is None else self.argument_format.json_close
        return next(iter(reversed(_TAG.findall(closes))), "")

    @property
    def is_python(self) -> bool:
        """True if a call is written as in Python: `[name(key="text")]`."""
        return self.argument_format is not None and self.mids == ("(",)


@dataclass(frozen=True, slots=True)
class MessageShape:
    """The form of messages with which the template writes each call exactly once.

    arguments: the arguments of a call must be a mapping, JSON text, or either.

    content: what a message with calls and no text has as content.

    ids: "functions": ids must be `functions.NAME:N`, because the template writes the id instead of
    the name.

    reasoning: the message key from which the template reads reasoning. "part" means a part of the
    content; None means that the template reads none.

    keeps_both: the template writes both the text and the calls of a message that has both.

    as_content: calls must be text in the content, because the template only describes their format.
    """

    arguments: Literal["mapping", "text", "either"] = "either"
    content: str | None = ""
    ids: Literal["any", "functions"] = "any"
    reasoning: str | None = None
    keeps_both: bool = True
    as_content: bool = False


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The format of an assistant's turn in a chat template.

    think: the tags around reasoning.

    opening, closing: the tags around the content; "" for none.

    end: the tag that ends the turn; "" if the turn does not end with a tag.

    calls: the format of tool calls; None without a template.

    shape: what messages must look like for the template.

    is_generic: the template has no format of calls, so Weft uses its own and describes the tools in
    a message (see `messages.describe_tools_in_text`).

    has_system: the template writes system messages. Only set if `is_generic`.
    """

    think: tuple[str, str] = ("<think>", "</think>")
    opening: str = ""
    closing: str = ""
    end: str = ""
    calls: Calls | None = None
    shape: MessageShape = MessageShape()
    is_generic: bool = False
    has_system: bool = True


@lru_cache(maxsize=64)
def chat_form(template: str, bos_token: str = "", eos_token: str = "") -> ChatForm:
    """Return the format of an assistant's turn in a template, by rendering test chats.

    Cost: up to twenty short renderings, once per template.

    bos_token, eos_token: variables of the template.
    """
    return _TemplateProbe(template, bos_token, eos_token).form()


@dataclass(frozen=True, slots=True)
class _RenderedCall:
    """A rendered test chat, and where the parts of one call are in it.

    spans: part → (start, end).

    is_json: the arguments are a JSON object.
    """

    text: str
    spans: dict[Slot, tuple[int, int]]
    is_json: bool

    def ordered(self) -> list[tuple[Slot, int, int]]:
        """Return (part, start, end) of each part, in order of the text."""
        return sorted(
            ((slot, *span) for slot, span in self.spans.items()), key=lambda each: each[1]
        )


class _TemplateProbe:
    """Finds a template's format of calls and reasoning by rendering test chats."""

    def __init__(self, template: str, bos_token: str, eos_token: str) -> None:
        self.template = template
        self.names = {"bos_token": bos_token, "eos_token": eos_token}
        prompt = self.render(add_generation_prompt=True)
        self.prompt = prompt or ""
        answer = self.render(_assistant_message(_ANSWER)) or ""
        self.before, mark, self.after = answer.rpartition(_ANSWER)
        if not mark:
            self.before, self.after = self.prompt, ""

    def form(self) -> ChatForm:
        """Return the format of an assistant's turn."""
        reasoning, think = self._reasoning()
        opening = ""
        if self.prompt and self.before.startswith(self.prompt):
            opening = self.before[len(self.prompt) :]
        opening = _without_thought(opening, think).strip()
        closing = "".join(_TAG.findall(self.after)[:1]) if opening else ""
        ends = _TAG.match(self.after.strip())
        end = "" if ends is None or closing else ends[0]
        form = ChatForm(think, opening, closing, end, None, MessageShape(reasoning=reasoning))
        for functions in (False, True):
            for content in ("", None):
                turns = [
                    self._render_one_call(content, functions, is_text, _TEXTS)
                    for is_text in (False, True)
                ]
                works = [is_text for is_text in (False, True) if turns[is_text] is not None]
                if (
                    len(works) == 2
                    and turns[0]
                    and turns[1]
                    and turns[0].is_json != turns[1].is_json
                ):
                    works = [False]
                if works:
                    calls = self._calls(content, functions, works[0], think)
                    if calls is None:
                        continue
                    both = self.render(
                        _assistant_message(_ANSWER, [self._call(0, _TEXTS, functions, works[0])])
                    )
                    keeps = (
                        both is not None
                        and _NAMES[0] in both[len(_common_prefix(both, self.before)) :]
                    )
                    shape = MessageShape(
                        "either" if len(works) == 2 else "text" if works[0] else "mapping",
                        content,
                        "functions" if functions else "any",
                        reasoning,
                        keeps,
                    )
                    return replace(form, calls=calls, shape=shape)
        return self._described_format(form)

    def render(self, *turns: Mapping[str, Any], add_generation_prompt: bool = False) -> str | None:
        """Render a chat of a question and these turns; None if the template fails."""
        tools = [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": "d",
                    "parameters": {
                        "type": "object",
                        "properties": {
                            key: {"type": "string", "description": "d"} for key in _KEYS
                        },
                        "required": list(_KEYS),
                    },
                },
            }
            for name in _NAMES
        ]
        chat = [{"role": "user", "content": _QUESTION}, *turns]
        try:
            return render_chat(
                self.template,
                chat,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **self.names,
            )
        except ConfigError:
            return None

    def _reasoning(self) -> tuple[str | None, tuple[str, str]]:
        """Return the message key from which the template reads reasoning, and the tags around it.

        The key is None if the template writes no reasoning; the tags are the usual ones then.
        """
        part = [{"type": "thinking", "thinking": _REASONING}, {"type": "text", "text": _ANSWER}]
        calls = [self._call(0, _TEXTS, False, False)]
        for name in ("reasoning_content", "reasoning", "thinking", "part"):
            if name == "part":
                turns = [_assistant_message(part)]
            else:
                turns = [
                    {**_assistant_message(_ANSWER), name: _REASONING},
                    {**_assistant_message("", calls), name: _REASONING},
                ]
            for text in map(self.render, turns):
                before, mark, after = (text or "").partition(_REASONING)
                tag = _TAG.match(after.lstrip())
                # If the prompt has opened the section already, its last tag did.
                start = len(_without_partial_tag(_common_prefix(before, self.prompt)))
                opened = before[start:].strip() or "".join(_TAG.findall(before)[-1:])
                if mark and opened and tag:
                    return name, (opened, tag[0])
        return None, ("<think>", "</think>")

    def _call(
        self, number: int, values: Sequence[Any], functions: bool, is_text: bool
    ) -> dict[str, Any]:
        """Return a test call as an entry of `tool_calls`.

        number: 0 or 1. functions: its id is `functions.NAME:N`. is_text: its arguments are JSON
        text.
        """
        arguments: Any = dict(zip(_KEYS, values, strict=False))
        name = _NAMES[number]
        return {
            "id": f"functions.{name}:{number}" if functions else _IDS[number],
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments) if is_text else arguments,
            },
        }

    def _render_one_call(
        self, content: str | None, functions: bool, is_text: bool, values: Sequence[Any]
    ) -> _RenderedCall | None:
        """Render a turn with one test call, and locate its parts; None if that fails."""
        text = self.render(_assistant_message(content, [self._call(0, values, functions, is_text)]))
        return (
            None
            if text is None
            else self._locate_call(text, values, 0, len(_common_prefix(text, self.before)))
        )

    def _locate_call(
        self, text: str, values: Sequence[Any], number: int, start: int
    ) -> _RenderedCall | None:
        """Locate the parts of a test call in a rendered chat; None if they are not there.

        Args:
            text: the rendered chat.
            values: the values of the call's arguments.
            number: the call's number: 0 or 1.
            start: the index from which to search.
        """
        name = text.find(_NAMES[number], start)
        key = text.find(_KEYS[0], start if number == 0 else name)
        if name < 0 or key < 0:
            return None
        arguments = dict(zip(_KEYS, values, strict=False))
        span = _json_span(text, start, key, arguments)
        is_json = span is not None
        if span is None:
            places = _argument_places(text, key, values)
            if places is None or _is_encoded(text, key, values):
                return None
            span = (key, places[-1][1])
        spans: dict[Slot, tuple[int, int]] = {
            "name": (name, name + len(_NAMES[number])),
            "arguments": span,
        }
        known = text.find(_IDS[number], start)
        if known >= 0:
            spans["id"] = (known, known + len(_IDS[number]))
        return _RenderedCall(text, spans, is_json)

    def _calls(
        self, content: str | None, functions: bool, is_text: bool, think: tuple[str, str]
    ) -> Calls | None:
        """Return the format of calls in turns with this content; None if there is none."""
        one = self._render_one_call(content, functions, is_text, _TEXTS)
        if one is None:
            return None
        text, parts = one.text, one.ordered()
        head = self._text_before_call(one, functions, is_text, think)
        mids = [text[a[2] : b[1]] for a, b in zip(parts, parts[1:], strict=False)]
        end = _without_turn_end(text[parts[-1][2] :], self.after)
        join, second = self._render_two_calls(one, content, functions, is_text)
        if second is not None:
            others = second.ordered()
            if [each[0] for each in others] != [each[0] for each in parts]:
                join = second = None
            else:
                texts = [second.text[a[2] : b[1]] for a, b in zip(others, others[1:], strict=False)]
                mids = [_with_index(a, b) for a, b in zip(mids, texts, strict=True)]
        slots = tuple(each[0] for each in parts)
        close, tail = end, ""
        if join is not None:
            close = _without_partial_tag(_common_prefix(end, join))
            tail, join = end[len(close) :], join[len(close) :]
            if second is not None and not tail:
                # Some templates close the list of several calls alone.
                last = _without_turn_end(second.text[second.ordered()[-1][2] :], self.after)
                tail = last[len(close) :] if last.startswith(close) else ""
            head, join = _heads_with_index(head, join)
        each = None
        if not one.is_json:
            each = self._separate_arguments(one, content, functions, is_text, close)
            if each is None:
                return None
        calls = Calls(head, slots, tuple(mids), close, join, tail, each)
        return replace(calls, envelope=_envelope(one, head, self.after)) if each is None else calls

    def _text_before_call(
        self, one: _RenderedCall, functions: bool, is_text: bool, think: tuple[str, str]
    ) -> str:
        """Return the text before the first part of a call, without the start that every turn has.

        Args:
            one: the rendered chat with the call.
            functions: its ids are `functions.NAME:N`.
            is_text: its arguments are JSON text.
            think: the tags around reasoning.
        """
        first = one.ordered()[0][1]
        text = one.text
        if self.prompt and text.startswith(self.prompt):
            start = len(self.prompt)
        else:
            start = len(_without_partial_tag(_common_prefix(text, self.before)))
        head = text[start:first]
        both = self.render(_assistant_message(_ANSWER, [self._call(0, _TEXTS, functions, is_text)]))
        at = -1 if both is None else both.rfind(_ANSWER)
        if both is not None and at >= 0:
            after_text = self._locate_call(both, _TEXTS, 0, at)
            if after_text is not None:
                between = both[at + len(_ANSWER) : after_text.ordered()[0][1]]
                shared = _common_prefix(head[::-1], between[::-1])[::-1]
                cut = head[: len(head) - len(shared)]
                # NOTE: never begin within a tag that only one of the two begins with.
                head = shared if cut.rfind("<") <= cut.rfind(">") else head
        head = _without_thought(head, think)
        return head.lstrip()

    def _render_two_calls(
        self, one: _RenderedCall, content: str | None, functions: bool, is_text: bool
    ) -> tuple[str | None, _RenderedCall | None]:
        """Render a turn with two calls: return the text between them, and the second call's parts.

        Both are None if the template does not write two calls.
        """
        given = [self._call(number, _TEXTS, functions, is_text) for number in (0, 1)]
        text = self.render(_assistant_message(content, given))
        if text is None:
            return None, None
        first = self._locate_call(text, _TEXTS, 0, len(_common_prefix(text, self.before)))
        if first is None:
            return None, None
        end = first.ordered()[-1][2]
        second = self._locate_call(text, _TEXTS, 1, end)
        if second is None:
            return None, None
        return text[end : second.ordered()[0][1]], second

    def _separate_arguments(
        self, one: _RenderedCall, content: str | None, functions: bool, is_text: bool, close: str
    ) -> ArgumentFormat | None:
        """Return the format of arguments that are written one by one; None if they are not.

        close: the text from the last argument, a string, to the end of the call.
        """
        samples = []
        for values in (_TEXTS, _NUMBERS):
            turn = self._render_one_call(content, functions, is_text, values)
            if turn is None:
                return None
            key = turn.spans["arguments"][0]
            places = _argument_places(turn.text, key, values)
            if places is None:
                return None
            (_, k1, v1, e1), (k2, _, _, e2) = (
                (places[0][0], places[0][0] + len(_KEYS[0]), places[0][2], places[0][1]),
                (places[1][0], 0, 0, places[1][1]),
            )
            rest = _without_turn_end(turn.text[e2:], self.after)
            samples.append((turn.text[k1:v1], turn.text[e1:k2], rest))
        (text_mid, text_sep, text_rest), (json_mid, json_sep, json_rest) = samples
        rest = text_rest[len(close) :]
        json_close = json_rest[: len(json_rest) - len(rest)]
        none = self.render(_assistant_message(content, [self._call(0, (), functions, is_text)]))
        empty = None
        if none is not None:
            at = none.find(_NAMES[0], len(_common_prefix(none, self.before)))
            if at >= 0:
                empty = _without_turn_end(none[at + len(_NAMES[0]) :], self.after)
                empty = empty[: len(empty) - len(rest)] if empty.endswith(rest) else empty
        return ArgumentFormat(text_mid, json_mid, text_sep, json_sep, close, json_close, empty)

    def _described_format(self, form: ChatForm) -> ChatForm:
        """Return the format of calls that a template describes in its prompt, else Weft's own.

        form: the format of the turn without calls.
        """
        named = [
            mark for mark in _DESCRIBED_FORMATS if mark in self.prompt or mark in self.template
        ]
        written = _DESCRIBED_FORMATS[named[0] if named else GENERIC]
        calls = _TemplateProbe(_template_of_format(*written), "", "").form().calls
        form = replace(form, calls=calls, shape=replace(form.shape, as_content=True))
        if named:
            return form
        return replace(form, is_generic=True, has_system=self._has_system())

    def _has_system(self) -> bool:
        """Return True if the template writes system messages."""
        chat = [{"role": "system", "content": _ANSWER}, {"role": "user", "content": _QUESTION}]
        try:
            return _ANSWER in render_chat(
                self.template, chat, add_generation_prompt=True, **self.names
            )
        except ConfigError:
            return False


def _template_of_format(before: str, call: str, between: str, after: str) -> str:
    """Return a chat template that writes calls in a given format, to probe it as any template.

    before, between, after: the text before, between and after the calls. call: the template of one
    call `c`.
    """
    # Blocks eat the line break after them; what is written out does not.
    before, between, after = (f"{{{{ {json.dumps(each)} }}}}" for each in (before, between, after))
    return (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}"
        + f"{before}{{% for c in m.tool_calls %}}{call}"
        + f"{{% if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{after}"
        + "{% endif %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )


def _assistant_message(
    content: Any, calls: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Return an assistant's message."""
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    return {**turn, "tool_calls": list(calls)} if calls else turn


def _common_prefix(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    size = min(len(one), len(other))
    at = next((i for i in range(size) if one[i] != other[i]), size)
    return one[:at]


def _without_partial_tag(text: str) -> str:
    """Return a text without an incomplete tag at its end."""
    for opens, closes in ("<>", "[]"):
        at = text.rfind(opens)
        if at > text.rfind(closes) and re.fullmatch(r"[<\[][^<>\[\]\s]*", text[at:]):
            text = text[:at]
    return text


def _without_turn_end(text: str, after: str) -> str:
    """Return a text without the end of the turn.

    after: the text after a turn's plain content.
    """
    if after and text.endswith(after):
        return text[: len(text) - len(after)]
    shared = _common_prefix(text[::-1], after[::-1])[::-1]
    tag = _TAG.search(shared)
    return text[: len(text) - len(shared) + tag.start()] if tag else text.rstrip()


def _without_thought(text: str, think: tuple[str, str]) -> str:
    """Return the text after the end of a reasoning block, if there is one.

    Some templates write an empty block in every turn.
    """
    at = text.find(think[1])
    return text[at + len(think[1]) :] if at >= 0 else text


def _json_span(text: str, start: int, key: int, want: Mapping[str, Any]) -> tuple[int, int] | None:
    """Locate a JSON object in a text: return (start, end); None if it is not there.

    Args:
        text: the text.
        start: the index from which to search.
        key: the index of the object's first key.
        want: the object.
    """
    at = text.rfind("{", start, key)
    if at < 0:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return None
    return (at, end) if value == want else None


def _argument_places(
    text: str, key: int, values: Sequence[Any]
) -> list[tuple[int, int, int]] | None:
    """Locate the test arguments: return (start of key, end of value, start of value) for each.

    None if one is not in the text.

    Args:
        text: the rendered chat.
        key: the index of the first key.
        values: the values of the arguments.
    """
    places, at = [], key
    for name, value in zip(_KEYS, values, strict=False):
        at = text.find(name, at)
        begin = -1 if at < 0 else text.find(str(value), at + len(name))
        if begin < 0:
            return None
        places.append((at, begin + len(str(value)), begin))
        at = begin + len(str(value))
    return places


def _is_encoded(text: str, key: int, values: Sequence[Any]) -> bool:
    """Return True if arguments are written as escaped JSON or as a Python dict.

    key: the index of the first key in the text.
    """
    around = text[max(key - 3, 0) : key]
    return around.endswith(('\\"', "{'", '{"', "{\\"))


def _with_index(one: str, other: str) -> str:
    """Return the text `one` of the first call, with INDEX in place of the call's number 0.

    Only if the same text of the second call, `other`, differs from it by a 1 at that place;
    otherwise return `one`.
    """
    shared = _common_prefix(one, other)
    at = len(shared)
    if one != other and one[at : at + 1] == "0" and other == f"{shared}1{one[at + 1 :]}":
        return f"{shared}{INDEX}{one[at + 1 :]}"
    return one


def _heads_with_index(head: str, join: str) -> tuple[str, str]:
    """Return the texts before the first and the second call, with INDEX in place of 0 and 1.

    Both unchanged if they do not differ by these numbers.
    """
    shared = _common_prefix(head[::-1], join[::-1])[::-1]
    a, b = head[: len(head) - len(shared)], join[: len(join) - len(shared)]
    if a.endswith("0") and b.endswith("1"):
        return f"{a[:-1]}{INDEX}{shared}", f"{b[:-1]}{INDEX}{shared}"
    return head, join


def _envelope(one: _RenderedCall, head: str, after: str) -> JsonEnvelope | None:
    """Return the format of the JSON value that contains the complete call; None if there is none.

    Args:
        one: the rendered chat with the call.
        head: the text before the call's first part.
        after: the text after a turn's plain content.
    """
    first = one.ordered()[0][1]
    start = first - len(head)
    for at in (match.start() + start for match in re.finditer(r"[{\[]", one.text[start:first])):
        try:
            value, end = json.JSONDecoder().raw_decode(one.text, at)
        except ValueError:
            continue
        item = value[0] if isinstance(value, list) and value else value
        paths = dict(_key_paths(item, ()))
        name = paths.get(_NAMES[0])
        arguments = paths.get(dict)
        if name is None or arguments is None:
            return None
        last = one.ordered()[-1][2]
        close = _without_turn_end(one.text[end:], after) if end >= last else ""
        return JsonEnvelope(
            head[: at - start], name, arguments, paths.get(_IDS[0]) or paths.get("0"), close
        )
    return None


def _key_paths(
    value: Any, path: tuple[str | None, ...]
) -> Iterator[tuple[Any, tuple[str | None, ...]]]:
    """Yield the parts of a test call in a JSON value, each with the path of keys to it.

    A part is a string, or `dict` for the arguments. path: the keys that lead to `value`.
    """
    if not isinstance(value, dict):
        if isinstance(value, str):
            yield value, path
        return
    if _KEYS[0] in value:
        yield dict, path
        return
    for key, item in value.items():
        if key == _NAMES[0]:
            yield key, (*path, None)
            yield dict, (*path, None)
        else:
            yield from _key_paths(item, (*path, key))
