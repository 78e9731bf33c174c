"""JSON schemas as GBNF text, for programs that keep grammars as text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import GrammarError

# Rules that schemas lean on; a rule is written only when it is used.
_RULES = {
    "space": '" "?',
    "string": r'"\"" char* "\""',
    "char": r'[^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" hex hex hex hex)',
    "hex": "[0-9a-fA-F]",
    "integer": '"-"? ("0" | [1-9] [0-9]*)',
    "number": 'integer ("." [0-9]+)? ([eE] [-+]? [0-9]+)?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" space (string ":" space value ("," space string ":" space value)*)? "}"',
    "array": '"[" space (value ("," space value)*)? "]"',
}
_TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
# What a schema may say without a rule of it: notes for people.
_NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs"}
_KNOWN = {
    "type", "enum", "const", "anyOf", "oneOf", "$ref", "properties", "required", "items",
    "additionalProperties", "minItems", "maxItems", "minLength", "maxLength", "definitions",
}  # fmt: skip


def json_schema_to_grammar(schema: Mapping[str, Any] | str) -> str:
    """Return GBNF text whose `root` is the JSON that fits a schema.

    Objects have their properties in the schema's order; optional ones may be left out. Known are
    type, enum, const, anyOf, oneOf, $ref to $defs, properties, required, items, lengths of arrays
    and strings. Raises: GrammarError naming what else a schema says; `JsonSchema` knows far more.
    """
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise GrammarError(f"JSON parse error: {error}") from error
    if not isinstance(parsed, Mapping):
        raise GrammarError(f"the JSON schema is {parsed!r}; allowed is an object")
    return _Writer(parsed).text()


class _Writer:
    """Rules made so far, by name."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        self.rules: dict[str, str] = {}

    def text(self) -> str:
        self.rules["root"] = ""
        self.rules["root"] = self.rule(self.schema, "root")
        self._add_used()
        return "".join(f"{name} ::= {body}\n" for name, body in self.rules.items())

    def _add_used(self) -> None:
        todo = list(self.rules.values())
        while todo:
            for name in re.findall(
                r"(?<![\w\"-])[a-z]+(?![\w-])", re.sub(r'"(\\.|[^"])*"', "", todo.pop())
            ):
                if name in _RULES and name not in self.rules:
                    self.rules[name] = _RULES[name]
                    todo.append(_RULES[name])

    def rule(self, schema: Any, name: str) -> str:
        """Return the body of the rule for a schema; inner ones get rules named after `name`."""
        if schema is True or schema == {}:
            return "value"
        if not isinstance(schema, Mapping):
            raise GrammarError(
                f"at {name}: {schema!r} is no schema that can be written as a grammar"
            )
        unknown = set(schema) - _KNOWN - _NOTES
        if unknown:
            raise GrammarError(f"at {name}: {', '.join(sorted(unknown))} cannot be written in GBNF")
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        if "const" in schema:
            return literal(schema["const"])
        if "enum" in schema:
            return " | ".join(literal(each) for each in schema["enum"])
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            return " | ".join(self._named(each, f"{name}-{at}") for at, each in enumerate(options))
        kind = schema.get("type", "object" if "properties" in schema else None)
        if isinstance(kind, list):
            parts = ({**schema, "type": each} for each in kind)
            return " | ".join(self._named(each, f"{name}-{at}") for at, each in enumerate(parts))
        return self._typed(schema, kind, name)

    def _typed(self, schema: Mapping[str, Any], kind: Any, name: str) -> str:
        if kind is None:
            return "value"
        if kind not in _TYPES:
            raise GrammarError(f"at {name}: type {kind!r}; allowed are {', '.join(_TYPES)}")
        if kind == "object" and "properties" in schema:
            return self._object(schema, name)
        if kind == "array" and {"items", "minItems", "maxItems"} & set(schema):
            return self._array(schema, name)
        if kind == "string" and {"minLength", "maxLength"} & set(schema):
            least, most = schema.get("minLength", 0), schema.get("maxLength", "")
            return rf'"\"" char{{{least},{most}}} "\""'
        return str(kind)

    def _object(self, schema: Mapping[str, Any], name: str) -> str:
        required = set(schema.get("required", ()))
        members = []
        for key, inner in schema["properties"].items():
            body = self._named(inner, f"{name}-{_clean(key)}")
            members.append((key in required, f'{literal(key)} ":" space {body}'))
        return f'"{{" {_listed(members)} "}}"' if members else '"{" "}"'

    def _array(self, schema: Mapping[str, Any], name: str) -> str:
        item = self._named(schema.get("items", True), f"{name}-item")
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most is not None and int(most) < 1:
            return '"[" "]"'
        rest = f'("," space {item}){{{max(least - 1, 0)},{"" if most is None else int(most) - 1}}}'
        inner = f"{item} {rest}"
        return f'"[" ({inner})? "]"' if least == 0 else f'"[" {inner} "]"'

    def _named(self, schema: Any, name: str) -> str:
        body = self.rule(schema, name)
        if re.fullmatch(r"[\w-]+", body):
            return body
        self.rules[name] = body
        return name

    def _reference(self, path: str) -> str:
        name = "ref-" + _clean(path.rsplit("/", 1)[-1])
        if name not in self.rules:
            found: Any = self.schema
            for step in path.removeprefix("#/").split("/"):
                found = found.get(step) if isinstance(found, Mapping) else None
            if not path.startswith("#/") or found is None:
                raise GrammarError(f"$ref {path!r} is not in the schema")
            self.rules[name] = ""  # it may lead to itself
            self.rules[name] = self.rule(found, name)
        return name


def _listed(members: list[tuple[bool, str]]) -> str:
    """Return members in order, with commas between those that are there."""
    out = ""
    for at in range(len(members) - 1, -1, -1):
        needed, body = members[at]
        after = f'("," space {out})' if out and any(n for n, _ in members[at + 1 :]) else ""
        tail = after or (f'("," space ({out}))?' if out else "")
        one = f"{body} {tail}".strip()
        out = one if needed or not out else f"(({one}) | ({out}))"
        if not needed and not members[at + 1 :]:
            out = body
        if not needed and at == 0 and not any(n for n, _ in members):
            out = f"({out})?"
    return out if members[0][0] else f"({out})"


def literal(value: Any) -> str:
    """Return the GBNF text of one JSON value."""
    return json.dumps(json.dumps(value, ensure_ascii=False), ensure_ascii=False)


def _clean(key: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "-", key).strip("-") or "x"
