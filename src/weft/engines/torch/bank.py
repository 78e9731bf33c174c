"""Live tails side by side: one padded tensor that a step attends as one batched product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .layout import Layout, Slots

if TYPE_CHECKING:
    from .store import KV

GROW_BY = 32
SMALLEST = 64


def width_for(length: int) -> int:
    """The width class of a tail: those of one class share a bank, padded to at most double."""
    return max(SMALLEST, 1 << (length - 1).bit_length())


class Bank:
    """Tails of one width class, one row each.

    [0, len) of a row   tokens of its fragment
    [len, room)         room to grow, in steps of GROW_BY up to `width`

    members: fragment of each row; None is a hole. A step makes its rows the first, in its order.
    """

    __slots__ = ("keys", "layout", "members", "room", "slots", "values", "width")

    def __init__(self, layout: Layout, width: int) -> None:
        self.layout = layout
        self.width = width
        self.room = 0
        self.members: list[KV | None] = []
        self.set_slots(layout.empty(0, 0))

    def set_slots(self, slots: Slots) -> None:
        self.slots = slots
        self.room = slots.keys[0].shape[2]
        self.keys = self.layout.per_layer(slots.keys)
        self.values = self.layout.per_layer(slots.values)

    @property
    def n_bytes(self) -> int:
        return self.slots.n_bytes

    def leads_with(self, tails: list[KV]) -> bool:
        """Are these the first rows, in this order?"""
        return len(self.members) >= len(tails) and all(
            a is b for a, b in zip(self.members, tails, strict=False)
        )

    def reserve(self, length: int) -> None:
        """Make room for `length` slots a row; a larger buffer replaces the old one."""
        if length > self.room:
            room = min(self.width, -(-length // GROW_BY) * GROW_BY)
            self._rebuild(len(self.members), room, list(range(len(self.members))))

    def lead_with(self, tails: list[KV], length: int) -> None:
        """Make `tails` the first rows, with room for `length`; other members follow, holes go.

        Slots of a tail that was elsewhere are copied in by the caller; rows of members keep theirs.
        """
        named = {id(t) for t in tails}
        rows = {id(m): row for row, m in enumerate(self.members) if m is not None}
        members = [*tails, *(m for m in self.members if m is not None and id(m) not in named)]
        longest = max(length, max((m.length for m in members), default=0))
        room = max(1, -(-longest // GROW_BY)) * GROW_BY
        self.members = list(members)
        self._rebuild(len(members), min(self.width, room), [rows.get(id(m), -1) for m in members])
        for row, member in enumerate(members):
            if id(member) in rows:
                member.start = row

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
