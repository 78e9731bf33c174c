"""JSON schemas as GBNF text, for programs and servers that take grammars as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import GrammarError
from .gbnf import read
from .number_ranges import integer_pattern
from .rules import MAX_DEPTH
from .schema_reader import Schema, SchemaReader, Variant, bounds, is_deep_schema
from .schema_rules import JsonLayout, RuleWriter, Whitespace, literal, literal_text, names_in

# Rules of any JSON; only the used ones are written. The rules allow no surrogate pairs, because a
# character of two escapes would count as two in `minLength` and `maxLength`.
_RULES = {
    "space": '" "?',
    "blank": r'" "? | "\n" ([ ]{0,32} | [\t]{0,32})',
    "string": r'"\"" char* "\""',
    "char": r'plain | "\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] hex | [dD] [0-7]) hex hex)',
    "plain": r'[^"\\\x00-\x1f]',
    "hex": "[0-9a-fA-F]",
    "integer": '"-"? ("0" | [1-9] [0-9]*)',
    "number": 'integer ("." [0-9]+)? ([eE] [-+]? [0-9]+)?',
    "boolean": '"true" | "false"',
    "null": '"null"',
}
# llguidance allows escapes only for characters that need one.
_EXACT_RULES = {
    "char": r'plain | "\\" (["\\bfnrt] | "u00" ([01] [0-9a-f] | "7f"))',
    "plain": r'[^"\\\x00-\x1f\x7f]',
}
# A space is optional after an opening bracket, a comma and a colon.
_OPTIONAL_SPACES = JsonLayout('"," space', '":" space', "space")
_MAX_GROUPS = 16  # nested groups; a deeper group gets a rule of its own
_REGEX = re.compile(r"\[[^\]]*\]|\\\.|[0-9-]+|\{[^}]*\}|.")


def json_schema_to_grammar(schema: Mapping[str, Any] | str, *, open_objects: bool = False) -> str:
    """Convert a JSON schema to GBNF text, for programs that take grammars as text.

    `root` of the GBNF matches JSON that fits the schema, and nothing else. A space is optional
    after `,`, `:` and opening brackets. Objects have their properties in the schema's order;
    optional ones may be missing. Unlisted properties come last. They are allowed where
    `additionalProperties` allows them, and where an object lists no `properties`. A text grammar
    cannot forbid that an unlisted name comes twice; `JsonSchema` forbids it.

    Args:
        schema: a JSON schema, or its text.
        open_objects: also allow unlisted properties where `properties` comes without
            `additionalProperties`, as the JSON Schema standard does.

    Raises:
        GrammarError: GBNF cannot express a keyword (`pattern`, known formats, bounds of fractions,
            …), or no JSON fits. The error has the keyword's JSON pointer. `JsonSchema` supports far
            more keywords.
    """
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        parsed = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"JSON parse error: {error}") from error
    if not isinstance(parsed, Mapping):
        raise GrammarError(f"the JSON schema is {parsed!r}; allowed is an object")
    return _as_gbnf(parsed, _OPTIONAL_SPACES, _RULES, open_objects=open_objects)


def exact_gbnf(schema: Schema, whitespace: Whitespace, *, open_objects: bool) -> str:
    """Return GBNF text of the JSON that `JsonSchema` with the same arguments allows.

    The GBNF may also allow objects with equal names. Raises: GrammarError.
    """
    layout = JsonLayout.from_whitespace(whitespace)
    return _as_gbnf(schema, layout, {**_RULES, **_EXACT_RULES}, open_objects=open_objects)


def _as_gbnf(
    schema: Schema, layout: JsonLayout, known: Mapping[str, str], *, open_objects: bool
) -> str:
    if is_deep_schema(schema):
        raise GrammarError(f"the JSON schema leads more than {MAX_DEPTH} levels deep")
    writer = _GbnfWriter(SchemaReader(schema, is_open=open_objects), layout)
    try:
        root = writer.write((schema,))
        text = _with_known_rules(writer, root, known)
        read(text)
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deep") from None
    return text


def _with_known_rules(writer: RuleWriter, root: str, known: Mapping[str, str]) -> str:
    rules = {**({} if root == "root" else {"root": root}), **writer.rules}
    known = {**known, **writer.layout.any_value()}
    todo = list(rules.values())
    while todo:
        for name in names_in(todo.pop()):
            if name in known and name not in rules:
                rules[name] = known[name]
                todo.append(known[name])
    return "".join(f"{name} ::= {body}\n" for name, body in rules.items())


class _GbnfWriter(RuleWriter):
    """Writes a schema's rules as GBNF, which has no intersection and no complement."""

    unsupported = RuleWriter.unsupported | {"pattern", "format", "multipleOf", "patternProperties"}
    refusal = "cannot be written in GBNF"

    def string(self, variant: Variant, name: str) -> str | None:
        low, high = variant.counts("minLength", "maxLength")
        if high is not None and high < low:
            return None
        if high == 0:
            return r'"\"\""'
        return rf'"\"" char{{{low},{"" if high is None else high}}} "\""'

    def number(self, variant: Variant, kind: str, name: str) -> str | None:
        """See `RuleWriter.number`. Raises: GrammarError for bounds of numbers with fractions."""
        if kind == "number":
            words = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            part = variant.with_any(*words)[0]
            raise self.unsupported_error(part, next(word for word in words if word in part))
        pattern = integer_pattern(*bounds(variant))
        return None if pattern is None else _from_regex(pattern)

    def scalars(self, values: Sequence[Any], name: str) -> str:
        return " | ".join(map(literal, values))

    def unlisted_name(
        self, listed: Sequence[str], limits: Variant | None, patterns: Mapping[str, bool], name: str
    ) -> str | None:
        """See `RuleWriter.unlisted_name`.

        Names have no escapes, because an escape could spell a listed name.
        """
        if limits is not None:
            self._check_keywords(limits, "string")
            if listed:
                raise self.unsupported_error(
                    limits.parts[0], "propertyNames", "there are properties too"
                )
            low, high = limits.counts("minLength", "maxLength")
            if high is not None and high < low:
                return None
            return rf'"\"" plain{{{low},{"" if high is None else high}}} "\""'
        if not listed:
            return "string"
        tree: dict[str, Any] = {}
        for key in listed:
            node = tree
            for char in key:
                node = node.setdefault(char, {})
            node[""] = {}
        return f'"\\"" {self._outside(tree, name, 0)} "\\""'

    def _outside(self, tree: dict[str, Any], name: str, depth: int) -> str:
        """Return the rule text of all texts that are not in a prefix tree.

        Args:
            tree: character → subtree; the key "" marks the end of a text.
            name: the prefix of names for new rules.
            depth: the number of characters above `tree`.
        """
        first = [char for char in tree if char and not _is_escaped(char)]
        known = "".join(f"\\U{ord(char):08x}" for char in first)
        options = [f'[^{known}"\\\\\\x00-\\x1f] plain*']
        for char in first:
            after = self._outside(tree[char], name, depth + 1)
            if depth % _MAX_GROUPS == _MAX_GROUPS - 1:
                after = self.new_rule(f"{name}-key", after)
            options.append(f"{literal_text(char)} {after}")
        return f"({' | '.join(options)}){'' if '' in tree else '?'}"


def _from_regex(pattern: str) -> str:
    """Return a regular expression of `number_ranges` as GBNF."""
    parts: list[str] = []
    for token in _REGEX.findall(pattern):
        text = token.removeprefix("\\")
        parts.append(token if token[0] in "([{?*+|)" else f'"{text}"')
    return re.sub(r" (?=[?*+{])", "", " ".join(parts))


def _is_escaped(char: str) -> bool:
    """Return True if JSON writes a character with a backslash."""
    return char in '"\\' or char < " "
