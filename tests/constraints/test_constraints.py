"""Values, grammars and matchers, without a model."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Set
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from weft._core.sampling.params import SamplingParams
from weft._core.tokens.tokenizer import Tokenizer
from weft.constraints import (
    GBNF,
    Allow,
    AnyOf,
    Choice,
    JsonSchema,
    Lark,
    Lazy,
    Regex,
    as_constraint,
    from_dict,
    json_schema_to_grammar,
)
from weft.constraints.base import Compiler, n_words
from weft.constraints.grammar import Masks
from weft.constraints.kinds import AllowMatcher
from weft.errors import ConfigError, ConstraintError, FormatError, GrammarError, Unfinished

ALL = [
    JsonSchema({"type": "integer"}),
    Regex("[0-9]+"),
    Lark('start: "a"+'),
    GBNF('root ::= "a"+'),
    Choice(["yes", "no"]),
    Allow({5, 6}),
    Lazy(Regex("x[0-9]"), ["x", re.compile("y+"), 7]),
    AnyOf([Regex("[0-9]+"), JsonSchema({"type": "object"}, whitespace="flexible")]),
]


# Texts of one choice: prefixes of one another, multi-byte characters, marks that grammars read.
MANY = [
    *(f"item {number}" for number in range(20_000)),
    *("a" * length for length in range(1, 20)),
    *("naïve 🦊", "naïve 🦊🦊", "日本", "日本語", " ", "  b", "\n", "\x00\t\x7f"),
    *(
        "<|end|>",
        "<|end|>x",
        '"',
        '\\"',
        "\\u0041",
        "| b",
        "/x/i",
        "CHOICE",
        "start: c",
        "%json {}",
    ),
]


def _ring(n: int) -> str:
    rules = "\n".join(f'r{index}: "a" r{index + 1} | "b"' for index in range(n))
    return f'start: r0\n{rules}\nr{n}: "c" start'


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    text = Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))
    return Compiler(text, text.n_vocab)


def fits(compiler: Compiler, constraint, text: str) -> bool:
    matcher = compiler.matcher(constraint)
    for token in compiler.text.encode(text, add_bos=False):
        if not matcher.is_allowed(token):
            return False
        matcher.accept(token)
    return matcher.may_end


@pytest.mark.parametrize("constraint", ALL, ids=lambda each: type(each).__name__)
def test_constraint_survives_a_json_round_trip(constraint) -> None:
    data = json.loads(json.dumps(constraint.to_dict()))
    assert from_dict(data) == constraint
    assert hash(from_dict(data)) == hash(constraint)
    params = SamplingParams(constraint=constraint, seed=1)
    restored = SamplingParams.from_dict(json.loads(json.dumps(params.to_dict())))
    assert restored == params


def test_choice_of_20_000_texts_allows_these_and_no_others(compiler: Compiler) -> None:
    first, texts = compiler.matcher(Choice(MANY)), {text.encode() for text in MANY}

    @cache
    def after(done: bytes) -> set[int]:
        rest = [text[len(done) :] for text in texts if text.startswith(done)]
        begun = {text[:length] for text in rest for length in range(1, len(text) + 1)}
        ends = compiler.stop_ids if done in texts else frozenset()
        return {token for token, each in enumerate(compiler.spellings) if each in begun} | ends

    for text in [*MANY[:20_000:6_666], *MANY[20_000:]]:
        matcher, done = first.clone(), b""
        for token in [*compiler.ids_of(text.encode()), None]:
            bits = np.zeros(n_words(compiler.n_vocab), dtype=np.int32)
            matcher.fill(bits)
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")
            ids = np.flatnonzero(allowed[: compiler.n_vocab]).tolist()
            # Where the text is forced, the library takes one way of writing it.
            assert set(ids) == after(done) or ids == matcher.forced()[:1]
            assert matcher.may_end == (done in texts)
            if token is not None:
                matcher.accept(token)
                done += compiler.spellings[token]
        assert done == text.encode()


def test_choice_of_few_texts_has_the_masks_and_forced_tokens_of_its_rule(
    compiler: Compiler,
) -> None:
    """A seed draws from a choice what it drew when each text was an alternative of a rule."""
    for texts in (["yes"], ["yes", "no"], ["a", "ab", "abc"], MANY[19_990:]):
        written = (json.dumps(each).replace("\x7f", "\\u007f") for each in texts)
        rule = Lark("start: " + " | ".join(written))
        for text in texts:
            one, two = compiler.matcher(Choice(texts)), compiler.matcher(rule)
            for token in [*compiler.ids_of(text.encode()), None]:
                assert one.forced() == two.forced()
                assert (one.may_end, one.must_end) == (two.may_end, two.must_end)
                masks = np.zeros((2, n_words(compiler.n_vocab)), dtype=np.int32)
                one.fill(masks[0])
                two.fill(masks[1])
                assert (masks[0] == masks[1]).all()
                if token is not None:
                    one.accept(token)
                    two.accept(token)


def test_user_values_become_a_constraint_or_raise() -> None:
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")

    class Owl(pydantic.BaseModel):
        name: str
        age: int

    constraint = as_constraint(Owl)
    assert constraint.parse('{"name": "Lena", "age": 3}') == Owl(name="Lena", age=3)
    assert as_constraint({"type": "object"}) == JsonSchema('{"type": "object"}')
    assert as_constraint({3, 4}) == Allow([4, 3])
    with pytest.raises(ConfigError, match="allowed is a Pydantic.* Allow, TokenLimits, AnyOf"):
        as_constraint("abc")
    surrogate = ["a", "\ud83d"]
    for wrong in (
        lambda: Choice([]), lambda: Choice("ab"), lambda: Choice([""]), lambda: Choice(surrogate)
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="Choice"):
            wrong()
    for wrong in (lambda: Allow(()), lambda: Allow({-1}), lambda: Allow({"a"})):
        with pytest.raises(ConfigError, match="Allow"):
            wrong()
    for triggers in ((), "word", [""], [1.5]):
        with pytest.raises(ConfigError, match="triggers"):
            Lazy(Regex("a"), triggers)
    with pytest.raises(FormatError):
        from_dict({"nosuch": 1})


PANICS = 'start: %json {"type": "integer", "maximum": "' + "ü" * 300 + '"}'
OVERLAPPING = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Regex("((("), "line 1.*unclosed group"),
        (lambda: GBNF("root ::= ((("), "line 1: expected"),
        (lambda: GBNF('root ::= nosuch "a"'), "nosuch"),
        (lambda: Lark("start: foo\n"), "line 1.*unknown name"),
        (lambda: JsonSchema({"type": "nosuch"}), "nosuch"),
        (lambda: JsonSchema("{"), "not JSON"),
        (lambda: JsonSchema({"type": "integer", "maximum": "ü"}), "at #: maximum is 'ü'"),
        (lambda: Lark(PANICS), "char boundary"),
        (lambda: JsonSchema({"const": float("inf")}), "not JSON"),
        (lambda: JsonSchema('{"const": 1e999}'), "not JSON"),
        (lambda: JsonSchema("3"), "allowed is an object"),
        (lambda: JsonSchema(False), "no JSON fits"),
        (lambda: JsonSchema('{"const": "\\ud83d"}'), "surrogate"),
        # the library's own option is not accepted
        (lambda: JsonSchema(OVERLAPPING), "oneOf whose options may overlap .*; write anyOf"),
        (lambda: Lark(f"start: %json {json.dumps(OVERLAPPING)}"), "line 1.*; write anyOf"),
        (lambda: Regex("\ud83d"), "surrogate"),
        (lambda: Lark(_ring(3_000)), "deep"),  # llguidance would crash
        (lambda: Regex("ab\na(?=b)"), "Regex is not valid: line 1: regex parse error"),
        (lambda: Lark("start: b\nb: c ~ 3"), 'line 2: at 2.4.: unknown name: "c"$'),
        (lambda: Regex(""), "not empty"),
        (lambda: GBNF("  "), "not empty"),
    ],
)
def test_invalid_grammar_raises_with_line_and_reason(compiler, make, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        compiler.matcher(make())


def test_one_of_whose_options_have_their_own_const_is_accepted(compiler) -> None:
    options = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "name": {"type": "string"}},
            "required": ["kind"],
        }
        for kind in ("cat", "dog")
    ]
    either = JsonSchema({"oneOf": options})
    assert fits(compiler, either, '{"kind": "dog", "name": "Rex"}')
    assert not fits(compiler, either, '{"kind": "cow"}')


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Regex("[0-9]{3}"), ["420"], ["42", "4200", "abc"]),
        (Choice(["yes", "no, never"]), ["yes", "no, never"], ["no", "maybe"]),
        (Lark('start: "a"+ "b"'), ["ab", "aaab"], ["b", "a"]),
        (GBNF('root ::= "{" ws "}"\nws ::= [ \\n]*'), ["{}", "{ \n }"], ["{", "{a}"]),
        (JsonSchema({"enum": ["x", 3]}), ['"x"', "3"], ["4", "x"]),
        (JsonSchema(True), ['{"a": [1, null]}', "3"], ["a", ""]),
        (Regex("a?"), ["", "a"], ["aa"]),
        (GBNF('root ::= ""'), [""], ["a"]),
        (Lark(_ring(200)), ["ab", "aaab"], ["a"]),
    ],
)
def test_fitting_texts_are_allowed_and_no_others(compiler, constraint, good, bad) -> None:
    assert all(fits(compiler, constraint, text) for text in good)
    assert not any(fits(compiler, constraint, text) for text in bad)


def test_forbidden_token_changes_nothing_and_a_clone_advances_alone(compiler) -> None:
    matcher = compiler.matcher(Regex("ab|cd"))
    a, b, c, d = (compiler.text.encode(character, add_bos=False)[0] for character in "abcd")
    with pytest.raises(ConstraintError):
        matcher.accept(b)
    twin = matcher.clone()
    matcher.accept(a)
    twin.accept(c)
    assert matcher.forced() == [b]
    assert twin.forced() == [d]
    matcher.accept(b)
    assert matcher.must_end
    assert matcher.may_end
    end = min(compiler.text.stop_ids)
    assert matcher.is_allowed(end)
    assert not twin.is_allowed(end)
    matcher.accept(end)
    assert matcher.must_end
    assert not twin.may_end
    assert compiler.matcher(Regex("ab|cd")).is_allowed(c)  # the cached matcher is at its start


def test_masks_of_a_batch_equal_those_of_single_tokens(compiler) -> None:
    constraints = [Regex("[0-9]+"), None, Allow({9, 70}), Choice(["yes", "no"]), Regex("[0-9]+")]
    constraints.append(AnyOf([Regex("[0-9]+"), Choice(["yes", "no"])]))
    matchers = [None if each is None else compiler.matcher(each) for each in constraints]
    matchers[4].accept(compiler.text.encode("7", add_bos=False)[0])
    logits = np.zeros((len(matchers), compiler.n_vocab), dtype=np.float32)
    masks = Masks(*2 * [[frozenset()] * len(matchers)])
    for begun in (False, True):
        if begun:
            masks.start(matchers, compiler.n_vocab)
        masks.finish(matchers, compiler.n_vocab)
        masked = masks.apply(logits, np.arange(len(matchers)))
        assert np.array_equal(masks.apply(logits[1:3], np.arange(1, 3)), masked[1:3])
        for row, matcher in zip(masked, matchers, strict=True):
            allowed = [
                matcher is None or matcher.is_allowed(token) for token in range(compiler.n_vocab)
            ]
            assert np.isfinite(row).tolist() == allowed
    assert not logits.any()
    ends = sorted(compiler.text.stop_ids)
    assert np.isfinite(masked[4, ends]).all()
    assert not np.isfinite(masked[0, ends]).any()


@pytest.mark.parametrize(
    ("triggers", "text", "is_on"),
    [
        (["<call>"], "hello <call>", True),
        (["<call>"], "hello <cal", False),
        ([re.compile("<c.ll>")], "say <cxll>", True),
        ([re.compile("<c.ll>")], "say", False),
    ],
)
def test_lazy_grammar_starts_at_its_trigger(compiler, triggers, text, is_on) -> None:
    matcher = compiler.matcher(Lazy(Regex(r"<c.ll>[0-9]{2}"), triggers))
    for token in compiler.text.encode(text, add_bos=False):
        matcher.accept(token)
    z, seven = (compiler.text.encode(each, add_bos=False)[0] for each in "z7")
    assert matcher.is_allowed(z) is not is_on
    assert matcher.is_allowed(seven)
    assert matcher.may_end is not is_on
    twin = matcher.clone()
    for _ in range(2):
        matcher.accept(seven)
    assert matcher.must_end is is_on
    assert not twin.must_end


def test_lazy_grammar_waits_for_a_token_and_rejects_an_impossible_trigger(
    compiler,
) -> None:
    start = compiler.text.encode("x", add_bos=False)[0]
    matcher = compiler.matcher(Lazy(Regex("x[0-9]"), [start]))
    other = compiler.text.encode("a", add_bos=False)[0]
    matcher.accept(other)
    matcher.accept(start)
    assert not matcher.is_allowed(other)
    for trigger in ("ab", other):
        with pytest.raises(GrammarError, match="begins with the trigger"):
            compiler.matcher(Lazy(Regex("[0-9]"), [trigger]))
    with pytest.raises(ConfigError, match="token id"):
        compiler.matcher(Lazy(Regex("[0-9]"), [compiler.n_vocab]))
    # What a pattern finds is not known before: there the mask keeps it out.
    wrong = compiler.matcher(Lazy(Regex("[0-9]"), [re.compile("a.")]))
    wrong.accept(other)
    assert not wrong.is_allowed(start)
    with pytest.raises(ConstraintError, match="begins with the trigger's own text"):
        wrong.accept(start)
    assert wrong.may_end


@pytest.mark.parametrize("required", [(), ("a",), ("b",), ("c",), ("a", "c"), ("a", "b", "c")])
def test_schema_as_gbnf_accepts_the_same_objects(compiler, required) -> None:
    schema = {
        "type": "object",
        "properties": {key: {"type": "integer"} for key in "abc"},
        "required": list(required),
    }
    grammar = GBNF(json_schema_to_grammar(schema))
    for n in range(4):
        for keys in itertools.combinations("abc", n):
            text = json.dumps(dict.fromkeys(keys, 1))
            assert fits(compiler, grammar, text) == (set(required) <= set(keys)), text


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": ["string", "null"], "maxLength": 3}, ['"abc"', "null"], ['"abcd"', "1"]),
        ({"type": "array", "items": {"enum": ["x"]}, "minItems": 1}, ['["x", "x"]'], ["[]"]),
        ({"anyOf": [{"const": {"k": '"q"'}}, {"type": "boolean"}]}, ["true"], ["1"]),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}}, ["-1.5e3"], ["x"]),
        ({}, ['{"a": [1, {"b": null}]}'], ["{a}"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ],
)
def test_parts_of_a_schema_have_their_rules(compiler, schema, good, bad) -> None:
    text = json_schema_to_grammar(json.dumps(schema))
    assert text.startswith("root ::= ")
    assert all(fits(compiler, GBNF(text), each) for each in good)
    assert not any(fits(compiler, GBNF(text), each) for each in bad)


def test_schema_keyword_without_gbnf_raises_and_is_named() -> None:
    for schema, message in (
        ({"type": "string", "pattern": "a+"}, "pattern"),
        ({"type": "nosuch"}, "nosuch"),
        ({"$ref": "#/$defs/x"}, "not in the schema"),
        ("{", "JSON parse error"),
        ("[]", "allowed is an object"),
        ({"properties": {"a": 3}}, "no schema"),
    ):
        with pytest.raises(GrammarError, match=message):
            json_schema_to_grammar(schema)


def test_parse_of_a_truncated_text_raises_unfinished() -> None:
    with weft.load("tiny") as lm:
        loom = weft.Loom(lm, "A person:")
        schema = {"type": "object", "properties": {"name": {"type": "string"}}}
        (node,) = loom.grow(1, constraint=schema, max_tokens=2, seed=1)
        with pytest.raises(Unfinished, match="not finished: .* larger max_tokens") as caught:
            _ = node.parsed
    assert isinstance(caught.value, ValueError)


def test_any_of_allows_the_texts_of_each_option_and_no_mixture(compiler) -> None:
    call = Lark('start: "{\\"name\\": \\"f\\"}" | "{\\"name\\": \\"g\\"}"')
    answer = JsonSchema({"properties": {"n": {"type": "integer"}}, "required": ["n"]})
    either = AnyOf([answer, call])
    for text in ('{"n": 12}', '{"name": "f"}', '{"name": "g"}'):
        assert fits(compiler, either, text)
    for text in ('{"n": "f"}', '{"name": 12}', '{"n": 12', "{}"):
        assert not fits(compiler, either, text)
    assert either.parse('{"n": 12}') == {"n": 12}


def test_any_of_forces_what_all_open_options_force(compiler) -> None:
    matcher = compiler.matcher(AnyOf([Choice(["owl one", "owl two"]), Choice(["owl three"])]))
    forced = compiler.text.decode(matcher.forced())
    assert "owl t".startswith(forced)
    for token in compiler.text.encode("owl th", add_bos=False):
        assert matcher.is_allowed(token)
        twin = matcher.clone()
        matcher.accept(token)
        assert twin.is_allowed(token)
    matcher = compiler.matcher(AnyOf([Choice(["12", "13"]), Choice(["7"])]))
    matcher.accept(compiler.text.encode("7", add_bos=False)[-1])
    assert matcher.may_end
    assert matcher.must_end


def test_any_of_without_options_raises() -> None:
    with pytest.raises(ConfigError, match="allowed is a list of constraints"):
        AnyOf([])


def test_first_mask_is_filled_once_when_a_constraint_is_compiled(compiler: Compiler) -> None:
    filled = []

    class RecordedMatcher(AllowMatcher):
        def fill(self, bits: Any, *sets: Set[int]) -> None:
            filled.append(bits.shape)
            super().fill(bits, *sets)

    class RecordedAllow(Allow):
        def compile(self, compiler: Compiler) -> RecordedMatcher:
            return RecordedMatcher(self.ids, np.zeros(n_words(compiler.n_vocab), dtype=np.int32))

    compiler.matcher(RecordedAllow({5}))
    compiler.matcher(RecordedAllow({5}))
    assert filled == [(n_words(compiler.n_vocab),)]
