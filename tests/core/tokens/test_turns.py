"""Turn deltas: the tokens so far + the delta are the complete chat, for every known template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from core.tokens.builders import byte_level
from weft._core.tokens.tokenizer import Tokenizer
from weft._core.tokens.turns import turn_delta, turn_separator
from weft.errors import ConfigError

FOLDER = Path(__file__).parent / "templates"
# name: begin, end, further special tokens, what the separator says
KINDS: dict[str, tuple[str, str, list[str], str]] = {
    "llama3": (
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|start_header_id|>", "<|end_header_id|>"],
        "<|eot_id|>",
    ),
    "phi3": ("<s>", "<|end|>", ["<|user|>", "<|assistant|>", "<|system|>"], "<|end|>\n"),
    "qwen": ("", "<|im_end|>", ["<|im_start|>"], "<|im_end|>\n"),
    "smollm": ("", "<|im_end|>", ["<|im_start|>"], "<|im_end|>\n"),
    "gemma": ("<bos>", "<end_of_turn>", ["<start_of_turn>"], "<end_of_turn>\n"),
    "mistral": ("<s>", "</s>", ["[INST]", "[/INST]"], "</s>"),
}
TURNS = [
    ("Hi <|im_end|> there", "Hello  "),
    (" two\n\nlines", "é 日本 </s> {{ x }}"),
    ("three", "\n ends in blanks \n"),
    ("four", "done"),
]


def tokenizer(name: str) -> Tokenizer:
    begin, end, others, _ = KINDS[name]
    backend = byte_level()
    names = [one for one in (begin, end, *others) if one]
    backend.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in names])
    return Tokenizer(
        backend,
        special_tokens={"bos_token": begin, "eos_token": end} if begin else {"eos_token": end},
        chat_template=(FOLDER / f"{name}.jinja").read_text(encoding="utf-8"),
    )


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def text(kind: str) -> Tokenizer:
    return tokenizer(kind)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def test_separator_is_the_end_token_and_blank_text(kind: str, text: Tokenizer) -> None:
    separator = turn_separator(text)
    assert text.decode(separator) == KINDS[kind][3]
    assert separator[0] in text.stop_ids


def test_tokens_so_far_plus_delta_equal_the_complete_chat(kind: str, text: Tokenizer) -> None:
    """Each answer is followed by its delta, and compared with a render of the complete chat."""
    chat: list[dict[str, Any]] = [user(TURNS[0][0])]
    for (_, answer), (question, _) in zip(TURNS, TURNS[1:], strict=False):
        # What a template trims of an answer it would trim of the words that were run, too.
        chat.append(assistant(answer.strip()))
        new = [user(question)]
        complete = text.encode_chat([*chat, *new])
        delta = turn_delta(text, new, history=chat)
        n_before = len(complete) - len(delta)
        assert complete[n_before:] == delta
        before = text.decode(complete[:n_before])
        assert before.endswith(answer.strip())
        assert delta[0] in text.stop_ids
        assert turn_delta(text, new) == delta
        chat += new


def test_delta_after_generated_tokens_equals_the_complete_chat(kind: str, text: Tokenizer) -> None:
    """Prompt ids + generated ids + delta, turn by turn, equal the ids of the complete chat."""
    chat = [user("one")]
    ids = text.encode_chat(chat)
    for answer in ("An answer", "and another", "last"):
        space = " " if kind == "mistral" else ""
        ids += text.continuation(space + answer)
        new = [user(f"after {answer}")]
        ids += turn_delta(text, new)
        chat += [assistant(answer), *new]
        assert ids == text.encode_chat(chat)


@pytest.mark.parametrize(("name", "block"), [("qwen", "helpful assistant"), ("smollm", "SmolLM")])
def test_automatic_system_block_appears_once(name: str, block: str) -> None:
    text = tokenizer(name)
    assert block in text.apply_chat_template([user("x")])
    assert block not in text.decode(turn_delta(text, [user("x")]))


def test_template_options_are_passed_on() -> None:
    text = tokenizer("qwen")
    short = turn_delta(text, [user("x")], add_generation_prompt=False)
    assert text.decode(short) == "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
    silent = turn_delta(text, [user("x")], enable_thinking=False)
    assert text.decode(silent).endswith("assistant\n<think></think>")


def test_error_raised_by_a_template_is_passed_on() -> None:
    gemma = tokenizer("gemma")
    with pytest.raises(ConfigError, match="System role not supported"):
        gemma.encode_chat([{"role": "system", "content": "s"}, user("x")])
    for name in ("gemma", "mistral"):
        with pytest.raises(ConfigError, match="Roles must alternate"):
            turn_delta(tokenizer(name), [user("x"), user("y")])


def test_values_that_cannot_be_a_turn_raise() -> None:
    text = tokenizer("phi3")
    with pytest.raises(ConfigError, match="no new messages"):
        turn_delta(text, [])
    with pytest.raises(ConfigError, match="no messages in the history"):
        turn_delta(text, [user("x")], history=[])
    with pytest.raises(ConfigError, match="must be the assistant's"):
        turn_delta(text, [user("x")], history=[user("y")])
    text.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ConfigError, match="leaves out earlier answers"):
        turn_delta(text, [user("x")])
    assert turn_separator(text) == [text.eos_token_id]
