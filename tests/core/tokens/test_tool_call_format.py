"""Tool calls in every kind of template: detected by rendering, parsed, and written back equal."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from tokenizers import AddedToken

from core.tokens.builders import byte_level
from core.tokens.call_templates import FORMS, Form
from weft._core.tokens.chat import ToolCall
from weft._core.tokens.parse import ChatOutput, parse_chat_output
from weft._core.tokens.tokenizer import Tokenizer
from weft.errors import ConfigError

Calls = list[tuple[str, dict[str, Any]]]
PARIS: Calls = [("f", {"city": "Paris", "n": 3})]
CASES: list[Calls] = [
    PARIS,
    [("f", {"city": "7"})],
    [("f", {"city": "São \"Paulo\", <b> & 'x'", "n": -1})],
    [("f", {"city": "a\nb", "deep": {"a": [1, {"b": None}]}, "ok": True, "l": [1.5, "x"]})],
    [("f", {})],
    [("f", {"city": "A"}), ("get_it", {"n": 2})],
]
ENDS = ("<|call|>", "<|END|>", "<end>")
KINDS = {"city": "string", "n": "integer", "deep": "object", "ok": "boolean", "l": "array"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in KINDS.items()},
            },
        },
    }
    for name in ("f", "get_it")
]


def tokenizer(form: Form) -> Tokenizer:
    backend = byte_level()
    names = [AddedToken(name, special=True, normalized=False) for name in form.specials]
    backend.add_special_tokens([*names, AddedToken("<eos>", special=True, normalized=False)])
    ends = [backend.token_to_id(name) for name in form.specials if name in ("<|call|>", "<end>")]
    return Tokenizer(
        backend,
        special_tokens={"eos_token": "<eos>"},
        chat_template=form.template,
        stop_ids=ends,
    )


@pytest.fixture(scope="module", params=list(FORMS))
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


@pytest.fixture(scope="module")
def text(form: Form) -> Tokenizer:
    return tokenizer(form)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def message(calls: Calls, *, as_text: bool = False) -> dict[str, Any]:
    """Return an assistant's message as people write it: without ids."""
    calls_of_message = [
        {
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(given, ensure_ascii=False) if as_text else given,
            },
        }
        for name, given in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls_of_message}


def rendered(text: Tokenizer, *messages: dict[str, Any]) -> str:
    options = {"tools": TOOLS} if "tools" in (text.chat_template or "") else {}
    return text.apply_chat_template([user("Q?"), *messages], add_generation_prompt=False, **options)


def turn_of(text: Tokenizer, form: Form, calls: Calls) -> str:
    """Return what the template writes for calls, from their mark on."""
    prompt = rendered(text, message(calls))
    return prompt[prompt.index(form.turn[:3], prompt.index("Q?")) :]


def test_written_turn_equals_that_of_published_templates(text: Tokenizer, form: Form) -> None:
    assert form.turn in rendered(text, message(PARIS))


@pytest.mark.parametrize("calls", CASES, ids=range(len(CASES)))
def test_calls_are_encoded_once_and_parsed_back(text: Tokenizer, form: Form, calls: Calls) -> None:
    """A turn that is parsed and put into the history renders as the same turn."""
    if len(calls) > 1 and not form.several:
        return
    prompt = rendered(text, message(calls))
    assert rendered(text, message(calls, as_text=True)) == prompt
    output = parse_chat_output(turn_of(text, form, calls), form=text.chat_form(), tools=TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in output.tool_calls] == calls
    assert rendered(text, output.message()) == prompt
    assert rendered(text, {**output.message(), "tool_calls": list(output.tool_calls)}) == prompt


def test_turn_without_end_token_and_text_before_calls_are_parsed(
    text: Tokenizer, form: Form
) -> None:
    how = text.chat_form()
    assert parse_chat_output(form.turn, form=how, tools=TOOLS).tool_calls[0].name == "f"
    assert how.calls is not None
    if how.calls.marker:
        output = parse_chat_output(f"Let me look. {form.turn}", form=how, tools=TOOLS)
        assert (output.content, len(output.tool_calls)) == ("Let me look.", 1)


def test_incomplete_call_is_returned_as_content(text: Tokenizer, form: Form) -> None:
    """A turn cut anywhere is parsed without an error; no call is invented."""
    how = text.chat_form()
    for end in range(len(form.turn)):
        output = parse_chat_output(form.turn[:end], form=how, tools=TOOLS)
        for call in output.tool_calls:
            assert (call.name, json.loads(call.arguments)) == PARIS[0]
        parse_chat_output(form.turn[end:], form=how, tools=TOOLS)
        partial = parse_chat_output(
            f"Ok. {form.turn[:end]}", form=how, tools=TOOLS, is_partial=True
        )
        if how.calls is not None and how.calls.marker and end > len(how.calls.marker):
            assert partial.content in ("Ok.", "Ok. ")


def test_later_call_that_is_cut_is_never_returned(text: Tokenizer, form: Form) -> None:
    """At every cut, while the text is generated and when it is complete."""
    if not form.several:
        return
    how, two = text.chat_form(), CASES[-1]
    turn = turn_of(text, form, two).rstrip()
    for name in (how.end or form.specials[-1], *ENDS):
        turn = turn.removesuffix(name).rstrip()
    before = "Let me look. " if how.calls is not None and how.calls.marker else ""
    counts = set()
    for end in range(1, len(turn) + 1):
        cut = before + turn[:end]
        final = parse_chat_output(cut, form=how, tools=TOOLS)
        partial = parse_chat_output(cut, form=how, tools=TOOLS, is_partial=True)
        parsed = [(call.name, json.loads(call.arguments)) for call in final.tool_calls]
        assert parsed == two[: len(parsed)]
        assert partial.tool_calls == final.tool_calls
        assert partial.content.strip() == before.strip()
        assert final.content.strip() == (before if parsed else cut).strip()
        counts.add(len(parsed))
    assert counts == {0, 1, 2}


def test_partial_call_without_a_mark_is_not_content() -> None:
    """Text that cannot become a call is content at once."""
    for kind in ("llama", "python"):
        form, how = FORMS[kind], tokenizer(FORMS[kind]).chat_form()
        for end in range(1, len(form.turn)):
            output = parse_chat_output(form.turn[:end], form=how, tools=TOOLS, is_partial=True)
            assert output.content == ""
        for text in ('{"age": 4', "[1] says", "Hi"):
            output = parse_chat_output(text, form=how, tools=TOOLS, is_partial=True)
            assert output == ChatOutput(text)


def test_missing_call_ids_are_created_and_copied_to_the_answers() -> None:
    text = tokenizer(FORMS["mistral"])
    two = [("f", {"n": 1}), ("get_it", {"n": 2})]
    answers = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    prompt = rendered(text, message(two), *answers)
    assert '"id": "call00000"' in prompt
    assert "[TOOL_RESULTS]call00000 one[/TOOL_RESULTS][TOOL_RESULTS]call00001 two" in prompt
    given = message(PARIS)
    given["tool_calls"][0]["id"] = "abcdefghi"
    prompt = rendered(text, given, {"role": "tool", "tool_call_id": "abcdefghi", "content": "x"})
    assert prompt.count("abcdefghi") == 2
    with pytest.raises(ConfigError, match="nine characters"):
        rendered(text, {**given, "tool_calls": [{**given["tool_calls"][0], "id": "abc"}]})


def test_tool_name_of_a_template_with_ids_only_is_in_the_id() -> None:
    text = tokenizer(FORMS["kimi"])
    given = message([("f", {"n": 1}), ("get_it", {"n": 2})])
    given["tool_calls"][0]["id"] = "mine"
    prompt = rendered(text, given, message(PARIS))
    assert [f"functions.{name}<" in prompt for name in ("f:0", "get_it:1", "f:2")] == [True] * 3
    assert "mine" not in prompt


def test_call_written_by_a_harmony_model_is_parsed() -> None:
    """Its template puts the name before the channel, the model after it."""
    how = tokenizer(FORMS["harmony"]).chat_form()
    output = parse_chat_output(
        "<|channel|>analysis<|message|>Weather? A tool.<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.f <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        form=how,
    )
    assert output == ChatOutput("", "Weather? A tool.", (ToolCall("f", '{"city": "Rome"}'),))
    output = parse_chat_output(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        form=how,
    )
    assert output == ChatOutput("Hi", "Hm.")


def test_reasoning_is_written_where_the_template_reads_it() -> None:
    text = tokenizer(FORMS["ministral"])
    output = parse_chat_output("[THINK]Hm.[/THINK]Hi", form=text.chat_form())
    assert output == ChatOutput("Hi", "Hm.")
    assert "[THINK]Hm.[/THINK]Hi" in rendered(text, output.message())
    harmony = tokenizer(FORMS["harmony"])
    thought = ChatOutput("", "Hm.", (ToolCall("f", "{}"),)).message()
    assert "analysis<|message|>Hm.<|end|>" in rendered(harmony, thought)


def test_marks_around_the_content_are_removed() -> None:
    how = tokenizer(FORMS["command"]).chat_form()
    output = parse_chat_output("<|START_RESPONSE|>Hi<|END_RESPONSE|>", form=how)
    assert output == ChatOutput("Hi")


def test_calls_that_a_template_would_drop_raise() -> None:
    deepseek = tokenizer(FORMS["deepseek"])
    with pytest.raises(ConfigError, match="leaves the calls out"):
        rendered(deepseek, {**message(PARIS), "content": "Let me look."})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (5, "has the tool call 5"),
        ({"function": {"arguments": {}}}, "has the tool call"),
        ({"function": {"name": "f", "arguments": "[1]"}}, "JSON text of an object"),
        ({"function": {"name": "f", "arguments": "{"}}, "JSON text of an object"),
        ({"function": {"name": "f", "arguments": 5}}, "JSON text of an object"),
    ],
)
def test_value_that_is_no_call_raises(call: Any, message: str) -> None:
    text = tokenizer(FORMS["hermes"])
    with pytest.raises(ConfigError, match=message):
        rendered(text, {"role": "assistant", "content": None, "tool_calls": [call]})
    with pytest.raises(ConfigError, match="allowed is a list of calls"):
        rendered(text, {"role": "assistant", "content": None, "tool_calls": {"name": "f"}})


def test_unknown_roles_raise() -> None:
    chatml = tokenizer(FORMS["hermes"])
    strict = tokenizer(
        Form(
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% elif m.role =="
            " 'assistant' or m.role == 'critic' %}{{ m.content }}{% endif %}{% endfor %}",
            "",
        )
    )
    for text, role in (
        (chatml, "usr"),
        (chatml, "developer"),
        (chatml, "<|im_end|>"),
        (strict, "system"),
        (strict, "bot"),
    ):
        with pytest.raises(ConfigError, match=r"message 1 has role .*; allowed are"):
            rendered(text, {"role": role, "content": "Be brief."})
    assert "Be brief." in rendered(strict, {"role": "critic", "content": "Be brief."})
    for role in ("system", "tool"):
        assert "Be brief." in rendered(chatml, {"role": role, "content": "Be brief."})


def test_no_generated_text_raises(text: Tokenizer, form: Form) -> None:
    how = text.chat_form()
    parts = [*re.findall(r"\w+|\s+|[^\w\s]+", form.turn), *form.specials, how.think[0], "[" * 3000]
    parts += [
        "{",
        "}",
        "[",
        "]",
        '"',
        "(",
        ")",
        ",",
        "=",
        r"\d",
        "\ud800",
        "NaN",
        "-" * 3000,
        "{'a'",
    ]
    rng = random.Random(11)
    for _ in range(400):
        start = rng.randrange(len(form.turn))
        generated = form.turn[:start] + "".join(rng.choices(parts, k=rng.randrange(6)))
        generated += form.turn[start + rng.randrange(3) :]
        for is_partial in (False, True):
            parse_chat_output(generated, form=how, tools=TOOLS, is_partial=is_partial)


def test_special_tokens_in_arguments_stay_text(text: Tokenizer, form: Form) -> None:
    """Of a call in the history, by every kind of template."""
    options = {"tools": TOOLS} if "tools" in form.template else {}

    def specials(city: str) -> list[int]:
        ids = text.encode_chat([user("Q?"), message([("f", {"city": city})])], **options)
        return [token for token in ids if token in text.special_ids]

    assert specials(f"a {''.join(form.specials)}") == specials("a b")
