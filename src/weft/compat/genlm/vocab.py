"""genlm-backend's functions for the bytes of a tokenizer's tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..._core.tokens.codec import Token, tokens_of
from ..._core.tokens.text import is_utf8, token_texts
from ..._core.tokens.tokenizer import Tokenizer
from ...errors import ConfigError, WeftError

__all__ = [
    "ByteDecoderError",
    "ByteVocabError",
    "Token",
    "check_byte_decoder",
    "decode_vocab",
    "get_byte_vocab",
]
FALLBACKS = ("tokenizer", "latin1", "replace")
# Decoders whose tokens, joined, are the text; byte for byte.
_EXACT = frozenset({"ByteLevel", "ByteFallback", "Metaspace"})
_SAMPLE = "’•¶∂ƒ˙∆£Ħ爨ൠᅘ∰፨"

as_bytes = Token.as_bytes
is_plain_bytes = Token.is_plain_bytes


class ByteVocabError(ConfigError):
    """The tokens of a tokenizer have no bytes of their own."""


class ByteDecoderError(ConfigError):
    """A table from characters to bytes does not reproduce a tokenizer's tokens."""


def decode_vocab(
    tokenizer: Any, byte2str_fallback: str = "tokenizer"
) -> tuple[list[Token], list[str]]:
    """Return the bytes and the text of every token of a tokenizer: two lists indexed by token id.

    Tokens of equal bytes stay distinct.

    Args:
        tokenizer: a Transformers tokenizer, or one of the tokenizers library.
        byte2str_fallback: the text of bytes that are no UTF-8: "tokenizer" (its own spelling,
            unique among tokens), "latin1", or "replace" (U+FFFD).

    Raises: ValueError for another fallback or a tokenizer whose tokens have no bytes.
    """
    if byte2str_fallback not in FALLBACKS:
        raise ConfigError(f"Unknown byte2str_fallback: {byte2str_fallback!r}; allowed: {FALLBACKS}")
    try:
        spelled = get_byte_vocab(tokenizer)
    except ByteVocabError as error:
        raise ByteVocabError(
            f"Could not decode byte representation of the tokens: {error}"
        ) from error
    return tokens_of(spelled), _texts(Tokenizer.wrap(tokenizer), spelled, byte2str_fallback)


def get_byte_vocab(tokenizer: Any) -> list[bytes]:
    """Return the bytes of every token, by id.

    Raises: ByteVocabError if joined tokens would differ from the text's bytes.
    """
    kinds = _decoder_kinds(tokenizer)
    if kinds and not kinds & _EXACT:
        raise ByteVocabError(
            f"the decoder of {type(tokenizer).__name__} is {', '.join(sorted(kinds))}, which is"
            " neither ByteLevel nor SentencePiece"
        )
    try:
        return list(Tokenizer.wrap(tokenizer).vocab_bytes)
    except WeftError as error:
        raise ByteVocabError(str(error)) from error


def check_byte_decoder(tokenizer: Any, byte_decoder: Mapping[str, int]) -> None:
    """Check that a table from characters to bytes reproduces a tokenizer's tokens.

    Raises: ByteDecoderError if it does not.
    """
    special = tokenizer.get_added_vocab()
    characters = {each for word in tokenizer.get_vocab() if word not in special for each in word}
    if missing := characters - byte_decoder.keys():
        raise ByteDecoderError(f"Byte decoder is missing bytes: {''.join(sorted(missing))!r:.80}")
    words = tokenizer.convert_ids_to_tokens(tokenizer.encode(_SAMPLE, add_special_tokens=False))
    try:
        text = bytes(byte_decoder[each] for word in words for each in word).decode()
    except ValueError as error:
        raise ByteDecoderError(f"Byte decoder makes no text of {_SAMPLE!r}: {error}") from error
    if text != _SAMPLE:
        raise ByteDecoderError(f"Byte decoder makes {text!r} of {_SAMPLE!r}")


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """Return the type names of the tokenizer's decoders; empty if it declares no decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        return set()
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return {part["type"] for part in decoder.get("decoders", [decoder]) if part}


def _texts(wrapped: Tokenizer, spelled: Sequence[bytes], fallback: str) -> list[str]:
    """Return a text for each token's bytes; `fallback` is `byte2str_fallback` of `decode_vocab`."""
    if fallback == "tokenizer":
        return token_texts(spelled, wrapped.spelling)
    other = "latin-1" if fallback == "latin1" else "utf-8"
    return [each.decode("utf-8" if is_utf8(each) else other, "replace") for each in spelled]
