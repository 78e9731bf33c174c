"""Grammar rules of a JSON schema, in the syntax that GBNF and Lark share.

`RuleWriter` writes one rule for each place of a JSON text, from all schemas that limit this place
(see `schema_reader`). Its subclasses write the parts that differ between the two formats.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, count
from typing import Any, Literal

from ..errors import ConfigError, GrammarError
from .gbnf import read_rules
from .regex_translate import PatternError
from .rules import can_end, fixed_point
from .schema_reader import (
    FORMATS,
    KEYWORDS_OF,
    TYPES,
    Schema,
    SchemaReader,
    Variant,
    is_equal_json,
    is_trivial,
    is_unresolved_not,
)

Whitespace = Literal["compact", "flexible"]
_LONG = 400  # characters of members that are written inline; longer ones get a rule
_MAX_STATES = 2000  # rules of one object or array that count or compare their members
_MAX_PATTERNS = 4  # of patternProperties: each combination is a rule
_NAME = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|([a-zA-Z][\w-]*)')


@dataclass(frozen=True, slots=True)
class JsonLayout:
    """The whitespace of the JSON, as parts of rules.

    comma, colon: these separators with the whitespace around them.

    begin: whitespace after an opening bracket.

    end: whitespace before a closing bracket, if the brackets are not empty.
    """

    comma: str
    colon: str
    begin: str = ""
    end: str = ""

    @classmethod
    def from_whitespace(cls, whitespace: Whitespace) -> JsonLayout:
        """Return the layout of "compact" or "flexible" whitespace. Raises: ConfigError."""
        if whitespace == "compact":
            return cls('", "', '": "')
        if whitespace == "flexible":
            return cls('"," blank', '":" space', "blank", "blank")
        raise ConfigError(f"whitespace is {whitespace!r}; allowed are 'compact' and 'flexible'")

    def enclosed(self, brackets: str, inner: str, *, may_be_empty: bool) -> str:
        """Return the rule text of an object or array.

        Args:
            brackets: "{}" or "[]".
            inner: the rule text of the members or items; "" for none.
            may_be_empty: also allow empty brackets.
        """
        opening, closing = (f'"{bracket}"' for bracket in brackets)
        if not inner:
            return _joined(opening, self.begin, closing)
        filled = _joined(f"({inner})" if "|" in inner else inner, self.end)
        return _joined(opening, self.begin, f"({filled})?" if may_be_empty else filled, closing)

    def any_value(self) -> dict[str, str]:
        """Return the rules of JSON without a schema, by name: value, object and array."""
        member = f"string {self.colon} value"
        members, items = f"{member} ({self.comma} {member})*", f"value ({self.comma} value)*"
        return {
            "value": "object | array | string | number | boolean | null",
            "object": self.enclosed("{}", members, may_be_empty=True),
            "array": self.enclosed("[]", items, may_be_empty=True),
        }


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


class RuleWriter(ABC):
    """Writes grammar rules for the JSON that fits a schema; subclasses write GBNF or Lark.

    `name` in its methods: the rule of the place that is written; names of new rules start with it.
    `variant`: the combination of options that limits the place.

    rules: bodies by name, without those of `JsonLayout.any_value`. Places of equal schemas share a
        rule.
    paths: the JSON pointer of each rule's schema.
    has_open_names: some object may have properties that no schema lists.
    """

    unsupported: frozenset[str] = frozenset({
        "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
        "unevaluatedItems", "contains",
    })  # fmt: skip
    refusal = "is not supported"

    def __init__(self, reader: SchemaReader, layout: JsonLayout) -> None:
        self.reader = reader
        self.layout = layout
        self.rules: dict[str, str] = {}
        self.paths: dict[str, str] = {}
        self.has_open_names = False
        self._is_recursive = False
        self._rule_of: dict[str, str] = {}  # by schemas
        self._used: set[str] = set()
        self._never: set[str] = set()  # schemas that no finite JSON fits

    @abstractmethod
    def string(self, variant: Variant, name: str) -> str | None:
        """Return the rule text of strings that keywords limit; None if no string fits."""

    @abstractmethod
    def number(self, variant: Variant, kind: str, name: str) -> str | None:
        """Return the rule text of numbers that keywords limit; None if no number fits.

        kind: "number" or "integer".
        """

    @abstractmethod
    def unlisted_name(
        self, listed: Sequence[str], limits: Variant | None, patterns: Mapping[str, bool], name: str
    ) -> str | None:
        """Return the rule text of unlisted property names, quotes included; None if no name fits.

        Args:
            listed: the names of listed properties, which are excluded.
            limits: keywords that limit a name as a string; None without limits.
            patterns: pattern → True if the name must match it, False if it must not.
            name: the name of the object's rule; names of new rules start with it.
        """

    @abstractmethod
    def scalars(self, values: Sequence[Any], name: str) -> str:
        """Return the rule text of one of some constants: strings, numbers, booleans or null."""

    def unique_scalars(self, values: Sequence[Any], low: int, high: int, schema: Any) -> str | None:
        """Return the rule text of `low` to `high` distinct constants, separated by commas.

        None if the format has no special form for this; the caller then writes general rules.

        Args:
            values: the constants.
            low, high: the minimum and maximum number of items.
            schema: the schema to name in errors.
        """
        return None

    def write(self, schemas: Sequence[Schema]) -> str:
        """Write the rules of JSON that fits all given schemas; return the name of the first rule.

        Raises: GrammarError, also if no JSON fits.
        """
        n_never = -1
        root: str | None = None
        while n_never < len(self._never):  # rules that lead to such a place are written without
            n_never = len(self._never)
            self.start()
            root = self.place(schemas, "root")
            if root is None:
                raise GrammarError("no JSON fits the schema")
            if len(self._never) == n_never and self._is_recursive:
                endless = self._endless(root)
                self._never |= {key for key, name in self._rule_of.items() if name in endless}
        assert root is not None
        return root

    def start(self) -> None:
        """Remove all rules, before writing another schema."""
        self.rules, self.paths, self._rule_of, self._used = {}, {}, {}, set()
        self.has_open_names = self._is_recursive = False

    def _endless(self, root: str) -> set[str]:
        """Return the names of rules that match no finite text. root: the name of the first rule."""
        bodies = {**({} if "root" in self.rules else {"root": root}), **self.rules}
        names = {name for body in bodies.values() for name in names_in(body)}
        stubs = dict.fromkeys(sorted(names - set(bodies)), '"x"')
        text = "".join(f"{name} ::= {body}\n" for name, body in {**bodies, **stubs}.items())
        rules = read_rules(text)
        return set(rules) - fixed_point(rules, can_end)

    def place(self, schemas: Sequence[Schema], name: str) -> str | None:
        """Return the rule name of JSON that fits all given schemas; None if no JSON does.

        Writes the rule, unless a place with equal schemas has one. The name of an existing rule,
        such as "value", is returned for schemas that need no rule of their own.

        name: the proposed name.
        """
        known = {self._key(schema): schema for schema in schemas if not is_trivial(schema)}
        if not known:
            self.has_open_names = True
            return "value"
        key = "\n".join(sorted(known))
        if key in self._never:
            return None
        if key in self._rule_of:
            self._used.add(key)
            self._is_recursive |= self.rules.get(self._rule_of[key]) == ""
            return self._rule_of[key]
        self._rule_of[key] = name = self.new_rule(name, "")  # it may lead to itself
        self.paths[name] = self.reader.path(next(iter(known.values())))
        variants = self.reader.variants(tuple(known.values()))
        bodies = [body for variant in variants for body in self._bodies(variant, name)]
        if not bodies:
            self._never.add(key)
            return None
        self.rules[name] = " | ".join(dict.fromkeys(bodies))
        if key not in self._used and name != "root" and re.fullmatch(r"[\w-]+", self.rules[name]):
            self._rule_of[key] = self.rules.pop(name)
        return self._rule_of[key]

    def _key(self, schema: Schema) -> str:
        """Return a key that equal schemas share, so that they share a rule."""
        return f"{self.reader.resource(schema)} {json.dumps(schema, sort_keys=True)}"

    def new_rule(self, name: str, body: str) -> str:
        """Add a rule; return its name: `name`, with a number if that is taken."""
        reserved = (*TYPES, "value", "space", "blank", "char", "plain", "hex")
        names = chain([name], (f"{name}-{number}" for number in count(2)))
        name = next(one for one in names if one not in self.rules and one not in reserved)
        self.rules[name] = body
        return name

    def _bodies(self, variant: Variant, name: str) -> Iterator[str]:
        """Yield a rule body for each JSON type that one combination of options allows."""
        if variant.values is not None:
            yield from self._constants(variant.values, name)
            return
        self._check_any_type(variant)
        if variant.types == set(TYPES) and not any(map(variant.limits, KEYWORDS_OF)):
            self.has_open_names = True
            yield "value"
            return
        for kind in TYPES:
            if kind not in variant.types or (kind == "integer" and "number" in variant.types):
                continue
            body = self._body(variant, kind, name)
            if body is not None:
                yield body

    def _body(self, variant: Variant, kind: str, name: str) -> str | None:
        """Return the rule text of values of one JSON type; None if no value fits."""
        group = "number" if kind == "integer" else kind
        if group not in KEYWORDS_OF or not variant.limits(group):
            self.has_open_names |= kind in ("object", "array")
            return kind
        self._check_keywords(variant, group)
        if kind == "object":
            return self._object(variant, name)
        if kind == "array":
            return self._array(variant, name)
        return self.string(variant, name) if kind == "string" else self.number(variant, kind, name)

    def _check_any_type(self, variant: Variant) -> None:
        """Raise GrammarError for keywords of any JSON type that the format cannot express."""
        for part in variant.parts:
            is_conditional = "if" in part and SchemaReader.condition(part) is None
            branches = [part.get(word, True) for word in ("then", "else")]
            for word, is_limit in (
                ("not", "not" in part and is_unresolved_not(part["not"])),
                ("if", is_conditional and not all(map(is_trivial, branches))),
                ("$dynamicRef", "$dynamicRef" in part),
                ("$recursiveRef", "$recursiveRef" in part),
            ):
                if is_limit:
                    raise self.unsupported_error(part, word)

    def _check_keywords(self, variant: Variant, group: str) -> None:
        """Raise GrammarError for keywords of one JSON type that the format cannot express."""
        for part in variant.parts:
            for word in part:
                if word in KEYWORDS_OF[group] & self.unsupported and _is_limit(word, part):
                    raise self.unsupported_error(part, word)

    def unsupported_error(self, part: Any, word: str, reason: str = "") -> GrammarError:
        """Return the error for a keyword that this format cannot express.

        Args:
            part: the schema with the keyword.
            word: the keyword.
            reason: added to the message; "" adds nothing.
        """
        message = f"{word} {self.refusal}{reason and f': {reason}'}"
        return self.reader.error(part, message)

    def _constants(self, values: Sequence[Any], name: str) -> Iterator[str]:
        """Yield the rule texts of the values of `const` or `enum`."""
        scalars = [value for value in values if not isinstance(value, dict | list)]
        if scalars:
            yield self.scalars(scalars, name)
        for value in values:
            if isinstance(value, dict | list):
                yield self._constant(value, name)

    def _constant(self, value: Any, name: str) -> str:
        """Return the rule text of one constant: an object, an array or a scalar."""
        comma, colon = self.layout.comma, self.layout.colon
        if isinstance(value, Mapping):
            members = (
                f"{literal(key)} {colon} {self._constant(inner, name)}"
                for key, inner in value.items()
            )
            return self.layout.enclosed("{}", f" {comma} ".join(members), may_be_empty=False)
        if isinstance(value, list):
            items = (self._constant(inner, name) for inner in value)
            return self.layout.enclosed("[]", f" {comma} ".join(items), may_be_empty=False)
        return self.scalars([value], name)

    # Objects --------------------------------------------------------------------------------------

    def _object(self, variant: Variant, name: str) -> str | None:
        """Return the rule text of an object; None if no object fits."""
        names = self._property_names(variant)
        required = set(variant.required())
        members: list[tuple[bool, str]] = []
        for key in [*variant.keys(), *names.enumerated]:
            value = None
            if all(self.reader.fits(key, schema) for schema in names.schemas):
                value = self.place(variant.property(key), f"{name}-{_clean(key)}")
            if value is not None:
                members.append((key in required, f"{literal(key)} {self.layout.colon} {value}"))
            elif key in required:
                return None
        other = self._unlisted(variant, names, name) if names.is_open else None
        low, high = variant.counts("minProperties", "maxProperties")
        n_required = sum(is_required for is_required, _ in members)
        if low <= n_required and (
            high is None or (other is None and n_required <= len(members) <= high)
        ):
            return self._listed(members, other, name)
        return self._counted(members, other, (low, high), name)

    def _property_names(self, variant: Variant) -> _Names:
        """Return the limits of `propertyNames`."""
        parts = variant.with_any("propertyNames")
        schemas = [s for part in parts if not is_trivial(s := part["propertyNames"])]
        if not schemas:
            return _Names()
        options = self.reader.variants([*schemas, {"type": "string"}])
        if all(option.values is not None for option in options):
            values = [value for option in options for value in option.values or ()]
            listed = set(variant.keys())
            fresh = [value for value in dict.fromkeys(values) if value not in listed]
            is_closed = variant.others() == [False]
            matched = [v for v in fresh if not is_closed or variant.matches_pattern(v)]
            return _Names(schemas, matched, is_open=False)
        if len(options) > 1:
            raise self.unsupported_error(parts[0], "propertyNames", "it has several options")
        self._check_any_type(options[0])
        return _Names(schemas, limits=options[0] if options[0].limits("string") else None)

    def _unlisted(self, variant: Variant, names: _Names, name: str) -> str | None:
        """Return the rule text of an unlisted property: name and value."""
        patterns = variant.patterns()
        if len(patterns) > _MAX_PATTERNS:
            part = variant.with_any("patternProperties")[0]
            raise self.unsupported_error(
                part, "patternProperties", f"more than {_MAX_PATTERNS} patterns"
            )
        options: list[str] = []
        for size in range(len(patterns) + 1):
            for matched in combinations(patterns, size):
                value = self.place(variant.others(matched), f"{name}-other")
                if value is None:
                    continue
                matching = {pattern: pattern in matched for pattern in patterns}
                try:
                    key = self.unlisted_name(variant.keys(), names.limits, matching, name)
                except PatternError as error:
                    part = variant.with_any("patternProperties", "propertyNames")[0]
                    raise self.reader.error(part, str(error)) from error
                if key is not None:
                    options.append(f"{key} {self.layout.colon} {value}")
        self.has_open_names |= bool(options)
        if len(options) < 2:
            return options[0] if options else None
        return self.new_rule(f"{name}-others", " | ".join(options))

    def _listed(self, members: list[tuple[bool, str]], other: str | None, name: str) -> str:
        """Return the rule text of an object with members in order.

        Args:
            members: pairs of a flag, True for required members, and the member's rule text.
            other: the rule text of unlisted members, which come last; None allows none.
            name: the name of the object's rule.
        """
        comma = self.layout.comma
        rest = f"({comma} {other})*" if other is not None else ""
        options = [f"{other} {rest}"] if other is not None else []
        may_be_empty = True
        for number in range(len(members) - 1, -1, -1):
            is_required, member = members[number]
            first = f"{member} {rest}".strip()
            options = [first] if is_required else [first, *options]
            may_be_empty = may_be_empty and not is_required
            rest = f"({comma} {member}){'' if is_required else '?'} {rest}".strip()
            if number and len(rest) > _LONG:
                rest = self.new_rule(f"{name}-and", rest)
        return self.layout.enclosed("{}", " | ".join(options), may_be_empty=may_be_empty)

    def _counted(
        self,
        members: list[tuple[bool, str]],
        other: str | None,
        counts: tuple[int, int | None],
        name: str,
    ) -> str | None:
        """Return the rule text of an object with members in order and a limited number of them.

        None if that is impossible.

        Args:
            members, other, name: as for `_listed`.
            counts: the minimum and maximum number of members; None means no maximum.
        """
        low, high = counts
        top = max(low, 1) if high is None else high
        if (len(members) + 1) * (top + 1) > _MAX_STATES:
            raise GrammarError(f"{self.paths[name]}: minProperties or maxProperties is too large")
        comma = self.layout.comma
        rest: dict[int, str | None] = {}  # what follows all members, by the number present
        for n in range(top + 1):
            left = None if high is None else high - n
            rest[n] = _repeated(other, comma, max(low - n, 0), left, is_first=not n)
        for is_required, member in reversed(members):
            after, rest = rest, {}
            for n in range(top + 1):
                following = after.get(n + 1 if high is not None else min(n + 1, top))
                taken = None
                if following is not None and (high is None or n < high):
                    taken = _joined(comma if n else "", member, following)
                skipped = None if is_required else after[n]
                options = [text for text in (taken, skipped) if text is not None]
                rest[n] = " | ".join(filter(None, options)) if options else None
                if rest[n] and "" in options:
                    rest[n] = f"({rest[n]})?"
                if rest[n] and n and not re.fullmatch(r"[\w-]+", rest[n] or ""):
                    rest[n] = self.new_rule(f"{name}-and", rest[n] or "")
        inner = rest[0]
        if inner is None:
            return None
        return self.layout.enclosed("{}", f"({inner})" if inner else "", may_be_empty=False)

    # Arrays ---------------------------------------------------------------------------------------

    def _array(self, variant: Variant, name: str) -> str | None:
        """Return the rule text of an array; None if no array fits."""
        low, high = variant.counts("minItems", "maxItems")
        if high is not None and high < low:
            return None
        if (high is None or high > 1) and any(part.get("uniqueItems") for part in variant.parts):
            return self._unique_array(variant, low, high, name)
        n_prefix = variant.prefix_items()
        n_prefix = n_prefix if high is None else min(n_prefix, high)
        items = [self.place(variant.item(i), f"{name}-item-{i}") for i in range(n_prefix)]
        item = None
        if high is None or high > n_prefix:
            item = self.place(variant.item(n_prefix), f"{name}-item")
        rest = _repeated(
            item,
            self.layout.comma,
            max(low - n_prefix, 0),
            None if high is None else high - n_prefix,
            is_first=not n_prefix,
        )
        for number in range(n_prefix - 1, -1, -1):
            first = items[number]
            if first is None or rest is None:
                rest = "" if number >= low else None
                continue
            rest = _joined(self.layout.comma if number else "", first, rest)
            rest = f"({rest})?" if number >= low else rest
            if number:
                rest = self.new_rule(f"{name}-and", rest)
        return None if rest is None else self._items(rest)

    def _items(self, inner: str) -> str:
        """Return the rule text of an array. inner: that of its items, with commas."""
        if inner.startswith("(") and inner.endswith(")?"):
            return self.layout.enclosed("[]", inner[1:-2], may_be_empty=True)
        return self.layout.enclosed("[]", inner, may_be_empty=False)

    def _unique_array(self, variant: Variant, low: int, high: int | None, name: str) -> str | None:
        """Return the rule text of an array of distinct constants; None if it is impossible.

        Each set of used constants has a rule of its own.

        low, high: the minimum and maximum number of items; None means no maximum.
        """
        part = variant.with_any("uniqueItems")[0]
        values = self._finite(variant, part)
        high = len(values) if high is None else min(high, len(values))
        if high < low:
            return None
        unique = self.unique_scalars(values, low, high, part)
        if unique is not None:
            return self.layout.enclosed("[]", unique, may_be_empty=False)
        items = ["".join(self._constants([value], name)) for value in values]
        after: dict[int, str] = {}  # rules by the set of values before, as bits

        def rest(before: int) -> str:
            """Return the rule text of the items after those in the bit set `before`; "" at the
            end.
            """
            n = before.bit_count()
            if n == high:
                return ""
            if before not in after:
                if len(after) * len(items) > _MAX_STATES:
                    raise self.unsupported_error(
                        part, "uniqueItems", "too many values; give maxItems"
                    )
                after[before] = self.new_rule(f"{name}-unique", "")
                comma = self.layout.comma if n else ""
                options = [
                    _joined(comma, item, rest(before | 1 << bit))
                    for bit, item in enumerate(items)
                    if not before >> bit & 1
                ]
                body = " | ".join(options)
                self.rules[after[before]] = f"({body})?" if n >= low and n else body
            return after[before]

        return self.layout.enclosed("[]", rest(0), may_be_empty=not low)

    def _finite(self, variant: Variant, part: Mapping[str, Any]) -> list[Any]:
        """Return the values that the items of an array with `uniqueItems` may have.

        Raises GrammarError if there are not finitely many.

        part: the schema with `uniqueItems`.
        """
        reason = "items must be of an enum, a const, booleans or null"
        if variant.prefix_items():
            raise self.unsupported_error(part, "uniqueItems", reason)
        values: list[Any] = []
        for option in self.reader.variants(variant.item(0)):
            allowed = option.values
            if allowed is None and option.types <= {"boolean", "null"}:
                allowed = [True, False] if "boolean" in option.types else []
                allowed = [*allowed, None] if "null" in option.types else allowed
            if allowed is None:
                raise self.unsupported_error(part, "uniqueItems", reason)
            for value in allowed:
                if not any(is_equal_json(value, known) for known in values):
                    values.append(value)
        return values


@dataclass(frozen=True, slots=True)
class _Names:
    """The limits of `propertyNames`.

    schemas: schemas that every name must fit.

    enumerated: the allowed unlisted names, if `propertyNames` enumerates them.

    limits: keywords that limit unlisted names as strings; None without limits.

    is_open: names that are neither listed nor enumerated may be allowed.
    """

    schemas: Sequence[Schema] = ()
    enumerated: Sequence[str] = ()
    limits: Variant | None = None
    is_open: bool = True


def _is_limit(word: str, part: Mapping[str, Any]) -> bool:
    """Return True if the value of the keyword `word` in a schema limits anything."""
    value = part[word]
    if word == "contains":
        return part.get("minContains") != 0 or "maxContains" in part
    if word in ("dependentRequired", "dependentSchemas", "dependencies"):
        inner = value.values()
        return any(bool(v) if isinstance(v, list) else not is_trivial(v) for v in inner)
    if word in ("unevaluatedProperties", "unevaluatedItems"):
        return not is_trivial(value)
    if word == "format":
        return value in FORMATS
    return bool(value) or isinstance(value, int)


def _repeated(
    part: str | None, comma: str, low: int, high: int | None, *, is_first: bool
) -> str | None:
    """Return the rule text of a part that occurs `low` to `high` times; None if it cannot.

    Args:
        part: its rule text; None if nothing fits it.
        comma: the rule text of the separator.
        low, high: numbers; None means no maximum.
        is_first: nothing comes before the first part, so it has no comma.
    """
    if high is not None and high < low:
        return None
    if part is None or high == 0:
        return None if low else ""
    if not is_first:
        return _times(f"({comma} {part})", low, high)
    more = _times(f"({comma} {part})", max(low - 1, 0), None if high is None else high - 1)
    inner = f"{part} {more}".strip()
    return inner if low else f"({inner})?"


def _times(part: str, low: int, high: int | None) -> str:
    if high == 0:
        return ""
    if high is None:
        return f"{part}*" if not low else f"{part}{{{low},}}"
    return f"{part}{{{low},{high}}}"


def names_in(body: str) -> Iterator[str]:
    """Yield the names of rules to which a rule's body refers."""
    return (match[1] for match in _NAME.finditer(body) if match[1])


def renamed(body: str, names: Mapping[str, str]) -> str:
    """Return a rule's body with other names. names: old → new, for all names in it."""
    return _NAME.sub(lambda match: names[match[1]] if match[1] else match[0], body)


def literal(value: Any) -> str:
    """Return the JSON text of a value as a quoted literal of a grammar. Raises: GrammarError."""
    try:
        return literal_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise GrammarError(f"{value!r:.80} is no JSON: {error}") from error


def literal_text(text: str) -> str:
    """Return a text as a quoted literal of a grammar. Raises: GrammarError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"{text!r:.80} contains a surrogate, half of a character") from error
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _clean(key: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "-", key).strip("-")[:40] or "x"
