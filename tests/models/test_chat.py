"""Chats, prompts and constraints on the real models' tokenizers and templates."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from models.conftest import Load, generate_text
from tokenizer_texts import TEXTS
from weft import Loom
from weft.constraints import Choice, JsonSchema, Regex

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", "日本"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
QUESTIONS = ["What is the capital of Italy?", "And of France?", "Name one river there."]
CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "My name is Ada.  I am 36."},
    {"role": "assistant", "content": "Hello Ada!"},
    {"role": "user", "content": "What is my name?\n\nAnswer in one word. 🙂"},
]


@pytest.mark.parametrize(
    "name", ["smollm2-torch", "smollm2-gguf-torch", "smollm2-gguf-numpy", "smollm2-llamacpp"]
)
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_rendered_chat_equals_that_of_transformers(
    name: str, length: int, load_real: Load, transformers_tokenizer: Any
) -> None:
    messages = CONVERSATION[:length]
    expected = transformers_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert str(load_real(name).format_chat(messages)) == expected


@pytest.mark.parametrize("name", ["smollm2-numpy", "smollm2-gguf-numpy", "smollm2-llamacpp"])
def test_rendered_chats_of_300_texts_equal_those_of_transformers(
    name: str, load_real: Load, transformers_tokenizer: Any
) -> None:
    """Also the tokens, unless a text spells a special token: Weft reads it as plain text."""
    lm = load_real(name)
    special_tokens = transformers_tokenizer.all_special_tokens
    n_compared = 0
    for number, text in enumerate(TEXTS):
        messages = [{"role": "user", "content": text}]
        if number % 3 == 0:
            messages.insert(0, {"role": "system", "content": TEXTS[number - 1]})
        if number % 2 == 0:
            messages.append({"role": "assistant", "content": TEXTS[number - 2]})
            messages.append({"role": "user", "content": text[::-1]})
        expected = transformers_tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        prompt = lm.format_chat(messages)
        assert str(prompt) == expected, text
        if any(mark in each["content"] for each in messages for mark in special_tokens):
            continue
        assert list(prompt.ids) == transformers_tokenizer(expected)["input_ids"], text
        n_compared += 1
    assert n_compared > 280


@pytest.mark.parametrize("name", ["smollm2-torch", "smollm2-numpy", "smollm2-mlx"])
def test_greedy_answers_of_three_turns_equal_those_of_generate(
    name: str, load_real: Load, transformers_model: Any, transformers_tokenizer: Any
) -> None:
    lm = load_real(name)
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = Loom(lm, messages).grow(n=1, temperature=0.0, max_tokens=12, show=False)[0]
        assert answer.text == generate_text(transformers_model, transformers_tokenizer, messages)
        messages.append({"role": "assistant", "content": answer.text})


@pytest.mark.parametrize(
    "name",
    ["smollm2-torch", "smollm2-gguf-numpy", "smollm2-llamacpp", "gemma3-llamacpp", "gemma3-torch"],
)
def test_constrained_samples_are_valid(name: str, load_real: Load) -> None:
    lm = load_real(name)
    loom = Loom(lm, "Describe a person as JSON. ", template=False)
    nodes = loom.grow(
        n=6, constraint=JsonSchema(PERSON), temperature=1.0, seed=3, max_tokens=200, show=False
    )
    finished = [node for node in nodes if node.terminal]
    assert finished
    for node in finished:
        jsonschema.validate(json.loads(node.text), PERSON)
    digits = loom.grow(n=4, constraint=Regex("[0-9]{3}-[a-z]{2}"), seed=1, show=False)
    assert all(len(node.text) == 6 and node.text[3] == "-" for node in digits)
    words = ["Lisbon", "Lima", "Łódź", "東京"]
    chosen = loom.grow(n=6, constraint=Choice(words), seed=2, show=False)
    assert {node.text for node in chosen} <= set(words)
