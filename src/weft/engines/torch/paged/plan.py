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
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...base import Row, Span
from .kernel import ITEM_FIELDS, NARROW, WIDE, Work
from .pool import SlotList, SlotPool, own

# Programs that keep a card busy, all KV heads together: twice the 132 processors of sm_90, twice.
_PROGRAMS = 528
_CHUNK = 256  # slots of an item at least
_ALIGN = 64

Ints = NDArray[np.int64]


class Stretch(NamedTuple):
    """Slots at … at + n of the table, the first at position `first`, and the packed query tokens
    start … start + size below. parent: the stretch above, by number; -1: none.
    """

    at: int
    n: int
    first: int
    start: int
    size: int
    parent: int


class TreePlan:
    """How one set of rows is packed, and what each meets.

    order: row numbers as packed. starts: packed index of each row's first token, by row number.
    stretches: paths' first, parents before children; then each row's own, in packed order. The
    last chunk of a row's own is open: it holds while the row's list is within `ends`.
    """

    def __init__(
        self, rows: Sequence[Row], lists: Sequence[SlotList], pool: SlotPool, n_kv: int
    ) -> None:
        pool.table.tidy()  # what is met is placed anew below
        self.order, self._bottoms, above, met = _packed(rows, pool)
        self.starts = [0] * len(rows)
        at = 0
        for i in self.order:
            self.starts[i] = at
            at += rows[i].n_tokens
        self.n_tokens = at
        self._rows = [(row.path, lists[i]) for i, row in enumerate(rows)]
        self._is_steady = all(row.n_tokens == 1 and row.dest is not None for row in rows)
        self._lay(rows, lists, above, pool, n_kv)
        self._stamps = [kv.stamp for kv in lists]
        self._above = [(kv, kv.stamp) for kv in met]
        self._works: dict[int, Work] = {}
        self._device = pool.layout.device
        self.positions = torch.empty(self.n_tokens, dtype=torch.int32, device=self._device)
        self._expected: list[int] | None = None

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether planning these rows, whose lists have their room, would give this plan again."""
        if not self._is_steady or len(rows) != len(self._rows):
            return False
        for row, (path, kv), stamp, end in zip(
            rows, self._rows, self._stamps, self._ends, strict=True
        ):
            if row.dest is not kv or row.path is not path or kv.stamp != stamp:
                return False
            if row.n_tokens != 1 or kv.length >= end:
                return False
        return all([kv.stamp == stamp for kv, stamp in self._above])

    def advance(self, positions: list[int], pool: SlotPool) -> None:
        """Say where the packed tokens are now: one on from the last step, on the device alone."""
        if positions == self._expected:
            self.positions += 1
        else:
            self.positions.copy_(torch.tensor(positions, dtype=torch.int32))
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

    def _lay(
        self,
        rows: Sequence[Row],
        lists: Sequence[SlotList],
        above: list[Stretch],
        pool: SlotPool,
        n_kv: int,
    ) -> None:
        """Cut all stretches into chunks; see the class."""
        order, n_above = self.order, len(above)
        in_order = [lists[i] for i in order]
        own_at = np.array([pool.place(kv, grows=True) for kv in in_order], np.int64)
        room = np.array([kv.room for kv in in_order], np.int64)
        lengths = np.array([kv.length for kv in in_order], np.int64)
        sizes = np.array([rows[i].n_tokens for i in order], np.int64)
        firsts = np.array([rows[i].position for i in order], np.int64) - lengths
        starts = np.cumsum(sizes) - sizes
        table = np.array(above, np.int64).reshape(n_above, len(Stretch._fields)).T
        self._at = np.concatenate([table[0], own_at])
        now = np.concatenate([table[1], lengths + sizes])
        self._first = np.concatenate([table[2], firsts])
        self._start = np.concatenate([table[3], starts])
        self._size = np.concatenate([table[4], sizes])
        parent = np.concatenate([table[5], np.array(self._bottoms, np.int64)])

        tiles = -(-self._size * 4 // WIDE)
        chunk = -(-int((now * tiles).sum()) * n_kv // _PROGRAMS // _ALIGN) * _ALIGN
        self._chunk = chunk = max(_CHUNK, chunk)
        self._n_chunks = np.maximum(1, -(-now // chunk))
        self._n = now.copy()
        # The last chunk of a row's own list takes one more, as far as there is room.
        self._n[n_above:] = np.minimum(room, (self._n_chunks[n_above:] + 1) * chunk)
        ends = np.empty(len(rows), np.int64)
        ends[order] = self._n[n_above:]
        self._ends = ends.tolist()

        before = np.zeros(len(parent), np.int64)  # chunks above, on the path
        for number in range(n_above):
            if parent[number] >= 0:
                before[number] = before[parent[number]] + self._n_chunks[parent[number]]
        below = parent[n_above:]
        if n_above:
            upper = before[below] + self._n_chunks[below]
            before[n_above:] = np.where(below >= 0, upper, 0)
        self._before = before
        n_parts = np.repeat(before[n_above:] + self._n_chunks[n_above:], sizes)
        self._first_part = np.concatenate([[0], np.cumsum(n_parts)]).astype(np.int32)
        bases = np.repeat(own_at - firsts, sizes).astype(np.int32)
        self._bases = torch.from_numpy(bases).to(pool.layout.device)

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
            first_part=torch.from_numpy(self._first_part).to(self._device),
            positions=self.positions,
            n_parts=int(self._first_part[-1]),
        )

    def _items(self, stretch: Ints, n_rows: Ints, m0: Ints) -> torch.Tensor:
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
        return torch.from_numpy(items).to(self._device)


def _packed(
    rows: Sequence[Row], pool: SlotPool
) -> tuple[list[int], list[int], list[Stretch], list[SlotList]]:
    """Return the rows in depth-first order, the stretch above each, all of these, their lists."""
    of_path: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        of_path.setdefault(id(row.path), []).append(i)
    numbers: dict[tuple[int, int], int] = {}
    keyed: list[tuple[tuple[int, ...], list[int], list[Span]]] = []
    for members in of_path.values():
        spans = [span for span in rows[members[0]].path if span.length]
        key = tuple([numbers.setdefault((id(s[0]), s[1]), len(numbers)) for s in spans])
        keyed.append((key, members, spans))
    keyed.sort(key=_key_of)
    order: list[int] = []
    bottoms: list[int] = []
    met: list[SlotList] = []
    found: list[list[int]] = []  # the fields of Stretch; sizes grow as rows come
    before: tuple[int, ...] = ()
    open_now: list[int] = []
    start = 0
    for key, members, spans in keyed:
        n_same = 0
        for a, b in zip(key, before, strict=False):
            if a != b:
                break
            n_same += 1
        del open_now[n_same:]
        first = sum([span.length for span in spans[:n_same]])
        for fragment, length in spans[n_same:]:
            kv = own(fragment)
            met.append(kv)
            parent = open_now[-1] if open_now else -1
            open_now.append(len(found))
            found.append([pool.place(kv, grows=False), length, first, start, 0, parent])
            first += length
        n_tokens = sum([rows[i].n_tokens for i in members])
        for number in open_now:
            found[number][4] += n_tokens
        order += members
        bottoms += [open_now[-1] if open_now else -1] * len(members)
        start += n_tokens
        before = key
    return order, bottoms, [Stretch(*fields) for fields in found], met


def _key_of(item: tuple[tuple[int, ...], list[int], list[Span]]) -> tuple[int, ...]:
    return item[0]
