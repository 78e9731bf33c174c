"""Live tails side by side: one padded tensor that a step attends as one batched product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .layout import Layout, Slots

if TYPE_CHECKING:
    from .store import KV

GROW_BY = 32
SMALLEST = 64
# Tails that would take more than this with GROW_BY slots each are a crowd.
CROWD_BYTES = 128 << 20


def width_for(length: int, *, crowd: bool = False) -> int:
    """The width class of a tail: those of one class share a bank, padded to at most double.

    Short ones share one class, so that few are copied often; a crowd cannot afford that.
    """
    return max(1 if crowd else SMALLEST, 1 << (length - 1).bit_length())


class Bank:
    """Tails of one width class, one row each.

    [0, len) of a row   tokens of its fragment
    [len, room)         room to grow, up to `width`

    members: fragment of each row; None is a hole. A step's rows lie side by side, in its order.
    n_members: those that are no holes.
    """

    __slots__ = ("keys", "layout", "members", "n_members", "room", "slots", "values", "width")

    def __init__(self, layout: Layout, width: int) -> None:
        self.layout = layout
        self.width = width
        self.room = 0
        self.members: list[KV | None] = []
        self.n_members = 0
        self.set_slots(layout.empty(0, 0))

    def set_slots(self, slots: Slots) -> None:
        self.slots = slots
        self.room = slots.keys[0].shape[2]
        self.keys = self.layout.per_layer(slots.keys)
        self.values = self.layout.per_layer(slots.values)

    @property
    def n_bytes(self) -> int:
        return self.slots.n_bytes

    @property
    def n_rows(self) -> int:
        """Rows that there is memory for."""
        return int(self.slots.keys[0].shape[1])

    def find(self, tails: list[KV]) -> int | None:
        """Return the row of the first of `tails`, if they lie side by side in this order."""
        first = tails[0].start
        if tails[0].home is not self or first + len(tails) > len(self.members):
            return None
        found = self.members[first : first + len(tails)]
        return first if all(a is b for a, b in zip(found, tails, strict=True)) else None

    def widen(self, length: int) -> None:
        """Make room for `length` slots a row: a larger buffer without holes or spare rows.

        Rows keep their order, not their numbers.
        """
        if length > self.room:
            staying = [m for m in self.members if m is not None]
            self._reseat(staying, length, len(staying))

    def take(self, tails: list[KV], length: int) -> int:
        """Make `tails` the last rows, in their order, with room for `length`; return the first.

        Slots of a tail that was elsewhere are copied in by the caller; rows of members keep theirs.
        """
        named = {id(t) for t in tails}
        staying = [m for m in self.members if m is not None and id(m) not in named]
        n_rows = len(staying) + len(tails)
        are_new = len(staying) == self.n_members
        if are_new and len(self.members) + len(tails) <= self.n_rows and length <= self.room:
            self.members += tails
            self.n_members += len(tails)
            return len(self.members) - len(tails)
        self._reseat([*staying, *tails], length, n_rows + n_rows // 4 if self.members else n_rows)
        return len(staying)

    def compact(self) -> None:
        """Give back the memory of holes, if they are most of it."""
        if 2 * self.n_members <= len(self.members):
            staying = [m for m in self.members if m is not None]
            self._reseat(staying, 1, len(staying))

    def _reseat(self, members: list[KV], length: int, n_rows: int) -> None:
        rows = {id(m): row for row, m in enumerate(self.members) if m is not None}
        longest = max(length, max((m.length for m in members), default=0))
        self.members, self.n_members = list(members), len(members)
        sources = [rows.get(id(m), -1) for m in members]
        self._rebuild(n_rows, self._room_for(n_rows, longest), sources)
        for row, member in enumerate(members):
            if id(member) in rows:
                member.start = row

    def _room_for(self, n_rows: int, length: int) -> int:
        step = GROW_BY
        if n_rows * GROW_BY * self.layout.slot_bytes > CROWD_BYTES:
            step = max(1, min(GROW_BY, length // 4))
        return min(self.width, max(1, -(-length // step)) * step)

    def _rebuild(self, n_rows: int, room: int, sources: list[int]) -> None:
        """Allocate anew; row i gets the old row `sources[i]` (-1: none)."""
        old, kept = self.slots, [i for i, s in enumerate(sources) if s >= 0]
        # A batched product also meets the slots past a row's end: hidden, but they must be finite.
        fresh = self.layout.zeros(n_rows, room)
        if kept:
            n = min(room, self.room)
            device = self.layout.device
            into = torch.tensor(kept, device=device)
            of = torch.tensor([sources[i] for i in kept], device=device)
            fresh.copy_from(old, (into, slice(0, n)), (of, slice(0, n)))
        self.set_slots(fresh)
