"""`TokenLimits`: limits on token ids, with or without another constraint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._core.validation import check_int
from ..errors import ConfigError, ConstraintError
from .base import Constraint, Matcher

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .._core.tokens.tokenizer import Tokenizer
    from .base import Compiler


@dataclass(frozen=True, slots=True, init=False)
class TokenLimits(Constraint):
    """Limits on tokens: allowed ones, bad words, a minimum length, further end tokens.

    allowed: the only token ids that are allowed, end tokens included; None means all.

    bad_words: texts or token sequences that the text must not contain. A text is banned in the
    tokens that it has at the start of a text, inside one, and after a space.

    min_tokens: end tokens and `stop_ids` are forbidden, and stop strings ignored, before this many
    tokens.

    stop_ids: token ids that end a continuation in addition to the model's end tokens.

    inner: another constraint that the text must fit too; None means there is none.
    """

    allowed: frozenset[int] | None
    bad_words: tuple[str | tuple[int, ...], ...]
    min_tokens: int
    stop_ids: frozenset[int]
    inner: Constraint | None

    def __init__(
        self,
        allowed: Iterable[int] | None = None,
        bad_words: Iterable[str | Sequence[int]] = (),
        min_tokens: int = 0,
        stop_ids: Iterable[int] = (),
        inner: Any = None,
    ) -> None:
        """inner: anything that `constraint=` accepts."""
        from .kinds import as_constraint

        words = [bad_words] if isinstance(bad_words, str) else list(bad_words)
        if not all(word.strip() if isinstance(word, str) else len(word) for word in words):
            raise ConfigError(
                f"bad_words is {words!r:.80}; allowed are texts that are not only white space"
            )
        values = {
            "allowed": None if allowed is None else frozenset(_ids("allowed", allowed)),
            "bad_words": tuple(
                word if isinstance(word, str) else tuple(_ids("bad_words", word)) for word in words
            ),
            "min_tokens": check_int("min_tokens", min_tokens, 0),
            "stop_ids": frozenset(_ids("stop_ids", stop_ids)),
            "inner": None if inner is None else as_constraint(inner),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def compile(self, compiler: Compiler) -> Matcher:
        """Return a matcher that counts tokens; see `Constraint.compile`.

        Raises: ConfigError for a token id outside the vocabulary, or the error of `inner`.
        """
        words = [
            spelled
            for word in self.bad_words
            for spelled in (_spellings(compiler.text, word) if isinstance(word, str) else [word])
        ]
        used = [*self.stop_ids, *(self.allowed or ()), *(i for word in words for i in word)]
        wrong = next((each for each in used if not 0 <= each < compiler.n_vocab), None)
        if wrong is not None:
            raise ConfigError(f"token id {wrong}; allowed are 0 to {compiler.n_vocab - 1}")
        inner = None if self.inner is None else compiler.matcher(self.inner)
        return TokenLimitsMatcher(self, words, compiler.stop_ids | self.stop_ids, inner)

    @property
    def is_resumed(self) -> bool:
        """False for limits alone, because they count the tokens of one call."""
        return self.inner is not None

    def parse(self, text: str) -> Any:
        """Return what `inner` parses; the text itself without `inner`. Raises: as `inner`."""
        return text if self.inner is None else self.inner.parse(text)

    def to_dict(self) -> dict[str, Any]:
        """Return `{"token_limits": limits, "inner": data or None}`, which `from_dict` reads."""
        limits = {
            "allowed": None if self.allowed is None else sorted(self.allowed),
            "bad_words": [word if isinstance(word, str) else list(word) for word in self.bad_words],
            "min_tokens": self.min_tokens,
            "stop_ids": sorted(self.stop_ids),
        }
        return {
            "token_limits": limits,
            "inner": None if self.inner is None else self.inner.to_dict(),
        }

    @classmethod
    def from_dict(cls, limits: Mapping[str, Any], inner: Constraint | None) -> TokenLimits:
        """Deserialize the "token_limits" of `to_dict`, with the inner constraint."""
        return cls(
            limits.get("allowed"),
            limits.get("bad_words", ()),
            limits.get("min_tokens", 0),
            limits.get("stop_ids", ()),
            inner,
        )


def _ids(name: str, ids: Iterable[int]) -> list[int]:
    """Return token ids as a list. Raises: ConfigError for other values."""
    return [check_int(f"a token id in {name}", token, 0) for token in ids]


def _spellings(text: Tokenizer, word: str) -> set[tuple[int, ...]]:
    """Return the token sequences of a word at the start of a text, inside it and after a space."""
    word = word.lstrip()
    spelled = (text.encode(word, add_bos=False), text.continuation(word))
    return set(map(tuple, (*spelled, text.continuation(f" {word}"))))


class TokenLimitsMatcher(Matcher):
    """State of `TokenLimits`: the number of tokens so far, and the last tokens."""

    __slots__ = ("_end_ids", "_inner", "_last", "_limits", "_longest", "_n", "_words")

    def __init__(
        self,
        limits: TokenLimits,
        words: Sequence[tuple[int, ...]],
        end_ids: frozenset[int],
        inner: Matcher | None,
    ) -> None:
        """Start a text.

        Args:
            limits: the constraint.
            words: the token sequences of its bad words.
            end_ids: all tokens that end a continuation.
            inner: the matcher of the inner constraint, which this object changes; None without one.
        """
        self._limits = limits
        self._end_ids = end_ids
        self._inner = inner
        self._words = words
        self._longest = max(map(len, words), default=1) - 1
        self._n = 0
        self._last: tuple[int, ...] = ()  # as many as the longest bad word has before its end

    def fill(
        self,
        bits: NDArray[np.int32],
        banned: Set[int] = frozenset(),
        biased: Set[int] = frozenset(),
    ) -> None:
        words = bits.view("uint32")
        forbidden = self._forbidden()
        if self._inner is not None:
            self._inner.fill(bits, banned | forbidden, biased)
        else:
            words[:] = 0xFFFFFFFF
        if self._limits.allowed is not None:
            kept = [t for t in self._limits.allowed if words[t // 32] >> t % 32 & 1]
            words[:] = 0
            _set_bits(words, kept)
        for token in forbidden:
            words[token // 32] &= 0xFFFFFFFF ^ (1 << token % 32)

    def _forbidden(self) -> frozenset[int]:
        """Return the tokens that complete a bad word here, or that end the text too early."""
        last = self._last
        completing = {
            word[-1] for word in self._words if len(word) == 1 or last[1 - len(word) :] == word[:-1]
        }
        return frozenset(
            completing | self._end_ids if self._n < self._limits.min_tokens else completing
        )

    def accept(self, token: int) -> None:
        if not self._is_within_limits(token):
            raise ConstraintError(f"token {token} is outside the limits on tokens")
        if self._inner is not None:
            self._inner.accept(token)
        self._n += 1
        if self._longest:
            self._last = (*self._last, token)[-self._longest :]

    def is_allowed(self, token: int) -> bool:
        within = self._is_within_limits(token)
        return within and (self._inner is None or self._inner.is_allowed(token))

    def _is_within_limits(self, token: int) -> bool:
        """Return True if the limits allow the token; the inner constraint is not considered."""
        allowed = self._limits.allowed
        return (allowed is None or token in allowed) and token not in self._forbidden()

    @property
    def may_end(self) -> bool:
        is_long = self._n >= self._limits.min_tokens
        return is_long and (self._inner is None or self._inner.may_end)

    @property
    def must_end(self) -> bool:
        return self._inner is not None and self._inner.must_end

    @property
    def failure(self) -> str | None:
        return None if self._inner is None else self._inner.failure

    def clone(self) -> TokenLimitsMatcher:
        inner = None if self._inner is None else self._inner.clone()
        twin = TokenLimitsMatcher(self._limits, self._words, self._end_ids, inner)
        twin._n, twin._last = self._n, self._last
        return twin


def _set_bits(words: NDArray[Any], tokens: Iterable[int]) -> None:
    """Set the bits of these tokens in a mask."""
    for token in tokens:
        words[token // 32] |= 1 << token % 32
