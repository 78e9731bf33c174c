"""Calls by every kind of template: found by rendering, parsed, and written again the same."""

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
    made = [
        {
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(given, ensure_ascii=False) if as_text else given,
            },
        }
        for name, given in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def rendered(text: Tokenizer, *messages: dict[str, Any]) -> str:
    options = {"tools": TOOLS} if "tools" in (text.chat_template or "") else {}
    return text.apply_chat_template([user("Q?"), *messages], add_generation_prompt=False, **options)


def turn_of(text: Tokenizer, form: Form, calls: Calls) -> str:
    """Return what the template writes for calls, from their mark on."""
    said = rendered(text, message(calls))
    return said[said.index(form.turn[:3], said.index("Q?")) :]


def test_a_turn_is_written_as_published_templates_do(text: Tokenizer, form: Form) -> None:
    assert form.turn in rendered(text, message(PARIS))


@pytest.mark.parametrize("calls", CASES, ids=range(len(CASES)))
def test_calls_are_encoded_once_and_come_back(text: Tokenizer, form: Form, calls: Calls) -> None:
    """What is parsed of a turn, put into the history, is the same turn."""
    if len(calls) > 1 and not form.several:
        return
    whole = rendered(text, message(calls))
    assert rendered(text, message(calls, as_text=True)) == whole
    said = parse_chat_output(turn_of(text, form, calls), form=text.chat_form(), tools=TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in said.tool_calls] == calls
    assert rendered(text, said.message()) == whole
    assert rendered(text, {**said.message(), "tool_calls": list(said.tool_calls)}) == whole


def test_a_turn_without_its_end_token_and_text_before_calls(text: Tokenizer, form: Form) -> None:
    how = text.chat_form()
    assert parse_chat_output(form.turn, form=how, tools=TOOLS).tool_calls[0].name == "f"
    assert how.calls is not None
    if how.calls.marker:
        said = parse_chat_output(f"Let me look. {form.turn}", form=how, tools=TOOLS)
        assert (said.content, len(said.tool_calls)) == ("Let me look.", 1)


def test_what_is_no_whole_call_is_content_as_it_stands(text: Tokenizer, form: Form) -> None:
    """A turn cut anywhere is parsed without an error; nothing is made up."""
    how = text.chat_form()
    for end in range(len(form.turn)):
        said = parse_chat_output(form.turn[:end], form=how, tools=TOOLS)
        for call in said.tool_calls:
            assert (call.name, json.loads(call.arguments)) == PARIS[0]
        parse_chat_output(form.turn[end:], form=how, tools=TOOLS)
        found = parse_chat_output(f"Ok. {form.turn[:end]}", form=how, tools=TOOLS, is_partial=True)
        if how.calls is not None and how.calls.marker and end > len(how.calls.marker):
            assert found.content in ("Ok.", "Ok. ")


def test_a_later_call_that_is_cut_is_never_told_beside_whole_ones(
    text: Tokenizer, form: Form
) -> None:
    """Wherever it is cut, and the same while the text is coming and when it is over."""
    if not form.several:
        return
    how, two = text.chat_form(), CASES[-1]
    whole = turn_of(text, form, two).rstrip()
    for name in (how.end or form.specials[-1], *ENDS):
        whole = whole.removesuffix(name).rstrip()
    before = "Let me look. " if how.calls is not None and how.calls.marker else ""
    n_seen = set()
    for end in range(1, len(whole) + 1):
        cut = before + whole[:end]
        said = parse_chat_output(cut, form=how, tools=TOOLS)
        told = parse_chat_output(cut, form=how, tools=TOOLS, is_partial=True)
        made = [(call.name, json.loads(call.arguments)) for call in said.tool_calls]
        assert made == two[: len(made)]
        assert told.tool_calls == said.tool_calls
        assert told.content.strip() == before.strip()
        assert said.content.strip() == (before if made else cut).strip()
        n_seen.add(len(made))
    assert n_seen == {0, 1, 2}


def test_a_call_without_a_mark_is_no_content_while_it_comes() -> None:
    """What cannot become a call is told at once."""
    for kind in ("llama", "python"):
        form, how = FORMS[kind], tokenizer(FORMS[kind]).chat_form()
        for end in range(1, len(form.turn)):
            said = parse_chat_output(form.turn[:end], form=how, tools=TOOLS, is_partial=True)
            assert said.content == ""
        for text in ('{"age": 4', "[1] says", "Hi"):
            said = parse_chat_output(text, form=how, tools=TOOLS, is_partial=True)
            assert said == ChatOutput(text)


def test_ids_are_made_up_and_go_to_the_answers() -> None:
    text = tokenizer(FORMS["mistral"])
    two = [("f", {"n": 1}), ("get_it", {"n": 2})]
    answers = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    said = rendered(text, message(two), *answers)
    assert '"id": "call00000"' in said
    assert "[TOOL_RESULTS]call00000 one[/TOOL_RESULTS][TOOL_RESULTS]call00001 two" in said
    given = message(PARIS)
    given["tool_calls"][0]["id"] = "abcdefghi"
    said = rendered(text, given, {"role": "tool", "tool_call_id": "abcdefghi", "content": "x"})
    assert said.count("abcdefghi") == 2
    with pytest.raises(ConfigError, match="nine letters"):
        rendered(text, {**given, "tool_calls": [{**given["tool_calls"][0], "id": "abc"}]})


def test_a_name_that_only_the_id_says_is_in_it() -> None:
    text = tokenizer(FORMS["kimi"])
    given = message([("f", {"n": 1}), ("get_it", {"n": 2})])
    given["tool_calls"][0]["id"] = "mine"
    said = rendered(text, given, message(PARIS))
    assert [f"functions.{name}<" in said for name in ("f:0", "get_it:1", "f:2")] == [True] * 3
    assert "mine" not in said


def test_what_the_model_of_the_harmony_form_writes_itself_is_read() -> None:
    """Its template puts the name before the channel, the model after it."""
    how = tokenizer(FORMS["harmony"]).chat_form()
    said = parse_chat_output(
        "<|channel|>analysis<|message|>Weather? A tool.<|end|><|start|>assistant<|channel|>"
        'commentary to=functions.f <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        form=how,
    )
    assert said == ChatOutput("", "Weather? A tool.", (ToolCall("f", '{"city": "Rome"}'),))
    said = parse_chat_output(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi",
        form=how,
    )
    assert said == ChatOutput("Hi", "Hm.")


def test_reasoning_goes_where_the_template_reads_it() -> None:
    text = tokenizer(FORMS["ministral"])
    said = parse_chat_output("[THINK]Hm.[/THINK]Hi", form=text.chat_form())
    assert said == ChatOutput("Hi", "Hm.")
    assert "[THINK]Hm.[/THINK]Hi" in rendered(text, said.message())
    harmony = tokenizer(FORMS["harmony"])
    thought = ChatOutput("", "Hm.", (ToolCall("f", "{}"),)).message()
    assert "analysis<|message|>Hm.<|end|>" in rendered(harmony, thought)


def test_what_surrounds_the_content_is_left_out() -> None:
    how = tokenizer(FORMS["command"]).chat_form()
    said = parse_chat_output("<|START_RESPONSE|>Hi<|END_RESPONSE|>", form=how)
    assert said == ChatOutput("Hi")


def test_calls_that_a_template_would_leave_out_are_refused() -> None:
    deepseek = tokenizer(FORMS["deepseek"])
    with pytest.raises(ConfigError, match="leaves the calls out"):
        rendered(deepseek, {**message(PARIS), "content": "Let me look."})


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (5, "has the tool call 5"),
        ({"function": {"arguments": {}}}, "has the tool call"),
        ({"function": {"name": "f", "arguments": "[1]"}}, "JSON text of an object"),
        ({"function": {"name": "f", "arguments": "{"}}, "JSON text of an object"),
        ({"function": {"name": "f", "arguments": 5}}, "JSON text of an object"),
    ],
)
def test_what_is_no_call_is_refused(call: Any, told: str) -> None:
    text = tokenizer(FORMS["hermes"])
    with pytest.raises(ConfigError, match=told):
        rendered(text, {"role": "assistant", "content": None, "tool_calls": [call]})
    with pytest.raises(ConfigError, match="allowed is a list of calls"):
        rendered(text, {"role": "assistant", "content": None, "tool_calls": {"name": "f"}})


def test_unknown_roles_are_refused() -> None:
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


def test_nothing_that_a_model_writes_raises(text: Tokenizer, form: Form) -> None:
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
        said = form.turn[:start] + "".join(rng.choices(parts, k=rng.randrange(6)))
        said += form.turn[start + rng.randrange(3) :]
        for is_partial in (False, True):
            parse_chat_output(said, form=how, tools=TOOLS, is_partial=is_partial)


def test_special_tokens_in_arguments_stay_text(text: Tokenizer, form: Form) -> None:
    """Of a call in the history, by every kind of template."""
    options = {"tools": TOOLS} if "tools" in form.template else {}

    def specials(city: str) -> list[int]:
        ids = text.encode_chat([user("Q?"), message([("f", {"city": city})])], **options)
        return [token for token in ids if token in text.special_ids]

    assert specials(f"a {''.join(form.specials)}") == specials("a b")
