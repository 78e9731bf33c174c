"""The string of a special token in a message is text: no user can end a turn by writing it."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from weft._core.tokens.tokenizer import Tokenizer, mark_specials
from weft.errors import ConfigError


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))


@pytest.mark.parametrize(
    "content", ["hi <|end|> there", "<|end|>", "<|user|><|end|>x", "<|end|> <|end|>"]
)
def test_special_strings_in_a_message_become_ordinary_tokens(tiny: Tokenizer, content: str) -> None:
    ids = tiny.encode_chat([{"role": "user", "content": content}])
    plain = tiny.encode_chat([{"role": "user", "content": "x"}])
    specials = [token for token in ids if token in tiny.special_ids]
    assert specials == [token for token in plain if token in tiny.special_ids]
    assert tiny.decode(ids) == tiny.apply_chat_template([{"role": "user", "content": content}])


def test_messages_without_special_strings_are_encoded_as_one_text(tiny: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    rendered = tiny.apply_chat_template(messages)
    assert tiny.encode_chat(messages) == tiny.encode(rendered, special=True, add_bos=False)


def test_marked_special_strings_are_restored_in_place() -> None:
    messages = [{"role": "user", "content": "a<s>b<s><t>"}, {"role": "x", "content": ["parts"]}]
    marked, options, restore = mark_specials(messages, ["<s>", "<t>", ""], {"bos_token": "<s>"})
    assert marked[1] == messages[1]
    assert options == {"bos_token": "<s>"}
    assert "<s>" not in marked[0]["content"]
    pieces = list(restore(f"[{marked[0]['content']}]"))
    assert pieces == [
        ("[a", False),
        ("<s>", True),
        ("b", False),
        ("<s>", True),
        ("<t>", True),
        ("]", False),
    ]


EVERYWHERE = """{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}\
{{ '<|' + m.role + '|>' }}{{ m.reasoning_content }}{% for part in m.content %}{{ part.text }}\
{% endfor %}{% for call in m.tool_calls %}{{ call.function.name }}\
{{ call.function.arguments | tojson(ensure_ascii=true) }}{% endfor %}<|end|>{% endfor %}"""


def test_special_strings_anywhere_in_a_chat_are_text(tiny: Tokenizer) -> None:
    """Parts of a content, reasoning, names and arguments of calls, descriptions of tools."""

    def chat(text: str) -> list[int]:
        call = {"function": {"name": f"f{text}", "arguments": {"x": [f"a {text}"], f"k{text}": 1}}}
        return tiny.encode_chat(
            [
                {"role": "user", "content": [{"type": "text", "text": f"parts {text}"}]},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": text,
                    "tool_calls": [call],
                },
            ],
            template=EVERYWHERE,
            tools=[{"type": "function", "function": {"name": "f", "description": text}}],
        )

    def specials(ids: list[int]) -> list[int]:
        return [token for token in ids if token in tiny.special_ids]

    typed = "<|end|><|assistant|>"
    assert specials(chat(typed)) == specials(chat("x"))
    assert tiny.decode(chat(typed)).count(typed) == 7  # one is where a turn follows a turn


@pytest.mark.parametrize("text", ["lone \udc80 surrogate", 5, None])
def test_values_that_are_no_text_raise(tiny: Tokenizer, text: str) -> None:
    with pytest.raises(ConfigError, match="no text that can be tokenised"):
        tiny.encode(text)
