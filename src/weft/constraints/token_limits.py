"""`TokenLimits`: limits on token ids, with or without another constraint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ConstraintError
from .base import Constraint, Matcher

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .base import Compiler


@dataclass(frozen=True, slots=True)
class TokenLimits(Constraint):
    """Limits on token ids: allowed tokens, bad words, a minimum length, further end tokens.

    allowed: the only token ids that are allowed, end tokens included; None means all.
    bad_words: token sequences that the text must not contain.
    min_tokens: end tokens and `stop_ids` are forbidden before this many tokens.
    stop_ids: token ids that end a continuation in addition to the model's end tokens.
    inner: another constraint that the text must fit too; None means there is none.
    """

    allowed: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    inner: Constraint | None = None

    def compile(self, compiler: Compiler) -> Matcher:
        used = [
            *self.stop_ids,
            *(self.allowed or ()),
            *(i for word in self.bad_words for i in word),
        ]
        wrong = next((each for each in used if not 0 <= each < compiler.n_vocab), None)
        if wrong is not None:
            raise ConfigError(f"token id {wrong}; allowed are 0 to {compiler.n_vocab - 1}")
        inner = None if self.inner is None else compiler.matcher(self.inner)
        return TokenLimitsMatcher(self, compiler.stop_ids | self.stop_ids, inner)

    @property
    def is_resumed(self) -> bool:
        """False for limits alone, because they count the tokens of one call."""
        return self.inner is not None

    def parse(self, text: str) -> Any:
        return text if self.inner is None else self.inner.parse(text)

    def to_dict(self) -> dict[str, Any]:
        limits = {
            "allowed": None if self.allowed is None else sorted(self.allowed),
            "bad_words": [list(word) for word in self.bad_words],
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
        allowed = limits.get("allowed")
        return cls(
            None if allowed is None else frozenset(allowed),
            tuple(tuple(word) for word in limits.get("bad_words", ())),
            limits.get("min_tokens", 0),
            frozenset(limits.get("stop_ids", ())),
            inner,
        )


class TokenLimitsMatcher(Matcher):
    """State of `TokenLimits`: the number of tokens so far, and the last tokens."""

    __slots__ = ("_end_ids", "_inner", "_last", "_limits", "_longest", "_n")

    def __init__(self, limits: TokenLimits, end_ids: frozenset[int], inner: Matcher | None) -> None:
        """Start a text.

        Args:
            limits: the constraint.
            end_ids: all tokens that end a continuation.
            inner: the matcher of the inner constraint, which this object changes; None without one.
        """
        self._limits = limits
        self._end_ids = end_ids
        self._inner = inner
        self._longest = max(map(len, limits.bad_words), default=1) - 1
        self._n = 0
        self._last: tuple[int, ...] = ()  # as many as the longest bad word has before its end

    def fill(self, bits: NDArray[np.int32], banned: Set[int] = frozenset()) -> None:
        words = bits.view("uint32")
        forbidden = self._forbidden()
        if self._inner is not None:
            self._inner.fill(bits, banned | forbidden)
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
            word[-1]
            for word in self._limits.bad_words
            if len(word) == 1 or last[1 - len(word) :] == word[:-1]
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
        twin = TokenLimitsMatcher(self._limits, self._end_ids, inner)
        twin._n, twin._last = self._n, self._last
        return twin


def _set_bits(words: NDArray[Any], tokens: Iterable[int]) -> None:
    """Set the bits of these tokens in a mask."""
    for token in tokens:
        words[token // 32] |= 1 << token % 32
