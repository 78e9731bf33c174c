"""Padded KV pool: finished fragments in blocks, growing tails as rows of padded buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....errors import ModelMismatch
from ...base import Fragment, Row, Usage
from ...padded_pool import (
    GROW_BY,
    PaddedFragment,
    PaddedPool,
    SharedBlock,
    TailBuffer,
    own,
    room_for,
)
from ..execution import on_engine_stream
from ..kv_backend import AttentionSpec, KVBackend
from ..kv_offload import HostTransfer, from_host, to_host
from ..layout import Layout, Slots
from .attention import attend

if TYPE_CHECKING:
    from .step import PaddedPlan


class PaddedKVFragment(PaddedFragment):
    """A fragment of the padded pool; see `PaddedFragment`."""

    __slots__ = ()
    engine = "torch"


class TorchTailBuffer(TailBuffer):
    """A tail buffer whose rows are in one tensor. keys, values: views of it by layer."""

    __slots__ = ("keys", "layout", "values")
    slots: Slots

    def __init__(self, layout: Layout, width: int) -> None:
        super().__init__(width)
        self.layout = layout
        self.set_slots(layout.empty(0, 0))

    def set_slots(self, slots: Slots) -> None:
        """Replace the tensors of all rows."""
        self.slots = slots
        self.n_rows, self.room = (int(n) for n in slots.keys[0].shape[1:3])
        self.keys = self.layout.per_layer(slots.keys)
        self.values = self.layout.per_layer(slots.values)

    def widen(self, length: int) -> None:
        """Make room for `length` slots a row, in a larger buffer without holes or spare rows.

        Rows keep their order, not their numbers.
        """
        if length > self.room:
            staying = [m for m in self.members if m is not None]
            self._reallocate(staying, length, len(staying))

    def take(self, tails: Sequence[PaddedFragment], length: int) -> int:
        """Assign adjacent rows, in order, to `tails`; return the row of the first.

        Other members keep their slots, but may change rows. The caller copies the slots of tails
        that were not members.
        length: slots that each row must have room for.
        """
        named = {id(t) for t in tails}
        staying = [m for m in self.members if m is not None and id(m) not in named]
        n_rows = len(staying) + len(tails)
        are_new = len(staying) == self.n_members
        if are_new and len(self.members) + len(tails) <= self.n_rows and length <= self.room:
            self.members += tails
            self.n_members += len(tails)
            return len(self.members) - len(tails)
        self._reallocate(
            [*staying, *tails], length, n_rows + n_rows // 4 if self.members else n_rows
        )
        return len(staying)

    def remove_missing(self, tails: Sequence[PaddedFragment]) -> None:
        """Free the rows that `take` assigned to tails whose slots were then not copied here."""
        gone = {id(t) for t in tails if t.home is not self}
        self.members = [None if id(m) in gone else m for m in self.members]
        self.n_members -= len(gone)

    def compact(self) -> None:
        """Release the memory of holes if they are most of the buffer."""
        if self.is_sparse:
            staying = [m for m in self.members if m is not None]
            self._reallocate(staying, 1, len(staying))

    def _reallocate(self, members: Sequence[PaddedFragment], length: int, n_rows: int) -> None:
        """Assign the first rows of new tensors to `members`, in order.

        Slots of members that are in this buffer are copied. The rows of others are empty.

        length: slots that each row must have room for. n_rows: rows to allocate.
        """
        rows = {id(m): row for row, m in enumerate(self.members) if m is not None}
        longest = max(length, max((m.length for m in members), default=0))
        sources = [rows.get(id(m), -1) for m in members]
        room = room_for(self.width, n_rows, longest, self.layout.slot_bytes)
        self._rebuild(
            n_rows, room, sources
        )  # raises before anything has changed if memory is short
        self.members, self.n_members = list(members), len(members)
        for row, member in enumerate(members):
            if id(member) in rows:
                member.start = row

    def _rebuild(self, n_rows: int, room: int, sources: list[int]) -> None:
        """Replace the tensor by a new one of `n_rows` rows with `room` slots.

        sources: for each new row, the old row to copy; -1 for zeros.
        """
        old, kept = self.slots, [i for i, s in enumerate(sources) if s >= 0]
        # A batched product also reads hidden slots beyond a row's end, which must be finite.
        fresh = self.layout.zeros(n_rows, room)
        if kept:
            n = min(room, self.room)
            device = self.layout.device
            into = torch.tensor(kept, device=device)
            of = torch.tensor([sources[i] for i in kept], device=device)
            fresh.copy_from(old, (into, slice(0, n)), (of, slice(0, n)))
        self.set_slots(fresh)


class PaddedKVPool(PaddedPool[PaddedKVFragment, TorchTailBuffer], KVBackend):
    """KV storage of the torch engine in rectangular tensors; see `PaddedPool`."""

    growth = GROW_BY
    kind = PaddedKVFragment

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout.slot_bytes)
        self.layout = layout
        self.plan: PaddedPlan | None = None
        self.single_sequence: SingleSequenceCache | None = None
        self._last: tuple[object, object, int] | None = None  # the last row that stepped alone
        self._copies = HostTransfer(layout.device)

    def on_slots_moved(self) -> None:
        """Discard the step plan."""
        self.plan = None

    def on_fragments_cut(self) -> None:
        """Discard the step plan and the copy of a single sequence."""
        self.plan = self.single_sequence = None

    @torch.inference_mode()
    def copy_slots(self, kv: PaddedKVFragment, capacity: int) -> Slots:
        """Return new tensors of `capacity` slots that start with the fragment's slots."""
        if capacity == kv.length:
            return self._copy(kv)
        slots = self.layout.empty(capacity)
        if kv.length:
            slots.copy_from(_slots_of(kv), (slice(0, kv.length),), _where(kv))
        return slots

    @torch.inference_mode()
    def concatenate(self, parts: Sequence[PaddedKVFragment]) -> Slots:
        """Return new tensors with the slots of several fragments, in order."""
        slots, at = self.layout.empty(sum(kv.length for kv in parts)), 0
        for kv in parts:
            slots.copy_from(_slots_of(kv), (slice(at, at + kv.length),), _where(kv))
            at += kv.length
        return slots

    # The protocol

    def new(self, parent: Fragment | None) -> PaddedKVFragment:
        """Return an empty fragment. `parent` is unused."""
        return PaddedKVFragment()

    def settle(self, fragment: Fragment) -> None:
        """Release unused capacity of a fragment that will not grow soon."""
        if self.single_sequence is not None and self.single_sequence.appends_to(fragment):
            self.single_sequence = None
        super().settle(fragment)

    @torch.inference_mode()
    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        """Copy the fragment's slots to host arrays; see `Fragments.export`."""
        kv = own(fragment, PaddedKVFragment)
        data: dict[str, NDArray[Any]] = {}
        with self._copies.copying_out():
            slots = self._copy(kv) if kv.length else self.layout.empty(0)
            for name, tensors in (("k", slots.keys), ("v", slots.values)):
                for layer, tensor in enumerate(self.layout.per_layer(tensors)):
                    data[f"{name}.{layer}"] = to_host(tensor.transpose(0, 1))
        data["dtype"] = np.array(self.layout.dtype)
        return data

    @torch.inference_mode()
    def load(self, data: dict[str, NDArray[Any]], parent: Fragment | None) -> PaddedKVFragment:
        """Create a fragment from exported arrays. `parent` is unused."""
        with on_engine_stream(self.layout.device):
            return self._loaded(data)

    def _loaded(self, data: dict[str, NDArray[Any]]) -> PaddedKVFragment:
        """Check exported arrays, and put them into a block of a new fragment."""
        like = self.layout.empty(0)
        slots = Slots(self._stack(data, "k", like.keys), self._stack(data, "v", like.values))
        n = int(slots.keys[0].shape[1])
        if any(t.shape[1] != n for t in (*slots.keys, *slots.values)):
            raise ModelMismatch("the exported KV has layers of different lengths; it is broken")
        kv = PaddedKVFragment()
        if n:
            self._place(kv, slots, n)
            kv.length = n
            self._slots += n
        return kv

    def _stack(self, data: dict[str, NDArray[Any]], name: str, like: list[Tensor]) -> list[Tensor]:
        """Read one exported kind, one tensor a layer group: [G, S, K, D]."""
        out = []
        for (_, layers), tensor in zip(self.layout.groups, like, strict=True):
            parts = [from_host(data, f"{name}.{layer}", tensor[0]) for layer in layers]
            if len({part.shape for part in parts}) > 1:
                raise ModelMismatch("the exported KV has layers of different lengths; it is broken")
            out.append(torch.stack([part.to(tensor.device) for part in parts]).transpose(1, 2))
        return out

    def usage(self) -> Usage:
        """Return the memory in use, with the copy of a single sequence."""
        n_slots, n_bytes = super().usage()
        return Usage(
            n_slots, n_bytes + (0 if self.single_sequence is None else self.single_sequence.n_bytes)
        )

    # What the engine's step needs

    def single_sequence_for(self, rows: Sequence[Row]) -> SingleSequenceCache | None:
        """Return the contiguous copy of the path of a row that steps alone; None: do not use one.

        It exists from the row's second such step on. The step must have one token; see
        `is_single_sequence`. Any other step frees the copy.
        """
        last, self._last = self._last, None
        if not is_single_sequence(rows, self):
            self.single_sequence = None
            return None
        (row,) = rows
        self._last = row.prefix, row.kv_out, row.position
        if self.single_sequence is None or not self.single_sequence.fits(row):
            follows = last is not None and last[0] is row.prefix and last[1] is row.kv_out
            is_adjacent = follows and last is not None and last[2] + 1 == row.position
            self.single_sequence = SingleSequenceCache(row, self) if is_adjacent else None
        return self.single_sequence

    def concatenated(
        self, spans: list[tuple[Fragment, int]], room: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return copies of spans one after the other, by layer: [1, K, room, D]."""
        slots, at = self.layout.zeros(1, room), 0
        for fragment, length in spans:
            kv = own(fragment, PaddedKVFragment)
            slots.copy_from(_slots_of(kv), (0, slice(at, at + length)), _where(kv, length))
            at += length
        return (
            self.layout.per_layer([t.transpose(2, 3) for t in slots.keys]),
            self.layout.per_layer([t.transpose(2, 3) for t in slots.values]),
        )

    def views(self, fragment: Fragment, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of the first `length` slots, by layer: [1, K, length, D]."""
        kv = own(fragment, PaddedKVFragment)
        index = (slice(None), *_where(kv, length))
        slots, per_layer = _slots_of(kv), self.layout.per_layer
        return (
            per_layer([t[index].transpose(1, 2).unsqueeze(1) for t in slots.keys]),
            per_layer([t[index].transpose(1, 2).unsqueeze(1) for t in slots.values]),
        )

    def padded(
        self, paths: Sequence[Sequence[tuple[Fragment, int]]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return padded copies of paths, by layer: [P, K, S, D], zero beyond a path's end.

        paths: by path, its spans in order.
        """
        longest = max(sum(length for _, length in spans) for spans in paths)
        slots = self.layout.zeros(len(paths), longest)
        for number, spans in enumerate(paths):
            at = 0
            for fragment, length in spans:
                kv = own(fragment, PaddedKVFragment)
                slots.copy_from(_slots_of(kv), (number, slice(at, at + length)), _where(kv, length))
                at += length
        per_layer = self.layout.per_layer
        return (
            per_layer([t.transpose(2, 3) for t in slots.keys]),
            per_layer([t.transpose(2, 3) for t in slots.values]),
        )

    def buffer_for(self, tails: list[PaddedKVFragment], width: int) -> tuple[TorchTailBuffer, int]:
        """Return the buffer of a width with `tails` in adjacent rows, and the row of the first.

        Each row has room for one more slot.
        """
        longest = max(t.length for t in tails) + 1
        buffer = self._buffers.get(width)
        if buffer is None:
            buffer = self._buffers[width] = TorchTailBuffer(self.layout, width)
        buffer.compact()
        buffer.widen(longest)
        first = buffer.find(tails)
        if first is None:
            arriving = [t for t in tails if t.home is not buffer]
            first = buffer.take(tails, longest)
            try:
                self._arrive(buffer, arriving, {id(t): first + at for at, t in enumerate(tails)})
            except BaseException:
                buffer.remove_missing(arriving)
                raise
        return buffer, first

    @torch.inference_mode()
    def append(
        self, kv: PaddedKVFragment, keys: list[Tensor], values: list[Tensor], start: int, stop: int
    ) -> None:
        """Append the tokens start … stop - 1 to the block of `kv`; `kv.length` does not change.

        keys, values: one tensor [K, T, D] per layer.
        """
        fresh = self.layout.gather(keys, values, start, stop)
        n = stop - start
        if not kv.length:
            self._remove(kv)
            self._place(kv, fresh, n)
            return
        self.plan = None
        if not self._has_room(kv, n):
            self._move(kv, max(kv.length + n, kv.length + kv.length // 4))
        assert isinstance(kv.home, SharedBlock)
        at = kv.start + kv.length
        kv.home.slots.copy_from(fresh, (slice(at, at + n),), (slice(0, n),))

    def clear(self) -> None:
        """Remove all fragments."""
        super().clear()
        self._last = None

    def _copy(self, kv: PaddedKVFragment) -> Slots:
        """Return a copy of the fragment's slots."""
        return _slots_of(kv).copy(*_where(kv))

    def _arrive(
        self, buffer: TorchTailBuffer, tails: Iterable[PaddedKVFragment], rows: dict[int, int]
    ) -> None:
        """Copy tails into a buffer, and remove them from their previous blocks or buffers.

        Tails from one buffer are copied together, others one by one.
        rows: row of each tail in `buffer`, by the id of the fragment.
        """
        by_buffer: dict[int, list[PaddedKVFragment]] = {}
        for kv in tails:
            if kv.length and isinstance(kv.home, TailBuffer):
                by_buffer.setdefault(kv.home.width, []).append(kv)
            elif kv.length:
                row, n = rows[id(kv)], kv.length
                buffer.slots.copy_from(_slots_of(kv), (row, slice(0, n)), _where(kv))
        device = self.layout.device
        for width, group in by_buffer.items():
            source = self._buffers[width]
            into = torch.tensor([rows[id(kv)] for kv in group], device=device)
            of = torch.tensor([kv.start for kv in group], device=device)
            span = slice(0, min(source.room, buffer.room))
            buffer.slots.copy_from(source.slots, (into, span), (of, span))
        for kv in tails:
            self._remove(kv)
            kv.home, kv.start = buffer, rows[id(kv)]


def _slots_of(kv: PaddedKVFragment) -> Slots:
    """Return the tensors of the block or buffer that holds the fragment."""
    assert kv.home is not None
    slots: Slots = kv.home.slots
    return slots


def _where(kv: PaddedKVFragment, length: int | None = None) -> tuple[slice | int, ...]:
    """Return the index, in `_slots_of`, of the fragment's first `length` slots (None: all)."""
    n = kv.length if length is None else length
    if isinstance(kv.home, TailBuffer):
        return kv.start, slice(0, n)
    return (slice(kv.start, kv.start + n),)


ROOM = 64  # slots that are allocated beyond the path
MAX_COPY_BYTES = 64 << 20  # longer paths are not copied


class SingleSequenceCache:
    """Contiguous copy of one row's path and tail, extended as the row steps.

    The fragments contain these slots, too.

    Attributes:
        n: number of slots.
        room: allocated slots.
    """

    __slots__ = ("_keys", "_row", "_values", "n", "n_bytes", "room")

    def __init__(self, row: Row, store: PaddedKVPool) -> None:
        spans = [(span.fragment, span.length) for span in row.prefix if span.length]
        if row.kv_out is not None and row.kv_out.length:
            spans.append((row.kv_out, row.kv_out.length))
        self.n = row.position
        self.room = self.n + ROOM
        self.n_bytes = self.room * store.layout.slot_bytes
        self._row = row.prefix, row.kv_out
        self._keys, self._values = store.concatenated(spans, self.room)

    def fits(self, row: Row) -> bool:
        """Return True if this is the row's path, complete, with room for another slot."""
        path, dest = self._row
        is_complete = row.position == self.n < self.room
        return is_complete and row.prefix is path and row.kv_out is dest

    def appends_to(self, fragment: Fragment) -> bool:
        """Return True if new slots of this sequence also go to this fragment."""
        return self._row[1] is fragment

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Add a slot and attend the only query to all slots; q: [H, 1, D]; k, v: [K, 1, …].

        Returns [1, 1, H, Dv].
        """
        keys, values = self._keys[layer], self._values[layer]
        keys[0, :, self.n] = k[:, 0]
        values[0, :, self.n] = v[:, 0]
        end = self.n + 1
        queries = q.reshape(1, k.shape[0], -1, q.shape[-1])
        out, _ = attend(queries, keys[:, :, :end], values[:, :, :end], spec)
        return out.reshape(1, 1, q.shape[0], -1)


def is_single_sequence(rows: Sequence[Row], store: PaddedKVPool) -> bool:
    """Return True for a step of one token of one row that keeps its KV, on a path small enough to
    copy.
    """
    if len(rows) != 1 or store.layout.device.type != "cpu":
        return False
    (row,) = rows
    n_bytes = (row.position + ROOM) * store.layout.slot_bytes
    return row.n_tokens == 1 and row.kv_out is not None and n_bytes <= MAX_COPY_BYTES
