"""A special token's string in a message is text: nobody ends a turn by writing how turns end."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.tokens.specials import mark_specials
from weft.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))


@pytest.mark.parametrize(
    "said", ["hi <|end|> there", "<|end|>", "<|user|><|end|>x", "<|end|> <|end|>"]
)
def test_special_strings_in_a_message_become_ordinary_tokens(tiny: Tokenizer, said: str) -> None:
    ids = tiny.encode_chat([{"role": "user", "content": said}])
    plain = tiny.encode_chat([{"role": "user", "content": "x"}])
    specials = [token for token in ids if token in tiny.special_ids]
    assert specials == [token for token in plain if token in tiny.special_ids]
    assert tiny.decode(ids) == tiny.apply_chat_template([{"role": "user", "content": said}])


def test_messages_without_special_strings_are_encoded_as_one_text(tiny: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    rendered = tiny.apply_chat_template(messages)
    assert tiny.encode_chat(messages) == tiny.encode(rendered, special=True, add_bos=False)


def test_marks_come_back_in_place() -> None:
    messages = [{"role": "user", "content": "a<s>b<s><t>"}, {"role": "x", "content": ["parts"]}]
    marked, restore = mark_specials(messages, ["<s>", "<t>", ""])
    assert marked[1] == messages[1]
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


@pytest.mark.parametrize("text", ["lone \udc80 surrogate", 5, None])
def test_what_is_no_text_is_refused(tiny: Tokenizer, text: str) -> None:
    with pytest.raises(ConfigError, match="no text that can be tokenised"):
        tiny.encode(text)
