"""The KV memory: settled fragments in blocks, live tails side by side in padded banks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....errors import ConfigError, ModelMismatch
from ...base import Fragment, Row, Usage
from ..layout import Layout, Slots
from ..memory import KVMemory, Spec
from .products import attend

if TYPE_CHECKING:
    from .step import LanePlan

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


# A token after a fragment at least this long goes to its block: moving it to a bank costs more.
LONG = 256
# Room and holes up to this share of a fragment's slots are left in place.
SPARE = 16


class DeviceBlock:
    """One buffer that holds one fragment, or several after splits; `users` are their views."""

    __slots__ = ("capacity", "slots", "users")

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.capacity = int(slots.keys[0].shape[1])
        self.users: list[KV] = []


class KV(Fragment):
    """A fragment: slots start..start+length of a block, or the head of row `start` of a bank."""

    __slots__ = ("home", "start")

    def __init__(self) -> None:
        super().__init__(0)
        self.home: DeviceBlock | Bank | None = None
        self.start = 0


class Store(KVMemory):
    """Fragments on one device. Splits share a block; growth, joins and settling copy."""

    growth = GROW_BY

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.plan: LanePlan | None = None
        self.alone: Alone | None = None
        self._last: tuple[object, object, int] | None = None  # a row that stepped alone
        self._banks: dict[int, Bank] = {}
        self._slots = 0
        self._block_bytes = 0

    # The protocol

    def new(self, parent: Fragment | None) -> KV:
        return KV()

    @torch.inference_mode()
    def split(self, fragment: Fragment, at: int) -> KV:
        lower = _own(fragment)
        self.alone = None
        if not 0 < at < lower.length:
            raise ConfigError(f"cannot split a fragment of {lower.length} slots before slot {at}")
        if isinstance(lower.home, Bank):
            self._move(lower, lower.length)
        self.plan = None
        block = lower.home
        assert isinstance(block, DeviceBlock)
        upper = KV()
        upper.home, upper.start, upper.length = block, lower.start, at
        block.users.append(upper)
        lower.start += at
        lower.length -= at
        return upper

    @torch.inference_mode()
    def join(self, upper: Fragment, lower: Fragment) -> None:
        first, second = _own(upper), _own(lower)
        self.plan = self.alone = None
        if not first.length:
            self._leave(first)
        elif (
            isinstance(second.home, DeviceBlock)
            and first.home is second.home
            and _touch(first, second)
        ):
            second.home.users.remove(first)
            second.start = first.start
            second.length += first.length
        else:
            self._join_by_copy(first, second)
        first.home, first.length = None, 0

    @torch.inference_mode()
    def trim(self, fragment: Fragment, length: int) -> None:
        kv = _own(fragment)
        if not 0 <= length <= kv.length:
            raise ConfigError(f"cannot trim a fragment of {kv.length} slots to {length}")
        self.plan = self.alone = None
        self._slots -= kv.length - length
        kv.length = length
        if not length:
            self._leave(kv)

    @torch.inference_mode()
    def settle(self, fragment: Fragment) -> None:
        kv = _own(fragment)
        if self.alone is not None and self.alone.is_of(kv):
            self.alone = None
        if isinstance(kv.home, Bank):
            self._move(kv, kv.length)
        elif isinstance(kv.home, DeviceBlock):
            self._compact(kv.home)

    @torch.inference_mode()
    def free(self, fragment: Fragment) -> None:
        kv = _own(fragment)
        self.alone = None
        self._slots -= kv.length
        block = kv.home
        self._leave(kv)
        kv.length = 0
        if isinstance(block, DeviceBlock) and block.users:
            self._compact(block)

    @torch.inference_mode()
    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        kv = _own(fragment)
        slots = self._copy(kv) if kv.length else self.layout.empty(0)
        data: dict[str, NDArray[Any]] = {}
        for name, tensors in (("k", slots.keys), ("v", slots.values)):
            for layer, tensor in enumerate(self.layout.per_layer(tensors)):
                data[f"{name}.{layer}"] = _to_host(tensor.transpose(0, 1))
        data["dtype"] = np.array(self.layout.dtype)
        return data

    @torch.inference_mode()
    def load(self, data: dict[str, NDArray[Any]], parent: Fragment | None) -> KV:
        like = self.layout.empty(0)
        slots = Slots(self._stack(data, "k", like.keys), self._stack(data, "v", like.values))
        n = int(slots.keys[0].shape[1])
        if any(t.shape[1] != n for t in (*slots.keys, *slots.values)):
            raise ModelMismatch("the exported KV has layers of different lengths; it is broken")
        kv = KV()
        if n:
            self._place(kv, slots)
            kv.length = n
            self._slots += n
        return kv

    def _stack(self, data: dict[str, NDArray[Any]], name: str, like: list[Tensor]) -> list[Tensor]:
        """Read one exported kind, a tensor a layer group: [G, S, K, D]."""
        out = []
        for (_, layers), tensor in zip(self.layout.groups, like, strict=True):
            parts = [_from_host(data, f"{name}.{layer}", tensor[0]) for layer in layers]
            if len({part.shape for part in parts}) > 1:
                raise ModelMismatch("the exported KV has layers of different lengths; it is broken")
            out.append(torch.stack(parts))
        return out

    def usage(self) -> Usage:
        n_bytes = self._block_bytes + sum(b.n_bytes for b in self._banks.values())
        return Usage(self._slots, n_bytes + (0 if self.alone is None else self.alone.n_bytes))

    # What the engine's step needs

    def alone_for(self, rows: Sequence[Row]) -> Alone | None:
        """Return the one piece of a row that steps alone, from its second such step on."""
        last, self._last = self._last, None
        if not is_alone(rows, self):
            self.alone = None
            return None
        (row,) = rows
        self._last = row.path, row.dest, row.position
        if self.alone is None or not self.alone.fits(row):
            follows = last is not None and last[0] is row.path and last[1] is row.dest
            is_next = follows and last is not None and last[2] + 1 == row.position
            self.alone = Alone(row, self) if is_next else None
        return self.alone

    def one_piece(
        self, spans: list[tuple[Fragment, int]], room: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of spans one after the other, a layer each: [1, K, room, D]."""
        slots, at = self.layout.zeros(1, room), 0
        for fragment, length in spans:
            kv = _own(fragment)
            slots.copy_from(_slots_of(kv), (0, slice(at, at + length)), _where(kv, length))
            at += length
        return (
            self.layout.per_layer([t.transpose(2, 3) for t in slots.keys]),
            self.layout.per_layer([t.transpose(2, 3) for t in slots.values]),
        )

    def views(self, fragment: Fragment, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the first `length` slots' keys and values, a layer each: [1, K, length, D]."""
        kv = _own(fragment)
        index = (slice(None), *_where(kv, length))
        slots, per_layer = _slots_of(kv), self.layout.per_layer
        return (
            per_layer([t[index].transpose(1, 2).unsqueeze(1) for t in slots.keys]),
            per_layer([t[index].transpose(1, 2).unsqueeze(1) for t in slots.values]),
        )

    def padded(self, spans: list[tuple[Fragment, int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Copies of spans side by side, a layer each: [P, K, S, D], zero past a span's end."""
        slots = self.layout.zeros(len(spans), max(length for _, length in spans))
        for number, (fragment, length) in enumerate(spans):
            kv = _own(fragment)
            slots.copy_from(_slots_of(kv), (number, slice(0, length)), _where(kv, length))
        per_layer = self.layout.per_layer
        return (
            per_layer([t.transpose(2, 3) for t in slots.keys]),
            per_layer([t.transpose(2, 3) for t in slots.values]),
        )

    def is_banked(self, kv: KV, n_long: int) -> bool:
        """Should one more slot of `kv` go to a bank? `n_long` fragments of the step are long."""
        if isinstance(kv.home, Bank) or kv.length < LONG:
            return True
        return n_long > 3  # a few keep a product of their own; many are worth one copy

    def is_crowd(self, n_more: int = 0) -> bool:
        """Are the tails in banks, and `n_more`, so many that none may have room to spare?"""
        n = n_more + sum(bank.n_members for bank in self._banks.values())
        return n * GROW_BY * self.layout.slot_bytes > CROWD_BYTES

    def bank_for(self, tails: list[KV], width: int) -> tuple[Bank, int]:
        """The bank of a width class with `tails` side by side, and the row of the first.

        There is room for one slot more.
        """
        longest = max(t.length for t in tails) + 1
        bank = self._banks.get(width)
        if bank is None:
            bank = self._banks[width] = Bank(self.layout, width)
        bank.compact()
        bank.widen(longest)
        first = bank.find(tails)
        if first is None:
            arriving = [t for t in tails if t.home is not bank]
            first = bank.take(tails, longest)
            self._arrive(bank, arriving, {id(t): first + at for at, t in enumerate(tails)})
        return bank, first

    @torch.inference_mode()
    def append(
        self, kv: KV, keys: list[Tensor], values: list[Tensor], start: int, stop: int
    ) -> None:
        """Write tokens start..stop of per-layer [K, T, D] tensors after `kv`; its length stays."""
        fresh = self.layout.gather(keys, values, start, stop)
        n = stop - start
        if not kv.length:
            self._leave(kv)
            self._place(kv, fresh)
            return
        self.plan = None
        if not self._has_room(kv, n):
            self._move(kv, max(kv.length + n, kv.length + kv.length // 4))
        assert isinstance(kv.home, DeviceBlock)
        at = kv.start + kv.length
        kv.home.slots.copy_from(fresh, (slice(at, at + n),), (slice(0, n),))

    def grew(self, kv: KV, n: int) -> None:
        """Count `n` slots that a finished forward wrote."""
        kv.length += n
        self._slots += n

    def clear(self) -> None:
        """Forget everything."""
        self.plan = self.alone = self._last = None
        self._banks.clear()
        self._slots = self._block_bytes = 0

    # Moving slots

    def _join_by_copy(self, first: KV, second: KV) -> None:
        total = first.length + second.length
        slots = self.layout.empty(total)
        slots.copy_from(_slots_of(first), (slice(0, first.length),), _where(first))
        if second.length:
            slots.copy_from(_slots_of(second), (slice(first.length, total),), _where(second))
        homes = [first.home, second.home]
        self._leave(first)
        self._leave(second)
        self._place(second, slots)
        second.length = total
        for home in {id(h): h for h in homes}.values():
            if isinstance(home, DeviceBlock) and home.users:
                self._compact(home)

    def _move(self, kv: KV, capacity: int) -> None:
        """Give the fragment a block of its own."""
        if capacity == kv.length:
            slots = self._copy(kv) if kv.length else self.layout.empty(0)
        else:
            slots = self.layout.empty(capacity)
            if kv.length:
                slots.copy_from(_slots_of(kv), (slice(0, kv.length),), _where(kv))
        self._leave(kv)
        if capacity:
            self._place(kv, slots)

    def _copy(self, kv: KV) -> Slots:
        return _slots_of(kv).copy(*_where(kv))

    def _place(self, kv: KV, slots: Slots) -> None:
        self.plan = None
        block = DeviceBlock(slots)
        block.users.append(kv)
        kv.home, kv.start = block, 0
        self._block_bytes += slots.n_bytes

    def _leave(self, kv: KV) -> None:
        """Take the fragment from its home; a home without fragments gives its memory back."""
        self.plan = None
        home, kv.home = kv.home, None
        if isinstance(home, DeviceBlock):
            home.users.remove(kv)
            if not home.users:
                self._block_bytes -= home.slots.n_bytes
        elif isinstance(home, Bank):
            home.members[kv.start] = None
            home.n_members -= 1
            if not home.n_members:
                self._banks.pop(home.width, None)
        kv.start = 0

    def _has_room(self, kv: KV, n: int) -> bool:
        block = kv.home
        if not isinstance(block, DeviceBlock):
            return False
        end = kv.start + kv.length
        last = all(u.start + u.length <= end for u in block.users)
        return last and end + n <= block.capacity

    def _compact(self, block: DeviceBlock) -> None:
        """Give every fragment of the block a buffer of its own size, if much of it is empty."""
        live = sum(u.length for u in block.users)
        if block.capacity - live > live // SPARE:
            for kv in list(block.users):
                self._move(kv, kv.length)

    def _arrive(self, bank: Bank, tails: Iterable[KV], rows: dict[int, int]) -> None:
        """Copy tails into their rows of the bank: those from one bank together, others singly."""
        by_bank: dict[int, list[KV]] = {}
        for kv in tails:
            if kv.length and isinstance(kv.home, Bank):
                by_bank.setdefault(kv.home.width, []).append(kv)
            elif kv.length:
                row, n = rows[id(kv)], kv.length
                bank.slots.copy_from(_slots_of(kv), (row, slice(0, n)), _where(kv))
        device = self.layout.device
        for width, group in by_bank.items():
            source = self._banks[width]
            into = torch.tensor([rows[id(kv)] for kv in group], device=device)
            of = torch.tensor([kv.start for kv in group], device=device)
            span = slice(0, min(source.room, bank.room))
            bank.slots.copy_from(source.slots, (into, span), (of, span))
        for kv in tails:
            self._leave(kv)
            kv.home, kv.start = bank, rows[id(kv)]


def _own(fragment: Fragment) -> KV:
    if not isinstance(fragment, KV):
        raise ConfigError(f"a {type(fragment).__name__} is not a fragment of the torch engine")
    return fragment


def _touch(first: KV, second: KV) -> bool:
    return first.start + first.length == second.start


def _slots_of(kv: KV) -> Slots:
    assert kv.home is not None
    return kv.home.slots


def _where(kv: KV, length: int | None = None) -> tuple[slice | int, ...]:
    n = kv.length if length is None else length
    if isinstance(kv.home, Bank):
        return kv.start, slice(0, n)
    return (slice(kv.start, kv.start + n),)


def _to_host(tensor: Tensor) -> NDArray[Any]:
    """Copy to the host, contiguous; bfloat16, which NumPy lacks, as its uint16 bits."""
    dense = tensor.contiguous()
    bits = dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense
    array: NDArray[Any] = bits.cpu().numpy()
    return array


def _from_host(data: dict[str, NDArray[Any]], name: str, like: Tensor) -> Tensor:
    """Read one exported array as [S, K, D]; `like` is one layer's, of any number of slots."""
    dtype = str(like.dtype).removeprefix("torch.")
    if name not in data or str(data.get("dtype", "")) != dtype:
        raise ModelMismatch(
            f"the exported KV has no {dtype} array {name!r}; load it with the model and dtype that "
            "wrote it"
        )
    held = "uint16" if like.dtype == torch.bfloat16 else dtype
    if str(data[name].dtype) != held:
        raise ModelMismatch(
            f"the exported KV has {data[name].dtype} for {name!r}, this model needs {held}"
        )
    tensor = torch.from_numpy(np.array(data[name]))
    if like.dtype == torch.bfloat16:
        tensor = tensor.view(torch.bfloat16)
    if tensor.ndim != 3 or (tensor.shape[0], tensor.shape[2]) != tuple(like.shape[1:]):
        raise ModelMismatch(
            f"the exported KV has shape {tuple(tensor.shape)} for {name!r}, this model needs "
            f"{(like.shape[1], 'n', like.shape[2])}"
        )
    return tensor.transpose(0, 1).to(like.device)


ROOM = 64  # slots that a piece is longer than its path, at first
MOST_BYTES = 64 << 20  # the piece is a copy; longer paths are met where they lie


class Alone:
    """A copy of one row's path and tail, which the row's new slots are added to as it steps.

    The fragments have those slots, too. n: slots that are there. room: slots there is memory for.
    """

    __slots__ = ("_keys", "_row", "_values", "n", "n_bytes", "room")

    def __init__(self, row: Row, store: Store) -> None:
        spans = [(span.fragment, span.length) for span in row.path if span.length]
        if row.dest is not None and row.dest.length:
            spans.append((row.dest, row.dest.length))
        self.n = row.position
        self.room = self.n + ROOM
        self.n_bytes = self.room * store.layout.slot_bytes
        self._row = row.path, row.dest
        self._keys, self._values = store.one_piece(spans, self.room)

    def fits(self, row: Row) -> bool:
        """Whether it is this row's, all of its path is there, and there is room for one slot."""
        path, dest = self._row
        is_whole = row.position == self.n < self.room
        return is_whole and row.path is path and row.dest is dest

    def is_of(self, kv: KV) -> bool:
        """Whether its new slots are this fragment's."""
        return self._row[1] is kv

    def meet(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> Tensor:
        """Add a slot and let the one query meet all: q [H, 1, D]; k, v [K, 1, …]. [1, 1, H, Dv]."""
        keys, values = self._keys[layer], self._values[layer]
        keys[0, :, self.n] = k[:, 0]
        values[0, :, self.n] = v[:, 0]
        end = self.n + 1
        queries = q.reshape(1, k.shape[0], -1, q.shape[-1])
        out, _ = attend(queries, keys[:, :, :end], values[:, :, :end], spec)
        return out.reshape(1, 1, q.shape[0], -1)


def is_alone(rows: Sequence[Row], store: Store) -> bool:
    """Whether a step is one token of one row that keeps it, on a path of a size to copy."""
    if len(rows) != 1 or store.layout.device.type != "cpu":
        return False
    (row,) = rows
    n_bytes = (row.position + ROOM) * store.layout.slot_bytes
    return row.n_tokens == 1 and row.dest is not None and n_bytes <= MOST_BYTES
