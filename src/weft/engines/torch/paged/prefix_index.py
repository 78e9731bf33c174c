"""The stretches that lie above rows: what paths have in common is one line.

A search that goes on from the best of each round leaves short nodes one below the other. Met one by
one, each is an item and a part a row. So a short stretch is *handed down*: what lies below it is
met with it, from one list of the slots of both, and it has no line any more:

    paths      a ─ b ─ c      met        (a b c)           one list, and one part a row
                     └ d      as         (a b d)

What lies above a single row is met with the row's own list, and has no line either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...base import Span
from .kernel import ITEM_FIELDS
from .pool import PagedFragment, SlotPool, own
from .tiling import AT, BEFORE, CHUNKS, FIRST, SIZE, Ints, N, chunks_of

# A part less of a row is worth reading so many slots once more: it is written and read in float32.
# Heads in groups of four have eight slots in 16 bits for it, those on their own two. Not measured.
_PART = 4

Path = tuple[Span, ...]


class PrefixIndex:
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
        self._spans: list[Span | None] = [None]
        self._lists: list[tuple[PagedFragment, ...]] = [()]  # whose slots its line has
        self._held: set[PagedFragment] = set()
        self._lost: list[int] = []
        self._lone = np.zeros(0, np.int64)  # those that are met with the one row below them
        # Of those that were handed down: what has their slots for rows that go on from there.
        self._ends: dict[int, int] = {}
        self._joined: list[PagedFragment] = []

    def bottoms(self, paths: Sequence[Path]) -> Ints:
        """Return the number of the lowest stretch of each path; what is not there is added."""
        ids = list(map(id, paths))
        distinct = dict(zip(ids, paths, strict=True))
        found = {number: self._bottom(path) for number, path in distinct.items()}
        if len(self._found) > len(self.lines):
            self._rank()
        return np.fromiter(map(found.__getitem__, ids), np.int64, len(ids))

    def merge_short(self, bottoms: Ints, chunk: int) -> Ints:
        """Hand down stretches of up to a chunk where that saves more than it reads twice.

        bottoms: the rows' lowest ones. Returns those that they have now.
        """
        n_all = len(self._found)
        n_below = np.bincount(self._parents[1:], minlength=n_all)
        n_more = n_below + (np.bincount(bottoms, minlength=n_all) > 0) - 1
        worth, size = _PART * self.lines[:, SIZE], self.lines[:, N]
        may = (n_below > 0) & (size > 0) & (size <= chunk) & (n_more * size <= worth)
        if not may.any():
            return bottoms
        handed = [0] * n_all  # slots, with those from above
        for number in range(1, n_all):
            parent = self._parents[number]
            n = handed[parent] + self._found[number][N]
            if may[number] and n <= chunk and n_more[number] * n <= worth[number]:
                handed[number] = n
                self._found[number][N] = 0
                self._ends[number] = 0
            elif handed[parent]:
                self._join(number)
        found = bottoms.copy()
        for number in set(bottoms.tolist()).intersection(self._ends):
            found[bottoms == number] = self._end(number)
        self._rank()
        return found

    def join_lone(self, bottoms: Ints, chunk: int) -> Ints:
        """Give those up that lie above one row alone, of one token, and have one chunk.

        bottoms: the rows' lowest ones. Returns which rows are to have theirs met with them.
        """
        lines = self.lines.take(bottoms, 0)
        is_lone = (lines[:, SIZE] == 1) & (lines[:, N] > 0) & (chunks_of(lines[:, N], chunk) == 1)
        self._lone = bottoms[is_lone]
        return np.flatnonzero(is_lone)

    def split_single_row(self, bottoms: Ints) -> Ints:
        """Let those have lines again that new rows lie below; return their numbers."""
        lone, numbers, found = set(self._lone.tolist()), set(bottoms.tolist()), set[int]()
        while lone and numbers:
            found |= lone & numbers
            numbers = {self._parents[number] for number in numbers} - {0}
        if found:
            self._lone = np.array(sorted(lone - found), np.int64)
            self.cut(self.chunk)
        return np.array(sorted(found), np.int64)

    def cut(self, chunk: int) -> None:
        """Cut them into chunks; what was handed down, or is met with one row, has none."""
        self.chunk = chunk
        lines = self.lines
        lines[:, CHUNKS] = np.where(lines[:, N] > 0, chunks_of(lines[:, N], chunk), 0)
        lines[self._lone, CHUNKS] = 0
        chunks, before = lines[:, CHUNKS].tolist(), [0]
        for parent in self._parents[1:]:
            before.append(before[parent] + chunks[parent])
        lines[:, BEFORE] = before

    def lose(self, lost: set[PagedFragment]) -> None:
        """Know stretches no more that lie elsewhere now."""
        if self._held.isdisjoint(lost):
            return
        for number, lists in enumerate(self._lists):
            if not lost.isdisjoint(lists):
                # What alone was written anew in its place is there. A joined list is a copy.
                first, at = lists[0], self._found[number][AT]
                if not self._pool.table.has(first) or first.at != at:
                    self._lost.append(number)
        gone = set(self._lost)
        self._numbers = {key: n for key, n in self._numbers.items() if n not in gone}

    def is_whole(self) -> bool:
        """Whether no row lies below one that was lost."""
        return not self._lost or not self.lines[self._lost, SIZE].any()

    def drop(self) -> None:
        """Give up the regions of joined lists: no plan goes by them any more."""
        for kv in self._joined:
            self._pool.table.drop(kv)

    def _bottom(self, path: Path) -> int:
        number = 0
        for span in path:
            if span.length:
                number = self._numbers.get((number, span)) or self._add(number, span)
        return self._end(number) if number in self._ends else number

    def _add(self, parent: int, span: Span) -> int:
        kv = own(span.fragment)
        above = self._end(parent) if parent in self._ends else parent
        number = self._new(above, span, (kv,))
        self._numbers[parent, span] = number
        first = self._found[above][FIRST] + self._found[above][N]
        self._found.append([self._pool.place(kv), span.length, first, *[0] * (ITEM_FIELDS - 3)])
        return number

    def _end(self, number: int) -> int:
        """Return the stretch that has what was handed down, for rows that go on from there."""
        if not self._ends[number]:
            self._ends[number] = made = self._new(number, None, ())
            self._found.append([0] * ITEM_FIELDS)
            self._join(made)
        return self._ends[number]

    def _new(self, parent: int, span: Span | None, lists: tuple[PagedFragment, ...]) -> int:
        self._parents.append(parent)
        self._spans.append(span)
        self._lists.append(lists)
        self._held.update(lists)
        return len(self._parents) - 1

    def _join(self, number: int) -> None:
        """Let a stretch have the slots, too, that were handed down to it."""
        at, spans = number, [self._spans[number]]
        while self._parents[at] in self._ends:
            at = self._parents[at]
            spans.append(self._spans[at])
        members = [(own(span.fragment), span.length) for span in reversed(spans) if span]
        joined = PagedFragment()
        joined.slots = np.concatenate([kv.slots[:length] for kv, length in members])
        self._joined.append(joined)
        self._lists[number] = tuple(kv for kv, _ in members)
        line = self._found[number]
        line[AT], line[N] = self._pool.place(joined), len(joined.slots)
        line[FIRST] = self._found[at][FIRST]

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
