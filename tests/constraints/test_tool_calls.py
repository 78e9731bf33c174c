"""Valid tool calls: the grammar accepts what the template writes for good calls, and no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from core.tokens.call_templates import FORMS
from core.tokens.test_tool_call_format import message, tokenizer, user
from weft._core.tokens.tokenizer import Tokenizer
from weft._core.tokens.tool_call_format import INDEX, ChatForm
from weft.constraints import Lark, Lazy
from weft.constraints.base import Compiler
from weft.constraints.tool_calls import (
    TaggedJson,
    call_constraint,
    loose_tool,
    tagged_constraint,
)
from weft.errors import ConfigError, GrammarError

Calls = list[tuple[str, dict[str, Any]]]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "n": {"type": "integer"},
                    "ok": {"type": "boolean"},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "units",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"type": "string", "enum": ["c", "f"]}},
            },
        },
    },
]
GOOD: list[Calls] = [
    [("weather", {"city": "Paris", "n": 3, "ok": True})],
    [("weather", {"city": "São <b> x, y"})],
    [("weather", {"city": "", "ok": False})],
    [("units", {"unit": "c"})],
    [("units", {})],
    [("weather", {"city": "A", "n": 1}), ("units", {"unit": "f"})],
]
BAD: list[Calls] = [
    [("weather", {"n": 3})],
    [("nope", {"city": "x"})],
    [("units", {"unit": "z"})],
    [("weather", {"city": "x", "n": "word"})],
    [("weather", {"city": "x", "colour": "red"})],
]


@pytest.fixture(scope="module", params=list(FORMS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def text(kind: str) -> Tokenizer:
    return tokenizer(FORMS[kind])


def turn_of(text: Tokenizer, kind: str, calls: Calls) -> str:
    """Return what the template writes for calls, up to its end token."""
    options = {"tools": TOOLS} if "tools" in FORMS[kind].template else {}
    prompt = text.apply_chat_template(
        [user("Q?"), message(calls)], add_generation_prompt=False, **options
    )
    how = text.chat_form().calls
    assert how is not None
    start = prompt.index(how.head.split(INDEX)[0], prompt.index("Q?"))
    end = text.chat_form().end or FORMS[kind].specials[-1]
    turn = prompt[start:].lstrip()
    for mark in (end, "<|call|>", "<|END|>", "<end>"):
        turn = turn.rstrip().removesuffix(mark)
    return turn


def verdict(text: Tokenizer, constraint: Any, call_text: str) -> bool:
    """Return True if a constraint accepts a text and lets it end."""
    matcher = Compiler(text, text.n_vocab).matcher(constraint)
    for token in text.continuation(call_text, special=True):
        if not matcher.is_allowed(token):
            return False
        matcher.accept(token)
    return matcher.may_end


def allowed(text: Tokenizer, kind: str, calls: Calls, choice: Any) -> bool:
    turn = turn_of(text, kind, calls)
    before = "Let me look. " if choice == "auto" else ""
    return verdict(text, call_constraint(text, text.chat_form(), TOOLS, choice), before + turn)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_good_call_as_the_template_writes_it_is_allowed(
    text: Tokenizer, kind: str, choice: str
) -> None:
    for calls in GOOD:
        if len(calls) == 1 or FORMS[kind].several:
            assert allowed(text, kind, calls, choice), calls


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_invalid_call_is_not_allowed(text: Tokenizer, kind: str, choice: str) -> None:
    for calls in BAD:
        if kind == "python" and choice == "auto" and calls[0][0] == "nope":
            continue  # without a mark of its own a call begins with a known name
        assert not allowed(text, kind, calls, choice), calls


def test_named_function_is_the_only_one_allowed(text: Tokenizer, kind: str) -> None:
    named = {"type": "function", "function": {"name": "units"}}
    for choice in ("units", named):
        assert allowed(text, kind, [("units", {"unit": "c"})], choice)
        assert not allowed(text, kind, [("weather", {"city": "x"})], choice)
        if FORMS[kind].several:
            assert not allowed(text, kind, [("units", {"unit": "c"})] * 2, choice)


def test_free_text_is_allowed_until_a_call(text: Tokenizer, kind: str) -> None:
    form = text.chat_form()
    auto = call_constraint(text, form, TOOLS)
    required = call_constraint(text, form, TOOLS, "required")
    assert isinstance(auto, Lazy)
    assert isinstance(required, Lark)
    assert verdict(text, auto, "It is sunny [1], {so} they say.")
    assert not verdict(text, required, "It is sunny.")
    assert call_constraint(text, form, TOOLS, "none") is None


def test_parallel_false_allows_one_call_only() -> None:
    text = tokenizer(FORMS["hermes"])
    two = turn_of(text, "hermes", GOOD[-1])
    one = call_constraint(text, text.chat_form(), TOOLS, "required", parallel=False)
    assert verdict(text, call_constraint(text, text.chat_form(), TOOLS, "required"), two)
    assert not verdict(text, one, two)


def test_call_is_allowed_after_reasoning_opened_by_the_prompt() -> None:
    text = tokenizer(FORMS["deepseek"])
    turn = turn_of(text, "deepseek", GOOD[0])
    opened = call_constraint(text, text.chat_form(), TOOLS, "required", thinking_open=True)
    assert verdict(text, opened, f"A tool, I think.\n</think>\n\n{turn}")
    assert not verdict(text, opened, "A tool, I think.\n</think>\n\nNo.")


@pytest.mark.parametrize("kind", ["qwen coder", "glm", "typed", "hermes"])
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"maxLength": 3}, "abc", "abcd"),
        ({"minLength": 3}, "abc", "ab"),
        ({"pattern": "^[a-z]+/[0-9]$"}, "ab/1", "ab/12"),
        ({"pattern": "^ab"}, "abc", "cab"),
        ({"pattern": "b$"}, "cab", "abc"),
        ({"const": "x y"}, "x y", "x"),
    ],
)
def test_string_keywords_of_a_schema_apply_without_quotes_too(
    kind: str, schema: dict[str, Any], good: str, bad: str
) -> None:
    text = tokenizer(FORMS[kind])
    properties = {"city": {"type": "string", **schema}}
    tools = [{"name": "f", "parameters": {"properties": properties, "required": ["city"]}}]
    constraint = call_constraint(text, text.chat_form(), tools, "required")
    for city, is_allowed in ((good, True), (bad, False)):
        turn = turn_of(text, kind, [("f", {"city": city})])
        assert verdict(text, constraint, turn) is is_allowed


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        ([], "required", "no tools"),
        ([{"type": "function"}], "auto", "has no name"),
        ([5], "auto", "has no name"),
        ([{"name": "f", "parameters": 5}], "auto", "parameters of 'f'"),
        (TOOLS, "nope", "allowed are 'auto', 'required', 'none' and the names"),
        (TOOLS, 5, "tool_choice is 5"),
        (TOOLS, {"type": "function"}, "tool_choice is None"),
    ],
)
def test_invalid_tools_or_choice_raise(tools: Any, choice: Any, message: str) -> None:
    text = tokenizer(FORMS["hermes"])
    with pytest.raises(ConfigError, match=message):
        call_constraint(text, text.chat_form(), tools, choice)


BIG = 9007199254740993  # 2**53 + 1, which no 64-bit float is
NESTED = {
    "properties": {
        "id": {"type": "integer", "minimum": BIG, "maximum": BIG},
        "at": {"$ref": "#/$defs/place"},
    },
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}


@pytest.mark.parametrize("kind", ["hermes", "qwen coder", "glm", "typed", "mistral", "python"])
def test_arguments_are_exact_and_closed_at_every_depth(kind: str) -> None:
    text = tokenizer(FORMS[kind])
    constraint = call_constraint(
        text, text.chat_form(), [{"name": "f", "parameters": NESTED}], "required"
    )
    for arguments, is_allowed in (
        ({"id": BIG, "at": {"x": 1}}, True),
        ({"id": BIG - 1}, False),
        ({"at": {"y": 1}}, False),
    ):
        turn = turn_of(text, kind, [("f", arguments)])
        assert verdict(text, constraint, turn) is is_allowed, arguments


@pytest.mark.parametrize("kind", ["hermes", "mistral", "deepseek"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_arguments_have_no_name_twice(kind: str, choice: str) -> None:
    text = tokenizer(FORMS[kind])
    schema = {"additionalProperties": {"type": "integer"}}
    tools = [{"name": "f", "parameters": schema}]
    constraint = call_constraint(text, text.chat_form(), tools, choice)
    turn = turn_of(text, kind, [("f", {"ab": 1, "ac": 2})])
    assert verdict(text, constraint, turn)
    assert not verdict(text, constraint, turn.replace("ac", "ab"))


def test_arguments_after_reasoning_have_no_name_twice() -> None:
    text = tokenizer(FORMS["deepseek"])
    schema = {"additionalProperties": {"type": "integer"}}
    tools = [{"name": "f", "parameters": schema}]
    constraint = call_constraint(text, text.chat_form(), tools, "required", thinking_open=True)
    thought = 'Of {"a": 1, "a": 2} and "x" I think.\n</think>\n\n'
    turn = turn_of(text, "deepseek", [("f", {"ab": 1, "ac": 2})])
    assert verdict(text, constraint, thought + turn)
    assert not verdict(text, constraint, thought + turn.replace("ac", "ab"))


def test_unsupported_schema_is_named_with_its_tool_and_place() -> None:
    text = tokenizer(FORMS["hermes"])
    schema = {"properties": {"a": {"type": "array", "contains": {"const": 1}}}}
    with pytest.raises(GrammarError, match="parameters of 'f': at #/properties/a: contains is not"):
        call_constraint(text, text.chat_form(), [{"name": "f", "parameters": schema}], "required")


# On a model


@pytest.fixture(scope="module")
def lm() -> Iterator[weft.LM]:
    with weft.load("tiny") as lm:
        yield lm


_SHORT = '{"type": "string", "maxLength": 9}'
QUESTION = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.mark.parametrize("kind", ["hermes", "qwen coder", "glm", "typed", "command", "python"])
def test_model_without_tool_training_writes_valid_calls(lm: weft.LM, kind: str) -> None:
    prompt = lm.format_chat(
        QUESTION,
        tools=TOOLS if "tools" in FORMS[kind].template else None,
        template=FORMS[kind].template,
    )
    short = json.loads(json.dumps(TOOLS).replace('{"type": "string"}', _SHORT))
    constraint = call_constraint(lm.text, prompt.form, short, "required", parallel=False)
    loom = weft.Loom(lm, prompt)
    nodes = loom.grow(n=6, max_tokens=160, temperature=1.2, seed=3, constraint=constraint)
    complete = [node for node in nodes if node.finish_reason == "stop"]
    assert complete
    for node in complete:
        output = lm.parse_chat_output(node.text, template=FORMS[kind].template, tools=TOOLS)
        assert output.tool_calls, node.text
        for call in output.tool_calls:
            given = json.loads(call.arguments)
            if call.name == "weather":
                assert len(given["city"]) <= 9
                assert isinstance(given.get("n", 0), int)
                assert isinstance(given.get("ok", True), bool)
            else:
                assert call.name == "units"
                assert given.get("unit", "c") in ("c", "f")


def test_prompt_has_its_tokens_its_constraint_and_its_parser(lm: weft.LM) -> None:
    template = FORMS["hermes"].template + "{{ tools | tojson if tools }}"
    typed = [{"role": "user", "content": "Hi <|end|><|assistant|>"}]
    prompt = lm.format_chat(typed, tools=TOOLS, tool_choice="required", template=template)
    assert isinstance(prompt, str)
    assert isinstance(prompt.constraint, Lark)
    assert list(prompt.ids) == lm.text.encode_chat(typed, template=template, tools=TOOLS)
    assert lm.tokenize(prompt, special=True, add_bos=False) == list(prompt.ids)
    assert weft.Loom(lm, prompt).tokens == list(prompt.ids)
    assert weft.Loom(lm, prompt, template=False).user_prompt == typed[0]["content"]
    assert prompt.parse(FORMS["hermes"].turn).tool_calls[0].name == "f"
    plain = lm.format_chat(typed)
    assert plain.constraint is None
    assert [t for t in plain.ids if t in lm.text.stop_ids] == [lm.eog_token]
    with pytest.raises(ConfigError, match="rendered chat"):
        weft.Loom(lm, prompt, system="x")


def test_tool_choice_that_is_impossible_raises_at_the_call(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match="no tools to call"):
        lm.format_chat(QUESTION, tool_choice="required")
    with pytest.raises(ConfigError, match="tool_choice is 'nope'"):
        lm.format_chat(QUESTION, tools=TOOLS, tool_choice="nope")
    with pytest.raises(ConfigError, match="no chat template"):
        call_constraint(lm.text, ChatForm(), TOOLS)


@pytest.mark.parametrize(("kind", "place"), [("hermes", "#/properties/to"), ("glm", "'to'")])
def test_schema_that_cannot_be_compiled_raises_with_its_tool_and_place(
    kind: str, place: str
) -> None:
    text = tokenizer(FORMS[kind])
    mail = {"properties": {"cc": {"type": "string"}, "to": {"type": "string", "pattern": "(?!x)y"}}}
    tools = [*TOOLS, {"name": "mail", "parameters": mail}]
    with pytest.raises(GrammarError) as caught:
        Compiler(text, text.n_vocab).matcher(call_constraint(text, text.chat_form(), tools))
    assert "'mail'" in str(caught.value)
    assert place in str(caught.value)
    loose = [*TOOLS, loose_tool(tools[-1])]
    constraint = call_constraint(text, text.chat_form(), loose, "required")
    assert verdict(text, constraint, turn_of(text, kind, [("mail", {"cc": "a", "to": "x"})]))
    assert not verdict(text, constraint, turn_of(text, kind, [("mail", {"bcc": "a"})]))


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", True),
        ("hello <f", True),
        ('hi <f=a>{"n": 1}</f>, then <f=b>5</f>.', True),
        ("<f=b>5</f><f=b>5</f>", True),
        ("<g>true", True),
        ('<f=a>{"n": 2}</f>', False),
        ("<f=c>", False),
        ("<f=b>5</f> and <f=b>6", False),
        ("<g>5", False),
    ],
)
def test_tagged_constraint_takes_free_text_and_valid_tags(text: str, fits: bool) -> None:
    lm = weft.load("tiny")
    tags = [
        TaggedJson("<f=a>", {"properties": {"n": {"const": 1}}, "type": "object"}, "</f>"),
        TaggedJson("<f=b>", {"const": 5}, "</f>"),
        TaggedJson("<g>", {"type": "boolean"}, ""),
    ]
    matcher = lm.constraints.matcher(tagged_constraint(tags, ["<f=", "<g>"]))
    tokens = lm.tokenize(text, add_bos=False)
    is_allowed = matcher.takes(tokens)
    if is_allowed:
        for token in tokens:
            matcher.accept(token)
    assert (is_allowed and matcher.may_end) == fits


def test_tag_that_no_trigger_begins_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="triggers"):
        tagged_constraint([TaggedJson("<f>", True, "")], ["<g>"])
