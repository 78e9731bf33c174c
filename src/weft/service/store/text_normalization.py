"""Normalize texts for full-text search, so that all databases find the same words.

Stored texts and queries are normalized in the same way. The tokenizers of the databases therefore
see only lowercase characters, digits and spaces. Chinese and Japanese have no spaces between words:
each of their characters is a word, and a word of several characters is a phrase.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

# Searched characters of a node. PostgreSQL limits a tsvector to 1 MB.
MAX_CHARS = 100_000
MAX_PROMPT_CHARS = 2000  # characters of the prompt in a loom's row, for lists
_ASCII = re.compile("[A-Za-z0-9]+")
# Scripts that are written without spaces between words.
_UNSPACED = (
    (0x3040, 0x30FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)


class Word(NamedTuple):
    """A normalized word, with its position in the original text."""

    text: str
    start: int
    end: int


def search_text(text: str) -> str:
    """Return the normalized words of a text, joined by spaces, for the full-text index."""
    return " ".join(word.text for word in split_words(text[:MAX_CHARS]))


def strip_template(text: str, prompt: str) -> str:
    """Return the part of a root's text that is the user prompt, without the chat template.

    prompt: the full user prompt, or its first `MAX_PROMPT_CHARS` characters. If the text does not
    contain it, because the prompt was changed since, the text is returned unchanged.
    """
    start = text.find(prompt) if prompt else -1
    if start < 0:
        return text
    return text[start : start + len(prompt) if len(prompt) != MAX_PROMPT_CHARS else None]


def split_words(text: str) -> list[Word]:
    """Split a text into alphanumeric words, in lowercase and without accents."""
    if text.isascii():
        matches = _ASCII.finditer(text)
        return [Word(match[0].lower(), match.start(), match.end()) for match in matches]
    return _split_unicode(text)


def _split_unicode(text: str) -> list[Word]:
    """Split a text that is not ASCII; see `split_words`."""
    words: list[Word] = []
    characters: list[str] = []
    start = 0
    for at, character in enumerate(text):
        normalized = _normalize(character)
        if not normalized or _is_unspaced(character):
            if characters and (normalized or not _is_mark(character)):
                words.append(Word("".join(characters), start, at))
                characters = []
            if normalized:
                words.append(Word(normalized, at, at + 1))
            continue
        if not characters:
            start = at
        characters.append(normalized)
    if characters:
        words.append(Word("".join(characters), start, len(text)))
    return words


def _normalize(character: str) -> str:
    """Return a character in lowercase without accents; "" if it is not part of a word."""
    if character.isascii():
        return character.lower() if character.isalnum() else ""
    parts = unicodedata.normalize("NFKD", character.casefold())
    return "".join(part for part in parts if part.isalnum())


def _is_mark(character: str) -> bool:
    """Return True for a combining mark."""
    return unicodedata.category(character).startswith("M")


def _is_unspaced(character: str) -> bool:
    """Return True for a character of a script without spaces between words."""
    return character > "\u3000" and any(low <= ord(character) <= high for low, high in _UNSPACED)
