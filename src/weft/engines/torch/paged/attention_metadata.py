"""What a step's rows meet: one flat list of work, which goes along as the tree's shape changes.

Rows are packed depth first, so the queries below a fragment are a slice:

    rows       a1 a2 a3 │ b1 b2 │ c         one path each; a, b below one trunk
    stretches  ├ trunk ─────────┤
               ├ a's parent ┤ ├ b's ┤
               a1 … each row's own list: its tail and its new tokens
    items      a stretch's slots in chunks, times its query rows in tiles

What is known of a row's list or a stretch is a line (`lines.py`). Where rows end and others join,
lines are taken over and few are made; the rest is arithmetic on arrays.
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
from .pool import PagedFragment, SlotPool, own
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

# Programs that keep a card busy, all KV heads together: as many as sm_90 has processors. Four times
# as many, which write more parts, took 1.3 times as long over 64 leaves below 16,384 tokens.
_PROGRAMS = 132
_CHUNK = 256  # slots of an item at least
# Query tokens of a tile, as far as that is known before heads are: twice that where there are many.
_TOKENS, _MANY_TOKENS = 16, 64
_ALIGN = 64
_SPARE_STRETCHES = 64  # that a plan may have more than twice those it was made with


class TreeAttentionMetadata:
    """How one set of rows is packed, and what each meets.

    order: row numbers as packed. starts: packed index of each row's first token, by row number.
    positions, slots: of every packed token, int32 [T]. table: the lists' slots. lists: the rows'
    own, by row number; each has room for its row's tokens. is_steady: every row has one token, and
    keeps it.

    The last chunk of a row's own list is open, so its line holds as the row grows.
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
        """sizes: the rows' tokens. largest: rows of the largest tiles."""
        pool.table.compact()  # what is met is placed anew below
        self._pool, self._age = pool, pool.table.age
        self.lists, self._paths = list(lists), [row.prefix for row in rows]
        self._held = set[Fragment | None](lists)
        self._n_planned, self._now = len(rows), _positions(rows)
        self._above = PrefixIndex(pool)
        self.is_steady = max(sizes, default=0) == 1 and None not in [row.kv_out for row in rows]
        self._largest = largest
        self._groups: list[int] = []
        self._cuts: dict[int, TiledWork] = {}  # by group, of what lies above rows alone
        self._bottoms = self._above.bottoms(self._paths)
        self._lines, room = _begun(self.lists, sizes, self._now, pool)
        self._pack()
        chunk = self._chunk_of(self._above.lines, self._lines)
        bottoms = self._above.merge_short(self._bottoms, chunk)
        if bottoms is not self._bottoms:
            self._bottoms = bottoms
            self._pack()
        if self.is_steady:
            self._join_lone(chunk)
        self._above.cut(chunk)
        self._most_above = 2 * len(self._above.lines) + _SPARE_STRETCHES
        self._cut(self._lines, room, self._bottoms, self.lists)
        self._lay()
        self._most_parts = 2 * self._n_parts / max(1, len(rows)) + 1

    def update(self, rows: Sequence[Row], dests: Sequence[Fragment | None]) -> bool:
        """Be the plan of these rows of one token each, most of which it has had.

        False: they ask for a new one, and this one is of no use any more.
        """
        table, n = self._pool.table, len(rows)
        if table.is_fragmented or table.age != self._age:
            return False
        if not self._n_planned <= 2 * n <= 4 * self._n_planned:
            return False
        paths, now = [row.prefix for row in rows], _positions(rows)
        is_same = not table.lost and dests == self.lists and paths == self._paths
        was = np.arange(n) if is_same else self._numbers_before(dests, paths)
        lines = self._lines.take(was, 0)
        self._reserve(lines, was, now)
        is_same = len(was) == len(self.lists) and bool((was == np.arange(n)).all())
        if not is_same and not self._change(dests, paths, lines, was, now):
            return False
        self._paths, self._lines = paths, lines
        if is_same:
            self._advance(now)
        table.lost.clear()
        return self._above.is_whole()

    def drop(self) -> None:
        """Leave nothing behind: no step goes by this plan any more."""
        self._above.drop()

    def work(self, group: int) -> Work:
        """Return what heads in groups of this size do."""
        found = self._works.get(group)
        if found is None:
            self._groups.append(group)  # from now on they come with the rest
            items, n_each = self._items(group)
            found = self._work(to_device(items, self._pool.layout.device), n_each)
        elif found.table is not self.table:
            found = found._replace(table=self.table)
        self._works[group] = found
        return found

    # What has changed

    def _numbers_before(self, dests: Sequence[Fragment | None], paths: list[Path]) -> Ints:
        """Return which rows these were, by number; -1 for those that are new or read elsewhere."""
        lost = self._pool.table.lost
        self._above.lose(lost)
        runs = self._runs(dests)
        was, before = np.full(len(dests), -1), paths.copy()
        if runs is None:  # in another order
            self._held = set[Fragment | None](dests)
            numbers = dict[Fragment | None, int](zip(self.lists, count()))
            was = np.fromiter(map(numbers.get, dests, repeat(-1)), np.int64, len(dests))
            for number in np.flatnonzero(was >= 0).tolist():
                before[number] = self._paths[was[number]]
        for at, old, n in runs or ():
            was[at : at + n] = np.arange(old, old + n)
            before[at : at + n] = self._paths[old : old + n]
        if before != paths:
            was[[one != other for one, other in zip(before, paths, strict=True)]] = -1
        if not self._held.isdisjoint(lost):
            was[[kv in lost for kv in dests]] = -1
        return was

    def _runs(self, dests: Sequence[Fragment | None]) -> list[tuple[int, int, int]] | None:
        """Return the runs of rows that still lie side by side: from where, from where before, how
        many. None where one has overtaken another.
        """
        lists, held, runs = self.lists, self._held, list[tuple[int, int, int]]()
        ended = list[PagedFragment]()
        at = old = 0
        while at < len(dests):
            pairs = map(is_not, islice(dests, at, None), islice(lists, old, None))
            n = next(compress(count(), pairs), min(len(dests) - at, len(lists) - old))
            if n:
                runs.append((at, old, n))
                at, old = at + n, old + n
            elif dests[at] not in held:
                held.add(dests[at])
                at += 1
            else:
                first = old
                while old < len(lists) and lists[old] is not dests[at]:
                    old += 1
                if old == len(lists):
                    return None
                ended += lists[first:old]
        held.difference_update(ended, lists[old:])
        return runs

    def _reserve(self, lines: Ints, was: Ints, now: Ints) -> None:
        """Let known rows' lists have room; what outgrows its line is to be made anew."""
        full = np.flatnonzero((now >= lines[:, LIMIT]) & (was >= 0))
        if not len(full):
            return
        lost, limits = self._pool.table.lost, list[int]()
        for number, line in zip(was[full].tolist(), lines[full].tolist(), strict=True):
            kv = self.lists[number]
            self._pool.reserve(kv, 1)
            limits.append(0 if kv in lost else line[FIRST] + min(len(kv.slots), line[N]))
        lines[full, LIMIT] = limits
        was[full[now[full] >= limits]] = -1

    def _change(
        self,
        dests: Sequence[Fragment | None],
        paths: list[Path],
        lines: Ints,
        was: Ints,
        now: Ints,
    ) -> bool:
        """Make the lines of new rows, and lay all anew; False where that asks for another plan."""
        fresh = np.flatnonzero(was < 0)
        numbers = fresh.tolist()
        if 2 * len(numbers) > len(dests):
            return False
        bottoms = self._bottoms.take(was)
        self.lists = cast(list[PagedFragment], dests)
        if numbers:
            lists = [own(self.lists[number]) for number in numbers]
            for kv in lists:
                self._pool.reserve(kv, 1)
            made, room = _begun(lists, [1] * len(lists), now[fresh], self._pool)
            bottoms[fresh] = below = self._above.bottoms([paths[number] for number in numbers])
            self._part_lone(below, lines, bottoms)
            self._cut(made, room, below, lists)
            lines[fresh] = made
        self._lines, self._bottoms, self._now = lines, bottoms, now
        self._pack()
        if len(self._above.lines) > self._most_above:
            return False
        self._lay()
        # Short stretches that came one below the other are handed down by another plan.
        return self._n_parts <= self._most_parts * len(dests)

    # Making it

    def _pack(self) -> None:
        """Put rows in order, and find the query tokens below every stretch."""
        above = self._above
        ranks = above.ranks.take(self._bottoms)
        self._order = order = ranks.argsort(kind="stable")
        self._starts = np.arange(len(order) + 1)
        if not self.is_steady:
            self._lines[:, SIZE].take(order).cumsum(out=self._starts[1:])
        first, end = self._starts.take(ranks.take(order).searchsorted(above.bounds))
        above.lines[:, START] = first
        above.lines[:, SIZE] = end - first

    def _join_lone(self, chunk: int) -> None:
        """Let what lies above one row alone be met with its own list: it is one part of it then."""
        is_short = chunks_of(self._lines[:, N], chunk) == 1
        bottoms = np.where(is_short, self._bottoms, 0)
        rows = self._above.join_lone(bottoms, chunk)
        above = self._above.lines.take(bottoms[rows], 0)
        self._lines[rows, AT_ABOVE], self._lines[rows, N_ABOVE] = above[:, AT], above[:, N]

    def _part_lone(self, below: Ints, lines: Ints, bottoms: Ints) -> None:
        """Have what new rows lie below, too, be met on its own again. below: their lowest ones."""
        parted = self._above.split_single_row(below)
        if not len(parted):
            return
        self._cuts.clear()
        rows = np.flatnonzero(np.isin(bottoms, parted))
        above = self._above.lines.take(bottoms[rows], 0)
        lines[rows, AT_ABOVE] = lines[rows, N_ABOVE] = 0
        lines[rows, BEFORE] = above[:, BEFORE] + above[:, CHUNKS]

    def _cut(self, lines: Ints, room: Ints, bottoms: Ints, lists: Sequence[PagedFragment]) -> None:
        """Cut rows' own lists into chunks."""
        chunk, above = self._above.chunk, self._above.lines.take(bottoms, 0)
        lines[:, CHUNKS] = chunks = chunks_of(lines[:, N], chunk)
        lines[:, BEFORE] = above[:, BEFORE] + above[:, CHUNKS]
        # The last one takes one more, as far as there is room.
        lines[:, N] = np.minimum(room, (chunks + 1) * chunk)
        n_slots = np.array([len(kv.slots) for kv in lists], np.int64)
        lines[:, LIMIT] = lines[:, FIRST] + np.minimum(n_slots, lines[:, N])

    def _lay(self) -> None:
        """Lay the packed tokens out on the device."""
        order, first, n = self._order, self._starts[:-1], int(self._starts[-1])
        self._packed = packed = self._lines.take(order, 0)
        packed[:, START] = first
        starts = np.empty_like(order)
        starts[order] = first
        self.order, self.starts = order.tolist(), starts.tolist()
        now = self._now.take(order)
        if not self.is_steady:
            sizes = packed[:, SIZE]
            packed = packed.repeat(sizes, 0)
            now = now.repeat(sizes) + np.arange(n) - packed[:, START]
        width = -(-(n + 1) // _ALIGN) * _ALIGN
        head = np.zeros((3, width), np.int32)
        np.subtract(packed[:, AT], packed[:, FIRST], out=head[0, :n])
        head[1, :n] = now
        np.add(packed[:, BEFORE], packed[:, CHUNKS]).cumsum(out=head[2, 1 : n + 1])
        self._n_parts = int(head[2, n])
        made = [(group, *self._items(group)) for group in self._groups]
        lists = [head.reshape(-1, ITEM_FIELDS), *[items for _, items, _ in made]]
        sent = to_device(np.concatenate(lists), self._pool.layout.device)
        at = 3 * width // ITEM_FIELDS
        bases, positions, first_part = sent[:at].view(3, width).unbind()
        self._bases, self.positions = bases[:n], positions[:n]
        self._first_part = first_part[: n + 1]
        self._find_slots(0)
        self._works: dict[int, Work] = {}
        for group, items, n_each in made:
            self._works[group] = self._work(sent[at : at + len(items)], n_each)
            at += len(items)

    def _advance(self, now: Ints) -> None:
        """Find where the packed tokens are: one on from the last step, on the device alone."""
        n_on = 1
        if not (now == self._now + 1).all():
            copy_to_device(self.positions, now.take(self._order).astype(np.int32))
            n_on = 0
        self._now = now
        self._find_slots(n_on)

    def _find_slots(self, n_on: int) -> None:
        self.table = self._pool.table.on_device()
        self.slots = advance_slots(self.positions, n_on, self._bases, self.table)

    def _work(self, items: Tensor, n_each: list[int]) -> Work:
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
        """Return the items for heads in groups of this size, and how many each of TILES has."""
        lines, packed = self._above.lines, self._packed
        # Rows of one tile and one chunk are nearly items.
        is_short = (packed[:, CHUNKS] == 1) & (packed[:, SIZE] <= NARROW // group)
        is_all = bool(is_short.all())
        if not is_all:
            lines, packed = np.concatenate([lines, packed[~is_short]]), packed[is_short]
        n_rows = lines[:, SIZE] * group
        n_tiles = tiles_of(n_rows, self._largest)
        cut = self._cuts.get(group) if is_all else None
        if cut is None or not np.array_equal(cut.n_tiles, n_tiles):
            cut = tile_work(lines, n_tiles, self._above.chunk)
        if is_all:
            self._cuts[group] = cut
        n_cut = len(cut.items)
        items = np.concatenate([cut.items, packed])
        items[:n_cut, START] = lines[:, START].take(cut.of)
        items[:n_cut, N_ROWS] = n_rows.take(cut.of)
        items[n_cut:, N_ROWS] *= group
        items[n_cut:, M0] = 0
        items[:, LIMIT] = 0
        *before, last = cut.n_each
        return items, [*before, last + len(packed)]

    def _chunk_of(self, *lines: Ints) -> int:
        """Return how many slots a chunk has, so that there are programs enough, and no more."""
        if self._pool.chunk is not None:
            return self._pool.chunk
        n = 0.0
        for each in lines:
            size = each[:, SIZE]
            tiles = np.where(size < _MANY_TOKENS, -(-size // _TOKENS), -(-size // (2 * _TOKENS)))
            # Two tiles of few rows share a processor, and have it read all the time.
            n += float((each[:, N] * np.where(size == 1, 0.5, tiles)).sum())
        n_slots = int(n * self._pool.layout.groups[0][0].n_heads) // _PROGRAMS
        return max(_CHUNK, -(-n_slots // _ALIGN) * _ALIGN)


def _positions(rows: Sequence[Row]) -> Ints:
    return np.fromiter([row.position for row in rows], np.int64, len(rows))


def _begun(
    lists: Sequence[PagedFragment], sizes: Sequence[int], now: Ints, pool: SlotPool
) -> tuple[Ints, Ints]:
    """Return lines of rows' own lists that are not cut yet, and the room of each."""
    at, room, lengths = pool.places(lists)
    lines = np.zeros((len(lists), ITEM_FIELDS), np.int32)
    lines[:, AT], lines[:, FIRST], lines[:, SIZE] = at, now - lengths, sizes
    lines[:, N] = lengths + lines[:, SIZE]
    return lines, room
