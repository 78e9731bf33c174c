"""`Token`: the bytes of a token, which know their id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Token(bytes):
    """Bytes with a token id. Two ids may have equal bytes: tokens are equal when their ids are.

    The hash is the id's, so a table of tokens keeps duplicates apart and plain bytes find none in
    it; compared with plain bytes, the bytes count. `byte_string` is the bytes alone.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise TypeError(f"token_id is {token_id!r}; allowed is an int")
        if not isinstance(byte_string, bytes):
            raise TypeError(f"byte_string is {byte_string!r}; allowed are bytes")
        made = super().__new__(cls, byte_string)
        made.token_id = int(token_id)
        return made

    @property
    def byte_string(self) -> bytes:
        """The bytes alone."""
        return bytes(self)

    def __bytes__(self) -> bytes:
        return self[:]

    def __eq__(self, other: object) -> bool:
        return self.token_id == other.token_id if isinstance(other, Token) else NotImplemented

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return NotImplemented if equal is NotImplemented else not equal

    def __hash__(self) -> int:
        return hash(self.token_id)

    def __lt__(self, other: Any) -> bool:
        return self.token_id < other.token_id if isinstance(other, Token) else NotImplemented

    def __le__(self, other: Any) -> bool:
        return self.token_id <= other.token_id if isinstance(other, Token) else NotImplemented

    def __gt__(self, other: Any) -> bool:
        return self.token_id > other.token_id if isinstance(other, Token) else NotImplemented

    def __ge__(self, other: Any) -> bool:
        return self.token_id >= other.token_id if isinstance(other, Token) else NotImplemented

    @staticmethod
    def as_bytes(value: bytes) -> bytes:
        """Return plain bytes, also of a token."""
        return value.byte_string if isinstance(value, Token) else value

    @staticmethod
    def is_plain_bytes(value: object) -> bool:
        """Whether a value is bytes and no token."""
        return isinstance(value, bytes) and not isinstance(value, Token)

    def __reduce__(self) -> tuple[Any, ...]:
        return Token, (self.token_id, self.byte_string)

    def __repr__(self) -> str:
        return f"Token(token_id={self.token_id}, byte_string={self.byte_string!r})"


def tokens_of(vocab: Sequence[bytes], kind: Callable[[int, bytes], Token] = Token) -> list[Token]:
    """Return the tokens of a byte vocabulary, made by `kind`; index = id."""
    return [kind(token_id, spelled) for token_id, spelled in enumerate(vocab)]
