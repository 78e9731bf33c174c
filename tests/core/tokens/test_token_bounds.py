from __future__ import annotations

import unicodedata
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from core.tokens import builders
from weft._core.tokens.token_bounds import max_token_bytes


def composed() -> Tokenizer:
    tokenizer = builders.byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def stripped() -> Tokenizer:
    tokenizer = builders.byte_level()
    tokenizer.normalizer = normalizers.Strip()
    return tokenizer


def cut_at_spaces() -> Tokenizer:
    tokenizer = builders.byte_level()
    parts = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return tokenizer


def with_greedy() -> Tokenizer:
    tokenizer = builders.byte_level()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def without_a_byte() -> Tokenizer:
    tokenizer = builders.byte_level()
    text = tokenizer.to_str().replace('"\u0100":', '"\u65e5":')
    return Tokenizer.from_str(text)


TEXTS = [
    "hello hello hello",
    " " * 400,
    "Übergrößenträger 日本語 🙂",
    "\u1100\u1161\u11a8" * 50,
    "\u2126\u0313\u0301\u0345" * 50,
    "\u1fef\u212a" * 50,
    "<|end|>" * 50 + "x",
    "<very long added token>" * 9,
    "\x00\x7f\xad\u200d\n\n\n",
]


@pytest.mark.parametrize(
    "make",
    [
        builders.byte_level,
        builders.sentencepiece,
        builders.metaspace_bytes,
        composed,
        lambda: builders.with_words("<very long added token>"),
    ],
)
@pytest.mark.parametrize("text", TEXTS)
def test_no_token_spells_more_bytes_than_the_maximum(
    make: Callable[[], Tokenizer], text: str
) -> None:
    backend = make()
    longest = max_token_bytes(backend)
    assert longest is not None
    ids = backend.encode(text, add_special_tokens=False).ids
    assert len(text.encode()) <= len(ids) * longest


@pytest.mark.parametrize(
    "make",
    [
        builders.wordpiece,
        builders.characters,
        builders.words,
        builders.metaspace,
        stripped,
        cut_at_spaces,
        with_greedy,
        without_a_byte,
    ],
)
def test_tokenizer_that_may_drop_text_has_no_maximum(make: Callable[[], Tokenizer]) -> None:
    assert max_token_bytes(make()) is None


@pytest.mark.programs
def test_nfc_shortens_a_text_by_a_factor_of_4_or_less() -> None:
    """The longest text that becomes a character is that of its parts, each in its longest form."""
    longest: dict[str, int] = {}
    # Every assigned code point but those for private use, which have no other forms.
    codes = [*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE0200)]
    for character in map(chr, codes):
        normal = unicodedata.normalize("NFC", character)
        longest[normal] = max(longest.get(normal, 0), len(character.encode()))
    for character in map(chr, codes):
        if unicodedata.normalize("NFC", character) != character:
            continue
        parts = unicodedata.normalize("NFD", character)
        n_bytes = sum(max(longest.get(part, 0), len(part.encode())) for part in parts)
        assert n_bytes <= 4 * len(character.encode())
