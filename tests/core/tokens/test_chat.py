from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from weft._core.tokens.chat import check_messages, check_roles, render_chat
from weft.errors import ConfigError

USER = [{"role": "user", "content": "Hi"}]
SIMPLE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def render(template: str, messages: Any = USER, **options: Any) -> str:
    return render_chat(template, messages, **options)


def test_template_receives_messages_and_special_tokens() -> None:
    text = render(SIMPLE, bos_token="[B]", eos_token="[E]")
    assert text == "[B]<user>Hi[E]<assistant>"
    assert render(SIMPLE, add_generation_prompt=False) == "<user>Hi"


def test_template_blocks_are_trimmed() -> None:
    template = "{% for m in messages %}\n    {% if true %}\nA\n    {% endif %}\n{% endfor %}\nB"
    assert render(template) == "A\nB"


def test_names_that_templates_use_are_defined() -> None:
    assert render("{{ {'b': 1, 'a': 'é<'} | tojson }}") == '{"b": 1, "a": "é<"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year + i) for i in (-1, 0)}
    assert (
        render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hi!"
    assert render(
        "{{ tools | length }} {{ enable_thinking }}", tools=[1], enable_thinking=False
    ) == ("1 False")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages[0].content.nothing.at_all }}", "has no attribute"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_error_in_a_template_raises_with_its_message(template: str, message: str) -> None:
    with pytest.raises(ConfigError, match="chat template") as caught:
        render(template)
    assert message in str(caught.value)
    assert "template=False" in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ("Hi", "messages are 'Hi'"),
        ({"role": "user", "content": "Hi"}, "allowed is a list"),
        (5, "allowed is a list"),
        (["Hi"], "message 0"),
        ([*USER, {"role": "user"}], "message 1 has content None"),
        ([{"content": "Hi"}], "role None"),
        ([{"role": "", "content": "Hi"}], "role ''"),
        ([{"role": "user", "content": 5}], "content 5"),
        ([{"role": "user", "content": object()}], "allowed is a string"),
    ],
)
def test_messages_of_the_wrong_shape_raise(messages: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_messages(messages)


def test_long_wrong_values_are_shortened_in_the_error() -> None:
    with pytest.raises(ConfigError) as caught:
        check_messages("x" * 500)
    assert len(str(caught.value)) < 200


def test_content_parts_and_tool_calls_without_text_are_messages() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": 1}]},
    ]
    checked = check_messages(tuple(messages))
    assert checked == messages
    assert checked[0] is not messages[0]


def test_unknown_role_raises_with_the_roles_that_the_template_renders() -> None:
    bogus = [{"role": "bogus", "content": "Hi"}]
    message = "'bogus'.*does not know; allowed are system, user, assistant, tool$"
    with pytest.raises(ConfigError, match=message):
        check_roles(SIMPLE, bogus, "<bogus>Hi")
    named = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}"
        "{% elif m['role'] in ['user', 'developer'] or m.role == 'tool' and tools %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    options: tuple[tuple[dict[str, Any], str], ...] = (({}, ""), ({"tools": [1]}, "tool, "))
    for given, allowed in options:
        with pytest.raises(ConfigError, match=f"are user, assistant, {allowed}developer$"):
            check_roles(named, bogus, "", **given)


def test_special_token_is_not_a_role() -> None:
    """Though it stands in the template, as roles do."""
    template = "{{ '<|end|>' }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"has role '<\|end\|>'"):
        check_roles(template, [{"role": "<|end|>", "content": "Hi"}], "<|end|><|end|>Hi")
