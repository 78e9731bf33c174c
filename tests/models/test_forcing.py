"""Forced text and prompts before a constraint, on vocabularies of real models."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from weft import LM, Loom
from weft.constraints import Choice, JsonSchema, Regex
from weft.errors import PromptWarning

Load = Callable[[str], LM]

TWO = "The capital of Italy is Rome. The capital of France is Paris. The capital of Portugal is "
CITIES = Choice(["Lisbon", "Athens", "Porto", "Madrid", "Berlin", "Oslo", "Rome", "Vienna"])
RECORD = JsonSchema(
    {
        "type": "object",
        "properties": {"hello": {"const": "there"}, "animal_name": {"const": "the yellow owl"}},
        "required": ["hello", "animal_name"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("name", ["smollm2-llamacpp", "smollm2-gguf-numpy"])
def test_keys_are_forced_as_the_tokenizer_cuts_them_though_bytes_are_missing(
    load_real: Load, name: str
) -> None:
    lm = load_real(name)
    vocabulary = lm.constraints.vocabulary
    assert any(vocabulary.token(bytes((byte,))) is None for byte in range(0x80))
    (node,) = Loom(lm, "Describe Lena.").grow(constraint=RECORD, seed=1, max_tokens=40)
    assert node.tokens == lm.tokenize(node.text, add_bos=False)


def test_healed_prompt_answers_as_one_without_the_space(load_real: Load) -> None:
    loom = Loom(load_real("gemma3-llamacpp"), TWO, template=False, heal=True)
    (node,) = loom.grow(constraint=CITIES, temperature=0, max_tokens=9)
    assert (node.text, node.parsed) == (" Lisbon", "Lisbon")


@pytest.mark.parametrize("name", ["smollm2-llamacpp", "gemma3-llamacpp"])
def test_space_before_digits_does_not_warn_and_before_words_does(
    load_real: Load, name: str
) -> None:
    lm = load_real(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = Loom(lm, "3 + 4 = 7. 5 + 3 = ", template=False)
        sums.grow(constraint=Regex("[0-9]+"), temperature=0, max_tokens=2)
    with pytest.warns(PromptWarning, match="ends in a space"):
        Loom(lm, TWO, template=False).grow(constraint=CITIES, temperature=0, max_tokens=2)
