"""A step's own slots: those that its new tokens are written to, and that only their row sees."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .attention import Floats, SpanPart, TailPart
from .bank import TailBank
from .fragments import NumpyFragment


class Tails:
    """The rows that add one token each to a tail: n rows of the bank side by side, in its order."""

    __slots__ = ("_bank", "_first", "_lengths", "_mask", "_scatter", "_slots", "_width", "n")

    def __init__(self, dests: list[NumpyFragment], bank: TailBank) -> None:
        self.n = len(dests)
        self._bank = bank
        self._first = dests[0].row if dests else 0
        self._lengths = np.array([dest.tail for dest in dests], np.int64)
        self._width = int(self._lengths.max(initial=-1)) + 1

    @property
    def has_room(self) -> bool:
        return self._width <= self._bank.width

    def begin(self) -> None:
        """Look at the bank up to the longest tail's new slot."""
        lengths, width = self._lengths, self._width
        seen = np.arange(width) <= lengths[:, None]
        if bool(seen.all()):
            self._mask = None
            rows = slice(self._first, self._first + self.n)
            self._slots = list(self._bank.data[:, :, rows, :, width - 1].swapaxes(2, 3))
        else:
            self._mask = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]
            self._slots = list(self._bank.data)
        rows_at = self._first + np.arange(self.n)
        self._scatter = (slice(None), rows_at, slice(None), lengths)

    def part(self, lo: int, hi: int) -> TailPart:
        """What tails lo … hi-1 see of their own, the new slot included."""
        mask = None if self._mask is None else self._mask[lo:hi]
        rows = slice(self._first + lo, self._first + hi)
        tails = self._bank.data[:, :, rows, :, : self._width]
        return TailPart(tails, slice(0, hi - lo), mask)

    def write(self, layer: int, kv: Floats) -> None:
        """Store keys and values of the new tokens: [n, 2, K, D]."""
        if self._mask is None:
            self._slots[layer][...] = kv.transpose(1, 2, 0, 3)
        else:
            self._slots[layer][self._scatter] = kv

    def commit(self) -> None:
        """The slots written are kept."""
        self._lengths += 1
        self._width += 1


class Chunk:
    """A row with its own array: `room`, [L, 2, K, S, D], whose last slots are the new ones."""

    __slots__ = ("_n_before", "_room", "_slots")

    def __init__(self, room: Floats, n_tokens: int) -> None:
        self._room = room
        self._n_before = room.shape[3] - n_tokens
        self._slots = list(room[:, :, :, self._n_before :])

    def part(self, lo: int, hi: int, start: int) -> SpanPart:
        """What its new tokens lo … hi-1 see of their own; they are the queries from `start` on."""
        seen = self._room[:, :, :, : self._n_before + hi]
        return SpanPart([seen], slice(start, start + hi - lo), triangle(hi - lo))

    def write(self, layer: int, kv: Floats) -> None:
        """Store keys and values of the new tokens: [n, 2, K, D]."""
        self._slots[layer][...] = kv.transpose(1, 2, 0, 3)


@lru_cache(maxsize=8)
def triangle(n: int) -> Floats:
    """Causal mask of n tokens among themselves: [n, 1, n], 0 up to itself and -inf after."""
    return np.triu(np.full((n, n), -np.inf, np.float32), k=1)[:, None]
