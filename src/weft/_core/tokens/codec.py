"""Vocabularies: text to ids by a library, and the exact bytes of each id."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError, ModelLoadError, Unsupported
from ..atomic_files import PARSE_ERRORS
from ..validation import find_lone_surrogate, lone_surrogate_message
from .special_tokens import pattern_of, segments, without_special_tokens
from .token_bounds import max_token_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_MAX_IDS = 1 << 24
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Speller = Callable[[str], bytes]


class Codec(ABC):
    """A vocabulary, immutable: encodes text to ids, and has the bytes of each token.

    vocab_bytes: the bytes of every token, by id.

    special_ids: the ids of special tokens.

    first_space_is_dummy: encoding adds a space before a text, which decoding removes.
    """

    vocab_bytes: list[bytes]
    special_ids: frozenset[int]
    first_space_is_dummy: bool

    @property
    def max_token_bytes(self) -> int | None:
        """The maximum UTF-8 bytes of a text that one token can represent; None if unknown."""
        return None

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""

    @abstractmethod
    def encode(self, text: str, *, special: bool, decorated: bool) -> list[int]:
        """Tokenize a text.

        Args:
            special: special tokens spelled in the text become those tokens.
            decorated: add the tokens that start and end a text, as the model's files define.

        Raises: ConfigError for text that is invalid, or cannot be written without special tokens.
        """

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Tokenize a rendered chat.

        Text between two special tokens is encoded at once, across the borders of pieces.

        pieces: pairs of a text and a flag. True: it is the name of a special token that a user
            typed; it is encoded as plain text. False: special tokens in it are special.
        """
        ids: list[int] = []
        read = ""
        for text, is_plain in segments(pieces, self._names):
            if not is_plain:
                read += text
                continue
            for part, special in ((read, True), (text, False)):
                ids += self.encode(part, special=special, decorated=False) if part else []
            read = ""
        return ids + (self.encode(read, special=True, decorated=False) if read else [])

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """A regular expression that finds the names of special tokens in a text."""
        spelled = (self.vocab_bytes[each] for each in self.special_ids)
        return pattern_of(frozenset(each.decode("utf-8", "replace") for each in spelled))

    @abstractmethod
    def spelling(self, token_id: int) -> str:
        """Return the library's own spelling of a token, such as "Ġhello"; "" for unknown ids."""

    @abstractmethod
    def id_of(self, spelling: str) -> int | None:
        """Return the id of the token with this spelling; None if there is none."""


_LONG = 1 << 16  # characters; what is shorter takes some ten milliseconds


class TokenizersCodec(Codec):
    """A vocabulary backed by a tokenizer of the Hugging Face tokenizers library."""

    def __init__(
        self,
        backend: Backend,
        name: str,
        *,
        specials: Iterable[str] = (),
        stop_ids: Iterable[int] = (),
    ) -> None:
        """Take over a tokenizer of the library; it is modified.

        Args:
            backend: the tokenizer.
            name: the tokenizer's name in error messages.
            specials: texts of further special tokens that the model's files list.
            stop_ids: end tokens. Those among them that are added tokens become special.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._name = name
        added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        ids = {text: backend.token_to_id(text) for text in specials}
        ids |= {added[each]: each for each in stop_ids if each in added}
        # A line end or a single character may be an end token, but stays ordinary text.
        named = {t: i for t, i in ids.items() if i is not None and len(t.strip()) > 1}
        backend.add_special_tokens([text for text in named if text not in added.values()])
        self._named = frozenset(named.values())

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def vocab_bytes(self) -> list[bytes]:  # type: ignore[override]
        return byte_vocab(self._backend)

    @cached_property
    def special_ids(self) -> frozenset[int]:  # type: ignore[override]
        added = self._backend.get_added_tokens_decoder()
        return self._named | {token_id for token_id, token in added.items() if token.special}

    @cached_property
    def first_space_is_dummy(self) -> bool:  # type: ignore[override]
        return first_space_is_dummy(self._backend)

    @cached_property
    def max_token_bytes(self) -> int | None:
        return max_token_bytes(self._backend)

    def encode(self, text: str, *, special: bool, decorated: bool) -> list[int]:
        ids = self._ids(self._backend, text, decorated)
        if special or (
            not self._names.search(text)
            and self._special_ids_in(ids) == self._added_around(decorated)
        ):
            return ids
        return self._ids(self._twin[0], text, decorated)

    def encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        given = list(pieces)
        if not any(is_text for _, is_text in given):
            ids = self._ids(self._backend, "".join(piece for piece, _ in given), decorated=False)
            names = (name for piece, _ in given for name in self._names.findall(piece))
            if self._special_ids_in(ids) == [self.id_of(name) for name in names]:
                return ids
        twin, hidden = self._twin

        def rename(match: re.Match[str]) -> str:
            return hidden.get(match[0], match[0])

        parts = [piece if is_text else self._names.sub(rename, piece) for piece, is_text in given]
        return self._ids(twin, "".join(parts), decorated=False)

    def _special_ids_in(self, ids: Sequence[int]) -> list[int]:
        """Return the special tokens among the ids of a text, without the unknown token.

        If these are exactly the intended ones, no typed text became a special token. The slower
        copy without special tokens (`_twin`) is then not needed.
        """
        marks = self._ids_of_specials
        return [] if marks.isdisjoint(ids) else [each for each in ids if each in marks]

    def _added_around(self, decorated: bool) -> list[int]:
        """Return the special tokens that `decorated` adds around a text; [] if it is False."""
        return self._decorations if decorated else []

    @cached_property
    def _decorations(self) -> list[int]:
        """The special tokens that the library adds around a text."""
        return self._special_ids_in(self._ids(self._backend, "", decorated=True))

    @cached_property
    def _ids_of_specials(self) -> frozenset[int]:
        """The ids of special tokens, without the unknown token."""
        unknown = self._backend.token_to_id(getattr(self._backend.model, "unk_token", None) or "")
        return self.special_ids - {unknown}

    def _ids(self, backend: Backend, text: str, decorated: bool) -> list[int]:
        """Tokenize a text with `backend`; raise ConfigError for invalid text."""
        try:
            # NOTE: `encode` holds the GIL, a second for megabytes; a batch does not.
            one = (
                backend.encode(text, add_special_tokens=decorated)
                if len(text) <= _LONG
                else backend.encode_batch_fast([text], add_special_tokens=decorated)[0]
            )
            ids: list[int] = one.ids
        except BaseException as error:
            if not is_library_error(error):
                raise
            at = find_lone_surrogate(text) if isinstance(text, str) else None
            why = error if at is None else lone_surrogate_message("it", text, at)
            raise ConfigError(f"{text!r:.60} is no text that can be tokenised: {why}") from error
        return ids

    def spelling(self, token_id: int) -> str:
        return self._backend.id_to_token(token_id) or ""

    def id_of(self, spelling: str) -> int | None:
        return self._backend.token_to_id(spelling)

    @cached_property
    def _twin(self) -> tuple[Backend, dict[str, str]]:
        """A copy of the tokenizer in which special tokens have other, random names.

        The value is that copy, and a mapping from each usual name to its name in the copy.
        """
        added = self._backend.get_added_tokens_decoder()
        names = {added[each].content: each for each in self.special_ids}
        try:
            return without_special_tokens(self._backend, names)
        except Exception as error:  # two tokens with one id, for one: one of them is not written
            raise ModelLoadError(
                f"{self._name} is an incomplete tokenizer: {error}. Download the file again"
            ) from error


def copy_of(backend: Backend) -> Backend:
    """Return an independent copy of a library tokenizer."""
    from tokenizers import Tokenizer as Backend

    return Backend.from_str(backend.to_str())


def is_library_error(error: BaseException) -> bool:
    """Return True if an error can come from the tokenizers library.

    That is an Exception, or a panic of its Rust code, which is only a BaseException.
    """
    return isinstance(error, Exception) or is_panic(error)


def is_panic(error: BaseException) -> bool:
    """Return True for the exception that a panic in Rust code raises."""
    return type(error).__name__ == "PanicException"


def byte_vocab(backend: Backend) -> list[bytes]:
    """Return the bytes of every token, by id; b"" for ids without a token.

    Added and special tokens have the bytes of their text. The joined bytes of a text's tokens are
    the text in UTF-8. Some tokenizers add a space before the first word (`first_space_is_dummy`).
    Cost: a fraction of a second for 128k tokens; call it once.

    Raises: Unsupported for a decoder whose tokens have no bytes of their own; ModelLoadError for a
        broken tokenizer.
    """
    try:
        spell = _spelling_to_bytes(_decoder_steps(backend))
    except (re.error, *PARSE_ERRORS) as error:
        raise ModelLoadError(f"the tokenizer's decoder cannot be followed: {error}") from error
    model = backend.get_vocab(with_added_tokens=False)
    added = {
        token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()
    }
    if len(set(model.values())) < len(model):
        raise ModelLoadError("two tokens of the tokenizer have one id. Download its file again")
    size = 1 + max((*model.values(), *added), default=-1)
    if size > _MAX_IDS:
        raise ModelLoadError(f"the tokenizer has a token of id {size - 1}; its file is broken")
    table = [b""] * size
    for token, token_id in model.items():
        table[token_id] = spell(token)
    for token_id, content in added.items():
        table[token_id] = content.encode()
    return table


def first_space_is_dummy(backend: Backend) -> bool:
    """Return True if decoding drops one space at the start of a text that encoding added."""
    for step in _decoder_steps(backend):
        kind = step["type"]
        if kind == "Strip" and step["content"] == " " and step["start"] > 0:
            return True
        if kind == "Metaspace":
            return bool(step.get("prepend_scheme", "always") != "never")
        if kind in ("WordPiece", "Words"):
            return True
    return False


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    """Return the steps of the tokenizer's decoder in order, as JSON objects of its file."""
    if backend.decoder is not None:
        return _flatten(json.loads(backend.decoder.__getstate__()), "decoders")
    if backend.pre_tokenizer is not None:
        parts = _flatten(json.loads(backend.pre_tokenizer.__getstate__()), "pretokenizers")
        if any(part["type"] == "ByteLevel" for part in parts):
            return [{"type": "ByteLevel"}]
    # Without a decoder the library puts a space between tokens.
    return [{"type": "Words"}]


def _flatten(part: dict[str, Any], inner: str) -> list[dict[str, Any]]:
    """Return the steps of a sequence step, or the step itself, as a list."""
    return list(part[inner]) if part["type"] == "Sequence" else [part]


def _spelling_to_bytes(steps: list[dict[str, Any]]) -> Speller:
    """Return a function from a token's spelling to its bytes.

    steps: see `_decoder_steps`.
    """
    if any(step["type"] == "ByteLevel" for step in steps):
        return _spell_byte_level
    edits = [edit for edit in map(_text_edit, steps) if edit is not None]
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)

    def spell(token: str) -> bytes:
        if has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes((int(match[1], 16),))
        for edit in edits:
            token = edit(token)
        return token.encode()

    return spell


def _text_edit(step: dict[str, Any]) -> Callable[[str], str] | None:
    """Return the function that a decoder step applies to a token's text.

    None if the step does not change single tokens.
    """
    kind = step["type"]
    if kind == "Replace":
        return _replacement(step)
    if kind == "Metaspace":
        mark: str = step["replacement"]
        return lambda token: token.replace(mark, " ")
    if kind == "WordPiece":
        prefix: str = step["prefix"]
        return lambda token: token[len(prefix) :] if token.startswith(prefix) else f" {token}"
    if kind == "BPEDecoder":
        suffix: str = step["suffix"]
        return lambda token: token.replace(suffix, " ")
    if kind == "Words":
        return lambda token: f" {token}"
    if kind in ("ByteFallback", "Fuse", "Strip"):
        return None
    raise Unsupported(
        f"tokens of a tokenizer with a {kind} decoder have no bytes of their own; use a model with "
        "a byte-level, SentencePiece or WordPiece tokenizer"
    )


def _replacement(step: dict[str, Any]) -> Callable[[str], str]:
    """Return the function of a "Replace" step: it replaces the pattern in a text."""
    (kind, pattern), *_ = step["pattern"].items()
    content: str = step["content"]
    if kind == "String":
        return lambda token: token.replace(pattern, content)
    expression = re.compile(pattern)
    return lambda token: expression.sub(lambda _: content, token)


def _byte_level_table() -> dict[int, int]:
    """Return the mapping of byte-level BPE from character codes to bytes, for `str.translate`.

    Printable Latin-1 characters stand for themselves; codes from 256 on stand for the other bytes.
    Other Latin-1 characters map to an invalid code, so that they give no byte.
    """
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in set(own)]
    table = {byte: 0xFFFF for byte in rest}
    table.update({byte: byte for byte in own})
    table.update({256 + index: byte for index, byte in enumerate(rest)})
    return table


_BYTE_LEVEL = _byte_level_table()


def _spell_byte_level(token: str) -> bytes:
    """Return the bytes of a token that is spelled in byte-level BPE."""
    try:
        return token.translate(_BYTE_LEVEL).encode("latin-1")
    except UnicodeEncodeError:
        # A character outside the alphabet: the token is plain text.
        return token.encode()


class Token(bytes):
    """The bytes of a token, with its id.

    Several ids may have equal bytes: two tokens are equal only if their ids are. The hash is that
    of the id. So a dict with tokens as keys distinguishes them, and plain bytes find no entry.
    A comparison with plain bytes compares the bytes.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Token:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise TypeError(f"token_id is {token_id!r}; allowed is an int")
        if not isinstance(byte_string, bytes):
            raise TypeError(f"byte_string is {byte_string!r}; allowed are bytes")
        token = super().__new__(cls, byte_string)
        token.token_id = int(token_id)
        return token

    @property
    def byte_string(self) -> bytes:
        """The token's bytes as plain `bytes`, without the id."""
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
        """Return True if a value is bytes but not a Token."""
        return isinstance(value, bytes) and not isinstance(value, Token)

    def __reduce__(self) -> tuple[Any, ...]:
        return Token, (self.token_id, self.byte_string)

    def __repr__(self) -> str:
        return f"Token(token_id={self.token_id}, byte_string={self.byte_string!r})"


def tokens_of(vocab: Sequence[bytes], kind: Callable[[int, bytes], Token] = Token) -> list[Token]:
    """Create one `Token` per entry of a byte vocabulary, by id.

    kind: creates a token from its id and bytes.
    """
    return [kind(token_id, spelled) for token_id, spelled in enumerate(vocab)]
