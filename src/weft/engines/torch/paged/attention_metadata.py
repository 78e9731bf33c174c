"""Attention metadata of a step: the work items of tree attention, updated as the tree changes.

Rows are packed depth first, so the queries below a fragment are a slice:

    rows       a1 a2 a3 │ b1 b2 │ c         one path each; a, b below one trunk

    nodes      ├ trunk ─────────┤
               ├ a's parent ┤ ├ b's ┤
               a1 … each row's own list: its tail and its new tokens

    items      a node's slots in chunks, times its query rows in tiles

A node or a row's own list is described by a segment (`tiling`). If rows end and others start, most
segments are reused. The rest is arithmetic on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count, islice, repeat
from operator import is_not
from typing import cast

import numpy as np
from torch import Tensor

from ...base import Fragment, Row
from ..cuda import copy_to_device, to_device
from .graph_inputs import advance_slots
from .kernel import ITEM_FIELDS, NARROW, Work
from .pool import PagedFragment, SlotPool, as_paged
from .prefix_index import Path, PrefixIndex
from .tiling import (
    AT,
    AT_ABOVE,
    BEFORE,
    CHUNKS,
    FIRST,
    LIMIT,
    M0,
    N_ABOVE,
    N_ROWS,
    SIZE,
    START,
    Ints,
    N,
    TiledWork,
    chunks_of,
    tile_work,
    tiles_of,
)

# Programs of all KV heads that keep a GPU busy: as many as sm_90 has processors. Four times as many
# write more parts, and took 1.3 times as long for 64 leaves below 16,384 tokens.
_PROGRAMS = 132
_CHUNK = 256  # slots of an item at least
# Query tokens of a tile, estimated before the head count is known; twice that for many tokens.
_TOKENS, _MANY_TOKENS = 16, 64
_ALIGN = 64
_SPARE_NODES = 64  # nodes beyond twice the initial number, until new metadata is created


class TreeAttentionMetadata:
    """How one set of rows is packed, and which slots each row attends to.

    The last chunk of a row's own list is open-ended, so its segment stays valid as the row grows.

    Attributes:
        order: row numbers in packed order.
        starts: packed index of each row's first token, by row number.
        positions, slots: of the packed tokens, int32 [T].
        table: the slots of all lists.
        lists: the rows' own lists, by row number, with room for their tokens.
        is_steady: every row has one token, and keeps it.
    """

    order: list[int]
    starts: list[int]
    positions: Tensor
    slots: Tensor
    table: Tensor

    def __init__(
        self,
        rows: Sequence[Row],
        sizes: list[int],
        lists: Sequence[PagedFragment],
        pool: SlotPool,
        largest: int,
    ) -> None:
        """Create the metadata of a step.

        Args:
            rows: rows of the step.
            sizes: number of tokens of each row.
            lists: slot list of each row: its tail and its new tokens.
            pool: pool of the slots.
            largest: query rows of the largest tiles.
        """
        pool.table.compact()  # regions are assigned below
        self._pool, self._age = pool, pool.table.age
        self.lists, self._paths = list(lists), [row.prefix for row in rows]
        self._known = set[Fragment | None](lists)
        self._n_planned, self._host_positions = len(rows), _positions(rows)
        self._prefixes = PrefixIndex(pool)
        self.is_steady = max(sizes, default=0) == 1 and None not in [row.kv_out for row in rows]
        self._largest = largest
        self._groups: list[int] = []
        self._tiled: dict[int, TiledWork] = {}  # by group size; for nodes only
        self._leaf_nodes = self._prefixes.leaf_nodes(self._paths)
        self._segments, room = _new_segments(self.lists, sizes, self._host_positions, pool)
        self._pack()
        chunk = self._chunk_of(self._prefixes.segments, self._segments)
        leaf_nodes = self._prefixes.merge_short(self._leaf_nodes, chunk)
        if leaf_nodes is not self._leaf_nodes:
            self._leaf_nodes = leaf_nodes
            self._pack()
        if self.is_steady:
            self._merge_into_rows(chunk)
        self._prefixes.cut(chunk)
        self._max_nodes = 2 * len(self._prefixes.segments) + _SPARE_NODES
        self._split_chunks(self._segments, room, self._leaf_nodes, self.lists)
        self._upload()
        self._max_parts = 2 * self._n_parts / max(1, len(rows)) + 1

    def update(self, rows: Sequence[Row], fragments: Sequence[Fragment | None]) -> bool:
        """Update the metadata for the next step, if most of its rows were in the last one.

        Args:
            rows: rows of one token each.
            fragments: fragment that each row writes to.

        Returns:
            False if new metadata is needed. This object is invalid then.
        """
        table, n = self._pool.table, len(rows)
        if table.is_fragmented or table.age != self._age:
            return False
        if not self._n_planned <= 2 * n <= 4 * self._n_planned:
            return False
        paths, host_positions = [row.prefix for row in rows], _positions(rows)
        is_same = not table.moved and fragments == self.lists and paths == self._paths
        old_rows = np.arange(n) if is_same else self._old_row_numbers(fragments, paths)
        segments = self._segments.take(old_rows, 0)
        self._reserve(segments, old_rows, host_positions)
        is_same = len(old_rows) == len(self.lists) and bool((old_rows == np.arange(n)).all())
        if not is_same and not self._change(fragments, paths, segments, old_rows, host_positions):
            return False
        self._paths, self._segments = paths, segments
        if is_same:
            self._advance(host_positions)
        table.moved.clear()
        return self._prefixes.is_complete()

    def drop(self) -> None:
        """Release the regions of the slot table that this metadata uses."""
        self._prefixes.drop()

    def work(self, group: int) -> Work:
        """Return the attention kernel's work items for `group` query heads per KV head."""
        work = self._works.get(group)
        if work is None:
            self._groups.append(group)  # uploaded with the other items from the next update on
            items, n_each = self._items(group)
            work = self._work(to_device(items, self._pool.layout.device), n_each)
        elif work.table is not self.table:
            work = work._replace(table=self.table)
        self._works[group] = work
        return work

    # Updates

    def _old_row_numbers(self, fragments: Sequence[Fragment | None], paths: list[Path]) -> Ints:
        """Return each row's number before this update: int64 [rows].

        -1 for a row that is new, whose path has changed, or whose list has moved in the table.

        Args:
            fragments: fragment that each row writes to.
            paths: path of each row.
        """
        moved = self._pool.table.moved
        self._prefixes.forget_moved(moved)
        runs = self._runs(fragments)
        old_rows, old_paths = np.full(len(fragments), -1), paths.copy()
        if runs is None:  # the order has changed
            self._known = set[Fragment | None](fragments)
            numbers = dict[Fragment | None, int](zip(self.lists, count()))
            old_rows = np.fromiter(
                map(numbers.get, fragments, repeat(-1)), np.int64, len(fragments)
            )
            for number in np.flatnonzero(old_rows >= 0).tolist():
                old_paths[number] = self._paths[old_rows[number]]
        for at, old, n in runs or ():
            old_rows[at : at + n] = np.arange(old, old + n)
            old_paths[at : at + n] = self._paths[old : old + n]
        if old_paths != paths:
            old_rows[[one != other for one, other in zip(old_paths, paths, strict=True)]] = -1
        if not self._known.isdisjoint(moved):
            old_rows[[kv in moved for kv in fragments]] = -1
        return old_rows

    def _runs(self, fragments: Sequence[Fragment | None]) -> list[tuple[int, int, int]] | None:
        """Return runs of rows that are still adjacent, as (first, first before the update, count).

        None if rows have changed their order.
        """
        lists, known, runs = self.lists, self._known, list[tuple[int, int, int]]()
        ended = list[PagedFragment]()
        at = old = 0
        while at < len(fragments):
            pairs = map(is_not, islice(fragments, at, None), islice(lists, old, None))
            n = next(compress(count(), pairs), min(len(fragments) - at, len(lists) - old))
            if n:
                runs.append((at, old, n))
                at, old = at + n, old + n
            elif fragments[at] not in known:
                known.add(fragments[at])
                at += 1
            else:
                first = old
                while old < len(lists) and lists[old] is not fragments[at]:
                    old += 1
                if old == len(lists):
                    return None
                ended += lists[first:old]
        known.difference_update(ended, lists[old:])
        return runs

    def _reserve(self, segments: Ints, old_rows: Ints, host_positions: Ints) -> None:
        """Reserve slots for rows whose segment is full.

        A segment with room in its region of the table gets a higher LIMIT. Other rows become -1 in
        `old_rows`, so that their segments are created again. Changes both arrays in place.
        """
        full = np.flatnonzero((host_positions >= segments[:, LIMIT]) & (old_rows >= 0))
        if not len(full):
            return
        moved, limits = self._pool.table.moved, list[int]()
        for number, segment in zip(old_rows[full].tolist(), segments[full].tolist(), strict=True):
            kv = self.lists[number]
            self._pool.reserve(kv, 1)
            limits.append(0 if kv in moved else segment[FIRST] + min(len(kv.slots), segment[N]))
        segments[full, LIMIT] = limits
        old_rows[full[host_positions[full] >= limits]] = -1

    def _change(
        self,
        fragments: Sequence[Fragment | None],
        paths: list[Path],
        segments: Ints,
        old_rows: Ints,
        host_positions: Ints,
    ) -> bool:
        """Update the metadata for rows that have ended or started.

        Creates the segments of new rows and uploads all. Returns False if new metadata is needed.
        """
        new_rows = np.flatnonzero(old_rows < 0)
        numbers = new_rows.tolist()
        if 2 * len(numbers) > len(fragments):
            return False
        leaf_nodes = self._leaf_nodes.take(old_rows)
        self.lists = cast(list[PagedFragment], fragments)
        if numbers:
            lists = [as_paged(self.lists[number]) for number in numbers]
            for kv in lists:
                self._pool.reserve(kv, 1)
            new_segments, room = _new_segments(
                lists, [1] * len(lists), host_positions[new_rows], self._pool
            )
            leaf_nodes[new_rows] = below = self._prefixes.leaf_nodes(
                [paths[number] for number in numbers]
            )
            self._unmerge(below, segments, leaf_nodes)
            self._split_chunks(new_segments, room, below, lists)
            segments[new_rows] = new_segments
        self._segments, self._leaf_nodes, self._host_positions = (
            segments,
            leaf_nodes,
            host_positions,
        )
        self._pack()
        if len(self._prefixes.segments) > self._max_nodes:
            return False
        self._upload()
        # New metadata merges short nodes that have been added below each other.
        return self._n_parts <= self._max_parts * len(fragments)

    # Construction

    def _pack(self) -> None:
        """Order the rows depth first, and set the range of query tokens below every node."""
        above = self._prefixes
        ranks = above.ranks.take(self._leaf_nodes)
        self._order = order = ranks.argsort(kind="stable")
        self._starts = np.arange(len(order) + 1)
        if not self.is_steady:
            self._segments[:, SIZE].take(order).cumsum(out=self._starts[1:])
        first, end = self._starts.take(ranks.take(order).searchsorted(above.bounds))
        above.segments[:, START] = first
        above.segments[:, SIZE] = end - first

    def _merge_into_rows(self, chunk: int) -> None:
        """Let a row of one token attend to its leaf node and its own list as one part.

        This needs a node that no other query uses; the node and the list are one chunk each.
        chunk: slots of a chunk.
        """
        is_short = chunks_of(self._segments[:, N], chunk) == 1
        leaf_nodes = np.where(is_short, self._leaf_nodes, 0)
        rows = self._prefixes.merge_into_rows(leaf_nodes, chunk)
        above = self._prefixes.segments.take(leaf_nodes[rows], 0)
        self._segments[rows, AT_ABOVE], self._segments[rows, N_ABOVE] = above[:, AT], above[:, N]

    def _unmerge(self, below: Ints, segments: Ints, leaf_nodes: Ints) -> None:
        """Undo merges (`_merge_into_rows`) of nodes that new rows share, in `segments`.

        below: leaf nodes of the new rows. leaf_nodes: of all rows.
        """
        parted = self._prefixes.unmerge(below)
        if not len(parted):
            return
        self._tiled.clear()
        rows = np.flatnonzero(np.isin(leaf_nodes, parted))
        above = self._prefixes.segments.take(leaf_nodes[rows], 0)
        segments[rows, AT_ABOVE] = segments[rows, N_ABOVE] = 0
        segments[rows, BEFORE] = above[:, BEFORE] + above[:, CHUNKS]

    def _split_chunks(
        self, segments: Ints, room: Ints, leaf_nodes: Ints, lists: Sequence[PagedFragment]
    ) -> None:
        """Split the rows' own lists into chunks; sets columns of `segments` in place.

        room: entries of each list's region of the table.
        """
        chunk, above = self._prefixes.chunk, self._prefixes.segments.take(leaf_nodes, 0)
        segments[:, CHUNKS] = chunks = chunks_of(segments[:, N], chunk)
        segments[:, BEFORE] = above[:, BEFORE] + above[:, CHUNKS]
        # The last chunk may grow by one more chunk, within its room.
        segments[:, N] = np.minimum(room, (chunks + 1) * chunk)
        n_slots = np.array([len(kv.slots) for kv in lists], np.int64)
        segments[:, LIMIT] = segments[:, FIRST] + np.minimum(n_slots, segments[:, N])

    def _upload(self) -> None:
        """Upload the packed tokens and items to the device."""
        order, first, n = self._order, self._starts[:-1], int(self._starts[-1])
        self._packed = packed = self._segments.take(order, 0)
        packed[:, START] = first
        starts = np.empty_like(order)
        starts[order] = first
        self.order, self.starts = order.tolist(), starts.tolist()
        host_positions = self._host_positions.take(order)
        if not self.is_steady:
            sizes = packed[:, SIZE]
            packed = packed.repeat(sizes, 0)
            host_positions = host_positions.repeat(sizes) + np.arange(n) - packed[:, START]
        width = -(-(n + 1) // _ALIGN) * _ALIGN
        head = np.zeros((3, width), np.int32)
        np.subtract(packed[:, AT], packed[:, FIRST], out=head[0, :n])
        head[1, :n] = host_positions
        np.add(packed[:, BEFORE], packed[:, CHUNKS]).cumsum(out=head[2, 1 : n + 1])
        self._n_parts = int(head[2, n])
        works = [(group, *self._items(group)) for group in self._groups]
        lists = [head.reshape(-1, ITEM_FIELDS), *[items for _, items, _ in works]]
        sent = to_device(np.concatenate(lists), self._pool.layout.device)
        at = 3 * width // ITEM_FIELDS
        bases, positions, first_part = sent[:at].view(3, width).unbind()
        self._bases, self.positions = bases[:n], positions[:n]
        self._first_part = first_part[: n + 1]
        self._find_slots(0)
        self._works: dict[int, Work] = {}
        for group, items, n_each in works:
            self._works[group] = self._work(sent[at : at + len(items)], n_each)
            at += len(items)

    def _advance(self, host_positions: Ints) -> None:
        """Set new positions, and look up the slots of the packed tokens.

        If all positions increase by one, nothing is copied to the device.
        """
        n_on = 1
        if not (host_positions == self._host_positions + 1).all():
            copy_to_device(self.positions, host_positions.take(self._order).astype(np.int32))
            n_on = 0
        self._host_positions = host_positions
        self._find_slots(n_on)

    def _find_slots(self, n_on: int) -> None:
        """Advance positions by `n_on`, and look up the tokens' slots in the table."""
        self.table = self._pool.table.on_device()
        self.slots = advance_slots(self.positions, n_on, self._bases, self.table)

    def _work(self, items: Tensor, n_each: list[int]) -> Work:
        """Return `Work` for uploaded items. n_each: number of items per tile class."""
        broad, wide, narrow = items.split(n_each)
        return Work(
            table=self.table,
            narrow=narrow,
            wide=wide,
            broad=broad,
            first_part=self._first_part,
            positions=self.positions,
            n_parts=self._n_parts,
            is_single=self._n_parts == len(self.positions),
        )

    def _items(self, group: int) -> tuple[Ints, list[int]]:
        """Return the work items of the attention kernel, ordered by tile class, and the number in
        each class.

        group: query heads per KV head.
        """
        segments, packed = self._prefixes.segments, self._packed
        # Rows of one tile and one chunk are almost items already.
        is_short = (packed[:, CHUNKS] == 1) & (packed[:, SIZE] <= NARROW // group)
        is_all = bool(is_short.all())
        if not is_all:
            segments, packed = np.concatenate([segments, packed[~is_short]]), packed[is_short]
        n_rows = segments[:, SIZE] * group
        n_tiles = tiles_of(n_rows, self._largest)
        tiled = self._tiled.get(group) if is_all else None
        if tiled is None or not np.array_equal(tiled.n_tiles, n_tiles):
            tiled = tile_work(segments, n_tiles, self._prefixes.chunk)
        if is_all:
            self._tiled[group] = tiled
        n_cut = len(tiled.items)
        items = np.concatenate([tiled.items, packed])
        items[:n_cut, START] = segments[:, START].take(tiled.segment_of_item)
        items[:n_cut, N_ROWS] = n_rows.take(tiled.segment_of_item)
        items[n_cut:, N_ROWS] *= group
        items[n_cut:, M0] = 0
        items[:, LIMIT] = 0
        *larger, last = tiled.n_each
        return items, [*larger, last + len(packed)]

    def _chunk_of(self, *segments: Ints) -> int:
        """Return the slots per chunk: the configured number, if any.

        Otherwise the number is chosen so that the device gets about enough programs.

        segments: all segments of the step, in any number of arrays.
        """
        if self._pool.chunk is not None:
            return self._pool.chunk
        n = 0.0
        for part in segments:
            size = part[:, SIZE]
            tiles = np.where(size < _MANY_TOKENS, -(-size // _TOKENS), -(-size // (2 * _TOKENS)))
            # Two tiles of few rows share a processor, and keep its memory reads busy.
            n += float((part[:, N] * np.where(size == 1, 0.5, tiles)).sum())
        n_slots = int(n * self._pool.layout.groups[0][0].n_heads) // _PROGRAMS
        return max(_CHUNK, -(-n_slots // _ALIGN) * _ALIGN)


def _positions(rows: Sequence[Row]) -> Ints:
    """Return the position of each row's first token: int64 [rows]."""
    return np.fromiter([row.position for row in rows], np.int64, len(rows))


def _new_segments(
    lists: Sequence[PagedFragment], sizes: Sequence[int], host_positions: Ints, pool: SlotPool
) -> tuple[Ints, Ints]:
    """Describe the slot list of each row by a segment, which is not split into chunks yet.

    sizes: number of tokens of each row.

    Returns the segments, [n, ITEM_FIELDS], and the room of each list's region of the table.
    """
    at, room, lengths = pool.regions(lists)
    segments = np.zeros((len(lists), ITEM_FIELDS), np.int32)
    segments[:, AT], segments[:, FIRST], segments[:, SIZE] = at, host_positions - lengths, sizes
    segments[:, N] = lengths + segments[:, SIZE]
    return segments, room
