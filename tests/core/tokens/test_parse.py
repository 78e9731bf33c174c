"""Assistant output: known forms are taken apart, everything else is content."""

from __future__ import annotations

import random

import pytest

from weft._core.tokens.parse import ChatOutput, ToolCall, parse_chat_output

CALL = ToolCall("f", '{"x": 1}')
JSON = '{"name": "f", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Hello", ChatOutput("Hello")),
        ("", ChatOutput("")),
        ("<think>\nhm\n</think>\n\nHi", ChatOutput("Hi", "hm")),
        ("\n<think>never ends", ChatOutput("", "never ends")),
        ("a <think>b</think>", ChatOutput("a <think>b</think>")),
        (f"<tool_call>\n{JSON}\n</tool_call>", ChatOutput("", "", (CALL,))),
        (
            f"<think>t</think>ok <tool_call>{JSON}</tool_call>\n<tool_call>{JSON}</tool_call>",
            ChatOutput("ok", "t", (CALL, CALL)),
        ),
        (f"[TOOL_CALLS][{JSON}, {JSON}]", ChatOutput("", "", (CALL, CALL))),
        (
            '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abc"}]',
            ChatOutput("", "", (ToolCall("f", '{"x": 1}', "abc"),)),
        ),
        ('{"name": "f", "parameters": {"x": 1}}', ChatOutput("", "", (CALL,))),
        (f"<|python_tag|>{JSON}; {JSON}", ChatOutput("", "", (CALL, CALL))),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', ChatOutput("", "", (CALL,))),
        # A later call that is cut is dropped after complete ones.
        (f'ok <tool_call>{JSON}</tool_call>\n<tool_call>{{"na', ChatOutput("ok", "", (CALL,))),
        (f"<tool_call>{JSON}</tool_call><tool_c", ChatOutput("", "", (CALL,))),
        (f'[TOOL_CALLS][{JSON}, {{"name": "f", "arg', ChatOutput("", "", (CALL,))),
        (f'{JSON}; {{"name": "f', ChatOutput("", "", (CALL,))),
    ],
)
def test_known_forms_are_parsed_into_parts(text: str, want: ChatOutput) -> None:
    assert parse_chat_output(text) == want


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{broken}</tool_call>",
        f"<tool_call>{JSON}",
        f"<tool_call>{JSON}</tool_call><tool_call>[]</tool_call>",
        "[TOOL_CALLS][{]",
        '[TOOL_CALLS][{"name": 1}]',
        "[TOOL_CALLS][]",
        f"[TOOL_CALLS][{JSON}, {{]",
        f"[TOOL_CALLS][{JSON}, {{}}",
        f"{JSON}; {{broken}}",
        "<|python_tag|>print(1)",
        '{"name": "Ann", "age": 4}',
        '{"a": 1}',
        f"{JSON} and more",
        '{"name": "f", "arguments": "x"}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"a":' * 100_000,
        "[" * 100_000,
    ],
)
def test_malformed_calls_are_returned_as_content(text: str) -> None:
    assert parse_chat_output(text) == ChatOutput(text)


def test_prompt_with_open_thinking_starts_in_the_reasoning() -> None:
    assert parse_chat_output("hm</think>Hi", thinking_open=True) == ChatOutput("Hi", "hm")
    assert parse_chat_output("hm", thinking_open=True) == ChatOutput("", "hm")


def test_partial_text_shows_no_partial_marks() -> None:
    text = f"<think>so</think>Ok <tool_call>{JSON}</tool_call>"
    for end in range(len(text) + 1):
        output = parse_chat_output(text[:end], is_partial=True)
        assert "so".startswith(output.reasoning)
        assert "Ok ".startswith(output.content)
    assert parse_chat_output(text, is_partial=True) == ChatOutput("Ok", "so", (CALL,))


def test_no_text_raises() -> None:
    parts = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", JSON, "[", "]"]
    parts += ["{", "}", '"', ";", "<|python_tag|>", "a", "\n", "\ud800", "NaN", "1e999"]
    rng = random.Random(7)
    for _ in range(3000):
        text = "".join(rng.choices(parts, k=rng.randrange(8)))
        for flags in ({}, {"thinking_open": True}, {"is_partial": True}):
            parse_chat_output(text, **flags)


@pytest.mark.parametrize("is_partial", [False, True])
def test_text_like_a_call_is_content_without_tools(is_partial: bool) -> None:
    text = '<think>so</think>\n{"name": "f", "arguments": {}} <tool_call>'
    output = parse_chat_output(text, reads_calls=False, is_partial=is_partial)
    assert output == ChatOutput('{"name": "f", "arguments": {}} <tool_call>', "so")
