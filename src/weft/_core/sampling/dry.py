"""DRY: a penalty on tokens that would continue a repeated sequence.

The rule and its defaults are llama.cpp's. The last tokens of a text are compared with all earlier
places of the text. The longer the tokens before a place are repeated at the end, the larger is the
penalty on the token at that place. A sequence breaker, such as a line end, ends a repetition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .params import SamplingParams

Ids = NDArray[np.int64]
Doubles = NDArray[np.float64]

# Later tokens of a breaker are compared up to this number.
_MAX_TAIL = 20
# Larger penalties would overflow float32, so longer repetitions get no larger one.
_MAX_LOG_PENALTY = 88.7228391
_NO_IDS = np.zeros(0, dtype=np.int64)
_NO_PENALTIES = np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceBreakers:
    """Sequence breakers as tokens of a vocabulary.

    tails: by the first token of a breaker, all sequences of tokens that complete it. A token that
    contains a breaker has the empty sequence.

    is_head: bool [V + 1], True for the tokens in `tails`; the last entry is False.

    single: int64, sorted ids of the tokens that contain a breaker. DRY never penalises them.
    """

    tails: dict[int, tuple[tuple[int, ...], ...]]
    is_head: NDArray[np.bool_]
    single: Ids

    @classmethod
    def from_texts(
        cls,
        texts: Iterable[str],
        vocab_bytes: Sequence[bytes],
        encode: Callable[[str], Sequence[int]],
    ) -> SequenceBreakers:
        """Find the tokens that contain a breaker, and those whose end begins one.

        Args:
            texts: the breakers.
            vocab_bytes: the bytes of each token.
            encode: returns the tokens of a text inside a longer one.

        Cost: O(vocabulary) per text.
        """
        tails: dict[int, set[tuple[int, ...]]] = {}
        for text in texts:
            breaker = text.encode()
            starts = [breaker[:n] for n in range(len(breaker) - 1, 0, -1)]
            for token, own in enumerate(vocab_bytes):
                if breaker in own:
                    tails.setdefault(token, set()).add(())
                    continue
                for start in starts:
                    if own.endswith(start):
                        rest = breaker[len(start) :].decode(errors="ignore")
                        ids = tuple(encode(rest))[:_MAX_TAIL]
                        tails.setdefault(token, set()).add(ids)
        is_head = np.zeros(len(vocab_bytes) + 1, dtype=bool)
        is_head[list(tails)] = True
        single = np.array(sorted(token for token, ends in tails.items() if () in ends), np.int64)
        return cls({token: tuple(ends) for token, ends in tails.items()}, is_head, single)

    def n_after(self, tokens: NDArray[np.int32]) -> int:
        """Return the number of tokens after the last breaker; all if there is none."""
        heads = self.is_head[np.minimum(tokens, len(self.is_head) - 1)]
        for at in np.flatnonzero(heads)[::-1].tolist():
            after = tuple(tokens[at + 1 : at + 1 + _MAX_TAIL].tolist())
            lengths = [len(tail) for tail in self.tails[int(tokens[at])] if _starts(after, tail)]
            if lengths:
                n_after: int = len(tokens) - at - 1 - max(lengths)
                return n_after
        return len(tokens)


NO_BREAKERS = SequenceBreakers({}, np.zeros(1, dtype=bool), _NO_IDS)


def _starts(tokens: tuple[int, ...], tail: tuple[int, ...]) -> bool:
    return tokens[: len(tail)] == tail


class DryHistory:
    """The tokens in which DRY looks for repetitions, and its parameters.

    Adding a token costs O(1), a copy O(tokens).
    """

    __slots__ = ("_breakers", "_max_length", "_n", "_params", "_tokens")

    def __init__(self, params: SamplingParams, breakers: SequenceBreakers = NO_BREAKERS) -> None:
        self._params = params
        self._breakers = breakers
        self._tokens: NDArray[np.int32] = np.zeros(64, dtype=np.int32)
        self._n = 0
        max_growth = 0
        if params.dry_base > 1.000001:
            max_growth = int(_MAX_LOG_PENALTY / math.log(params.dry_base))
        # Longer repetitions have the same penalty.
        self._max_length = params.dry_allowed_length + max_growth

    def add(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text."""
        given = np.array(
            token_ids if isinstance(token_ids, Sequence) else list(token_ids), dtype=np.int32
        )
        n = self._n + len(given)
        if n > len(self._tokens):
            kept = self._window()
            n = len(kept) + len(given)
            self._tokens = np.zeros(max(2 * n, 64), dtype=np.int32)
            self._tokens[: len(kept)] = kept
        self._tokens[n - len(given) : n] = given
        self._n = n

    def copy(self) -> DryHistory:
        """Return an independent copy."""
        twin = DryHistory(self._params, self._breakers)
        window = self._window()
        twin._tokens = np.concatenate((window, np.zeros(64, dtype=np.int32)))
        twin._n = len(window)
        return twin

    def penalties(self) -> tuple[Ids, Doubles]:
        """Return the tokens that would continue a repetition, and the penalty of each.

        Returns: int64 [n] of distinct ids, and float64 [n], to be subtracted from their logits.

        Cost: O(tokens), a comparison of each with the last one.
        """
        tokens, allowed = self._window(), self._params.dry_allowed_length
        longest = min(
            self._breakers.n_after(tokens[-self._max_length - _MAX_TAIL :]), self._max_length
        )
        if longest < allowed or len(tokens) <= allowed:
            return _NO_IDS, _NO_PENALTIES
        # Places whose tokens up to here are repeated at the end of the text.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        lengths = np.ones(len(ends), dtype=np.int64)
        open_ones = np.arange(len(ends))
        for length in range(1, longest):
            open_ones = open_ones[ends[open_ones] >= length]
            open_ones = open_ones[tokens[ends[open_ones] - length] == tokens[-1 - length]]
            if not len(open_ones):
                break
            lengths[open_ones] = length + 1
        repeated = lengths >= allowed
        following = tokens[ends[repeated] + 1].astype(np.int64)
        ids, index = np.unique(following, return_inverse=True)
        longest_of = np.zeros(len(ids), dtype=np.int64)
        np.maximum.at(longest_of, index, lengths[repeated])
        if len(self._breakers.single):
            counted = ~np.isin(ids, self._breakers.single)
            ids, longest_of = ids[counted], longest_of[counted]
        growth = (longest_of - allowed) * math.log(self._params.dry_base)
        return ids, np.minimum(self._params.dry_multiplier * np.exp(growth), 1e30)

    def _window(self) -> NDArray[np.int32]:
        """Return the tokens that count, a view."""
        last_n = self._params.dry_penalty_last_n
        first = 0 if last_n is None else max(self._n - last_n, 0)
        return self._tokens[first : self._n]
