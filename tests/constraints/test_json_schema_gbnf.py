"""JSON schemas as GBNF, compared with an independent validator.

json_schema_suite: cases of the official JSON-Schema-Test-Suite, draft 2020-12, as it is.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from itertools import permutations, product
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from cases import one_in
from weft._core.tokens.tokenizer import Tokenizer
from weft.constraints import GBNF, JsonSchema, json_schema_to_grammar
from weft.constraints.base import Compiler, Constraint, Matcher, n_words
from weft.errors import GrammarError

SUITE = Path(__file__).parent / "json_schema_suite"
# Reasons to reject a schema; each names the keyword.
NAMED = (
    "cannot be written in GBNF|not supported|is not in the schema|no JSON fits the schema"
    "|leads to itself|is not valid: at #"
)


@cache
def compiler() -> Compiler:
    text = Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))
    return Compiler(text, text.n_vocab)


def takes(start: Matcher, text: str) -> bool:
    matcher, ids = start.clone(), compiler().ids_of(text.encode())
    if not matcher.takes(ids):
        return False
    for token in ids:
        matcher.accept(token)
    return matcher.may_end


def drawn(start: Matcher, rng: random.Random, max_tokens: int = 200) -> str | None:
    """A text drawn under the masks; None if it does not end in time."""
    grammar_compiler, matcher = compiler(), start.clone()
    bits = np.empty(n_words(grammar_compiler.n_vocab), dtype=np.int32)
    tokens: list[int] = []
    ends = grammar_compiler.stop_ids
    while not matcher.must_end and len(tokens) < max_tokens:
        matcher.fill(bits)
        (ids,) = np.unpackbits(bits.view(np.uint8), bitorder="little")[
            : grammar_compiler.n_vocab
        ].nonzero()
        assert ids.size, grammar_compiler.text.decode(tokens)
        signs = [each for each in ids.tolist() if grammar_compiler.spellings[each] in b'"}],']
        token = rng.choice([*signs, *rng.sample(ids.tolist(), k=min(2, ids.size))])
        if token in ends:
            break
        matcher.accept(token)
        tokens.append(token)
    return grammar_compiler.text.decode(tokens) if matcher.may_end else None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different."""
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def is_valid(schema: Any, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def gbnf(schema: Any, *, open_objects: bool = False) -> Constraint:
    return GBNF(json_schema_to_grammar(schema, open_objects=open_objects))


def matcher_of(schema: Any, form: Any = gbnf, *, open_objects: bool = False) -> Matcher:
    return compiler().matcher(form(schema, open_objects=open_objects))


both_forms = pytest.mark.parametrize("form", [gbnf, JsonSchema])


# The official cases ------------------------------------------------------------------------------


def groups() -> Iterator[Any]:
    for file in sorted(SUITE.glob("*.json")):
        for group in json.loads(file.read_text("utf-8")):
            if isinstance(group["schema"], dict):
                yield pytest.param(group, id=f"{file.stem}: {group['description']}")


def forms(value: Any) -> Iterator[str]:
    """JSON texts of a value, properties in any order."""
    for ordered in orders(value):
        yield json.dumps(ordered, ensure_ascii=False)


def orders(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        yield from map(list, product(*map(list, map(orders, value))))
    elif isinstance(value, dict):
        # Of many, only as they are and sorted: there are too many orders.
        for keys in permutations(value) if len(value) < 4 else (list(value), sorted(value)):
            for inner in product(*(list(orders(value[key])) for key in keys)):
                yield dict(zip(keys, inner, strict=True))
    else:
        yield value


def is_written(value: Any, schema: Any, *, is_open: bool = False) -> bool:
    """Return True if the grammar writes JSON of this form, as `json_schema_to_grammar` documents.

    It does not write integers as 1.0 (or without .0 where a const has it), and properties that
    are not listed, where others are.
    """
    if "." in json.dumps([value, schema.get("const"), schema.get("enum")]):
        return False
    if "anyOf" in schema:  # each option lists its own
        return not isinstance(value, dict)
    if not isinstance(value, dict):
        inner = value if isinstance(value, list) else ()
        return all(is_written(each, schema, is_open=is_open) for each in inner)
    listed, is_closed = set[str](), False
    todo: list[Any] = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            if isinstance(part.get("properties"), dict):
                listed |= set(part["properties"])
                is_closed = not is_open
            todo += part.values()
        elif isinstance(part, list):
            todo += part
    escaped = any(json.dumps(key, ensure_ascii=False) != f'"{key}"' for key in value)
    return set(value) <= listed or not (is_closed or escaped)


def some(cases: list[Any], n: int) -> list[Any]:
    """Every n-th case as it is, the others as slow ones."""
    slow = pytest.mark.slow
    return [
        pytest.param(*case.values, id=case.id, marks=slow) if number % n else case
        for number, case in enumerate(cases)
    ]


@both_forms
@pytest.mark.parametrize("is_open", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("group", some(list(groups()), 10))
def test_official_case_is_accepted_correctly_or_raises_with_a_name(
    group: Any, is_open: bool, form: Any
) -> None:
    """Accepted values are valid; valid values of the grammar's form are accepted."""
    schema = group["schema"]
    try:
        start = matcher_of(schema, form, open_objects=is_open)
    except GrammarError as error:
        assert re.search(NAMED, str(error)), error  # noqa: PT017
        return
    for case in group["tests"]:
        is_accepted = any(takes(start, text) for text in forms(case["data"]))
        if is_accepted:
            assert case["valid"], case
        elif case["valid"]:
            assert not is_written(case["data"], schema, is_open=is_open), case


@pytest.mark.parametrize(
    ("write", "n_min"), [(json_schema_to_grammar, 160), (lambda s: JsonSchema(s).grammar(), 195)]
)
def test_160_official_cases_or_more_can_be_written(write: Any, n_min: int) -> None:
    """The rest needs what no grammar can say, or refers to other documents."""
    n_written = 0
    for case in groups():
        try:
            write(case.values[0]["schema"])
            n_written += 1
        except GrammarError:
            pass
    assert n_written >= n_min


# Any schema --------------------------------------------------------------------------------------

SCALARS = [None, True, False, 0, 1, -2, 1.5, "", "a", "ab", "é🙂"]


class Some:
    """Random schemas of the known words, and JSON that may fit them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def schema(self, depth: int) -> Any:
        rng = self.rng
        if rng.random() < 0.08:
            return rng.choice([True, False, {}])
        parts: dict[str, Any] = {}
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            parts |= rng.choice(self.words(depth))()
        return parts

    def words(self, depth: int) -> list[Any]:
        rng = self.rng
        kinds = ["object", "array", "string", "number", "integer", "boolean", "null"]
        simple = [
            lambda: {"type": rng.choice(kinds)},
            lambda: {"type": rng.sample(kinds, 2)},
            lambda: {"enum": rng.sample(SCALARS, 3) + [{"a": 1}, [1, "a"]][: rng.randint(0, 2)]},
            lambda: {"const": self.value(1)},
            lambda: {"minLength": rng.randint(0, 2), "maxLength": rng.randint(1, 3)},
            lambda: {"required": rng.sample("abc", rng.randint(1, 2))},
        ]
        if depth == 0:
            return simple
        deeper = [
            lambda: {"properties": {k: self.schema(depth - 1) for k in rng.sample("abc", 2)}},
            lambda: {"additionalProperties": self.schema(depth - 1)},
            lambda: {"items": self.schema(depth - 1), "maxItems": rng.randint(0, 3)},
            lambda: {"minItems": rng.randint(0, 2)},
            lambda: {"anyOf": [self.schema(depth - 1) for _ in range(2)]},
            lambda: {"oneOf": [self.schema(depth - 1) for _ in range(2)]},
            lambda: {"allOf": [self.schema(depth - 1) for _ in range(2)]},
            lambda: {"$ref": rng.choice(["#/$defs/x", "#/$defs/y"])},
            lambda: {"minProperties": rng.randint(0, 2), "maxProperties": rng.randint(1, 3)},
            lambda: {"propertyNames": rng.choice([{"maxLength": 1}, {"enum": ["a", "d"]}])},
            lambda: {"patternProperties": {rng.choice(["a", "^b$", "c|d"]): self.schema(0)}},
            lambda: {"prefixItems": [self.schema(depth - 1), self.schema(0)]},
            lambda: {"items": {"enum": rng.sample(SCALARS, 3)}, "uniqueItems": True},
            lambda: {"minimum": rng.choice([0, -2, 0.5]), "maximum": rng.choice([1, 2**60])},
            lambda: {"not": rng.choice([{"type": "string"}, {}, False])},
            lambda: {"if": rng.choice([True, False, {}]), "then": self.schema(0)},
        ]
        return simple + 2 * deeper

    def value(self, depth: int) -> Any:
        rng = self.rng
        kind = rng.randrange(4) if depth else 0
        if kind == 2:
            return [self.value(depth - 1) for _ in range(rng.randint(0, 3))]
        if kind == 3:
            return {key: self.value(depth - 1) for key in rng.sample("abcd", rng.randint(0, 3))}
        return rng.choice(SCALARS)


@pytest.mark.parametrize(
    "seed",
    [
        *one_in(2, range(10)),
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 40)),
    ],
)
@both_forms
def test_random_schema_is_compiled_correctly_or_raises_with_a_name(seed: int, form: Any) -> None:
    """Texts drawn from its grammar are valid, and of any JSON no more is taken than is valid."""
    some = Some(seed)
    for _ in range(3):
        schema = some.schema(2)
        if not isinstance(schema, dict):
            continue
        schema["$defs"] = {
            "x": some.schema(1),
            "y": {"type": "array", "items": {"$ref": "#/$defs/y"}},
        }
        values = [some.value(2) for _ in range(40)]
        try:
            start = matcher_of(schema, form)
        except GrammarError as error:
            assert re.search(NAMED, str(error)), (schema, error)  # noqa: PT017
            if "no JSON fits" in str(error):
                assert not any(is_valid(schema, value) for value in values), schema
            continue
        for _ in range(3):
            text = drawn(start, some.rng)
            assert text is None or is_valid(schema, json.loads(text)), (schema, text)
            if form is JsonSchema and text is not None:
                json.loads(text, object_pairs_hook=unique)
        for value in values:
            is_accepted = any(takes(start, text) for text in forms(value))
            assert not is_accepted or is_valid(schema, value), (schema, value)
            if not is_accepted and not isinstance(value, dict | list) and is_written(value, schema):
                assert not is_valid(schema, value), (schema, value)


# One by one --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # additionalProperties without properties
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            ["{}", '{"a": 1, "b": 2}'],
            ['{"a": "x"}', '{"a": 1, "b": null}'],
        ),
        ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a": 1}']),
        # … and with: no other property has a listed name
        (
            {
                "type": "object",
                "properties": {"ab": {"type": "null"}, "abc": {"type": "null"}},
                "additionalProperties": {"type": "integer"},
            },
            ["{}", '{"ab": null, "a": 1, "abd": 2}', '{"x": 1, "": 2, "abcd": 3}'],
            ['{"ab": 1}', '{"abc": 1}', '{"a": 1, "ab": 2}', '{"\\u0061b": 1}', '{"a": null}'],
        ),
        (
            {
                "properties": {"a" * 40: {"const": 1}, 'q"': {"const": 2}},
                "additionalProperties": {"const": 3},
                "type": ["object"],
            },
            [f'{{"{"a" * 40}": 1, "{"a" * 39}": 3, "{"a" * 41}": 3, "{"a" * 20}b": 3}}'],
            [f'{{"{"a" * 40}": 3}}', '{"q\\"": 3}', '{"\\u0061": 3}'],
        ),
        # required of a key that is not listed
        (
            {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]},
            ['{"b": 1}', '{"a": null, "b": [2]}'],
            ["{}", '{"a": null}'],
        ),
        # options and references with siblings
        ({"type": "string", "anyOf": [{"maxLength": 1}, {"minLength": 3}]}, ['"a"'], ['"ab"', "1"]),
        (
            {
                "$ref": "#/$defs/named",
                "properties": {"age": {"type": "integer"}},
                "required": ["age"],
                "$defs": {"named": {"properties": {"name": {"type": "string"}}}},
                "type": "object",
            },
            ['{"age": 1, "name": "x"}'],
            ['{"name": "x"}', '{"age": 1, "name": 2}'],
        ),
        # enum plus type, and enums together
        ({"type": "string", "enum": ["a", 1, None]}, ['"a"'], ["1", "null"]),
        ({"enum": [1, 2], "allOf": [{"enum": [2.0, 3]}, {"type": "integer"}]}, ["2"], ["1", "3"]),
        # oneOf: options that exclude each other by type, by const, by a property
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"a"', "1"], ["null"]),
        ({"oneOf": [{"enum": [1, 2]}, {"const": "x"}]}, ["1", '"x"'], ["3"]),
        (
            {
                "type": "object",
                "oneOf": [
                    {"properties": {"kind": {"const": kind}, kind: {}}, "required": ["kind", kind]}
                    for kind in ("cat", "dog")
                ],
            },
            ['{"kind": "cat", "cat": 1}', '{"kind": "dog", "dog": 1}'],
            ['{"kind": "cat", "dog": 1}', '{"kind": "cow"}', "{}"],
        ),
        # names that would clash
        (
            {
                "type": "object",
                "properties": {
                    "a b": {"type": "array", "items": {"const": 1}},
                    "a-b": {"type": "array", "items": {"const": 2}},
                    "a": {"properties": {"b": {"const": [3, 4]}}, "type": "object"},
                    "value": {"enum": ["x", "y"]},
                    "root": {"enum": ["r", "s"]},
                },
                "required": ["a b", "a-b", "a", "value", "root"],
            },
            ['{"a b": [1], "a-b": [2], "a": {"b": [3, 4]}, "value": "x", "root": "r"}'],
            ['{"a b": [2], "a-b": [2], "a": {}, "value": "x", "root": "r"}'],
        ),
        # lengths
        ({"type": "array", "items": {"const": 1}, "maxItems": 1}, ["[]", "[1]"], ["[1, 1]"]),
        ({"type": "string", "maxLength": 0}, ['""'], ['"a"']),
        ({"type": "array", "minItems": 2, "maxItems": 2.0}, ["[1, {}]"], ["[1]", "[1, 1, 1]"]),
        (
            {"type": "string", "minLength": 2, "maxLength": 2},
            ['"é🙂"', '"\\n\\u00e9"'],
            ['"\\ud83d\\ude42"', '"a"'],
        ),
        # what nothing fits is left out
        (
            {"type": "object", "properties": {"a": False, "b": {"$ref": "#/$defs/endless"}},
             "$defs": {"endless": {"type": "object", "required": ["x"],
                                   "properties": {"x": {"$ref": "#/$defs/endless"}}}}},
            ["{}"],
            ['{"a": 1}', '{"b": {}}'],
        ),
        ({"type": "array", "items": False}, ["[]"], ["[1]"]),
        (
            {"type": "array", "items": {"enum": [1, 1.0, True]}, "uniqueItems": True,
             "minItems": 2},
            ["[1, true]", "[true, 1]"],
            ["[1, 1.0]", "[1.0, 1]", "[1, 1]", "[1, true, 1.0]", "[1]"],
        ),
        ({"type": "array", "uniqueItems": False}, ["[1, 1]"], ["1"]),
        ({"$ref": "#/anyOf/1", "anyOf": [True, {"const": 1}]}, ["1"], ["2"]),
        ({"anyOf": [{"type": "array", "items": False, "minItems": 1}, {"const": "é\n\"\\"}]},
         ['"é\\n\\"\\\\"'], ["[]"]),
        ({"properties": {"a": {"type": "null"}}}, ["1", '{"a": null}', '"x"'], ['{"a": 1}']),
        ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"const": 1}}}, ["1"], ["2"]),
        (
            {"type": "object", "properties": {"next": {"$ref": "#"}, "n": {"type": "integer"}},
             "required": ["n"]},
            ['{"next": {"next": {"n": 3}, "n": 2}, "n": 1}'],
            ['{"next": {}, "n": 1}'],
        ),
    ],
)  # fmt: skip
def test_grammar_of_a_schema_accepts_its_values_only(schema: Any, good: Any, bad: Any) -> None:
    start = matcher_of(schema)
    for text in good:
        assert is_valid(schema, json.loads(text))
        assert takes(start, text), text
    for text in bad:
        assert not takes(start, text), text


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "pattern": "a+"}, "at #: pattern cannot be written"),
        (
            {"properties": {"a": {"minimum": 3}}, "type": "object"},
            "at #/properties/a: minimum cannot",
        ),
        ({"type": "nosuch"}, "nosuch"),
        ({"type": []}, "type is"),
        ({"enum": []}, "no JSON fits the schema"),
        ({"anyOf": []}, "no JSON fits the schema"),
        ({"type": "string", "const": 1}, "no JSON fits the schema"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "no JSON fits the schema"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "no JSON fits the schema"),
        ({"type": "object", "required": ["a"], "properties": {"a": False}}, "no JSON fits"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no JSON fits the schema"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "at #: a oneOf .* not supported"),
        ({"oneOf": [{"type": "object"}, {"required": ["a"]}]}, "at #: a oneOf .* not supported"),
        ({"$ref": "#/$defs/x"}, "not in the schema"),
        ({"$ref": "https://example.com/x"}, "not in the schema"),
        ({"$ref": "#"}, "leads to itself"),
        ({"$ref": 3}, "not in the schema"),
        ({"properties": {"a": 3}}, "no schema"),
        ({"required": "a"}, "required is 'a'"),
        ({"maxItems": -1}, "maxItems is -1"),
        ({"maxLength": True}, "maxLength is True"),
        ({"minLength": 1.5}, "minLength is 1.5"),
        ({"minItems": float("inf")}, "JSON parse error"),
        ({"const": float("nan")}, "JSON parse error"),
        ('{"enum": [1, NaN]}', "JSON parse error"),
        ({"const": "\ud800"}, "surrogate"),
        ({"enum": "abc"}, "enum is 'abc'"),
        (
            {"allOf": [{"anyOf": [{"const": i} for i in range(30)]} for _ in range(3)]},
            "combinations",
        ),
        ("{", "JSON parse error"),
        ("[]", "allowed is an object"),
        ({"const": {1, 2}}, "JSON parse error"),
    ],
)
def test_schema_that_cannot_be_written_raises_with_its_place(schema: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        json_schema_to_grammar(schema)


def test_schemas_nested_thousands_deep_raise() -> None:
    nested: Any = {"type": "integer"}
    for _ in range(5_000):
        nested = {"type": "array", "items": nested}
    names = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3_000)}
    chain = {"$ref": "#/$defs/d0", "$defs": {**names, "d3000": {"type": "null"}}}
    anchors = {f"d{i}": {"$anchor": f"d{i}", "items": {"$ref": f"#d{i + 1}"}} for i in range(3_000)}
    anchored = {"$ref": "#d0", "$defs": {**anchors, "d3000": {"$anchor": "d3000"}}}
    for schema in (nested, chain):
        with pytest.raises(GrammarError, match=r"deep|JSON parse error"):
            json_schema_to_grammar(schema)
    for schema in (nested, chain, anchored):
        with pytest.raises(GrammarError, match="deep"):  # llguidance would crash
            compiler().matcher(JsonSchema(schema))


def test_object_of_many_properties_is_written_in_time() -> None:
    properties = {f"property {i}": {"type": "integer"} for i in range(300)}
    text = json_schema_to_grammar({"type": "object", "properties": properties})
    assert len(text) < 300_000
    start = compiler().matcher(GBNF(text))
    assert takes(start, '{"property 3": 1, "property 299": 2}')
    assert not takes(start, '{"property 299": 1, "property 3": 2}')
