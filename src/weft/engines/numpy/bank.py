"""The padded bank: the growing tails of all live leaves in one array, one batched product.

        slots →  0 1 2 3 4 5 …            width
    row 0        ■ ■ ■ ■ ■ · · · · ·
    row 1        ■ ■ · · · · · · · ·      ■ holds a token, · zero or stale, masked
    row 2        ■ ■ ■ ■ ■ ■ ■ · · ·

Rows are dense (0 … n-1) and change hands: `Tail.row` is right until the bank's next change of rows.
A few rows have room for 32 slots at a time, so that they are seldom copied; thousands of them have
a quarter more than they need, as all are as wide as the widest.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

GROWTH = 32
# A bank that would be larger than this with `GROWTH` slots a row is crowded.
CROWDED_BYTES = 128 << 20


class Tail(Protocol):
    """What the bank knows of a fragment: its row (-1: none) and how many slots hold tokens."""

    row: int

    @property
    def tail(self) -> int: ...


class TailBank:
    """float32 [L, 2, R, K, S, D], keys at 0 and values at 1 of axis 1; empty without rows."""

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int) -> None:
        self._shape = (n_layers, 2, 0, n_kv_heads, 0, head_dim)
        self.data: NDArray[np.float32] = np.zeros(self._shape, np.float32)
        self.rows: list[Tail] = []
        self._slot_bytes = 4 * n_layers * 2 * n_kv_heads * head_dim

    @property
    def is_crowded(self) -> bool:
        """There are so many rows that none may be wider than it must."""
        return self._step(len(self.rows), 1) < GROWTH

    @property
    def width(self) -> int:
        return self.data.shape[4]

    def row(self, index: int) -> NDArray[np.float32]:
        """One row's slots, a view: [L, 2, K, S, D]; valid until rows or width change."""
        return self.data[:, :, index]

    def add(self, tails: Sequence[Tail]) -> None:
        """Give rows to tails that have none. Changes the array only if there is no room."""
        needed = len(self.rows) + len(tails)
        capacity = self.data.shape[2]
        if needed > capacity:
            rows = max(needed, capacity + capacity // 4)
            self._resize(rows, self._rounded(rows, self._longest()))
        for tail in tails:
            tail.row = len(self.rows)
            self.rows.append(tail)

    def remove(self, tail: Tail) -> None:
        """Take a row back; the last row moves into its place."""
        last = self.rows.pop()
        if last is not tail:
            self.data[:, :, tail.row, :, : last.tail] = self.data[:, :, last.row, :, : last.tail]
            self.rows[tail.row] = last
            last.row = tail.row
        tail.row = -1
        if not self.rows:
            self.data = np.zeros(self._shape, np.float32)
        elif len(self.rows) <= self.data.shape[2] // 2:
            self._resize(len(self.rows), self._rounded(len(self.rows), self._longest()))

    def widen(self, width: int) -> None:
        """Make room for `width` slots in every row."""
        if width > self.width:
            self._resize(self.data.shape[2], self._rounded(len(self.rows), width))

    def bring_together(self, tails: Collection[Tail]) -> bool:
        """Give `tails` rows side by side, in any order; whether rows changed hands.

        Those that step together stay where they are. Cost: one copy of two tails for each that
        stood apart.
        """
        if not tails:
            return False
        n = len(tails)
        first = min(min(tail.row for tail in tails), len(self.rows) - n)
        apart = [tail for tail in tails if not first <= tail.row < first + n]
        if not apart:
            return False
        wanted = set(map(id, tails))
        strangers = [tail for tail in self.rows[first : first + n] if id(tail) not in wanted]
        for tail, stranger in zip(apart, strangers, strict=True):
            self._swap(tail, stranger)
        return True

    def _swap(self, one: Tail, other: Tail) -> None:
        both = [one.row, other.row]
        n = max(one.tail, other.tail)
        self.data[:, :, both, :, :n] = self.data[:, :, both[::-1], :, :n]
        one.row, other.row = other.row, one.row
        self.rows[one.row], self.rows[other.row] = one, other

    def _longest(self) -> int:
        return max((row.tail for row in self.rows), default=1) or 1

    def _step(self, n_rows: int, width: int) -> int:
        """Return how many slots a row grows by."""
        if n_rows * GROWTH * self._slot_bytes <= CROWDED_BYTES:
            return GROWTH
        return max(1, min(GROWTH, width // 4))

    def _rounded(self, n_rows: int, width: int) -> int:
        step = self._step(n_rows, width)
        return -(-width // step) * step

    def _resize(self, capacity: int, width: int) -> None:
        n_layers, _, _, n_kv_heads, _, head_dim = self._shape
        # NOTE: zeros, not empty: a masked slot is multiplied by weight 0, and 0 * NaN is NaN.
        data = np.zeros((n_layers, 2, capacity, n_kv_heads, width, head_dim), np.float32)
        n_rows, n_slots = len(self.rows), min(width, self.width)
        data[:, :, :n_rows, :, :n_slots] = self.data[:, :, :n_rows, :, :n_slots]
        self.data = data
