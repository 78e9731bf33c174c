"""The token history that repetition, presence and frequency penalties count."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class History:
    """Distinct token ids of a history, and how often each was generated.

    Only the last `last_n` tokens count, or all if it is None. Tokens that are in the prompt only
    have count 0. Adding a token costs O(1). The arrays are views, valid until the next change.
    """

    __slots__ = ("_counts", "_ids", "_index", "_n", "_n_in_window", "_recent", "last_n")

    def __init__(self, last_n: int | None = None) -> None:
        self.last_n = last_n
        self._index: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.int64)
        self._n = 0
        # Only with a window: its tokens, whether each was generated, and the count of each id.
        self._recent: deque[tuple[int, bool]] = deque()
        self._n_in_window: Counter[int] = Counter()

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._n]

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._counts[: self._n]

    def __len__(self) -> int:
        return self._n

    def add_prompt(self, token_ids: Iterable[int]) -> None:
        """Add prompt tokens."""
        if self.last_n is not None:
            token_ids = deque(token_ids, maxlen=self.last_n)
        for token_id in token_ids:
            if token_id not in self._index:
                self._append(token_id)
            self._add_to_window(token_id, False)

    def add_generated(self, token_id: int) -> None:
        """Count one generated token."""
        at = self._index.get(token_id)
        if at is None:
            at = self._append(token_id)
        self._counts[at] += 1
        self._add_to_window(token_id, True)

    def copy(self) -> History:
        """Return an independent copy."""
        twin = History(self.last_n)
        twin._recent, twin._n_in_window = self._recent.copy(), self._n_in_window.copy()
        twin._index = self._index.copy()
        twin._ids = self._ids.copy()
        twin._counts = self._counts.copy()
        twin._n = self._n
        return twin

    def _add_to_window(self, token_id: int, generated: bool) -> None:
        """Add a token to the last `last_n` tokens; if there are too many, drop the oldest one.

        Does nothing without a window.

        generated: the token was counted, so its count falls when it is dropped. False for a token
            of the prompt.
        """
        if self.last_n is None:
            return
        self._recent.append((token_id, generated))
        self._n_in_window[token_id] += 1
        if len(self._recent) > self.last_n:
            oldest, was_generated = self._recent.popleft()
            self._counts[self._index[oldest]] -= was_generated
            self._n_in_window[oldest] -= 1
            if not self._n_in_window[oldest]:
                self._remove(oldest)

    def _remove(self, token_id: int) -> None:
        """Remove an id from the arrays; the last id moves to its index."""
        del self._n_in_window[token_id]
        at, last = self._index.pop(token_id), self._n - 1
        if at != last:
            self._ids[at], self._counts[at] = self._ids[last], self._counts[last]
            self._index[int(self._ids[at])] = at
        self._counts[last] = 0
        self._n = last

    def _append(self, token_id: int) -> int:
        at = self._n
        if at == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[at] = token_id
        self._index[token_id] = at
        self._n = at + 1
        return at
