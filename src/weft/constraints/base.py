"""`Constraint`, which defines the allowed text, and `Matcher`, the state of one generation in
it.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .cuts import Vocabulary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .._core.tokens.tokenizer import Tokenizer


class Constraint(ABC):
    """The text that a generation may produce: a hashable value, independent of tokenizers.

    Subclasses are frozen dataclasses, so constraints with equal fields are equal.

    stop_ids: token ids that end a text in addition to the model's end tokens.

    min_tokens: stop strings are ignored if they end within the first `min_tokens` tokens.
    """

    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0

    @abstractmethod
    def compile(self, compiler: Compiler) -> Matcher:
        """Return a matcher at the start of a text.

        Cost: may be large; `Compiler.matcher` caches compiled constraints and returns clones.

        compiler: the tokenizer for which to compile.

        Raises: GrammarError, with line and reason.
        """

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data that `from_dict` of this package reads."""

    @property
    def is_resumed(self) -> bool:
        """True if the constraint continues from a node's text into its children.

        Then growing a node continues the constrained text, if the node was grown with an equal
        constraint. False: the constraint starts again at each node.
        """
        return True

    def parse(self, text: str) -> Any:
        """Convert a finished text to the object it represents; by default the text itself.

        Raises: Unfinished, which is a ValueError, if the text is not finished.
        """
        return text


class Matcher(ABC):
    """The state of a constraint during one generation: which tokens may come next.

    It belongs to one sampler; clone it to fork.

    Masks are bits, least significant first: token t is bit t % 32 of word t // 32; 1 is allowed.

    In its methods, `banned` has the tokens that the caller never draws, because of a bias of -inf;
    `biased` has those with another bias.
    """

    __slots__ = ()

    @abstractmethod
    def fill(
        self,
        bits: NDArray[np.int32],
        banned: Set[int] = frozenset(),
        biased: Set[int] = frozenset(),
    ) -> None:
        """Write the mask of tokens that may come next; it has all end tokens if the text may end.

        Args:
            bits: int32 [n_words(V)], overwritten; bits from V on are undefined.
            banned: tokens that the caller never draws. The mask may still have them. But if the
                grammar forces a text, the mask allows a tokenization of it without them. If there
                is none, it allows nothing.
            biased: tokens with a finite bias. In a forced text, the usual tokens before the first
                of these stay forced. From there the mask allows all tokenizations without banned
                tokens.
        """

    @abstractmethod
    def accept(self, token: int) -> None:
        """Advance by a token. Raises: ConstraintError if it is not allowed; nothing changes then.

        If it raises although the token is allowed, `failure` is set.
        """

    @abstractmethod
    def is_allowed(self, token: int) -> bool:
        """Return True if this token may come next. Changes nothing."""

    def takes(self, tokens: Sequence[int]) -> bool:
        """Return True if these tokens may come next, in this order. Changes nothing."""
        twin = self.clone()
        for token in tokens:
            if not twin.is_allowed(token):
                return False
            twin.accept(token)
        return True

    def forced(self, banned: Set[int] = frozenset(), biased: Set[int] = frozenset()) -> list[int]:
        """Return the next tokens if the constraint leaves no other choice; [] if none is known.

        There may be fewer than all of them. At each of these tokens the mask allows only that
        token. Changes nothing.

        banned, biased: as for `fill`; the result has none of them.
        """
        return []

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """True if the text may end here."""

    @property
    @abstractmethod
    def must_end(self) -> bool:
        """True if only an end token may follow."""

    @property
    def failure(self) -> str | None:
        """The reason why the matcher is unusable, such as a limit of the grammar library.

        None if it works, also if the constraint allows no token.
        """
        return None

    @abstractmethod
    def clone(self) -> Matcher:
        """Return an independent matcher in the same state."""


N_BYTES = 256
# llguidance's end token where the tokenizer has none: the place of a byte that UTF-8 never has.
_END = 0xFF


def n_words(n_vocab: int) -> int:
    """Return the number of int32 words of a mask for a vocabulary.

    A mask has one bit per token, and one for each of 256 bytes (see `Compiler.ids_of`).
    """
    return (n_vocab + N_BYTES + 31) // 32


_KEPT = 64  # compiled constraints, least recently used out first


class Compiler:
    """Compiles constraints for one model and tokenizer, and caches the results.

    text: the tokenizer.

    n_vocab: number of tokens for which the model has logits; the tokenizer may have more or fewer.

    stop_ids: the end tokens below `n_vocab`.
    """

    def __init__(self, text: Tokenizer, n_vocab: int) -> None:
        self.text = text
        self.n_vocab = n_vocab
        self.stop_ids = frozenset(each for each in text.stop_ids if each < n_vocab)
        self._compiled: OrderedDict[Constraint, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> Matcher:
        """Return a new matcher at the start of a constraint; compile the constraint at first use.

        Raises: GrammarError.
        """
        with self._lock:
            kept = self._compiled.get(constraint)
            if kept is not None:
                self._compiled.move_to_end(constraint)
                return kept.clone()
        matcher = constraint.compile(self)
        # llguidance builds most of its automaton for the first mask, which can take seconds. Clones
        # share it, so the scheduler does not wait for it between two steps. A mask over a limit
        # leaves its matcher unusable, so the mask is filled on a clone.
        import numpy as np

        matcher.clone().fill(np.empty(n_words(self.n_vocab), dtype=np.int32))
        with self._lock:
            self._compiled[constraint] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher.clone()

    def first_texts(self, constraint: Constraint) -> Iterator[str]:
        """Yield the texts of the tokens with which a constrained text may begin.

        Tokens that begin with a part of a character are left out.
        """
        import numpy as np

        mask = np.empty(n_words(self.n_vocab), dtype=np.int32)
        self.matcher(constraint).fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.n_vocab]
        texts = (self.spellings[each].decode(errors="replace") for each in bits.nonzero()[0])
        return (text for text in texts if text and text[0] != "\ufffd")

    def ids_of(self, spelled: bytes) -> list[int]:
        """Tokenize bytes: return tokens whose joined bytes are exactly `spelled`.

        They are the tokenizer's own: of a text's start, or of a continuation if the tokenizer adds
        a space at the start. If neither has these bytes, or they are not UTF-8, return the fewest
        tokens that have them. A byte without a token has the id n_vocab + byte, which no model
        draws.
        """
        try:
            written = spelled.decode()
        except UnicodeDecodeError:
            return self.vocabulary.cut(spelled, self.n_vocab)
        for ids in (self.text.encode(written, add_bos=False), self.text.continuation(written)):
            if self._joined_bytes(ids) == spelled:
                return ids
        return self.vocabulary.cut(spelled, self.n_vocab)

    def _joined_bytes(self, ids: list[int]) -> bytes | None:
        """Return the joined bytes of tokens; None if one of them has no bytes."""
        if any(each >= self.n_vocab for each in ids):
            return None
        return b"".join(self.spellings[each] for each in ids)

    @cached_property
    def spellings(self) -> list[bytes]:
        """The bytes of each of the model's tokens as grammars see them.

        b"" for special and end tokens, and for ids without a token.
        """
        mute = self.text.special_ids | self.text.stop_ids
        table = self.text.vocab_bytes[: self.n_vocab]
        table = [b"" if each in mute else spelled for each, spelled in enumerate(table)]
        return table + [b""] * (self.n_vocab - len(table))

    @cached_property
    def quote_tokens(self) -> dict[bytes, list[int]]:
        """Ids of tokens that contain a double quote, by the bytes before their first one."""
        tokens: dict[bytes, list[int]] = {}
        for token, spelled in enumerate(self.spellings):
            begin, quote, _ = spelled.partition(b'"')
            if quote:
                tokens.setdefault(begin, []).append(token)
        return tokens

    @cached_property
    def two_quote_tokens(self) -> list[int]:
        """Ids of tokens that contain two double quotes or more."""
        tokens = (token for group in self.quote_tokens.values() for token in group)
        return [token for token in tokens if self.spellings[token].count(b'"') > 1]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The model's tokens by their bytes. Cost: once, O(vocabulary)."""
        return Vocabulary(self.spellings)

    @cached_property
    def guidance(self) -> Any:
        """The tokenizer as an object of llguidance. Cost: once, O(vocabulary)."""
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        view = _GuidanceTokenizer(self)
        return LLTokenizer(
            TokenizerWrapper(view), eos_token=sorted(self.stop_ids) or [view.eos_token_id]
        )


class _GuidanceTokenizer:
    """A tokenizer as llguidance requires it: the model's tokens, then 256 ids for bytes.

    The library's masks are as wide as this vocabulary. The library needs an end token and a token
    for every byte: it drops bytes without a token from forced text. Id n_vocab + byte stands for a
    byte without a single-byte token; no model draws it.
    """

    def __init__(self, compiler: Compiler) -> None:
        self._ids_of = compiler.ids_of
        mute = compiler.text.special_ids | compiler.stop_ids
        names = compiler.text.vocab_bytes
        self.eos_token_id = min(compiler.stop_ids, default=compiler.n_vocab + _END)
        self.bos_token_id = None
        self.special_token_ids = sorted(each for each in mute if each < compiler.n_vocab)
        self.tokens = [*compiler.spellings, *_missing_bytes(compiler.vocabulary)]
        for token in self.special_token_ids:
            self.tokens[token] = names[token] if token < len(names) else b""

    def __call__(self, text: bytes) -> list[int]:
        return self._ids_of(text)


def _missing_bytes(vocabulary: Vocabulary) -> list[bytes]:
    """Return 256 entries: each byte that lacks a single-byte token, and b"" for the others."""
    single = [bytes((byte,)) for byte in range(N_BYTES)]
    missing = [each if vocabulary.token(each) is None else b"" for each in single]
    missing[_END] = b""
    return missing
