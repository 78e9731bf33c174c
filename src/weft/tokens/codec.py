"""What a tokenizer library does for `Tokenizer`: text to ids, and what each id is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import ConfigError, ModelLoadError
from .vocab import byte_vocab, first_space_is_dummy

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


class Codec(ABC):
    """One vocabulary. Nothing here changes it.

    vocab_bytes: the bytes of every token, by id. special_ids: of special tokens.
    first_space_is_dummy: encoding puts a space before a text, which decoding takes away.
    """

    vocab_bytes: list[bytes]
    special_ids: frozenset[int]
    first_space_is_dummy: bool

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""

    @abstractmethod
    def encode(self, text: str, *, special: bool, decorated: bool) -> list[int]:
        """Return the ids of a text.

        special: special tokens written in it become those tokens. decorated: with the tokens that
        begin and end a text, as the model's files say. Raises: ConfigError for what is no text.
        """

    @abstractmethod
    def spelling(self, token_id: int) -> str:
        """Return a token as the library writes it; "" where no token has that id."""

    @abstractmethod
    def id_of(self, spelling: str) -> int | None:
        """Return the id of a token as the library writes it; None where there is none."""


class TokenizersCodec(Codec):
    """A tokenizer of the tokenizers library, which becomes this object's own."""

    def __init__(self, backend: Backend, name: str) -> None:
        """name: what errors call it."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._name = name

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def vocab_bytes(self) -> list[bytes]:  # type: ignore[override]
        return byte_vocab(self._backend)

    @cached_property
    def special_ids(self) -> frozenset[int]:  # type: ignore[override]
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def first_space_is_dummy(self) -> bool:  # type: ignore[override]
        return first_space_is_dummy(self._backend)

    def encode(self, text: str, *, special: bool, decorated: bool) -> list[int]:
        backend = self._backend if special else self._plain_backend
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=decorated).ids
        except BaseException as error:
            if not is_librarys(error):
                raise
            raise ConfigError(f"{text!r:.60} is no text that can be tokenised: {error}") from error
        return ids

    def spelling(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""

    def id_of(self, spelling: str) -> int | None:
        return self._backend.token_to_id(spelling)

    @cached_property
    def _plain_backend(self) -> Backend:
        try:
            plain = copy_of(self._backend)
        except Exception as error:  # two tokens with one id, for one: one of them is not written
            raise ModelLoadError(
                f"{self._name} is no whole tokenizer: {error}. Download the file again"
            ) from error
        plain.encode_special_tokens = True
        return plain


def copy_of(backend: Backend) -> Backend:
    """Return a tokenizer of the library that shares nothing with the given one."""
    from tokenizers import Tokenizer as Backend

    return Backend.from_str(backend.to_str())


def is_librarys(error: BaseException) -> bool:
    """Whether the tokenizers library gave up: by a plain Exception, or by a panic of its Rust."""
    return isinstance(error, Exception) or is_panic(error)


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust met what it never expected."""
    return type(error).__name__ == "PanicException"
