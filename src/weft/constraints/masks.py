"""Masks of many matchers: filled together, beside the model call, and laid over logits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cores import usable_cores
from .base import Matcher, n_words
from .grammar import GrammarMatcher


class Masks:
    """The masks of B samplers, None for those without a matcher; kept while they step together."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows
        self._bits: NDArray[np.int32] | None = None
        self._filling: Future[None] | None = None

    def begin(self, matchers: Sequence[Matcher | None], n_vocab: int) -> None:
        """Start filling on another thread; matchers must stay as they are until `finish`."""
        self._filling = _worker().submit(self._fill, list(matchers), n_vocab)

    def finish(self, matchers: Sequence[Matcher | None], n_vocab: int) -> None:
        """Fill, or wait for what `begin` started."""
        filling, self._filling = self._filling, None
        if filling is None:
            self._fill(matchers, n_vocab)
        else:
            filling.result()

    def over(self, logits: NDArray[np.float32], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return logits with -inf for what is not allowed: float32 [B, V], a copy.

        rows: int64 [B], whose masks; they are filled (see `finish`).
        """
        assert self._bits is not None
        allowed = np.unpackbits(self._bits[rows].view(np.uint8), axis=1, bitorder="little")
        return np.where(allowed[:, : logits.shape[1]].view(bool), logits, np.float32(-np.inf))

    def _fill(self, matchers: Sequence[Matcher | None], n_vocab: int) -> None:
        shape = (self._n_rows, n_words(n_vocab))
        if self._bits is None or self._bits.shape != shape:
            self._bits = np.empty(shape, dtype=np.int32)
        bits = self._bits
        grammars: list[tuple[GrammarMatcher, int]] = []
        for row, matcher in enumerate(matchers):
            if matcher is None:
                bits[row] = -1
            elif isinstance(matcher, GrammarMatcher):
                grammars.append((matcher, row))
            else:
                matcher.fill(bits[row])
        if len(grammars) == 1:
            grammars[0][0].fill(bits[grammars[0][1]])
        elif grammars:
            inner = [(matcher.inner, row) for matcher, row in grammars]
            width = bits.shape[1] * bits.itemsize
            _executor().unsafe_compute_mask_ptr(inner, bits.ctypes.data, width, len(bits))
            for matcher, row in grammars:
                matcher.filled(bits[row])


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="weft-masks")


@cache
def _executor() -> Any:
    from llguidance import LLExecutor

    return LLExecutor(max(1, min(8, usable_cores() // 2)))
