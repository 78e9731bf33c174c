"""JSON schemas as GBNF text, for programs that keep grammars as text.

A schema is what several parts of it say together: what stands beside a `$ref`, the option taken of
an `anyOf`, its own words. So a place is written from all its parts at once, for each combination of
options that some JSON fits (`Flat`); a combination that none fits is left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, count
from typing import Any
from urllib.parse import unquote

from ..errors import GrammarError
from ..files import shown
from .gbnf import read, read_rules
from .rules import DEEPEST, LOWEST, ends, is_too_deep, passing

# Rules that schemas lean on; a rule is written only when it is used. No letter is written as two
# escapes (surrogates), so that lengths count.
_RULES = {
    "space": '" "?',
    "string": r'"\"" char* "\""',
    "char": r'plain | "\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] hex | [dD] [0-7]) hex hex)',
    "plain": r'[^"\\\x00-\x1f]',
    "hex": "[0-9a-fA-F]",
    "integer": '"-"? ("0" | [1-9] [0-9]*)',
    "number": 'integer ("." [0-9]+)? ([eE] [-+]? [0-9]+)?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" space (string ":" space value ("," space string ":" space value)*)? "}"',
    "array": '"[" space (value ("," space value)*)? "]"',
}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# What a schema may say without a rule of it: notes for people.
_NOTES = {
    "title", "description", "default", "examples", "$schema", "$comment", "$defs", "definitions",
    "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema",
}  # fmt: skip
_KNOWN = {
    "type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref", "properties", "required", "items",
    "additionalProperties", "minItems", "maxItems", "minLength", "maxLength",
}  # fmt: skip
_PLAIN = _KNOWN - {"allOf", "anyOf", "oneOf", "$ref"}
INSTEAD = "write anyOf, or give each option a required property with a const of its own"
_MOST = 500  # combinations of options in one place
_LONG = 400  # letters of members that stand in a rule; more get a rule of their own
_NAME = 80  # letters of a rule's name, at most
_NEST = 16  # groups in each other, until one gets a rule of its own

Schema = Mapping[str, Any] | bool
Plain = tuple[Mapping[str, Any], ...]  # schemas that say no options and refer to nothing


def json_schema_to_grammar(schema: Mapping[str, Any] | str) -> str:
    """Return GBNF text whose `root` is JSON that fits a schema, and none that does not.

    Objects have their properties in the schema's order, optional ones may be left out; others come
    after them where `additionalProperties` is there and not false, or no `properties` are. Known:
    type, enum, const, allOf, anyOf, oneOf whose options exclude each other, $ref into the schema,
    properties, required, additionalProperties, items, lengths of arrays and strings.
    Raises: GrammarError naming what else a schema says, or a place that no JSON fits; `JsonSchema`
    knows far more.
    """
    try:
        given = json.loads(schema) if isinstance(schema, str) else schema
        parsed = json.loads(json.dumps(given, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"JSON parse error: {error}") from error
    if not isinstance(parsed, Mapping):
        raise GrammarError(f"the JSON schema is {parsed!r}; allowed is an object")
    if is_deep_schema(parsed):
        raise GrammarError(f"the JSON schema leads more than {DEEPEST} levels deep")
    try:
        return _RuleWriter(parsed).text()
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deep") from None


@dataclass(frozen=True, slots=True)
class Flat:
    """What JSON must be in one place, all of it together.

    parts: schemas without options or references. kinds: the types it may have. values: what it must
    be one of; None for anything.
    """

    parts: tuple[Mapping[str, Any], ...]
    kinds: frozenset[str]
    values: list[Any] | None

    def says(self, *keywords: str) -> list[Mapping[str, Any]]:
        """Return the parts that have one of some keywords."""
        return [part for part in self.parts if any(word in part for word in keywords)]

    def count(self, least: str, most: str) -> tuple[int, int | None]:
        """Return how many there may be, by all parts."""
        lows = [int(part[least]) for part in self.says(least)]
        highs = [int(part[most]) for part in self.says(most)]
        return max(lows, default=0), min(highs) if highs else None

    def keys(self) -> list[str]:
        """Return the properties that are named, in order; those only required come last."""
        named = [key for part in self.says("properties") for key in part["properties"]]
        return list(dict.fromkeys([*named, *self.required()]))

    def required(self) -> list[str]:
        """Return the properties that must be there."""
        return [key for part in self.says("required") for key in part["required"]]

    def property(self, key: str) -> list[Schema]:
        """Return what the value of a property must fit."""
        found: list[Schema] = []
        for part in self.parts:
            if key in part.get("properties", ()):
                found.append(part["properties"][key])
            elif "additionalProperties" in part:
                found.append(part["additionalProperties"])
        return found

    def others(self) -> list[Schema]:
        """Return what properties that are not named must fit; False for none."""
        if self.says("properties") and not self.says("additionalProperties"):
            return [False]
        return [part["additionalProperties"] for part in self.says("additionalProperties")]

    def items(self) -> list[Schema]:
        """Return what an array's items must fit."""
        return [part["items"] for part in self.says("items")]


class _RuleWriter:
    """Rules made so far. A place is known by all its parts; places of equal parts are one rule."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.reader = _SchemaReader(schema)
        self.schema = schema
        self.never: set[str] = set()  # places that no JSON fits, or none that ends

    def text(self) -> str:
        n_never = -1
        while n_never < len(self.never):  # what leads there is written anew without
            n_never = len(self.never)
            self.rules: dict[str, str] = {}
            self.names: dict[str, str] = {}
            self.used: set[str] = set()
            root = self.place((self.schema,), "root")
            if root is None:
                raise GrammarError("no JSON fits the schema")
            if len(self.never) == n_never:
                text = self._joined(root)
                rules = read_rules(text)
                endless = set(rules) - passing(rules, ends)
                self.never |= {key for key, name in self.names.items() if name in endless}
        read(text)
        return text

    def _joined(self, root: str) -> str:
        body = {} if root == "root" else {"root": root}
        rules = {**body, **self.rules}
        todo = list(rules.values())
        while todo:
            plain = re.sub(r'"(\\.|[^"\\])*"|\[(\\.|[^\]\\])*\]', " ", todo.pop())
            for name in re.findall(r"(?<![\w-])[a-z]+(?![\w-])", plain):
                if name in _RULES and name not in rules:
                    rules[name] = _RULES[name]
                    todo.append(_RULES[name])
        return "".join(f"{name} ::= {body}\n" for name, body in rules.items())

    def place(self, parts: Sequence[Schema], name: str) -> str | None:
        """Return the rule of JSON that fits all of some schemas; None if none does."""
        known = {json.dumps(part, sort_keys=True): part for part in parts if part is not True}
        known.pop("{}", None)
        if not known:
            return "value"
        key = "\n".join(sorted(known))
        if key in self.never:
            return None
        if key in self.names:
            self.used.add(key)
            return self.names[key]
        self.names[key] = name = self._new(name)
        self.rules[name] = ""  # it may lead to itself
        flats = self.reader.flats(tuple(known.values()), name)
        bodies = [body for flat in flats for body in self._bodies(flat, name)]
        if not bodies:
            self.never.add(key)
            return None
        self.rules[name] = " | ".join(dict.fromkeys(bodies))
        if key not in self.used and name != "root" and re.fullmatch(r"[\w-]+", self.rules[name]):
            self.names[key] = self.rules.pop(name)
        return self.names[key]

    def _new(self, name: str) -> str:
        """Return a name that no rule has."""
        numbered = (f"{name}-{number}" for number in count(2))
        names = chain([name], numbered)
        return next(each for each in names if each not in self.rules and each not in _RULES)

    def _bodies(self, flat: Flat, name: str) -> Iterator[str]:
        """Yield what JSON may be in a place of one combination of options."""
        if flat.values is not None:
            yield from map(literal, flat.values)
            return
        if flat.kinds == set(_TYPES) and not any(flat.parts):
            yield "value"
            return
        for kind in _TYPES:
            if kind not in flat.kinds or (kind == "integer" and "number" in flat.kinds):
                continue
            body: str | None = kind
            if kind == "object" and flat.says("properties", "required", "additionalProperties"):
                body = self._object(flat, name)
            elif kind == "array" and flat.says("items", "minItems", "maxItems"):
                body = self._array(flat, name)
            elif kind == "string" and flat.says("minLength", "maxLength"):
                body = _string(*flat.count("minLength", "maxLength"))
            if body is not None:
                yield body

    def _object(self, flat: Flat, name: str) -> str | None:
        members = []
        required = set(flat.required())
        for key in flat.keys():
            value = self.place(flat.property(key), f"{name}-{_clean(key)}")
            if value is not None:
                members.append((key in required, f'{literal(key)} ":" space {value}'))
            elif key in required:
                return None
        other = self.place(flat.others(), f"{name}-other")
        if other is not None:
            text = self._other_key(flat.keys(), name)
            other = f'{text} ":" space {other}'
        return self._listed(members, other, name)

    def _listed(self, members: list[tuple[bool, str]], other: str | None, name: str) -> str:
        """Return an object of members in order, with commas between those that are there."""
        rest = f'("," space {other})*' if other is not None else ""
        options = [f"{other} {rest}"] if other is not None else []
        may_be_empty = True
        for at in range(len(members) - 1, -1, -1):
            needed, member = members[at]
            first = f"{member} {rest}".strip()
            options = [first] if needed else [first, *options]
            may_be_empty = may_be_empty and not needed
            rest = f'("," space {member}){"" if needed else "?"} {rest}'.strip()
            if at and len(rest) > _LONG:
                rest_name = self._new(f"{name}-and")
                self.rules[rest_name], rest = rest, rest_name
        if not options:
            return '"{" space "}"'
        return f'"{{" space ({" | ".join(options)}){"?" if may_be_empty else ""} "}}"'

    def _other_key(self, keys: Sequence[str], name: str) -> str:
        """Return text that is none of some keys; without escapes, which could spell one."""
        if not keys:
            return "string"
        tree: dict[str, Any] = {}
        for key in keys:
            node = tree
            for letter in key:
                node = node.setdefault(letter, {})
            node[""] = {}
        return f'"\\"" {self._not_in(tree, name, 0)} "\\""'

    def _not_in(self, tree: dict[str, Any], name: str, depth: int) -> str:
        """Return how text goes on that is not in a tree of texts, letter by letter."""
        letters = [letter for letter in tree if letter and not _is_escaped(letter)]
        known = "".join(f"\\U{ord(letter):08x}" for letter in letters)
        options = [f'[^{known}"\\\\\\x00-\\x1f] plain*']
        for letter in letters:
            after = self._not_in(tree[letter], name, depth + 1)
            if depth % _NEST == _NEST - 1:
                rest = self._new(f"{name}-key")
                self.rules[rest], after = after, rest
            options.append(f"{literal_text(letter)} {after}")
        return f"({' | '.join(options)}){'' if '' in tree else '?'}"

    def _array(self, flat: Flat, name: str) -> str | None:
        least, most = flat.count("minItems", "maxItems")
        item = self.place(flat.items(), f"{name}-item")
        if item is None:
            most = 0
        if most is not None and most < least:
            return None
        if most == 0:
            return '"[" space "]"'
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        rest = "" if most == 1 else f' ("," space {item}){times}'
        inner = f"{item}{rest}"
        return f'"[" space {inner} "]"' if least else f'"[" space ({inner})? "]"'


class _SchemaReader:
    """What schemas say, and whether JSON fits them."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema

    def flats(self, parts: Sequence[Schema], name: str) -> list[Flat]:
        """Return the combinations of options in a place that some JSON may fit."""
        found = self._crossed([self._options(part, name, ()) for part in parts], name)
        flats = (self._flat(plain, name) for plain in found)
        return [flat for flat in flats if flat is not None]

    def _crossed(self, options: Sequence[list[Plain]], name: str) -> list[Plain]:
        made: list[Plain] = [()]
        for each in options:
            made = [(*before, *after) for before in made for after in each]
            if len(made) > _MOST:
                raise GrammarError(f"at {name}: more than {_MOST} combinations of options")
        return made

    def _options(self, schema: Schema, name: str, through: tuple[str, ...]) -> list[Plain]:
        """Return for each combination of options the plain parts that a schema comes to."""
        checked(schema, name, is_root=schema is self.schema)
        if isinstance(schema, bool):
            return [()] if schema else []
        plain = {word: schema[word] for word in schema if word in _PLAIN}
        found: list[list[Plain]] = [[(plain,)] if plain else [()]]
        if "$ref" in schema:
            path = schema["$ref"]
            if path in through:
                raise GrammarError(f"at {name}: $ref {path!r} leads to itself")
            found.append(self._options(self.target(path), name, (*through, path)))
        found += [self._options(each, name, through) for each in schema.get("allOf", ())]
        if "anyOf" in schema:
            options = [self._options(each, name, through) for each in schema["anyOf"]]
            found.append([each for option in options for each in option])
        if "oneOf" in schema:
            found.append(self._one_of(schema, self._crossed(found, name), name, through))
        return self._crossed(found, name)

    def _one_of(
        self, schema: Mapping[str, Any], beside: list[Plain], name: str, through: tuple[str, ...]
    ) -> list[Plain]:
        """Return the options of a oneOf; none may fit what another fits."""
        options = [self._options(each, name, through) for each in schema["oneOf"]]
        for one, other in combinations(options, 2):
            if any(self._may_be((*a, *b, *c), name, 4) for a in one for b in other for c in beside):
                raise GrammarError(
                    f"at {name}: oneOf cannot be written in GBNF where options may overlap;"
                    f" {INSTEAD}"
                )
        return [each for option in options for each in option]

    def _flat(self, parts: Plain, name: str) -> Flat | None:
        kinds = frozenset(_TYPES)
        for part in parts:
            if "type" in part:
                given = part["type"]
                found = {given} if isinstance(given, str) else set(given)
                kinds &= found | {"integer"} if "number" in found else found
        values = None
        for part in parts:
            if values is None and ("enum" in part or "const" in part):
                values = [part["const"]] if "const" in part else list(part["enum"])
        if values is not None:
            values = [each for each in values if all(self.fits(each, part) for part in parts)]
        return Flat(parts, kinds, values) if kinds and values != [] else None

    def _may_be(self, parts: Plain, name: str, depth: int) -> bool:
        """Whether JSON may fit all of some plain parts, as far as looking a little deeper tells."""
        flat = self._flat(parts, name)
        if flat is None:
            return False
        if flat.values is not None or not depth:
            return True
        if flat.kinds != {"object"}:
            return True
        for key in flat.required():
            options = self._crossed(
                [self._options(each, name, ()) for each in flat.property(key)], name
            )
            if not any(self._may_be(each, name, depth - 1) for each in options):
                return False
        return True

    def fits(self, value: Any, schema: Schema) -> bool:
        """Whether JSON fits a schema."""
        checked(schema, "a schema that values are compared with", is_root=schema is self.schema)
        if isinstance(schema, bool):
            return schema
        given = schema.get("type", _TYPES)
        kinds = {given} if isinstance(given, str) else set(given)
        options = schema.get("oneOf")
        return (
            (not kinds.isdisjoint(_kinds(value)))
            and ("const" not in schema or _same(value, schema["const"]))
            and ("enum" not in schema or any(_same(value, each) for each in schema["enum"]))
            and ("$ref" not in schema or self.fits(value, self.target(schema["$ref"])))
            and all(self.fits(value, each) for each in schema.get("allOf", ()))
            and ("anyOf" not in schema or any(self.fits(value, s) for s in schema["anyOf"]))
            and (options is None or sum(self.fits(value, each) for each in options) == 1)
            and self._inner_fits(value, schema)
        )

    def _inner_fits(self, value: Any, schema: Mapping[str, Any]) -> bool:
        if isinstance(value, str):
            return _is_counted(len(value), schema, "minLength", "maxLength")
        if isinstance(value, list):
            return _is_counted(len(value), schema, "minItems", "maxItems") and all(
                self.fits(each, schema.get("items", True)) for each in value
            )
        if not isinstance(value, Mapping):
            return True
        named, other = schema.get("properties", {}), schema.get("additionalProperties", True)
        return set(schema.get("required", ())) <= set(value) and all(
            self.fits(each, named.get(key, other)) for key, each in value.items()
        )

    def target(self, path: Any) -> Schema:
        """Return what a $ref refers to."""
        found: Schema | None = schema_at(self.schema, path) if isinstance(path, str) else None
        if found is None:
            raise GrammarError(f"$ref {path!r} is not in the schema")
        return found


def schema_at(schema: Any, path: str) -> Any:
    """Return the part of a schema that a JSON pointer behind # leads to; None if there is none."""
    if path != "#" and not path.startswith("#/"):
        return None
    found = schema
    for step in path.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found


def is_deep_schema(schema: Any) -> bool:
    """Whether what a schema holds and refers to leads too deep; see `DEEPEST`."""
    named: dict[str, Any] = {}
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            named |= {str(part[key]): part for key in ("$id", "$anchor") if key in part}
        todo += _containers(part)

    def inner(part: Any) -> list[Any]:
        found = _containers(part)
        ref = part.get("$ref") if isinstance(part, dict) else None
        if isinstance(ref, str):
            target = named.get(ref, named.get(ref.lstrip("#")))
            found += _containers([schema_at(schema, ref) if target is None else target])
        return found

    return is_too_deep(schema, inner)


def too_low(schema: Any) -> str | None:
    """Return a number of a schema that llguidance cannot take, shown short; see `LOWEST`."""
    todo = _containers([schema])
    while todo:
        part = todo.pop()
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            # How far down it may go is counted in floats.
            is_floor = isinstance(value, float) and key in ("minimum", "exclusiveMinimum")
            if isinstance(value, int | float) and value < LOWEST and not is_floor:
                return shown(value)
        todo += _containers(part)
    return None


def _containers(part: Any) -> list[Any]:
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return [each for each in inner if isinstance(each, dict | list)]


def checked(schema: Any, name: str, *, is_root: bool = False) -> None:
    """Refuse what is no schema, or says what cannot be written."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise GrammarError(f"at {name}: {schema!r} is no schema that can be written as a grammar")
    unknown = set(schema) - _KNOWN - _NOTES - ({"$id"} if is_root else set())
    if schema.get("uniqueItems") is False:
        unknown.discard("uniqueItems")
    if unknown:
        raise GrammarError(
            f"at {name}: {', '.join(sorted(map(str, unknown)))} cannot be written in GBNF"
        )
    for word, value in schema.items():
        if word in _FORMS and not _FORMS[word](value):
            raise GrammarError(f"at {name}: {word} is {value!r:.80}, which is no schema's {word}")


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(each, str) and each in _TYPES for each in names)


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and _is_whole(value) and value >= 0


def _is_whole(value: float) -> bool:
    return math.isfinite(value) and value == int(value)


_FORMS: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    "enum": lambda value: isinstance(value, list),
    "allOf": lambda value: isinstance(value, list),
    "anyOf": lambda value: isinstance(value, list),
    "oneOf": lambda value: isinstance(value, list),
    "properties": lambda value: isinstance(value, Mapping),
    "required": lambda value: isinstance(value, list) and all(isinstance(k, str) for k in value),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _is_count),
}


def _kinds(value: Any) -> set[str]:
    """Return the types that JSON has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if _is_whole(value) else {"number"}
    found = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {found[type(value)]}


def _same(one: Any, other: Any) -> bool:
    """Whether two are the same JSON: 1 is 1.0, and is not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _is_counted(size: int, schema: Mapping[str, Any], least: str, most: str) -> bool:
    return bool(schema.get(least, 0) <= size <= schema.get(most, size))


def _string(least: int, most: int | None) -> str | None:
    if most is not None and most < least:
        return None
    if most == 0:
        return r'"\"\""'
    return rf'"\"" char{{{least},{"" if most is None else most}}} "\""'


def literal(value: Any) -> str:
    """Return the GBNF text of one JSON value."""
    try:
        return literal_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{value!r:.80} is no JSON: {error}") from error


def literal_text(text: str) -> str:
    """Return the GBNF text of some letters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"{text!r:.80} has half a letter (a surrogate) in it") from error
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _is_escaped(letter: str) -> bool:
    """Whether JSON writes a letter with a backslash."""
    return letter in '"\\' or letter < " "


def _clean(key: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "-", key).strip("-")[:40] or "x"
