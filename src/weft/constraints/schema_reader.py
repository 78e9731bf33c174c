"""Read JSON schemas: resolve references, combine options, and test values.

Several schemas can limit one place in a JSON text. Examples are the keywords next to a `$ref`, each
part of an `allOf`, and an option of an `anyOf`. A `Variant` is one combination of such parts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any
from urllib.parse import unquote, urljoin

from ..errors import GrammarError
from .rules import is_too_deep

Schema = Mapping[str, Any] | bool
Parts = tuple[Mapping[str, Any], ...]

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
# Keywords that limit values of one type only.
KEYWORDS_OF: dict[str, frozenset[str]] = {
    "object": frozenset({
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames",
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
        "unevaluatedProperties",
    }),
    "array": frozenset({
        "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems",
        "contains", "minContains", "maxContains", "unevaluatedItems",
    }),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    }),
}  # fmt: skip
_ANY_TYPE = {
    "type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref", "not", "if", "$dynamicRef",
    "$recursiveRef",
}  # fmt: skip
# All other keywords are annotations, or belong to a vocabulary of the schema's author.
LIMITING = _ANY_TYPE.union(*KEYWORDS_OF.values())
# Formats that llguidance enforces. The standard (2020-12, 7.2.1) makes all formats annotations.
FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
})  # fmt: skip
INSTEAD = "write anyOf, or give each option a required property with a const of its own"
_MAX_COMBINATIONS = 2000  # of options in one place


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination of options at a place: a value must satisfy every part.

    parts: schemas; their `$ref`, `allOf`, `anyOf` and `oneOf` are resolved into further parts.
    types: the JSON types that all parts allow.
    values: the values that all parts allow, if one has `const` or `enum`; else None.
    is_open: `properties` without `additionalProperties` also allows unlisted properties.
    """

    parts: Parts
    types: frozenset[str]
    values: list[Any] | None
    is_open: bool

    def with_any(self, *keywords: str) -> list[Mapping[str, Any]]:
        """Return the parts that have at least one of these keywords."""
        return [part for part in self.parts if any(keyword in part for keyword in keywords)]

    def limits(self, type_name: str) -> bool:
        """Return True if a keyword of some part limits values of this JSON type."""
        return bool(self.with_any(*KEYWORDS_OF[type_name]))

    def counts(self, lowest: str, highest: str) -> tuple[int, int | None]:
        """Return the minimum and maximum count that all parts allow; None means no limit.

        lowest, highest: the keywords of the limits, such as "minItems" and "maxItems".
        """
        lows = [int(part[lowest]) for part in self.with_any(lowest)]
        highs = [int(part[highest]) for part in self.with_any(highest)]
        return max(lows, default=0), min(highs) if highs else None

    def required(self) -> list[str]:
        """Return the names of required properties."""
        return [key for part in self.with_any("required") for key in part["required"]]

    def keys(self) -> list[str]:
        """Return the names of listed properties in order, then those of other required ones."""
        listed = [key for part in self.with_any("properties") for key in part["properties"]]
        return list(dict.fromkeys([*listed, *self.required()]))

    def property(self, key: str) -> list[Schema]:
        """Return all schemas that the value of the property `key` must fit."""
        schemas: list[Schema] = []
        for part in self.parts:
            patterns = part.get("patternProperties", {})
            own = [schema for pattern, schema in patterns.items() if matches(pattern, key)]
            if key in part.get("properties", {}):
                own.append(part["properties"][key])
            elif not own:
                own.append(part.get("additionalProperties", True))
            schemas += own
        return schemas

    def patterns(self) -> list[str]:
        """Return the patterns of `patternProperties`."""
        groups = (part["patternProperties"] for part in self.with_any("patternProperties"))
        return list(dict.fromkeys(pattern for group in groups for pattern in group))

    def matches_pattern(self, key: str) -> bool:
        """Return True if a pattern of `patternProperties` matches part of a property name."""
        return any(matches(pattern, key) for pattern in self.patterns())

    def others(self, matched: Sequence[str] = ()) -> list[Schema]:
        """Return all schemas that the value of an unlisted property must fit.

        matched: the patterns of `patternProperties` that its name matches.
        """
        schemas: list[Schema] = []
        is_closed = not self.is_open and not matched and not self.with_any("additionalProperties")
        if is_closed and self.with_any("properties"):
            return [False]
        for part in self.parts:
            patterns = part.get("patternProperties", {})
            own = [schema for pattern, schema in patterns.items() if pattern in matched]
            schemas += own or [part.get("additionalProperties", True)]
        return schemas

    def prefix_items(self) -> int:
        """Return how many items at an array's start have a schema of their own."""
        return max((len(_prefix_schemas(part)) for part in self.parts), default=0)

    def item(self, number: int) -> list[Schema]:
        """Return all schemas that an array's item must fit.

        number: its index.
        """
        schemas: list[Schema] = []
        for part in self.parts:
            prefix = _prefix_schemas(part)
            schemas.append(prefix[number] if number < len(prefix) else _rest_schema(part))
        return schemas


def _prefix_schemas(part: Mapping[str, Any]) -> Sequence[Schema]:
    """Return the schemas of an array's first items: `prefixItems`, or `items` if it is a list.

    Drafts before 2020-12 have the list in `items`.
    """
    prefix: Sequence[Schema] = part.get("prefixItems", ())
    return part["items"] if isinstance(part.get("items"), list) else prefix


def _rest_schema(part: Mapping[str, Any]) -> Schema:
    """Return the schema of an array's items after the first ones."""
    items: Schema = part.get("items", True)
    return part.get("additionalItems", True) if isinstance(items, list) else items


class SchemaReader:
    """Reads one JSON schema: resolves references, combines options, tests values."""

    def __init__(self, schema: Schema, *, is_open: bool) -> None:
        self.schema = schema
        self.is_open = is_open
        self.paths: dict[int, str] = {}  # JSON pointers of subschemas, by id()
        self._resources: dict[int, str] = {}  # URIs of their `$id`
        self._by_uri: dict[str, Any] = {"": schema}
        self._index()

    def _index(self) -> None:
        """Record the path and the base URI of each subschema."""
        stack: list[tuple[Any, str, str]] = [(self.schema, "#", "")]
        while stack:
            part, path, resource = stack.pop()
            if not isinstance(part, dict | list):
                continue
            if isinstance(part, dict):
                if isinstance(part.get("$id"), str):
                    resource = urljoin(resource, part["$id"]).rstrip("#")
                    self._by_uri[resource] = part
                if isinstance(part.get("$anchor"), str):
                    self._by_uri[f"{resource}#{part['$anchor']}"] = part
            self.paths[id(part)] = path
            self._resources[id(part)] = resource
            items = part.items() if isinstance(part, dict) else enumerate(part)
            for key, inner in items:
                if key not in ("const", "enum", "default", "examples"):
                    step = str(key).replace("~", "~0").replace("/", "~1")
                    stack.append((inner, f"{path}/{step}", resource))

    def path(self, schema: Any) -> str:
        """Return the JSON pointer of a subschema; "#" for a schema that is not in this one."""
        return self.paths.get(id(schema), "#")

    def resource(self, schema: Any) -> str:
        """Return the base URI that a subschema's references are relative to."""
        return self._resources.get(id(schema), "")

    def error(self, schema: Any, message: str) -> GrammarError:
        """Return a GrammarError that names the place of a subschema."""
        return GrammarError(f"at {self.path(schema)}: {message}")

    # Combinations of options ----------------------------------------------------------------------

    def variants(self, schemas: Sequence[Schema]) -> list[Variant]:
        """Return the combinations of options at a place that all given schemas limit.

        Combinations that no value can fit are left out.
        """
        crossed = self._combinations([self._options(schema, ()) for schema in schemas])
        variants = (self._variant(parts) for parts in crossed)
        return [variant for variant in variants if variant is not None]

    def _combinations(self, options: Sequence[list[Parts]]) -> list[Parts]:
        """Return all combinations of one entry from each list; raise GrammarError if too many."""
        combined: list[Parts] = [()]
        for choices in options:
            combined = [(*before, *after) for before in combined for after in choices]
            if len(combined) > _MAX_COMBINATIONS:
                first = next(parts[0] for parts in combined if parts)
                raise self.error(first, f"more than {_MAX_COMBINATIONS} combinations of options")
        return combined

    def _options(self, schema: Schema, referrers: tuple[int, ...]) -> list[Parts]:
        """Return the parts of each combination of a schema's options.

        referrers: ids of the schemas whose references led here, to detect endless references.
        """
        self.check(schema)
        if isinstance(schema, bool):
            return [()] if schema else []
        if is_trivial(schema):
            return [()]
        groups: list[list[Parts]] = [[(schema,)]]
        if "$ref" in schema:
            target = self.target(schema)
            if id(target) in (*referrers, id(schema)):
                raise self.error(schema, f"$ref {schema['$ref']!r} leads to itself")
            groups.append(self._options(target, (*referrers, id(schema))))
        groups += [self._options(part, referrers) for part in schema.get("allOf", ())]
        if "anyOf" in schema:
            options = [self._options(option, referrers) for option in schema["anyOf"]]
            groups.append([parts for option in options for parts in option])
        if "oneOf" in schema:
            groups += [[(part,)] for part in _discriminator(schema)]
            resolved = ("$ref", "allOf", "anyOf", "oneOf")
            own = {keyword: value for keyword, value in schema.items() if keyword not in resolved}
            other_parts = self._combinations([[(own,)], *groups[1:]])
            groups.append(self._one_of(schema, other_parts, referrers))
        if "if" in schema and (applied := self.condition(schema)) is not None:
            groups.append(self._options(applied, referrers))
        if "not" in schema and is_trivial(schema["not"]):
            return []
        return self._combinations(groups)

    @staticmethod
    def condition(schema: Mapping[str, Any]) -> Schema | None:
        """Return the schema (`then` or `else`) that an `if` with a constant result selects.

        None if the result depends on the value.
        """
        if is_trivial(schema["if"]):
            applied: Schema = schema.get("then", True)
            return applied
        return schema.get("else", True) if schema["if"] is False else None

    def _one_of(
        self, schema: Mapping[str, Any], other_parts: list[Parts], referrers: tuple[int, ...]
    ) -> list[Parts]:
        """Return the options of a `oneOf`. Raises GrammarError if a value could fit two of them.

        Args:
            schema: the schema with the `oneOf`.
            other_parts: combinations of its other keywords.
            referrers: as for `_options`.
        """
        options = [self._options(option, referrers) for option in schema["oneOf"]]
        for one, other in combinations(options, 2):
            if any(self._may_fit((*a, *b, *c), 4) for a in one for b in other for c in other_parts):
                raise self.error(
                    schema, f"a oneOf whose options may overlap is not supported; {INSTEAD}"
                )
        return [parts for option in options for parts in option]

    def _variant(self, parts: Parts) -> Variant | None:
        """Return the combination of these parts; None if no value fits."""
        types = frozenset(TYPES)
        for part in parts:
            if "type" in part:
                types &= _type_set(part["type"])
            excluded = _excluded_types(part.get("not", False))
            types -= excluded or set()
        listing = next((part for part in parts if "const" in part or "enum" in part), None)
        allowed: list[Any] | None = None
        if listing is not None:
            keyword = "const" if "const" in listing else "enum"
            allowed = [listing["const"]] if keyword == "const" else list(listing["enum"])
            allowed = [
                value
                for value in allowed
                if all(self.fits(value, p, known=keyword if p is listing else "") for p in parts)
            ]
        if not types or allowed == []:
            return None
        return Variant(parts, types, allowed, self.is_open)

    def _may_fit(self, parts: Parts, depth: int) -> bool:
        """Return False if it is certain that no value fits all parts.

        depth: how many levels of properties to look into.
        """
        variant = self._variant(parts)
        if variant is None:
            return False
        if variant.values is not None or not depth:
            return True
        if variant.types <= {"number", "integer"} and not _has_numbers(variant):
            return False
        if variant.types != {"object"}:
            return True
        for key in variant.required():
            schemas = variant.property(key)
            options = self._combinations([self._options(schema, ()) for schema in schemas])
            if not any(self._may_fit(option, depth - 1) for option in options):
                return False
        return True

    # Values ---------------------------------------------------------------------------------------

    def fits(self, value: Any, schema: Schema, *, known: str = "") -> bool:
        """Return True if a JSON value fits a schema; `format` is ignored.

        known: a keyword that the caller has checked already, which is skipped.
        """
        self.check(schema)
        if isinstance(schema, bool):
            return schema
        for keyword in (
            "$dynamicRef",
            "$recursiveRef",
            "unevaluatedProperties",
            "unevaluatedItems",
        ):
            if keyword in schema and not is_trivial(schema[keyword]):
                raise self.error(schema, f"{keyword} is not supported")
        options = schema.get("oneOf")
        return (
            ("type" not in schema or not _type_set(schema["type"]).isdisjoint(types_of(value)))
            and ("const" not in schema or known == "const" or is_equal_json(value, schema["const"]))
            and (
                "enum" not in schema
                or known == "enum"
                or any(is_equal_json(value, one) for one in schema["enum"])
            )
            and ("$ref" not in schema or self.fits(value, self.target(schema)))
            and all(self.fits(value, part) for part in schema.get("allOf", ()))
            and ("anyOf" not in schema or any(self.fits(value, s) for s in schema["anyOf"]))
            and (options is None or sum(self.fits(value, s) for s in options) == 1)
            and ("not" not in schema or not self.fits(value, schema["not"]))
            and ("if" not in schema or self._fits_condition(value, schema))
            and self._fits_inside(value, schema)
        )

    def _fits_condition(self, value: Any, schema: Mapping[str, Any]) -> bool:
        """Return True if the value fits the `then` or `else` that the `if` selects."""
        branch = "then" if self.fits(value, schema["if"]) else "else"
        return self.fits(value, schema.get(branch, True))

    def _fits_inside(self, value: Any, schema: Mapping[str, Any]) -> bool:
        """Return True if the value fits the keywords of its own JSON type."""
        if isinstance(value, str):
            return _is_count_in_limits(len(value), schema, "minLength", "maxLength") and (
                "pattern" not in schema or self._matches_pattern(schema, value)
            )
        if isinstance(value, list):
            return self._fits_array(value, schema)
        if isinstance(value, Mapping):
            return self._fits_object(value, schema)
        return is_number(value) is False or _is_in_range(value, schema)

    def _matches_pattern(self, schema: Mapping[str, Any], text: str) -> bool:
        """Return True if the text contains a match of the schema's `pattern`."""
        self._check_patterns(schema, [schema["pattern"]])
        return matches(schema["pattern"], text)

    def _check_patterns(self, schema: Any, patterns: Iterable[str]) -> None:
        """Raise GrammarError for a pattern that Python's `re` cannot read."""
        for pattern in patterns:
            try:
                re.compile(pattern, re.ASCII)
            except re.error as error:
                message = f"the pattern {pattern!r:.80} is not supported: {error}"
                raise self.error(schema, message) from error

    def _fits_array(self, value: list[Any], schema: Mapping[str, Any]) -> bool:
        """Return True if an array fits the keywords for arrays."""
        prefix, rest = _prefix_schemas(schema), _rest_schema(schema)
        schemas = [*prefix, *[rest] * (len(value) - len(prefix))]
        contained = True
        if "contains" in schema:
            n_contained = sum(self.fits(item, schema["contains"]) for item in value)
            low, high = schema.get("minContains", 1), schema.get("maxContains", n_contained)
            contained = low <= n_contained <= high
        return (
            contained
            and _is_count_in_limits(len(value), schema, "minItems", "maxItems")
            and all(map(self.fits, value, schemas))
            and not (
                schema.get("uniqueItems")
                and any(is_equal_json(a, b) for a, b in combinations(value, 2))
            )
        )

    def _fits_object(self, value: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
        """Return True if an object fits the keywords for objects."""
        needs = {**schema.get("dependencies", {}), **schema.get("dependentRequired", {})}
        schemas = {**schema.get("dependencies", {}), **schema.get("dependentSchemas", {})}
        read = Variant((schema,), frozenset(TYPES), None, is_open=True)
        names = schema.get("propertyNames", True)
        return (
            set(schema.get("required", ())) <= set(value)
            and _is_count_in_limits(len(value), schema, "minProperties", "maxProperties")
            and all(
                self.fits(key, names) and all(self.fits(inner, s) for s in read.property(key))
                for key, inner in value.items()
            )
            and all(
                set(needed) <= set(value)
                for key, needed in needs.items()
                if key in value and isinstance(needed, list)
            )
            and all(
                self.fits(value, needed)
                for key, needed in schemas.items()
                if key in value and not isinstance(needed, list)
            )
        )

    # References and forms -------------------------------------------------------------------------

    def target(self, schema: Mapping[str, Any]) -> Schema:
        """Return the schema that a `$ref` refers to."""
        reference = schema["$ref"]
        base = self.resource(schema)
        target: Schema | None = None
        if isinstance(reference, str):
            uri = urljoin(base, reference) if base else reference
            resource, _, fragment = uri.partition("#")
            target = self._by_uri.get(uri.rstrip("#"))
            if target is None and resource in self._by_uri:
                target = schema_at(self._by_uri[resource], f"#{fragment}")
        if target is None:
            raise self.error(
                schema, f"$ref {reference!r} is not in the schema; other documents are not loaded"
            )
        return target

    def check(self, schema: Any) -> None:
        """Raise GrammarError unless `schema` is a schema whose keywords have valid values."""
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise GrammarError(f"{schema!r:.80} is no schema; allowed: an object, true, false")
        for keyword, value in schema.items():
            if keyword in _FORMS and not _FORMS[keyword](value):
                raise self.error(
                    schema, f"{keyword} is {value!r:.80}, which is no schema's {keyword}"
                )
        self._check_patterns(schema, schema.get("patternProperties", ()))


def is_trivial(schema: Any) -> bool:
    """Return True if a schema allows every value; annotations such as `title` do not count."""
    if isinstance(schema, Mapping):
        return LIMITING.isdisjoint(schema)
    return schema is True


def _type_set(type_names: str | Sequence[str]) -> set[str]:
    """Return the JSON types that a `type` keyword names; "number" includes "integer"."""
    names = {type_names} if isinstance(type_names, str) else set(type_names)
    return names | {"integer"} if "number" in names else names


def _discriminator(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas that OpenAPI's `discriminator` adds: its property is required.

    [] without a discriminator.
    """
    discriminator = schema.get("discriminator")
    name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
    return [{"required": [name]}] if isinstance(name, str) else []


def _excluded_types(schema: Any) -> set[str] | None:
    """Return the JSON types that a `not` excludes; None if it excludes more than types.

    schema: the value of `not`.
    """
    if schema is False:
        return set()
    if not isinstance(schema, Mapping) or set(schema) & LIMITING != {"type"}:
        return None
    types = _type_set(schema["type"])
    return types if "integer" not in types or "number" in types else None


def is_unresolved_not(schema: Any) -> bool:
    """Return True if a `not` excludes more than JSON types.

    schema: the value of `not`.
    """
    return _excluded_types(schema) is None


def matches(pattern: str, text: str) -> bool:
    """Return True if a schema's pattern matches part of a text. Raises: re.error."""
    return re.search(pattern, text, re.ASCII) is not None


def bounds(variant: Variant) -> tuple[tuple[Any, bool] | None, tuple[Any, bool] | None]:
    """Return the lower and the upper bound of a number; None means no bound.

    A bound is a pair: the value, and True if the value itself is excluded.
    """
    lows: list[tuple[Any, bool]] = []
    highs: list[tuple[Any, bool]] = []
    for part in variant.parts:
        for limits, keyword, exclusive in (
            (lows, "minimum", "exclusiveMinimum"),
            (highs, "maximum", "exclusiveMaximum"),
        ):
            strict = part.get(exclusive, False)  # a boolean in draft 4
            if keyword in part:
                limits.append((part[keyword], strict is True))
            if not isinstance(strict, bool):
                limits.append((strict, True))
    low = max(lows, key=lambda bound: (bound[0], bound[1]), default=None)
    high = min(highs, key=lambda bound: (bound[0], not bound[1]), default=None)
    return low, high


def _has_numbers(variant: Variant) -> bool:
    """Return True if some number fits the bounds and `multipleOf`."""
    low, high = bounds(variant)
    if low is None or high is None:
        return True
    return bool(low[0] < high[0] or (low[0] == high[0] and not (low[1] or high[1])))


def _is_in_range(value: float, schema: Mapping[str, Any]) -> bool:
    """Return True if a number fits the bounds of a schema."""
    low, high = bounds(Variant((schema,), frozenset(TYPES), None, is_open=True))
    step = schema.get("multipleOf")
    return (
        (low is None or (value > low[0] if low[1] else value >= low[0]))
        and (high is None or (value < high[0] if high[1] else value <= high[0]))
        and (step is None or exact_fraction(value) % exact_fraction(step) == 0)
    )


def exact_fraction(value: float) -> Fraction:
    """Return a JSON number as an exact fraction of its decimal text."""
    return Fraction(json.dumps(value))


def schema_at(schema: Any, path: str) -> Any:
    """Return the subschema at a JSON pointer (the text after #); None if there is none."""
    if path != "#" and not path.startswith("#/"):
        return None
    part = schema
    for step in path.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(part, Mapping):
            part = part.get(step)
        elif isinstance(part, list) and step.isdecimal() and int(step) < len(part):
            part = part[int(step)]
        else:
            return None
    return part


def is_deep_schema(schema: Any) -> bool:
    """Return True if a schema's nesting and references are deeper than `MAX_DEPTH` levels."""
    named: dict[str, Any] = {}
    todo = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            named |= {str(part[key]): part for key in ("$id", "$anchor") if key in part}
        todo += _containers(part)

    def inner(part: Any) -> list[Any]:
        """Return the subschemas and reference targets directly inside."""
        containers = _containers(part)
        ref = part.get("$ref") if isinstance(part, dict) else None
        if isinstance(ref, str):
            target = named.get(ref, named.get(ref.lstrip("#")))
            containers += _containers([schema_at(schema, ref) if target is None else target])
        return containers

    return is_too_deep(schema, inner)


def _containers(part: Any) -> list[Any]:
    """Return the values of an object or array that are objects or arrays."""
    inner = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return [value for value in inner if isinstance(value, dict | list)]


# Forms of keywords --------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Return True for a JSON number, which excludes True and False."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integral(value: float) -> bool:
    """Return True for a number without a fraction, such as 2.0."""
    return isinstance(value, int) or (math.isfinite(value) and value == int(value))


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _is_count(value: Any) -> bool:
    return is_number(value) and is_integral(value) and value >= 0


def _is_pattern(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_bound(value: Any) -> bool:
    return is_number(value) or isinstance(value, bool)


_FORMS: dict[str, Callable[[Any], bool]] = {
    "type": _is_type,
    **dict.fromkeys(("enum", "allOf", "anyOf", "oneOf", "prefixItems"), _is_list),
    **dict.fromkeys(("properties", "patternProperties", "dependentRequired"), _is_mapping),
    **dict.fromkeys(("dependentSchemas", "dependencies"), _is_mapping),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _is_count),
    **dict.fromkeys(("minProperties", "maxProperties", "minContains", "maxContains"), _is_count),
    **dict.fromkeys(("minimum", "maximum"), is_number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _is_bound),
    "multipleOf": lambda value: is_number(value) and value > 0,
    "required": _is_text_list,
    "pattern": _is_pattern,
    "format": _is_pattern,
}


def types_of(value: Any) -> set[str]:
    """Return the JSON types of a value: "integer" and "number" for an integer, else one."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if is_integral(value) else {"number"}
    names = {str: "string", list: "array", dict: "object", type(None): "null"}
    return {names[type(value)]}


def is_equal_json(one: Any, other: Any) -> bool:
    """Return True if two values are equal in JSON: 1 equals 1.0, but not true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            is_equal_json(one[key], other[key]) for key in one
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal_json, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _is_count_in_limits(size: int, schema: Mapping[str, Any], lowest: str, highest: str) -> bool:
    """Return True if a size is within two keywords, such as "minItems" and "maxItems"."""
    return bool(schema.get(lowest, 0) <= size <= schema.get(highest, size))
