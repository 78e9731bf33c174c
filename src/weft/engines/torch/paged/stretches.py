"""The stretches that lie above rows: what paths have in common is one line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...base import Span
from .kernel import ITEM_FIELDS
from .lines import AT, BEFORE, CHUNKS, FIRST, SIZE, Ints, N, chunks_of
from .pool import SlotList, SlotPool, own

Path = tuple[Span, ...]


class Stretches:
    """The stretches of paths, by number. 0 is above all, and has no slots.

    lines: one each. ranks: depth first. bounds: [2, n], the ranks of what lies below a stretch.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self.chunk = 0  # until they are cut
        self.lines: Ints = np.zeros((0, ITEM_FIELDS), np.int32)
        self._numbers: dict[tuple[int, Span], int] = {}  # by the parent's, and the stretch
        self._parents = [0]
        self._found = [[0] * ITEM_FIELDS]
        self._lists: list[SlotList | None] = [None]
        self._held: set[SlotList] = set()
        self._lost: list[int] = []

    def bottoms(self, paths: Sequence[Path]) -> Ints:
        """Return the number of the lowest stretch of each path; what is not there is added."""
        ids = list(map(id, paths))
        distinct = dict(zip(ids, paths, strict=True))
        found = {number: self._bottom(path) for number, path in distinct.items()}
        if len(self._found) > len(self.lines):
            self._rank()
        return np.fromiter(map(found.__getitem__, ids), np.int64, len(ids))

    def cut(self, chunk: int) -> None:
        """Cut them into chunks."""
        self.chunk = chunk
        lines = self.lines
        lines[1:, CHUNKS] = chunks_of(lines[1:, N], chunk)
        chunks, before = lines[:, CHUNKS].tolist(), [0]
        for parent in self._parents[1:]:
            before.append(before[parent] + chunks[parent])
        lines[:, BEFORE] = before

    def lose(self, lost: set[SlotList]) -> None:
        """Know stretches no more that lie elsewhere now."""
        if self._held.isdisjoint(lost):
            return
        for number, kv in enumerate(self._lists):
            if kv in lost and not (self._pool.table.has(kv) and kv.at == self._found[number][AT]):
                self._lost.append(number)
        gone = set(self._lost)
        self._numbers = {key: n for key, n in self._numbers.items() if n not in gone}

    def is_whole(self) -> bool:
        """Whether no row lies below one that was lost."""
        return not self._lost or not self.lines[self._lost, SIZE].any()

    def _bottom(self, path: Path) -> int:
        number = 0
        for span in path:
            if span.length:
                number = self._numbers.get((number, span)) or self._add(number, span)
        return number

    def _add(self, parent: int, span: Span) -> int:
        kv, above, number = own(span.fragment), self._found[parent], len(self._found)
        self._numbers[parent, span] = number
        self._parents.append(parent)
        self._lists.append(kv)
        self._held.add(kv)
        first = above[FIRST] + above[N]
        self._found.append([self._pool.place(kv), span.length, first, 0, 0, 0, 0, 0])
        return number

    def _rank(self) -> None:
        """Parents come before their children: once up and once down will do."""
        self.lines = np.array(self._found, np.int32)
        n = [1] * len(self._parents)
        for number in range(len(n) - 1, 0, -1):
            n[self._parents[number]] += n[number]
        ranks, free = [0], [1]
        for parent, n_below in zip(self._parents[1:], n[1:], strict=True):
            ranks.append(free[parent])
            free.append(free[parent] + 1)
            free[parent] += n_below
        self.ranks = np.array(ranks, np.int64)
        self.bounds = np.stack([self.ranks, self.ranks + np.array(n, np.int64)])
        if self.chunk:
            self.cut(self.chunk)
