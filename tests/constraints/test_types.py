"""Python types and functions as constraints."""

from __future__ import annotations

import json
import re
import traceback
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

import pydantic
import pytest

from constraints.test_json_schema import takes
from weft._core.sampling.params import SamplingParams
from weft.constraints import Choice, JsonSchema, as_constraint, from_dict
from weft.errors import ConfigError, GrammarError


class Animal(Enum):
    OWL = "owl"
    FOX = "red fox"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Point:
    x: int
    y: float = 0.0


class Place(TypedDict):
    name: str
    point: NotRequired[Point]


class Trip(TypedDict, total=False):
    places: list[Place]
    first: Required[Place | None]
    last: Annotated[Place, "annotated"]
    best: Place


class Owl(pydantic.BaseModel):
    name: str
    friends: list[Owl] = []


class OpenOwl(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    name: str


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


def weather(city: str, days: int = 1, *, unit: Literal["c", "f"] = "c") -> str:
    raise AssertionError("a constraint does not call the function")


@pytest.mark.parametrize(
    ("given", "texts", "bad"),
    [
        (int, {"12": 12, "-3": -3}, ["1.5", '"1"', "x"]),
        (float, {"1.5": 1.5, "2": 2.0}, ['"1"', "x"]),
        (bool, {"true": True, "false": False}, ["True", "1"]),
        (str, {'"a b"': "a b"}, ["a b"]),
        (list[int], {"[]": [], "[1, 2]": [1, 2]}, ['["a"]', "1"]),
        (dict[str, int], {'{"a": 1}': {"a": 1}}, ['{"a": "x"}', '{"a": 1, "a": 2}']),
        (tuple[int, str], {'[1, "a"]': (1, "a")}, ["[1]", '[1, "a", 2]']),
        (int | None, {"1": 1, "null": None}, ["x"]),
        (Annotated[int, pydantic.Field(ge=2**60 + 1)], {str(2**60 + 1): 2**60 + 1}, [str(2**60)]),
        (Literal["yes", "no"], {"yes": "yes", "no": "no"}, ['"yes"', "maybe"]),
        (Literal["yes", 1], {'"yes"': "yes", "1": 1}, ["yes", "2"]),
        (Animal, {"owl": Animal.OWL, "red fox": Animal.FOX}, ["OWL", '"owl"']),
        (Level, {"2": Level.HIGH}, ["3", "HIGH"]),
        (list[Animal], {'["owl"]': [Animal.OWL]}, ["[owl]", '["cat"]']),
        (Point, {'{"x": 1}': Point(1), '{"x": 1, "y": 2.5}': Point(1, 2.5)}, ['{"x": 1, "z": 2}']),
        (
            Place,
            {'{"name": "a", "point": {"x": 1}}': {"name": "a", "point": Point(1)}},
            ['{"name": "a", "where": 1}', "{}"],
        ),
        (
            list[Trip],
            {
                '[{"places": [{"name": "a"}], "first": null}]': [
                    {"places": [{"name": "a"}], "first": None}
                ]
            },
            ["[{}]", '[{"first": null, "best": {}}]', '[{"first": null, "last": 1}]'],
        ),
        (
            Owl,
            {'{"name": "a", "friends": [{"name": "b"}]}': Owl(name="a", friends=[Owl(name="b")])},
            ['{"name": "a", "age": 1}', '{"name": "a", "friends": [{"name": "b", "age": 1}]}'],
        ),
        (OpenOwl, {'{"name": "a", "age": 1}': OpenOwl(name="a", age=1)}, ["{}"]),
        (list[Pet], {'[{"kind": "dog"}]': [Dog()]}, ["[{}]", '[{"kind": "dog", "lives": 9}]']),
        (
            weather,
            {
                '{"city": "Rome"}': {"city": "Rome", "days": 1, "unit": "c"},
                '{"city": "Rome", "days": 2, "unit": "f"}': {
                    "city": "Rome", "days": 2, "unit": "f"
                },
            },
            ["{}", '{"city": "Rome", "unit": "k"}', '{"city": "Rome", "country": "it"}'],
        ),
    ],
    ids=str,
)  # fmt: skip
def test_type_takes_its_json_and_parses_it(given: Any, texts: Any, bad: list[str]) -> None:
    constraint = as_constraint(given)
    for text, value in texts.items():
        assert takes(constraint, text), text
        parsed = constraint.parse(text)
        assert parsed == value
        assert type(parsed) is type(value)
    assert [text for text in bad if takes(constraint, text)] == []
    assert from_dict(json.loads(json.dumps(constraint.to_dict()))) == constraint
    assert SamplingParams(constraint=given).constraint == constraint


def test_type_with_options_of_json_schema() -> None:
    assert takes(JsonSchema(Owl, whitespace="flexible"), '{\n  "name": "a"\n}')
    assert takes(JsonSchema(Owl, open_objects=True), '{"name": "a", "age": 1}')


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("[0-9]+", r"regular expression: Regex\('\[0-9\]\+'\)"),
        ('root ::= "a"', r"GBNF: GBNF\(text\)"),
        ("start: /a/", r"Lark: Lark\(text\)"),
        ('{"type": "object"}', r"JSON schema: JsonSchema\(text\)"),
        ("yes", r"for exactly this text: Choice\(\['yes'\]\)"),
        ("", "constraint=None"),
        (["yes", "no"], r"for one of these texts: Choice\(\['yes', 'no'\]\)"),
    ],
)
def test_text_is_rejected_with_a_guess(given: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match="allowed is a Pydantic class, a type") as caught:
        as_constraint(given)
    assert re.search(hint, caught.value.hint)
    assert re.search(hint, "".join(traceback.format_exception(caught.value)))


def test_texts_that_choice_rejects_get_no_guess() -> None:
    with pytest.raises(ConfigError) as caught:
        as_constraint(["yes", ""])
    assert caught.value.hint == ""


class Clock:
    def wait(self, minutes: int) -> None: ...

    @staticmethod
    def ring(times: int) -> None: ...


def draw(point: complex) -> None: ...


def test_method_needs_an_object() -> None:
    with pytest.raises(ConfigError, match=r"Clock\.wait is a method.* Give Clock\(…\)\.wait"):
        as_constraint(Clock.wait)
    assert as_constraint(Clock().wait).parse('{"minutes": 1}') == {"minutes": 1}
    assert as_constraint(Clock.ring).parse('{"times": 1}') == {"times": 1}


@pytest.mark.parametrize("given", [complex, list[complex], draw])
def test_complex_numbers_have_no_json_schema(given: Any) -> None:
    with pytest.raises(ConfigError, match="has no JSON schema: .*complex numbers"):
        as_constraint(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "constraint is 3; allowed"),
        (None.__class__.__call__, "allowed"),
        (lambda *cities: cities, "takes .cities; allowed are functions with named arguments"),
        (type("Plain", (), {}), "Plain.* has no JSON schema"),
    ],
)
def test_other_value_is_rejected(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_constraint(given)


def test_unsupported_pattern_of_a_field_is_named_with_its_place() -> None:
    class Price(pydantic.BaseModel):
        amount: Annotated[str, pydantic.Field(json_schema_extra={"pattern": "(?=1)1"})]

    with pytest.raises(GrammarError, match="at #/properties/amount: .*look-ahead"):
        JsonSchema(Price).validated()


def test_choice_of_literal_is_the_plain_choice() -> None:
    assert as_constraint(Literal["yes", "no"]) == Choice(["yes", "no"])
