"""`JsonSchema`: exact integers, names, keywords, whitespace and closed objects."""

from __future__ import annotations

import json
import random
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft._core.tokens.tokenizer import Tokenizer
from weft.constraints import JsonSchema, Lark, from_dict, json_schema_to_grammar
from weft.constraints.base import Compiler, Constraint, Matcher, n_words
from weft.constraints.grammar import Prefixed
from weft.constraints.unique_names import OpenNames
from weft.errors import ConfigError, ConstraintError, FormatError, GrammarError

BIG = 9007199254740993  # 2**53 + 1, which no 64-bit float is


@cache
def compiler() -> Compiler:
    text = Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))
    return Compiler(text, text.n_vocab)


def takes(constraint: Constraint, text: str) -> bool:
    matcher, ids = compiler().matcher(constraint), compiler().ids_of(text.encode())
    if not matcher.takes(ids):
        return False
    for token in ids:
        matcher.accept(token)
    return matcher.may_end


def allowed(matcher: Matcher) -> set[int]:
    bits = np.empty(n_words(compiler().n_vocab), dtype=np.int32)
    matcher.fill(bits)
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")[: compiler().n_vocab]
    return set(flags.nonzero()[0].tolist())


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"const": BIG}, [str(BIG)], [str(BIG - 1), str(BIG + 1)]),
        ({"enum": [BIG, "x"]}, [str(BIG), '"x"'], [str(BIG - 1)]),
        ({"const": {"id": [BIG]}}, [f'{{"id": [{BIG}]}}'], [f'{{"id": [{BIG - 1}]}}']),
        (
            {"type": "integer", "minimum": BIG, "maximum": BIG + 2},
            [str(BIG), str(BIG + 2)],
            [str(BIG - 1), str(BIG + 3), "7"],
        ),
        (
            {"type": "integer", "exclusiveMinimum": -(2**63), "exclusiveMaximum": -BIG},
            [str(1 - 2**63), str(-BIG - 1)],
            [str(-(2**63)), str(-BIG), "0"],
        ),
        (
            {"type": "number", "minimum": 0.5, "maximum": BIG},
            ["0.5", "3.25", "1", str(BIG), f"{BIG}.0", f"{BIG - 1}.9"],
            ["0.4", "0", f"{BIG}.1", str(BIG + 1), "-1"],
        ),
        ({"type": "number", "maximum": 7.0 - 2**63}, [str(-(2**63))], [str(1 - 2**63), "1"]),
        ({"type": "integer", "multipleOf": 1, "minimum": BIG}, [str(BIG)], [str(BIG - 1)]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, ["4"], ["3"]),  # draft 4
    ],
)
def test_integers_of_any_size_are_exact(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(JsonSchema(schema), text)] == []
    assert [text for text in bad if takes(JsonSchema(schema), text)] == []


def test_parse_of_big_integer_returns_it() -> None:
    assert JsonSchema({"const": BIG}).parse(str(BIG)) == BIG
    assert JsonSchema({"type": "object"}).parse(f'{{"id": {BIG}}}') == {"id": BIG}


NAMES = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "additionalProperties": {"type": "string"},
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (NAMES, ['{"n": 1, "b": "x"}', '{"nn": "x"}'], ['{"n": "x"}', '{"\\u006e": "x"}']),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            ['{"a": 1, "b": 2}'],
            ['{"a": 1, "a": 2}', '{"a": 1, "b": 2, "a": 3}'],
        ),
        (
            {"type": "object"},
            ['{"a": {"a": 1}, "b": [{"a": 1}, {"a": 1}]}', '{"a": "\\", \\"a"}'],
            ['{"a": 1, "a": 2}', '{"b": {"a": 1, "a": 2}}', '{"b": [{"\\n": 1, "\\u000a": 2}]}'],
        ),
        ({}, ['"{"', '["{", {"a": 1}]', '"a"'], ['{"a": "}", "a": 1}']),
        (
            {"type": "object", "patternProperties": {"^x": {"type": "integer"}, "y$": {}}},
            ['{"xa": 1, "y": "s", "q": null}'],
            ['{"xa": "s"}', '{"xy": "s"}'],
        ),
        (
            {
                "type": "object",
                "patternProperties": {"^x/[0-9]+$": {"type": "null"}},
                "additionalProperties": False,
            },
            ["{}", '{"x/1": null, "x/22": null}'],
            ['{"x/": null}', '{"y": null}', '{"x/1": 1}'],
        ),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "minProperties": 1},
            ['{"a": 1}', '{"a": {}, "b": 2}'],
            ["{}", '{"c": 1}'],
        ),
        (
            {
                "type": "object",
                "propertyNames": {"pattern": "^[a-z]+$", "maxLength": 2},
                "maxProperties": 2,
            },
            ["{}", '{"ab": 1, "c": 2}'],
            ['{"abc": 1}', '{"A": 1}', '{"a": 1, "b": 2, "c": 3}'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {}, "b": {}, "c": {}},
                "required": ["b"],
                "minProperties": 2,
                "maxProperties": 2,
            },
            ['{"a": 1, "b": 2}', '{"b": 1, "c": 2}'],
            ['{"b": 1}', '{"a": 1, "c": 2}', '{"a": 1, "b": 2, "c": 3}'],
        ),
    ],
)
def test_names_of_properties(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(JsonSchema(schema), text)] == []
    assert [text for text in bad if takes(JsonSchema(schema), text)] == []


@pytest.mark.parametrize("seed", range(3))
def test_mask_of_open_object_has_exactly_the_accepted_tokens(seed: int) -> None:
    rng = random.Random(seed)
    text = '{"ab": 1, "a": {"x": [], "y": 2}, "abc": "ab", "b": [{"a": 1}]}'
    matcher = compiler().matcher(JsonSchema({"type": "object"}))
    for token in compiler().ids_of(text.encode()):
        mask = allowed(matcher)
        sample = {token, *rng.sample(range(compiler().n_vocab), 60), *sorted(mask)[::9]}
        assert {one for one in sample if matcher.is_allowed(one)} == mask & sample
        matcher.accept(token)
    assert matcher.may_end


def test_accept_of_repeated_name_raises_and_changes_nothing() -> None:
    matcher = compiler().matcher(JsonSchema({"type": "object"}))
    *ids, last = compiler().ids_of(b'{"a": 1, "a"')
    for token in ids:
        matcher.accept(token)
    assert not matcher.is_allowed(last)
    with pytest.raises(ConstraintError, match="a name that it has already"):
        matcher.accept(last)
    twin = matcher.clone()
    for token in compiler().ids_of(b'b": 2}'):
        twin.accept(token)
    assert twin.may_end
    assert not matcher.may_end


@pytest.mark.parametrize("text", [b'{"a": [1, {"b": "\\"}"}], "c": {"a": 2}} {"a": 1}', b'"{'])
def test_open_names_are_the_same_however_the_text_is_cut(text: bytes) -> None:
    once = OpenNames().after(text)
    state: OpenNames | None = OpenNames()
    for byte in text:
        assert state is not None
        state = state.after(bytes((byte,)))
    assert once is not None
    assert state is not None
    assert (once.stack, once.string, once.is_name) == (state.stack, state.string, state.is_name)


def test_closed_objects_need_no_check_of_names() -> None:
    closed = {"type": "object", "properties": {"a": {"type": "null"}}}
    assert JsonSchema(closed).unique_names_after() is None
    assert JsonSchema({"type": "object"}).unique_names_after() == ""


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "format": "path"}, ['"x y"'], ["1"]),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"x"', '"2024-02-30"']),
        ({"type": "string", "pattern": "^a", "allOf": [{"pattern": "b$"}]}, ['"ab"'], ['"a"']),
        ({"type": "string", "pattern": "^a|b$", "maxLength": 2}, ['"ac"', '"cb"'], ['"cc"']),
        ({"anyOf": [{"not": {}}, {"type": "null"}]}, ["null"], ["1"]),
        ({"not": {"type": ["object", "array", "string"]}}, ["1", "null"], ['"x"', "[]"]),
        ({"enum": [1, 2, "a"], "not": {"const": 2}}, ["1", '"a"'], ["2"]),
        ({"enum": ["ab", "c"], "pattern": "^a"}, ['"ab"'], ['"c"']),
        ({"enum": [1, 6], "if": {"minimum": 5}, "then": {"multipleOf": 5}}, ["1"], ["6"]),
        ({"if": {}, "then": {"type": "null"}, "else": {"type": "string"}}, ["null"], ['"x"']),
        ({"if": False, "then": {"type": "null"}, "else": {"const": 1}}, ["1"], ["null"]),
        ({"type": "null", "if": {"const": 1}}, ["null"], ["1"]),
        ({"type": "array", "items": {"type": "null"}, "contains": {"const": 1}, "minContains": 0},
         ["[]", "[null]"], ["[1]"]),
        ({"type": "string", "dependentRequired": {"a": ["b"]}, "x-order": 3}, ['"x"'], ["1"]),
        ({"type": "object", "dependentRequired": {"a": []}}, ['{"a": 1}'], ["1"]),
        ({"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 2},
         ['["c", "a"]', '["a", "b", "c"]'], ['["a"]', '["a", "a"]', '["a", "b", "a"]']),
        ({"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
         ["[]", "[true, false]"], ["[true, true]"]),
        ({"type": "array", "items": {}, "uniqueItems": True, "maxItems": 1}, ['["x"]'], ["[1, 1]"]),
        ({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
         ["[]", "[1]", "[1, 2]"], ["[2]", "[1, 2, 3]"]),
        ({"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}},  # draft 7
         ["[1, 2, 2]"], ["[2]", "[1, 1]"]),
        ({"$id": "https://x.org/a", "$ref": "b#/$defs/n", "$defs": {
            "b": {"$id": "b", "$defs": {"n": {"$ref": "#m"}, "m": {"$anchor": "m", "const": 4}}}}},
         ["4"], ["5"]),
    ],
)  # fmt: skip
def test_keywords(schema: Any, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not takes(JsonSchema(schema), text)] == []
    assert [text for text in bad if takes(JsonSchema(schema), text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"contains": {"const": 1}, "type": "array"}, "at #: contains is not supported"),
        ({"not": {"const": 1}}, "at #: not is not supported"),
        ({"if": {"const": 1}, "then": {"const": 2}}, "at #: if is not supported"),
        ({"anyOf": [{"dependentRequired": {"a": ["b"]}}]}, "at #/anyOf/0: dependentRequired"),
        ({"items": {"unevaluatedItems": False}}, "at #/items: unevaluatedItems"),
        (
            {"properties": {"a/b": {"items": {"type": "string"}, "uniqueItems": True}}},
            "at #/properties/a~1b: uniqueItems is not supported: items must be of an enum",
        ),
        (
            {"items": {"enum": list(range(65))}, "uniqueItems": True},
            "at #: uniqueItems is not supported: too many values; give maxItems",
        ),
        ({"properties": {"a": {"pattern": "(?=x)y"}}}, "at #/properties/a: .*look-ahead"),
        (
            {"items": {"patternProperties": {"(?=x)y": {}}}},
            "at #/items: the pattern '(?=x)y' is not",
        ),
        (
            {"items": {"patternProperties": {"(": {}}}},
            "at #/items: the pattern .* is not supported",
        ),
        ({"items": {"enum": ["a"], "pattern": "("}}, "at #/items: the pattern .* is not supported"),
        (
            {"$defs": {"n": {"multipleOf": 2**60}}, "items": {"$ref": "#/$defs/n"}},
            r"at #/\$defs/n: multipleOf",
        ),
        ({"properties": {"a": {"$ref": "other.json"}}}, "at #/properties/a: .ref 'other.json'"),
        ({"$dynamicRef": "#a"}, "at #: .dynamicRef is not supported"),
        ({"items": {"minimum": "3"}}, "at #/items: minimum is '3'"),
    ],
)
def test_unsupported_keyword_is_named_with_its_place(schema: Any, message: str) -> None:
    message = message.replace("(?=x)", r"\(\?=x\)")
    with pytest.raises(GrammarError, match=message):
        compiler().matcher(JsonSchema(schema))


MANY = {"items": {"enum": [f"t{i}" for i in range(20)]}, "uniqueItems": True, "type": "array"}


@pytest.mark.parametrize(
    ("limits", "good", "bad"),
    [
        ({}, [[], ["t3"], ["t19", "t3", "t0"], list(range(20))], [["t3", "t3"], ["t20"]]),
        (
            {"minItems": 2, "maxItems": 3},
            [["t1", "t2"], ["t9", "t1", "t12"]],
            [[], ["t1"], ["t1", "t2", "t1"], ["t1", "t2", "t3", "t4"]],
        ),
    ],
)
def test_unique_items_of_many_constants(limits: Any, good: Any, bad: Any) -> None:
    for indent, whitespace in ((None, "compact"), (2, "flexible")):
        constraint = JsonSchema(MANY | limits, whitespace=whitespace)
        for items, is_allowed in [(i, True) for i in good] + [(i, False) for i in bad]:
            texts = [item if isinstance(item, str) else f"t{item}" for item in items]
            assert takes(constraint, json.dumps(texts, indent=indent)) is is_allowed, items


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "is_closed"),
    [
        (OBJECT, True),
        ({**OBJECT, "additionalProperties": True}, False),
        ({"allOf": [OBJECT, {"required": ["a"]}]}, True),
        ({"allOf": [OBJECT, {"additionalProperties": {}}]}, False),
        ({"$ref": "#/$defs/o", "$defs": {"o": OBJECT}}, True),
    ],
)
def test_objects_with_properties_are_closed_by_default(schema: Any, is_closed: bool) -> None:
    from weft.constraints import GBNF

    for make in (JsonSchema, lambda s, **o: GBNF(json_schema_to_grammar(s, **o))):
        assert takes(make(schema), '{"a": 1}')
        assert takes(make(schema), '{"a": 1, "b": 2}') != is_closed
        assert takes(make(schema, open_objects=True), '{"a": 1, "b": 2}')
        assert not takes(make(schema, open_objects=True), '{"a": "x"}')


SPACES = [
    ('{"a": 1, "b": [1, 2]}', True),
    ('{"a":1,"b":[1,2]}', False),
    ('{ "a": 1, "b": [ 1, 2 ] }', False),
    ('{\n  "a": 1,\n  "b": [\n    1,\n    2\n  ]\n}', False),
    ('{\r\n\t"a": 1,\r\n\t"b": []\r\n}', False),
]


@pytest.mark.parametrize(("text", "is_compact"), SPACES)
@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"properties": {"a": {}, "b": {"items": {"type": "integer"}}}},
        {"enum": [{"a": 1, "b": [1, 2]}, {"a": 1, "b": []}]},
    ],
)
def test_whitespace(schema: Any, text: str, is_compact: bool) -> None:
    assert takes(JsonSchema(schema, whitespace="flexible"), text)
    assert takes(JsonSchema(schema), text) == is_compact


def test_flexible_whitespace_is_what_pretty_printers_write() -> None:
    flexible = JsonSchema({}, whitespace="flexible")
    for indent in ("\n" + " " * 32, "\n" + "\t" * 32, "\n", " ", ""):
        assert takes(flexible, "[" + indent + "1," + indent + "2" + indent + "]"), indent
        assert takes(flexible, "{" + indent + '"a": 1,' + indent + '"b":2' + indent + "}"), indent
    for text in (
        '{"a"\t\t\t\t: 1}',
        '{"a" : 1}',
        '{"a":  1}',
        '{"a":\n1}',
        '{"a": 1 , "b": 2}',
        '{"a": 1\n, "b": 2}',
        "[  1]",
        "[\t1]",
        "[\n\n1]",
        "[\n \t1]",
        "[\n" + " " * 33 + "1]",
        "[1\n" + "\t" * 33 + "]",
        " 1",
        "1 ",
    ):
        assert not takes(flexible, text), text


def test_unknown_whitespace_is_an_error() -> None:
    with pytest.raises(ConfigError, match="allowed are 'compact' and 'flexible'"):
        JsonSchema({}, whitespace="none")  # type: ignore[arg-type]


def test_options_are_part_of_the_value_and_of_its_data() -> None:
    plain = JsonSchema(OBJECT)
    flexible = JsonSchema(OBJECT, whitespace="flexible", open_objects=True)
    assert plain != flexible
    assert plain.to_dict() == {"json_schema": OBJECT}
    for constraint in (plain, flexible, Lark("start: /a/", unique_names=True, json_after="a")):
        assert from_dict(json.loads(json.dumps(constraint.to_dict()))) == constraint
    with pytest.raises(FormatError):
        from_dict({"json_schema": {}, "nosuch": 1})


def test_lark_with_unique_names_checks_each_json_in_the_text() -> None:
    grammar = 'start: "<" %json {"type": "object"} "> " %json {"type": "object"}'
    assert takes(Lark(grammar), '<{"a": 1, "a": 2}> {}')
    constraint = Lark(grammar, unique_names=True)
    assert takes(constraint, '<{"a":1}> {"a":1}')
    assert not takes(constraint, '<{"a":1,"a":2}> {}')
    assert not takes(constraint, '<{}> {"a":1,"a":2}')


@pytest.mark.parametrize("prefix", [' "', "{", '["', 'x}, "'])
def test_names_are_compared_after_a_prefix(prefix: str) -> None:
    constraint = Prefixed(prefix, JsonSchema({"type": "object"}))
    assert takes(constraint, prefix + '{"a": 1, "b": {"a": 1}}')
    assert not takes(constraint, prefix + '{"a": 1, "a": 2}')
    twice = Prefixed(prefix, Lark('start: "{<" %json {}', unique_names=True, json_after="{<"))
    assert takes(twice, prefix + '{<{"a":1}')
    assert not takes(twice, prefix + '{<{"a":1,"a":2}')


def test_schema_of_many_properties_compiles_in_linear_space() -> None:
    sizes = []
    for n in (100, 200):
        properties = {f"property {i}": {"type": "integer"} for i in range(n)}
        constraint = JsonSchema({"type": "object", "properties": properties})
        assert takes(constraint, f'{{"property 3": 1, "property {n - 1}": 2}}')
        sizes.append(len(constraint.grammar()))
    assert sizes[1] < 2.2 * sizes[0]
