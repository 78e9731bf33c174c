"""JSON schemas translated to llguidance's Lark.

llguidance's lexer does not backtrack, so all options at a place must have the same lexemes:
brackets, separators, names and scalars, in every schema. Strings and numbers that a regular
expression cannot express are written as the library's own `%json` schemas.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import GrammarError
from .number_ranges import Bound, integer_pattern, number_pattern
from .regex_translate import search_regex
from .rules import MAX_DEPTH
from .schema_reader import (
    FORMATS,
    Schema,
    SchemaReader,
    Variant,
    bounds,
    is_deep_schema,
    is_integral,
)
from .schema_rules import JsonLayout, RuleWriter, Whitespace, literal, names_in, renamed

_SELF = "\0"
_FEW = 5  # constants whose sets are rules; more are the bits of one rule's parameter
_BITS = 64
_EXACT = 2**53  # the library computes with 64-bit floats
# Whitespace in one place: a space, or one line end with an indentation. Without a limit, small
# models write endless whitespace.
_BLANK = r"/ |\r?\n( {0,32}|\t{0,32})/"


@dataclass(frozen=True, slots=True)
class _Definition:
    """The definition of a rule or a terminal of the Lark.

    body: its right side. `_SELF` in it stands for its own name.

    path: the JSON pointer of its schema.

    is_lexeme: the body is a lexeme, which refers to no other rule.

    is_terminal: Lark writes its name in capitals.

    has_bits: the rule has a 64-bit parameter, initially 0.
    """

    body: str
    path: str = "#"
    is_lexeme: bool = True
    is_terminal: bool = True
    has_bits: bool = False


_KNOWN = {
    "blank": _Definition("BLANK?", is_lexeme=False, is_terminal=False),
    "space": _Definition('" "?', is_lexeme=False, is_terminal=False),
    "string": _Definition('%json {"type": "string"}', is_terminal=False),
    "boolean": _Definition('"true" | "false"', is_lexeme=False, is_terminal=False),
    "null": _Definition('"null"', is_lexeme=False, is_terminal=False),
    "integer": _Definition("/-?(0|[1-9][0-9]*)/"),
    "number": _Definition(r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/"),
    "BLANK": _Definition(_BLANK),
}


@dataclass(frozen=True, slots=True)
class SchemaLark:
    """A schema as Lark text, with the places in the schema for error messages.

    lines: one rule or terminal per line.

    paths: the JSON pointer of each line's schema.

    has_open_names: some object may have unlisted properties.
    """

    lines: tuple[str, ...]
    paths: tuple[str, ...]
    has_open_names: bool

    @property
    def text(self) -> str:
        """All lines."""
        return "\n".join(self.lines)


def schema_as_lark(
    root: Schema,
    *,
    part: Schema | None = None,
    name: str = "start",
    whitespace: Whitespace = "compact",
    open_objects: bool = False,
) -> SchemaLark:
    """Translate a JSON schema to Lark.

    Args:
        root: the parsed schema; each `$ref` is resolved in it.
        part: the schema in `root` to write; None means `root` itself.
        name: the name of the first rule, and the prefix of other names.
        whitespace, open_objects: as for `JsonSchema`.

    Raises: GrammarError naming the place of a keyword that is not supported.
    """
    if is_deep_schema(root):
        raise GrammarError(f"the JSON schema leads more than {MAX_DEPTH} levels deep")
    layout = JsonLayout.from_whitespace(whitespace)
    writer = _SchemaLarkWriter(SchemaReader(root, is_open=open_objects), layout)
    try:
        first = writer.write((root if part is None else part,))
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deep") from None
    return writer.lark(name, first)


class _SchemaLarkWriter(RuleWriter):
    """Writes a schema's rules as Lark."""

    def __init__(self, reader: SchemaReader, layout: JsonLayout) -> None:
        super().__init__(reader, layout)
        self._lexemes: dict[str, _Definition] = {}
        self._lexeme_names: dict[str, str] = {}  # by body

    def start(self) -> None:
        super().start()
        self._lexemes, self._lexeme_names = {}, {}

    def lark(self, name: str, root: str) -> SchemaLark:
        """Return all rules that are needed.

        Args:
            name: the name of the first rule in the result.
            root: the writer's name of that rule.
        """
        definitions = {**_KNOWN, **self._lexemes}
        for rule, body in {**self.layout.any_value(), **self.rules}.items():
            path = self.paths.get(rule, "#")
            definitions[rule] = _Definition(body, path, is_lexeme=False, is_terminal=False)
        names = {root: f"{name}_r0"}
        todo = [root]
        for used in todo:  # grows
            definition = definitions[used]
            for inner in () if definition.is_lexeme else names_in(definition.body):
                if inner not in names:
                    kind = "t" if definitions[inner].is_terminal else "r"
                    new = f"{name}_{kind}{len(names)}"
                    names[inner] = new.upper() if kind == "t" else new
                    names[inner] += "::0x0" if definitions[inner].has_bits else ""
                    todo.append(inner)
        lines, paths = [f"{name}: {name}_r0"], ["#"]
        for used in todo:
            definition = definitions[used]
            body = definition.body if definition.is_lexeme else renamed(definition.body, names)
            rule = names[used].removesuffix("::0x0")
            head = f"{rule}::_" if definition.has_bits else rule
            lines.append(f"{head}: {_lark_body(body).replace(_SELF, rule)}")
            paths.append(definition.path)
        return SchemaLark(tuple(lines), tuple(paths), self.has_open_names)

    def _lexeme(
        self, body: str, schema: Any, *, is_terminal: bool = True, has_bits: bool = False
    ) -> str:
        """Define a lexeme, unless one has an equal body; return its name.

        Args:
            body: its Lark.
            schema: the schema to name in errors.
            is_terminal, has_bits: as in `_Definition`.
        """
        name = self._lexeme_names.setdefault(body, f"lexeme-{len(self._lexemes)}")
        if name not in self._lexemes:
            path = self.reader.path(schema)
            self._lexemes[name] = _Definition(
                body, path, is_terminal=is_terminal, has_bits=has_bits
            )
        return name

    def string(self, variant: Variant, name: str) -> str | None:
        low, high = variant.counts("minLength", "maxLength")
        if high is not None and high < low:
            return None
        limits: dict[str, Any] = {"minLength": low} if low else {}
        limits |= {} if high is None else {"maxLength": high}
        for word in ("pattern", "format"):
            values = list(dict.fromkeys(part[word] for part in variant.with_any(word)))
            if word == "format":
                values = [value for value in values if value in FORMATS]
            if values:
                limits[word] = values[0]
            if len(values) > 1:
                limits.setdefault("allOf", []).extend({word: value} for value in values[1:])
        words = ("pattern", "format", "minLength", "maxLength")
        return self._json("string", limits, variant.with_any(*words)[0])

    def _json(self, kind: str, limits: Mapping[str, Any], schema: Any) -> str:
        """Return the rule text of a scalar as an inline `%json` schema of the library.

        Args:
            kind: the JSON type.
            limits: the keywords and their values.
            schema: the schema to name in errors.
        """
        if not limits:
            return kind
        return self._lexeme(
            f"%json {json.dumps({'type': kind, **limits})}", schema, is_terminal=False
        )

    def number(self, variant: Variant, kind: str, name: str) -> str | None:
        low, high = bounds(variant)
        parts = variant.with_any("multipleOf")
        steps = [part["multipleOf"] for part in parts]
        schema = variant.with_any(*NUMBER_WORDS)[0]
        if all(is_integral(step) and step == 1 for step in steps):
            if kind == "integer" or steps:
                return self._pattern(integer_pattern(low, high), schema)
            if not any(map(_is_rounded, (low, high))):
                return self._json(kind, _limits(low, high), schema)
            return self._exact_number(low, high, schema)
        if any(map(_is_rounded, (low, high, *((step, False) for step in steps)))):
            raise self.unsupported_error(parts[0], "multipleOf", "a number is beyond 2**53")
        limits = {**_limits(low, high), "multipleOf": steps[0]}
        if steps[1:]:
            limits["allOf"] = [{"multipleOf": step} for step in steps[1:]]
        return self._json(kind, limits, schema)

    def _exact_number(self, low: Bound | None, high: Bound | None, schema: Any) -> str | None:
        """Return the rule text of the numbers between two bounds, of which one exceeds 2**53.

        The library computes with floats, so such a bound is written as a regular expression. A
        bound with a fraction is small enough: the library writes numbers up to the next integer.

        None if there are no such numbers.
        """
        options: list[str | None] = []
        if low is not None and not is_integral(low[0]):
            integer = math.ceil(low[0])
            options.append(self._json("number", _limits(low, (integer, True)), schema))
            low = (integer, False)
        if high is not None and not is_integral(high[0]):
            integer = math.floor(high[0])
            options.append(self._json("number", _limits((integer, True), high), schema))
            high = (integer, False)
        options.append(self._pattern(number_pattern(low, high), schema))
        return " | ".join(filter(None, options)) or None

    def _pattern(self, pattern: str | None, schema: Any) -> str | None:
        """Return a schema's `pattern` in Rust's syntax; raise GrammarError naming its place."""
        return None if pattern is None else self._lexeme(f"/{pattern}/", schema)

    def scalars(self, values: Sequence[Any], name: str) -> str:
        if len(values) == 1:
            return literal(values[0])
        body = " | ".join(dict.fromkeys(map(literal, values)))
        return self._lexeme(_lark_body(body), None)

    def unique_scalars(self, values: Sequence[Any], low: int, high: int, schema: Any) -> str | None:
        """See `RuleWriter.unique_scalars`. One rule whose bits mark the constants already used."""
        if not _FEW < len(values) <= _BITS or any(isinstance(v, dict | list) for v in values):
            return None
        comma, bits = self.layout.comma.replace("blank", f"({_BLANK})?"), f"[0:{len(values)}]"
        options = [f'"" %if bit_count_ge({bits}, {low})']
        for bit, item in enumerate(map(literal, values)):
            more = f"and(bit_count_ge({bits}, 1), bit_count_lt({bits}, {high}))"
            options += [
                f"{item} {_SELF}::set_bit({bit}) %if bit_count_eq({bits}, 0)",
                f"{comma} {item} {_SELF}::set_bit({bit}) %if and(bit_clear({bit}), {more})",
            ]
        return self._lexeme(" | ".join(options), schema, is_terminal=False, has_bits=True)

    def unlisted_name(
        self, listed: Sequence[str], limits: Variant | None, patterns: Mapping[str, bool], name: str
    ) -> str | None:
        """See `RuleWriter.unlisted_name`.

        Names have no escapes, because an escape could spell a listed name.
        """
        low, high = (0, None) if limits is None else limits.counts("minLength", "maxLength")
        if high is not None and high < low:
            return None
        wanted = {pattern: True for part in _parts(limits) if (pattern := part.get("pattern"))}
        if any(part.get("format") in FORMATS for part in _parts(limits)):
            assert limits is not None
            raise self.unsupported_error(
                limits.with_any("format")[0], "format", "of a property's name"
            )
        times = "*" if not low and high is None else f"{{{low},{'' if high is None else high}}}"
        plain = rf'[^"\\\x00-\x1f\x7f]{times}'
        terms = [f'/"{plain}"/']
        terms += [
            f'{"" if is_match else "~"}/"{search_regex(pattern)}"/'
            for pattern, is_match in [*patterns.items(), *wanted.items()]
        ]
        if listed:
            terms.append(f"~({' | '.join(map(literal, listed))})")
        return self._lexeme(_lark_body(" & ".join(terms)), _parts(limits)[0] if limits else None)


NUMBER_WORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def _parts(limits: Variant | None) -> Sequence[Mapping[str, Any]]:
    """Return the schemas that limit strings; () without limits."""
    return () if limits is None else limits.with_any("minLength", "maxLength", "pattern", "format")


def _is_rounded(bound: Bound | None) -> bool:
    """Return True if a bound exceeds 2**53, so that the library may round it or overflow."""
    return bound is not None and abs(bound[0]) > _EXACT


def _limits(low: Bound | None, high: Bound | None) -> dict[str, Any]:
    """Return two bounds as keywords of JSON Schema."""
    limits: dict[str, Any] = {}
    for bound, plain, exclusive in (
        (low, "minimum", "exclusiveMinimum"),
        (high, "maximum", "exclusiveMaximum"),
    ):
        if bound is not None:
            limits[exclusive if bound[1] else plain] = bound[0]
    return limits


def _lark_body(body: str) -> str:
    """Escape raw DEL characters in a body, which llguidance's Lark rejects in literals."""
    return body.replace("\x7f", "\\u007f") or '""'
