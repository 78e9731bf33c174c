"""Tools for chat templates that have none: described in a message, called as tagged JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

import weft
from core.tokens.call_templates import Form
from core.tokens.test_tool_call_format import tokenizer, user
from weft._core.tokens.tokenizer import Tokenizer
from weft.errors import ConfigError

ROLES = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
# As Gemma's: no system role, and turns must alternate.
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|{{ 'model' if m.role == 'assistant' else m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}},
    {"type": "function", "function": {"name": "now", "description": "The time <|end|>"}},
]
CALLS: dict[str, Any] = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "now", "arguments": {}}},
    ],
}
RESULTS = [
    {"role": "tool", "tool_call_id": "1", "content": "46"},
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
]


def rendered(text: Tokenizer, *messages: Any, **options: Any) -> str:
    return text.apply_chat_template(messages, add_generation_prompt=False, **options)


@pytest.mark.parametrize("template", [ROLES, STRICT])
def test_template_without_tools_has_the_generic_form(template: str) -> None:
    text = tokenizer(Form(template, ""))
    form = text.chat_form()
    assert form.is_generic
    assert text.tool_form == "generic"
    assert form.calls is not None
    assert form.calls.marker == "<tool_call>"
    assert form.has_system == (template == ROLES)


def test_tools_are_described_in_the_system_message_or_the_first_of_the_user() -> None:
    roles, strict = tokenizer(Form(ROLES, "")), tokenizer(Form(STRICT, ""))
    system = {"role": "system", "content": "Be brief."}
    with_system = rendered(roles, system, user("Q?"), tools=TOOLS)
    assert with_system.startswith("<|system|>Be brief.\n\nYou can call these functions:\n{")
    assert with_system.endswith("<|user|>Q?<|end|>")
    assert rendered(roles, user("Q?"), tools=TOOLS).startswith("<|system|>You can call")
    without = rendered(strict, user("Q?"), tools=TOOLS)
    assert without.startswith("<|user|>You can call")
    assert without.endswith("\n\nQ?<|end|>")
    for text in (with_system, without):
        assert json.dumps(TOOLS[0]["function"]) in text
    with pytest.raises(ConfigError, match="alternate"):
        rendered(strict, system, user("Q?"), tools=TOOLS)


@pytest.mark.parametrize("template", [ROLES, STRICT])
def test_past_calls_and_results_are_in_the_prompt(template: str) -> None:
    text = tokenizer(Form(template, ""))
    prompt = rendered(text, user("Q?"), CALLS, *RESULTS, user("And?"), tools=TOOLS)
    assert (
        'Let me look.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|end|>'
    ) in prompt
    assert prompt.endswith(
        "<|user|><tool_response>\n46\n</tool_response>\n\n<tool_response>\nnoon\n"
        "</tool_response>\n\nAnd?<|end|>"
    )


def test_generic_form_works_in_process_on_the_embedded_model() -> None:
    lm = weft.load("tiny")
    tools = [
        {
            "name": "add",
            "parameters": {
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["a"],
            },
        },
        TOOLS[1],
    ]
    chat: list[Any] = [{"role": "user", "content": "Tell me a story about a fox."}]
    prompt = lm.format_chat(chat, tools=tools, tool_choice="required")
    # The name of an end token in a description is plain text.
    n_ends = lm.format_chat(chat).ids.count(lm.eog_token)
    assert prompt.ids.count(lm.eog_token) == n_ends + 1  # of the system message
    node = weft.Loom(lm, prompt).grow(max_tokens=80, seed=1, constraint=prompt.constraint)[0]
    output = prompt.parse(node.text)
    (call,) = output.tool_calls
    assert call.name in ("add", "now")
    chat += [output.message(), {"role": "tool", "content": "46"}]
    after = lm.format_chat(chat, tools=tools)
    assert after.startswith(str(prompt))
    assert after.endswith("<tool_response>\n46\n</tool_response><|end|><|assistant|>")
