"""Grammars of tool calls: the chat template's format with the tools' names and schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .._core.tokens.tokenizer import Tokenizer
from .._core.tokens.tool_call_format import INDEX, ArgumentFormat, Calls, ChatForm
from ..errors import ConfigError, GrammarError
from .base import Constraint
from .grammar import Lark, located_message
from .kinds import Lazy
from .schema_lark import schema_as_lark
from .schema_reader import TYPES

# What gpt-oss itself writes between a name and its arguments; its template writes another order.
_HARMONY = " <|constrain|>json<|message|>"
_CHANNEL = "<|channel|>commentary "
_NOTHING = '""'
_SHORT = 4  # minimum characters of a trigger


@dataclass(frozen=True, slots=True)
class CallGrammar(Lark):
    """A Lark grammar of tool calls, whose errors name the tool and the place in its schema.

    places: line of the grammar → the tool and the place in its schema, for messages.
    """

    places: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def _what(self) -> str:
        return "the grammar of the tools"

    def _error_message(self, message: str) -> str:
        lines = self.text.splitlines()
        return located_message(message, [self.places.get(line, "the calls") for line in lines])


def call_constraint(
    text: Tokenizer,
    form: ChatForm,
    tools: Sequence[Any],
    choice: Any = "auto",
    *,
    parallel: bool | None = None,
    thinking_open: bool = False,
) -> Constraint | None:
    """Return the constraint that makes tool calls valid, in the template's format.

    Args:
        text: the tokenizer.
        form: the template's format.
        tools: the tools' JSON descriptions.
        choice: "auto" allows free text, and only valid calls in it. "required" requires a call at
            once, or after the reasoning. The name of a function, or
            `{"type": "function", "function": {"name": …}}`, requires one call of it. "none" returns
            None.
        parallel: allow several calls, if the template can write several. None means True, except
            for Weft's generic format: models that were not trained on it repeat calls.
        thinking_open: the prompt ends inside the reasoning.

    Raises: ConfigError for an invalid choice, invalid tools, or a model without a chat template.
    """
    functions = _argument_schemas(tools)
    wanted = _validate_choice(choice, functions)
    if wanted == "none":
        return None
    if form.calls is None:
        raise ConfigError(
            "the model has no chat template, so no form of calls; give a constraint of your own, or"
            " tool_choice='none'"
        )
    if wanted not in ("auto", "required"):
        functions, parallel = {wanted: functions[wanted]}, False
    if parallel is None:
        parallel = not form.is_generic
    writer = _CallsWriter(text, form.calls, functions, parallel=parallel)
    if wanted == "auto":
        triggers, skipped = writer.triggers()
        return Lazy(writer.lark(skipped=skipped), triggers)
    if thinking_open:
        mark = form.think[1]
        return writer.lark(before=writer.until(mark), json_after=mark)
    return writer.lark()


def loose_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool whose arguments keep their names and types, and may have any values."""
    function = tool.get("function", tool)
    properties, required = map(function["parameters"].get, ("properties", "required"))
    known = properties if isinstance(properties, Mapping) else {}
    parameters = {
        "type": "object",
        "properties": {key: _only_type(schema) for key, schema in known.items()},
        "required": [key for key in known if isinstance(required, list) and key in required],
        "additionalProperties": not known,
    }
    return {"type": "function", "function": {**function, "parameters": parameters}}


def _only_type(schema: Any) -> Any:
    """Return a schema with the type of a schema and nothing else."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return {"type": kind} if kind in TYPES else True


def _argument_schemas(tools: Sequence[Any]) -> dict[str, Any]:
    """Validate tools; return the schema of each function's arguments, by name."""
    schemas: dict[str, Any] = {}
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise ConfigError(
                f"the tool {tool!r:.80} has no name; allowed is a mapping like"
                ' {"type": "function", "function": {"name": "f", "parameters": {…}}}'
            )
        schema = function.get("parameters") or {}
        if not isinstance(schema, Mapping):
            raise ConfigError(f"the parameters of {name!r} are {schema!r:.60}; allowed is a schema")
        try:
            parameters = json.loads(json.dumps(schema, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"the parameters of {name!r} are no JSON: {error}") from error
        # A tool without listed arguments takes none.
        schemas[name] = {"type": "object", "properties": {}, **parameters}
    if not schemas:
        raise ConfigError("there are no tools to call; give some, or leave tool_choice out")
    return schemas


def _validate_choice(choice: Any, functions: Mapping[str, Any]) -> str:
    """Return a `tool_choice` as "auto", "required", "none" or a function's name."""
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, Mapping) else None
        named = choice if isinstance(choice, str) else None
    else:
        named = choice if choice not in ("auto", "required", "none") else None
    if named is None and choice in ("auto", "required", "none"):
        return str(choice)
    if named is None or named not in functions:
        raise ConfigError(
            f"tool_choice is {choice!r}; allowed are 'auto', 'required', 'none' and the names of"
            f" the tools: {', '.join(functions)}"
        )
    return str(named)


class _CallsWriter:
    """Writes the grammar of tool calls in one template's format.

    `number` in its methods: the index of a function; `at`: the index of one of its arguments, in
    the schema's order.
    """

    def __init__(
        self, text: Tokenizer, format: Calls, functions: Mapping[str, Any], *, parallel: bool
    ) -> None:
        self.text = text
        self.format = format
        self.functions = functions
        self.parallel = parallel
        self.rules: list[str] = []
        self.places: dict[str, str] = {}  # of the rules' lines
        self.has_open_names = False
        names = {text.token_text(token): token for token in text.special_ids}
        self.specials = {name: token for name, token in names.items() if name}
        longest_first = sorted(self.specials, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, (*longest_first, INDEX)))})")

    def triggers(self) -> tuple[list[str | int], str]:
        """Return the triggers of a `Lazy` constraint of calls, and a start of the format's head.

        The text is the part of the head before the trigger, which the grammar must not repeat.
        """
        head = self.format.head
        skipped = ""
        for part in self._cut.split(head):
            token = self.specials.get(part)
            if token is not None and token not in self.text.stop_ids:
                return [token], skipped
            skipped += part
        marker = self.format.marker
        if marker and head.startswith(marker):
            return [marker], ""
        plain = head.split(INDEX)[0]
        if len(plain.strip()) >= _SHORT:
            return [plain], ""
        after = (
            ""
            if self.format.slots[0] != "name" or len(self.format.slots) < 2
            else self.format.mids[0]
        )
        return [f"{plain}{name}{after[:1]}" for name in self.functions], ""

    def lark(self, *, skipped: str = "", before: str = "", json_after: str = "") -> Lark:
        """Return the constraint of calls.

        Args:
            skipped: the start of the format's head that the text has already.
            before: the rule text of the text before the calls; "" for none.
            json_after: the end of that text; only JSON after it is checked for equal names.
        """
        text = self.grammar(skipped=skipped, before=before)
        # Arguments without JSON may have any brackets and quotes.
        is_json = self.format.argument_format is None and not self.format.is_python
        if not (self.has_open_names and is_json):
            return CallGrammar(text, places=self.places)
        return CallGrammar(text, unique_names=True, json_after=json_after, places=self.places)

    def grammar(self, *, skipped: str = "", before: str = "") -> str:
        """Return the grammar as Lark text. skipped, before: as for `lark`."""
        format = self.format
        calls = [self._call(number, name) for number, name in enumerate(self.functions)]
        self.rules.append(f"call: {' | '.join(calls)}")
        head = format.head[len(skipped) :]
        if format.marker == "to=functions." and not skipped:
            opening = " | ".join(filter(None, map(self.literal, (" ", _CHANNEL))))
            before = f"({opening})?" if before == "" and self._starts_turn else before
        more = (
            f"({self.literal(format.join)} call)*"
            if format.join is not None and self.parallel
            else ""
        )
        if format.join == "":
            more = "call*" if self.parallel else ""
        parts = [
            before,
            self.literal(head),
            "call",
            more,
            self.literal(self._until_end(format.tail)),
        ]
        start = f"start: {' '.join(filter(None, parts))}"
        return "\n".join([start, *self.rules, "NUMBER: /[0-9]{1,3}/", "ID: /[a-zA-Z0-9]{9}/"])

    # Where the calls begin a turn.
    _starts_turn = False

    def until(self, mark: str) -> str:
        """Add a rule of any text up to and including `mark`; return a reference to it.

        Some whitespace may follow the mark.
        """
        self._starts_turn = True
        if mark in self.specials:
            self.rules.append("thought: /(?s:.*)/")
            thought = f"thought {self.literal(mark)}"
        else:
            self.rules.append(f"thought[lazy]: /(?s:.*){_escape_regex(mark)}/")
            thought = "thought"
        self.rules.append(r"BLANK: /[ \n]{1,4}/")
        return f"{thought} BLANK?"

    def literal(self, text: str | None) -> str:
        """Return the rule text of a literal text of the format; "" for None.

        Special tokens in it are written as tokens, and INDEX as any number.
        """
        parts = []
        for part in self._cut.split(text or ""):
            if part == INDEX:
                parts.append("NUMBER")
            elif part in self.specials:
                parts.append(f"<[{self.specials[part]}]>")
            elif part:
                parts.append(json.dumps(part, ensure_ascii=False))
        return " ".join(parts)

    def _until_end(self, text: str) -> str:
        """Return a text up to its first end token, because the model ends its answer there."""
        kept = ""
        for part in self._cut.split(text):
            if self.specials.get(part) in self.text.stop_ids:
                break
            kept += part
        return kept

    def _call(self, number: int, name: str) -> str:
        """Add the rules of one function; return the rule text of its call. name: the function's."""
        format, fmt = self.format, self.format.argument_format
        parts, is_closed = [], False
        for at, slot in enumerate(format.slots):
            mid = format.mids[at - 1] if at else ""
            if slot == "arguments" and fmt is not None:
                parts.append(self._separate_arguments(number, name, fmt, mid))
                is_closed = True
                continue
            between = self.literal(mid)
            if slot == "arguments" and format.marker == "to=functions.":
                between = f"({between} | {self.literal(_HARMONY)})"
            parts.append(between)
            if slot == "name":
                parts.append(json.dumps(name, ensure_ascii=False))
            elif slot == "id":
                parts.append("ID")
            else:
                parts.append(self._json(f"args_{number}", name, self.functions[name]))
        close = "" if is_closed else self.literal(self._until_end(format.close))
        return " ".join(filter(None, (*parts, close)))

    def _json(self, rule: str, name: str, schema: Any) -> str:
        """Add the rules of JSON that fits a schema of a function's arguments.

        Args:
            rule: the name of the first rule, which is returned.
            name: the function's name.
            schema: the schema, a part of that of the function's arguments.
        """
        part = schema if isinstance(schema, Mapping | bool) else True
        try:
            lark = schema_as_lark(self.functions[name], part=part, name=rule, whitespace="flexible")
        except GrammarError as error:
            raise GrammarError(f"the parameters of {name!r}: {error}") from error
        self.rules += lark.lines
        for line, path in zip(lark.lines, lark.paths, strict=True):
            self.places[line] = f"the parameters of {name!r} at {path}"
        self.has_open_names |= lark.has_open_names
        return rule

    def _separate_arguments(self, number: int, name: str, fmt: ArgumentFormat, mid: str) -> str:
        """Add the rules of arguments that are written one by one; return the name of the first.

        They come in the schema's order; optional ones may be left out.

        Args:
            name: the function's name.
            fmt: the format of arguments.
            mid: the text before the first of them.
        """
        root = self.functions[name]
        known = root.get("properties") or {}
        required = {key for key in root.get("required") or () if key in known}
        keys = list(known)
        ways = list(self._next_arguments(keys, required, -1))
        first = [
            f"{self.literal(mid)} {self._rule_name(number, at)}" for at in ways if at is not None
        ]
        if None in ways:
            first.append(self.literal(fmt.empty if fmt.empty is not None else mid + fmt.text_close))
        for at, key in enumerate(keys):
            n_rules = len(self.rules)
            self._argument(number, at, key, known[key], name, fmt)
            for line in self.rules[n_rules:]:
                self.places.setdefault(line, f"the argument {key!r} of {name!r}")
            sep, close = self._argument_ends(number, at, known[key], fmt)
            after = [
                close if follow is None else f"{sep} {self._rule_name(number, follow)}".strip()
                for follow in self._next_arguments(keys, required, at)
            ]
            options = " | ".join(way or _NOTHING for way in after)
            self.rules.append(f"after_{number}_{at}: {options}")
        self.rules.append(f"each_{number}: {' | '.join(filter(None, first))}")
        return f"each_{number}"

    @staticmethod
    def _rule_name(number: int, at: int) -> str:
        """Return the name of the rule of the arguments from index `at` on."""
        return f"arg_{number}_{at} after_{number}_{at}"

    @staticmethod
    def _next_arguments(keys: Sequence[str], required: set[str], at: int) -> Iterator[int | None]:
        """Yield the indices of arguments that may follow argument `at`; None for the end.

        at: -1 for the start.
        """
        for follow in range(at + 1, len(keys)):
            yield follow
            if keys[follow] in required:
                return
        yield None

    def _argument(
        self, number: int, at: int, key: str, schema: Any, name: str, fmt: ArgumentFormat
    ) -> None:
        """Add the rules of one argument and what may follow it."""
        rule = f"arg_{number}_{at}"
        if not _is_text(schema) or self.format.is_python:
            mid = fmt.json_mid.removesuffix('"') if self.format.is_python else fmt.json_mid
            if not fmt.is_typed and isinstance(schema, Mapping) and schema.get("type") == "boolean":
                value = '("true" | "false" | "True" | "False")'  # some templates write Python's
            else:
                value = self._json(f"value_{number}_{at}", name, schema)
            self.rules.append(f"{rule}: {self.literal(key + mid)} {value}")
            return
        end = _shared_end(fmt)
        allowed = [schema["const"]] if "const" in schema else schema.get("enum")
        body = _string_pattern(schema)
        before = self.literal(key + fmt.text_mid)
        if isinstance(allowed, Sequence) and allowed and not isinstance(allowed, str):
            texts = " | ".join(json.dumps(str(text), ensure_ascii=False) for text in allowed)
            self.rules.append(f"{rule}: {before} ({texts}) {self.literal(end)}")
        elif any(part in self.specials for part in self._cut.split(end)):
            self.rules.append(f"{rule}: {before} text_{number}_{at} {self.literal(end)}")
            plain = self._cut.split(end)[0]
            lazy = f"[lazy]: /{body}{_escape_regex(plain)}/" if plain else f": /{body}/"
            self.rules.append(f"text_{number}_{at}{lazy}")
            if plain:
                self.rules[-2] = (
                    f"{rule}: {before} text_{number}_{at} {self.literal(end[len(plain) :])}"
                )
        else:
            self.rules.append(f"{rule}: {before} text_{number}_{at}")
            self.rules.append(f"text_{number}_{at}[lazy]: /{body}{_escape_regex(end)}/")

    def _argument_ends(
        self, number: int, at: int, schema: Any, fmt: ArgumentFormat
    ) -> tuple[str, str]:
        """Return the rule texts of the separator after an argument, and of the close of the call.

        schema: the argument's schema.
        """
        if self.format.is_python:
            sep, close = fmt.json_sep.removeprefix('"'), fmt.json_close.removeprefix('"')
        elif not _is_text(schema):
            sep, close = fmt.json_sep, fmt.json_close
        else:
            end = _shared_end(fmt)
            sep, close = fmt.text_sep[len(end) :], fmt.text_close[len(end) :]
        return self.literal(sep), self.literal(self._until_end(close))


def _shared_end(fmt: ArgumentFormat) -> str:
    """Return the text that ends a string argument, both before another one and at the end."""
    size = min(len(fmt.text_sep), len(fmt.text_close))
    at = next((i for i in range(size) if fmt.text_sep[i] != fmt.text_close[i]), size)
    shared = fmt.text_sep[:at]
    return shared[: shared.rfind("<")] if shared.rfind("<") > shared.rfind(">") else shared


def _is_text(schema: Any) -> bool:
    """Return True if a schema is that of a string."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _string_pattern(schema: Mapping[str, Any]) -> str:
    """Return a regular expression of the strings that an argument's schema allows."""
    min_length, max_length = schema.get("minLength", 0), schema.get("maxLength", "")
    pattern = schema.get("pattern")
    if pattern is None:
        return (
            f"(?s:.{{{min_length},{max_length}}})" if min_length or max_length != "" else "(?s:.*)"
        )
    if "minLength" in schema or "maxLength" in schema:
        raise GrammarError(
            f"the pattern {pattern!r} and a length of one text cannot both be had in calls whose"
            " arguments are written one by one; leave one out"
        )
    # A schema's pattern is searched for, not matched fully.
    inner, free = str(pattern).replace("/", r"\/"), "(?s:.*)"
    is_begun, is_ended = inner.startswith("^"), inner.endswith("$") and not inner.endswith(r"\$")
    inner = inner.removeprefix("^")[: -1 if is_ended else None]
    return f"{'' if is_begun else free}({inner}){'' if is_ended else free}"


def _escape_regex(text: str) -> str:
    """Return a regular expression that matches a fixed text, in the syntax of Lark and Rust."""
    return re.sub(r"[.^$*+?()\[\]{}|\\/\-]", r"\\\g<0>", text).replace("\n", r"\n")


class TaggedJson(NamedTuple):
    """A tagged structure: the text `begin`, JSON that fits `schema`, the text `end`."""

    begin: str
    schema: Any
    end: str


def tagged_constraint(tags: Sequence[TaggedJson], triggers: Sequence[str]) -> Lark:
    """Return a constraint of free text in which each trigger must continue as one of the tags.

    vLLM and SGLang call this a structural tag.

    Args:
        tags: the structures.
        triggers: texts with which tags begin; the `begin` of each tag starts with one of them.

    Raises: ConfigError for a tag without a trigger, GrammarError for an invalid schema.
    """
    if not tags or not all(triggers):
        raise ConfigError("a structural tag needs structures, and triggers that are not empty")
    for tag in tags:
        if not any(tag.begin.startswith(trigger) for trigger in triggers):
            raise ConfigError(
                f"the begin {tag.begin!r:.60} starts with none of the triggers"
                f" {', '.join(map(repr, triggers))}"
            )
    heads, rules = [], ["text: /(?s:.*)/"]
    for number, trigger in enumerate(triggers):
        options = []
        for at, tag in enumerate(tags):
            if tag.begin.startswith(trigger):
                name = f"json_{number}_{at}"
                rules += schema_as_lark(tag.schema, name=name, whitespace="flexible").lines
                before = json.dumps(tag.begin[len(trigger) :], ensure_ascii=False)
                options.append(f"{before} {name} {json.dumps(tag.end, ensure_ascii=False)}")
        if options:
            heads.append(f"head_{number} ({' | '.join(options)})")
            rules.append(f"head_{number}[lazy]: /(?s:.*){_escape_regex(trigger)}/")
    return Lark("\n".join([f"start: ({' | '.join(heads)})* text", *rules]))
