"""Texts as they are searched: what is written alike is found alike, in every database.

The same folding is done to what is kept and to what is asked, so the database's own tokenizer only
ever sees small letters, digits and spaces. Chinese and Japanese are written without spaces: each of
their characters is a word, and a word of several is a phrase of them.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

# Of a node, in characters: PostgreSQL's vector of words holds a megabyte.
MAX_CHARS = 100_000
MAX_PROMPT_CHARS = 2000  # characters of the prompt that a loom's row has, for lists
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
    """A word of a text, folded; where it stands in the text."""

    text: str
    start: int
    end: int


def search_text(text: str) -> str:
    """Return the folded words of a text, joined by spaces."""
    return " ".join(word.text for word in split_words(text[:MAX_CHARS]))


def strip_template(text: str, prompt: str) -> str:
    """Return what a root has of its prompt: without what a chat template puts around it.

    prompt: the full prompt, or its first `MAX_PROMPT_CHARS` characters from the loom's row. A text
    that does not contain it (the prompt was changed since) is returned unchanged.
    """
    start = text.find(prompt) if prompt else -1
    if start < 0:
        return text
    return text[start : start + len(prompt) if len(prompt) != MAX_PROMPT_CHARS else None]


def split_words(text: str) -> list[Word]:
    """Return the words of a text: runs of letters and digits, in small letters, without accents."""
    if text.isascii():
        found = _ASCII.finditer(text)
        return [Word(match[0].lower(), match.start(), match.end()) for match in found]
    return _words_of_any(text)


def _words_of_any(text: str) -> list[Word]:
    found: list[Word] = []
    letters: list[str] = []
    start = 0
    for at, character in enumerate(text):
        folded = _folded(character)
        if not folded or _is_unspaced(character):
            if letters and (folded or not _is_mark(character)):
                found.append(Word("".join(letters), start, at))
                letters = []
            if folded:
                found.append(Word(folded, at, at + 1))
            continue
        if not letters:
            start = at
        letters.append(folded)
    if letters:
        found.append(Word("".join(letters), start, len(text)))
    return found


def _folded(character: str) -> str:
    """Return a character without case and accents; "" for what is in no word."""
    if character.isascii():
        return character.lower() if character.isalnum() else ""
    parts = unicodedata.normalize("NFKD", character.casefold())
    return "".join(part for part in parts if part.isalnum())


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


def _is_unspaced(character: str) -> bool:
    return character > "\u3000" and any(low <= ord(character) <= high for low, high in _UNSPACED)
