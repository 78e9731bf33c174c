"""What a step's rows meet: one flat list of work, made on the host when the tree's shape changes.

Rows are packed depth first, so the queries below a fragment are a slice:

    rows       a1 a2 a3 │ b1 b2 │ c         one path each; a, b below one trunk
    stretches  ├ trunk ─────────┤
               ├ a's parent ┤ ├ b's ┤
               a1 … each row's own list: its tail and its new tokens
    items      a stretch's slots in chunks, times its query rows in tiles
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...base import Row, Span
from ..seats import overwrite, upload
from .kernel import ITEM_FIELDS, NARROW, WIDE, Work
from .pool import SlotList, SlotPool, own

# Programs that keep a card busy, all KV heads together: twice the 132 processors of sm_90, twice.
_PROGRAMS = 528
_CHUNK = 256  # slots of an item at least
_TOKENS = 16  # query tokens of a tile, as far as that is known before heads are
_ALIGN = 64

Ints = NDArray[np.int64]


class TreePlan:
    """How one set of rows is packed, and what each meets.

    order: row numbers as packed. starts: packed index of each row's first token, by row number.
    positions, slots: of every packed token, once `advance` has found them. table: the lists' slots.
    lists: the rows' own, by row number; each has room for its row's tokens.

    Paths' stretches come first, parents before children, then each row's own in packed order. The
    last chunk of these is open, so a plan of rows of one token holds as they grow.
    """

    order: list[int]
    starts: list[int]
    positions: Tensor
    slots: Tensor
    table: Tensor
    _bases: Tensor
    _works: dict[int, Work]
    _expected: list[int] | None

    def __init__(
        self, rows: Sequence[Row], sizes: list[int], lists: Sequence[SlotList], pool: SlotPool
    ) -> None:
        """sizes: the rows' tokens."""
        pool.table.tidy()  # what is met is placed anew below
        self.lists = lists
        self.order, bottoms, above, met = _packed(rows, sizes, pool)
        self._paths = [row.path for row in rows]
        self._n_rows_planned = len(rows)
        self._is_steady = max(sizes, default=0) == 1 and all([row.dest is not None for row in rows])
        self._device = pool.layout.device
        self._cut(rows, sizes, above, bottoms, pool)
        self._stamps = [kv.stamp for kv in lists]
        self._above = [(kv, kv.stamp) for kv in met]

    def goes_on(self, rows: Sequence[Row], pool: SlotPool) -> bool:
        """Whether planning these rows would give this plan again; their lists have room then."""
        if not self._is_steady or len(rows) != len(self.lists):
            return False
        for row, path, kv, stamp, end in zip(
            rows, self._paths, self.lists, self._stamps, self._ends, strict=True
        ):
            n = kv.length
            if row.dest is not kv or row.path is not path or n >= end or row.n_tokens != 1:
                return False
            if n >= len(kv.slots):
                pool.reserve(kv, 1)
            if kv.stamp != stamp:
                return False
        return all([kv.stamp == stamp for kv, stamp in self._above])

    def without(self, rows: Sequence[Row], pool: SlotPool) -> TreePlan | None:
        """Return the plan of these rows where they are its own less a few, in their order."""
        if not self._is_steady or 2 * len(rows) < self._n_rows_planned:
            return None
        kept: list[int] = []
        numbers = iter(enumerate(self.lists))
        for row in rows:
            for number, kv in numbers:
                if kv is row.dest:
                    kept.append(number)
                    break
            else:
                return None
        if len(kept) == len(self.lists):
            return None
        plan = copy(self)
        plan.lists = [self.lists[number] for number in kept]
        plan._paths = [self._paths[number] for number in kept]
        plan._stamps = [self._stamps[number] for number in kept]
        plan._ends = [self._ends[number] for number in kept]
        if not plan.goes_on(rows, pool):
            return None
        plan._keep(kept)
        return plan

    def advance(self, rows: Sequence[Row], pool: SlotPool) -> None:
        """Find where the packed tokens are now: positions, slots.

        One on from the last step, that is found on the device alone.
        """
        if self._is_steady:
            positions = [rows[i].position for i in self.order]
        else:
            ranges = [range(r.position, r.position + r.n_tokens) for r in rows]
            positions = [position for i in self.order for position in ranges[i]]
        if positions == self._expected:
            self.positions += 1
        else:
            overwrite(self.positions, np.array(positions, np.int32))
        self._expected = [position + 1 for position in positions] if self._is_steady else None
        self.table = pool.table.on_device()
        self.slots = self.table[(self._bases + self.positions).long()].long()

    def work(self, group: int) -> Work:
        """Return what heads in groups of this size do."""
        found = self._works.get(group)
        if found is None or found.table is not self.table:
            found = self._works[group] = self._work(group)
        return found

    # Making it

    def _cut(
        self,
        rows: Sequence[Row],
        row_sizes: list[int],
        above: list[list[int]],
        bottoms: list[int],
        pool: SlotPool,
    ) -> None:
        """Cut all stretches into chunks; see the class."""
        order, n_above = np.array(self.order, np.int64), len(above)
        own_at, room, lengths = pool.places(self.lists)[:, order]
        sizes = np.array(row_sizes, np.int64)[order]
        firsts = np.array([row.position for row in rows], np.int64)[order] - lengths
        after = sizes.cumsum()
        starts = np.empty_like(after)
        starts[order] = after - sizes
        self.starts = starts.tolist()
        fields = np.array(above, np.int64).reshape(n_above, 6).T
        mine = (own_at, lengths + sizes, firsts, after - sizes, sizes, np.array(bottoms, np.int64))
        self._at, now, self._first, self._start, self._size, parent = (
            np.concatenate(pair) for pair in zip(fields, mine, strict=True)
        )
        n_programs = int((now * -(-self._size // _TOKENS)).sum()) * pool.layout.groups[0][0].n_heads
        self._chunk = chunk = max(_CHUNK, -(-n_programs // _PROGRAMS // _ALIGN) * _ALIGN)
        self._n_chunks = n_chunks = np.maximum(1, -(-now // chunk))
        self._n = now
        # The last chunk of a row's own list takes one more, as far as there is room.
        now[n_above:] = np.minimum(room, (n_chunks[n_above:] + 1) * chunk)
        ends = np.empty_like(room)
        ends[order] = now[n_above:]
        self._ends: list[int] = ends.tolist()

        self._before = before = np.zeros(len(parent), np.int64)  # chunks above, on the path
        for number, upper in enumerate(parent[:n_above].tolist()):
            if upper >= 0:
                before[number] = before[upper] + n_chunks[upper]
        if n_above:
            below = parent[n_above:]
            before[n_above:] = np.where(below >= 0, before[below] + n_chunks[below], 0)
        n_parts = (before + n_chunks)[n_above:].repeat(sizes)
        self._first_part = np.zeros(len(n_parts) + 1, np.int32)
        n_parts.cumsum(out=self._first_part[1:])
        self._host_bases = (own_at - firsts).repeat(sizes).astype(np.int32)
        self._to_device()

    def _keep(self, kept: list[int]) -> None:
        """Close the gaps that other rows left. Stretches that nobody is below any more stay."""
        is_kept = np.zeros(len(self.order), bool)
        is_kept[kept] = True
        order = np.array(self.order, np.int64)
        is_packed = is_kept[order]  # a row is a token
        n_before = np.zeros(len(order) + 1, np.int64)
        is_packed.cumsum(out=n_before[1:])
        ends = n_before[self._start + self._size]
        self._start = n_before[self._start]
        self._size = ends - self._start
        stays = np.ones(len(self._start), bool)
        stays[len(stays) - len(order) :] = is_packed
        self._at, self._n, self._first, self._start, self._size, self._n_chunks, self._before = (
            each[stays]
            for each in (
                self._at,
                self._n,
                self._first,
                self._start,
                self._size,
                self._n_chunks,
                self._before,
            )
        )
        order = (is_kept.cumsum() - 1)[order[is_packed]]
        self.order = order.tolist()
        starts = np.empty_like(order)
        starts[order] = np.arange(len(order))
        self.starts = starts.tolist()
        n_parts = np.diff(self._first_part)[is_packed]
        self._first_part = np.zeros(len(n_parts) + 1, np.int32)
        n_parts.cumsum(out=self._first_part[1:])
        self._host_bases = self._host_bases[is_packed]
        self._to_device()

    def _to_device(self) -> None:
        self._bases = upload(self._host_bases, self._device)
        self.positions = torch.empty(len(self._host_bases), dtype=torch.int32, device=self._device)
        self._works = {}
        self._expected = None

    def _work(self, group: int) -> Work:
        n_rows = self._size * group
        n_wide, rest = np.divmod(n_rows, WIDE)
        is_narrow = (rest > 0) & (rest <= NARROW)
        n_wide += (rest > 0) & ~is_narrow
        everywhere = np.arange(len(n_rows))
        narrow = everywhere[is_narrow]
        wide = np.repeat(everywhere, n_wide)
        tile = np.arange(len(wide)) - np.repeat(np.cumsum(n_wide) - n_wide, n_wide)
        return Work(
            table=self.table,
            narrow=self._items(narrow, n_rows, n_rows[narrow] - rest[narrow]),
            wide=self._items(wide, n_rows, tile * WIDE),
            first_part=upload(self._first_part, self._device),
            positions=self.positions,
            n_parts=int(self._first_part[-1]),
        )

    def _items(self, stretch: Ints, n_rows: Ints, m0: Ints) -> Tensor:
        """Items of tiles: every chunk of the stretch with the rows from `m0` on."""
        counts = self._n_chunks[stretch]
        of = np.repeat(stretch, counts)
        number = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        skipped = number * self._chunk
        is_last = number == self._n_chunks[of] - 1
        items = np.zeros((len(of), ITEM_FIELDS), np.int32)
        items[:, 0] = self._at[of] + skipped
        items[:, 1] = np.where(is_last, self._n[of] - skipped, self._chunk)
        items[:, 2] = self._first[of] + skipped
        items[:, 3] = self._start[of]
        items[:, 4] = n_rows[of]
        items[:, 5] = np.repeat(m0, counts)
        items[:, 6] = self._before[of] + number
        return upload(items, self._device)


def _packed(
    rows: Sequence[Row], sizes: list[int], pool: SlotPool
) -> tuple[list[int], list[int], list[list[int]], list[SlotList]]:
    """Return row numbers depth first, the number of the stretch above each (-1: none), the
    stretches of all paths, and their lists.

    A stretch is slots at … at + n of the table, the first at position `first`, and the packed query
    tokens start … start + size below it: [at, n, first, start, size, number of its parent].
    """
    of_tuple: dict[int, list[int]] = {}
    of_path: dict[tuple[Span, ...], list[int]] = {}
    for i, row in enumerate(rows):
        members = of_tuple.get(id(row.path))
        if members is None:
            members = of_tuple[id(row.path)] = of_path.setdefault(row.path, [])
        members.append(i)
    numbers: dict[Span, int] = {}
    keyed: list[tuple[list[int], list[Span], list[int]]] = []
    for path, members in of_path.items():
        spans = [span for span in path if span.length]
        key = [numbers.setdefault(span, len(numbers)) for span in spans]
        keyed.append((key, spans, members))
    keyed.sort(key=_key_of)
    order, bottoms, found, met = list[int](), list[int](), list[list[int]](), list[SlotList]()
    before: list[int] = []
    open_now: list[int] = []  # the stretches down to here
    start = 0
    for key, spans, members in keyed:
        n_same = 0
        while n_same < min(len(key), len(before)) and key[n_same] == before[n_same]:
            n_same += 1
        del open_now[n_same:]
        first = sum([span.length for span in spans[:n_same]])
        for fragment, length in spans[n_same:]:
            kv = own(fragment)
            parent = open_now[-1] if open_now else -1
            open_now.append(len(found))
            met.append(kv)
            found.append([pool.place(kv), length, first, start, 0, parent])
            first += length
        n_tokens = sum([sizes[i] for i in members])
        for number in open_now:
            found[number][4] += n_tokens
        order += members
        bottoms += [open_now[-1] if open_now else -1] * len(members)
        start += n_tokens
        before = key
    return order, bottoms, found, met


def _key_of(item: tuple[list[int], list[Span], list[int]]) -> list[int]:
    return item[0]
