"""Byte vocabularies under their known names."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError, WeftError
from ...tokens.token import Token, tokens_of
from ...tokens.tokenizer import Tokenizer

FALLBACKS = ("tokenizer", "latin1", "replace")


def decode_vocab(
    tokenizer: Any, byte2str_fallback: str = "tokenizer"
) -> tuple[list[Token], list[str]]:
    """Return the bytes and the text of every token, by id; tokens of equal bytes stay apart.

    byte2str_fallback: the text of bytes that are no UTF-8: what the tokenizer decodes, latin-1, or
    U+FFFD. Raises: ValueError for another fallback or a tokenizer whose tokens have no bytes.
    """
    if byte2str_fallback not in FALLBACKS:
        raise ConfigError(f"Unknown byte2str_fallback: {byte2str_fallback!r}; allowed: {FALLBACKS}")
    wrapped = _wrapped(tokenizer)
    tokens = tokens_of(wrapped.vocab_bytes)
    return tokens, [_text(wrapped, token, byte2str_fallback) for token in tokens]


def get_byte_vocab(tokenizer: Any) -> list[bytes]:
    """Return the bytes of every token, by id."""
    return list(_wrapped(tokenizer).vocab_bytes)


def as_bytes(value: bytes) -> bytes:
    """Return plain bytes, also of a token."""
    return value.byte_string if isinstance(value, Token) else bytes(value)


def is_plain_bytes(value: object) -> bool:
    """Whether a value is bytes and no token."""
    return isinstance(value, bytes) and not isinstance(value, Token)


def _wrapped(tokenizer: Any) -> Tokenizer:
    try:
        wrapped = Tokenizer.wrap(tokenizer)
        assert wrapped.vocab_bytes
        return wrapped
    except WeftError as error:
        raise ConfigError(f"Could not decode byte representation of the tokens: {error}") from error


def _text(wrapped: Tokenizer, token: Token, fallback: str) -> str:
    try:
        return token.byte_string.decode("utf-8")
    except UnicodeDecodeError:
        if fallback == "latin1":
            return token.byte_string.decode("latin-1")
        if fallback == "replace":
            return token.byte_string.decode("utf-8", "replace")
        return wrapped.token_text(token.token_id)
