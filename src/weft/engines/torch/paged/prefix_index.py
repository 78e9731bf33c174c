"""Tree of the paths' prefixes: common prefixes are one node.

A search that continues the best paths of each round leaves short nodes below each other. Each would
be an item, and a part of each row. So a short node is *merged* into its children: they attend to
both from one list of slots, and the short node has no segment:

    paths      a ─ b ─ c      items      (a b c)           one list, and one part a row
                     └ d                 (a b d)

A node above a single row is merged into the row's own list, and has no segment, either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...base import Span
from .kernel import ITEM_FIELDS
from .pool import PagedFragment, SlotPool, as_paged
from .tiling import AT, BEFORE, CHUNKS, FIRST, SIZE, Ints, N, chunks_of

# Slots that may be read twice to save one part of a row, which is written and read in float32.
# Equal traffic would be eight slots for heads in groups of four, two for single heads.
_PART = 4

Path = tuple[Span, ...]


class PrefixIndex:
    """Tree of the paths of a step's rows. Nodes have numbers; node 0 is the root, without slots.

    Attributes:
        segments: [n, ITEM_FIELDS], the slots and query tokens of each node; see `tiling`.
        ranks: [n], position of each node in depth-first order.
        bounds: [2, n], first rank at or below each node, and one more than the last.
        chunk: slots of a chunk; 0 before `cut`.
    """

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self.chunk = 0  # 0: not split yet
        self.segments: Ints = np.zeros((0, ITEM_FIELDS), np.int32)
        self._numbers: dict[tuple[int, Span], int] = {}  # by parent number and span
        self._parents = [0]
        self._records = [[0] * ITEM_FIELDS]
        self._spans: list[Span | None] = [None]
        self._lists: list[tuple[PagedFragment, ...]] = [()]  # fragments of its segment's slots
        self._fragments: set[PagedFragment] = set()
        self._moved: list[int] = []
        self._merged_nodes = np.zeros(0, np.int64)  # merged into the only row below them
        # For each merged node: the node with its slots for rows that end there; 0: none yet.
        self._merged_ends: dict[int, int] = {}
        self._joined: list[PagedFragment] = []

    def leaf_nodes(self, paths: Sequence[Path]) -> Ints:
        """Return the number of the lowest node of each path; add nodes that are missing."""
        ids = list(map(id, paths))
        distinct = dict(zip(ids, paths, strict=True))
        result = {number: self._leaf_node(path) for number, path in distinct.items()}
        if len(self._records) > len(self.segments):
            self._rebuild_arrays()
        return np.fromiter(map(result.__getitem__, ids), np.int64, len(ids))

    def merge_short(self, leaf_nodes: Ints, chunk: int) -> Ints:
        """Merge short nodes into their children where that saves memory traffic.

        Each row below a merged node has one partial result less, but each child reads the node's
        slots again.

        Args:
            leaf_nodes: leaf node of each row.
            chunk: slots of a chunk; longer nodes are not merged.

        Returns: the new leaf node of each row.
        """
        n_all = len(self._records)
        n_below = np.bincount(self._parents[1:], minlength=n_all)
        n_more = n_below + (np.bincount(leaf_nodes, minlength=n_all) > 0) - 1
        worth, size = _PART * self.segments[:, SIZE], self.segments[:, N]
        may = (n_below > 0) & (size > 0) & (size <= chunk) & (n_more * size <= worth)
        if not may.any():
            return leaf_nodes
        merged_slots = [0] * n_all  # merged slots, with those of ancestors
        for number in range(1, n_all):
            parent = self._parents[number]
            n = merged_slots[parent] + self._records[number][N]
            if may[number] and n <= chunk and n_more[number] * n <= worth[number]:
                merged_slots[number] = n
                self._records[number][N] = 0
                self._merged_ends[number] = 0
            elif merged_slots[parent]:
                self._join(number)
        result = leaf_nodes.copy()
        for number in set(leaf_nodes.tolist()).intersection(self._merged_ends):
            result[leaf_nodes == number] = self._end_node(number)
        self._rebuild_arrays()
        return result

    def merge_into_rows(self, leaf_nodes: Ints, chunk: int) -> Ints:
        """Mark leaf nodes of one chunk and one query token as merged into their row's own list.

        leaf_nodes: leaf node of each row. chunk: slots of a chunk.
        Returns the numbers of the rows whose leaf nodes are merged.
        """
        segments = self.segments.take(leaf_nodes, 0)
        is_lone = (
            (segments[:, SIZE] == 1)
            & (segments[:, N] > 0)
            & (chunks_of(segments[:, N], chunk) == 1)
        )
        self._merged_nodes = leaf_nodes[is_lone]
        return np.flatnonzero(is_lone)

    def unmerge(self, leaf_nodes: Ints) -> Ints:
        """Undo `merge_into_rows` for nodes that new rows share; return the numbers of these nodes.

        leaf_nodes: leaf nodes of the new rows.
        """
        lone, numbers, result = (
            set(self._merged_nodes.tolist()),
            set(leaf_nodes.tolist()),
            set[int](),
        )
        while lone and numbers:
            result |= lone & numbers
            numbers = {self._parents[number] for number in numbers} - {0}
        if result:
            self._merged_nodes = np.array(sorted(lone - result), np.int64)
            self.cut(self.chunk)
        return np.array(sorted(result), np.int64)

    def cut(self, chunk: int) -> None:
        """Split nodes into chunks of `chunk` slots, one work item each; merged nodes have none."""
        self.chunk = chunk
        segments = self.segments
        segments[:, CHUNKS] = np.where(segments[:, N] > 0, chunks_of(segments[:, N], chunk), 0)
        segments[self._merged_nodes, CHUNKS] = 0
        chunks, before = segments[:, CHUNKS].tolist(), [0]
        for parent in self._parents[1:]:
            before.append(before[parent] + chunks[parent])
        segments[:, BEFORE] = before

    def forget_moved(self, moved: set[PagedFragment]) -> None:
        """Remove nodes whose slot lists have moved in the table; their segments are out of date."""
        if self._fragments.isdisjoint(moved):
            return
        for number, lists in enumerate(self._lists):
            if not moved.isdisjoint(lists):
                # A list that was rewritten in place is valid. A merged list is a copy.
                first, at = lists[0], self._records[number][AT]
                if not self._pool.table.has(first) or first.at != at:
                    self._moved.append(number)
        gone = set(self._moved)
        self._numbers = {key: n for key, n in self._numbers.items() if n not in gone}

    def is_complete(self) -> bool:
        """Return True if no row's path contains a node that `forget_moved` has removed."""
        return not self._moved or not self.segments[self._moved, SIZE].any()

    def drop(self) -> None:
        """Release the table regions of merged lists."""
        for kv in self._joined:
            self._pool.table.drop(kv)

    def _leaf_node(self, path: Path) -> int:
        """Return the number of the lowest node of one path; add missing nodes."""
        number = 0
        for span in path:
            if span.length:
                number = self._numbers.get((number, span)) or self._add(number, span)
        return self._end_node(number) if number in self._merged_ends else number

    def _add(self, parent: int, span: Span) -> int:
        """Add a node for a span below `parent`, with its slots in the table; return its number."""
        kv = as_paged(span.fragment)
        above = self._end_node(parent) if parent in self._merged_ends else parent
        number = self._new(above, span, (kv,))
        self._numbers[parent, span] = number
        first = self._records[above][FIRST] + self._records[above][N]
        self._records.append(
            [self._pool.region_start(kv), span.length, first, *[0] * (ITEM_FIELDS - 3)]
        )
        return number

    def _end_node(self, number: int) -> int:
        """Return the node that replaces `number` for rows whose path ends there.

        `number` was merged into its children, so it has no segment of its own. The first call
        creates the node, with a copy of the merged slots.
        """
        if not self._merged_ends[number]:
            self._merged_ends[number] = node = self._new(number, None, ())
            self._records.append([0] * ITEM_FIELDS)
            self._join(node)
        return self._merged_ends[number]

    def _new(self, parent: int, span: Span | None, lists: tuple[PagedFragment, ...]) -> int:
        """Append a node without a segment; return its number. lists: its slot lists."""
        self._parents.append(parent)
        self._spans.append(span)
        self._lists.append(lists)
        self._fragments.update(lists)
        return len(self._parents) - 1

    def _join(self, number: int) -> None:
        """Give a node a list of its own that starts with the slots of its merged ancestors."""
        at, spans = number, [self._spans[number]]
        while self._parents[at] in self._merged_ends:
            at = self._parents[at]
            spans.append(self._spans[at])
        members = [(as_paged(span.fragment), span.length) for span in reversed(spans) if span]
        joined = PagedFragment()
        joined.slots = np.concatenate([kv.slots[:length] for kv, length in members])
        self._joined.append(joined)
        self._lists[number] = tuple(kv for kv, _ in members)
        segment = self._records[number]
        segment[AT], segment[N] = self._pool.region_start(joined), len(joined.slots)
        segment[FIRST] = self._records[at][FIRST]

    def _rebuild_arrays(self) -> None:
        """Rebuild `segments`, `ranks` and `bounds` after nodes were added, and split the chunks."""
        self.segments = np.array(self._records, np.int32)
        n = [1] * len(self._parents)
        # Parents precede their children: one pass up and one down are enough.
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
