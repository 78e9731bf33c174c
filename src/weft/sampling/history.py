"""The tokens a sampler has seen, counted, for penalties."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class History:
    """Distinct token ids in the order they came, with how often each was generated.

    Prompt tokens count zero. Adding one token costs O(1). The arrays are views, valid until the
    next change.
    """

    __slots__ = ("_counts", "_ids", "_index", "_n")

    def __init__(self) -> None:
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int64)
        self._n = 0

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._n]

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._counts[: self._n]

    def __len__(self) -> int:
        return self._n

    def see(self, token_ids: Iterable[int]) -> None:
        """Note prompt tokens."""
        for token_id in token_ids:
            if token_id not in self._index:
                self._append(token_id)

    def generate(self, token_id: int) -> None:
        """Count one generated token."""
        at = self._index.get(token_id)
        if at is None:
            at = self._append(token_id)
        self._counts[at] += 1

    def copy(self) -> History:
        """Return an independent copy."""
        twin = History.__new__(History)
        twin._index = self._index.copy()
        twin._ids = self._ids.copy()
        twin._counts = self._counts.copy()
        twin._n = self._n
        return twin

    def _append(self, token_id: int) -> int:
        at = self._n
        if at == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[at] = token_id
        self._index[token_id] = at
        self._n = at + 1
        return at
