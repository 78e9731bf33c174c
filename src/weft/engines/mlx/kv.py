"""KV memory of the mlx engine: finished fragments in blocks, growing tails in padded buffers.

MLX arrays are values: a write copies the array unless nothing else refers to it, even lazily.
Growing slots are therefore written in one place. Holders of views (`plan`) release them before, and
fragments that leave a buffer or a block get arrays of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...errors import ModelMismatch
from ..base import Fragment, Fragments, Span, Usage
from ..padded_pool import (
    GROW_BY,
    PaddedFragment,
    PaddedPool,
    SharedBlock,
    TailBuffer,
    own,
    room_for,
)

if TYPE_CHECKING:
    from .shared_prefixes import StepPlan

# One array of keys and one of values a layer: k.0, v.0, k.1, v.1, …
Arrays = list[mx.array]


class KVShape(NamedTuple):
    """Shape and dtype of the keys, or of the values, of one token in one layer."""

    n_heads: int
    size: int
    dtype: mx.Dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of one token's keys, or values."""
        return self.n_heads * self.size * self.dtype.size


class SlotShape(tuple[KVShape, ...]):
    """Shapes of one token's KV in all layers, in the order k.0, v.0, k.1, v.1, …"""

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self) // 2

    @property
    def n_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(each.n_bytes for each in self)

    def zeros(self, room: int, *rows: int) -> Arrays:
        """Return one array of zeros [*rows, K, room, D] for each shape."""
        return [mx.zeros((*rows, each.n_heads, room, each.size), dtype=each.dtype) for each in self]

    def copy_parts(self, parts: Iterable[mx.array], room: int) -> Arrays:
        """Return new arrays [K, room, D] that start with a copy of the matching part and end in
        zeros.

        parts: arrays [K, n, D] in the order k.0, v.0, k.1, …
        """
        arrays = self.zeros(room)
        for array, part in zip(arrays, parts, strict=True):
            array[:, : part.shape[1]] = part
        mx.eval(arrays)
        return arrays


class MlxFragment(PaddedFragment):
    """A fragment of the mlx engine; see `PaddedFragment`."""

    __slots__ = ()
    engine = "mlx"


class RowTailBuffer(TailBuffer):
    """A tail buffer whose arrays are [R, K, room, D]."""

    __slots__ = ()
    slots: Arrays

    def set_rows(self, arrays: Arrays, members: list[PaddedFragment | None]) -> None:
        """Replace the arrays, and assign their rows to fragments.

        Each member's `home` and `start` are set to this buffer and its row.
        members: fragment of each row; None for a hole.
        """
        self.slots, self.members = arrays, members
        self.n_rows, self.room = int(arrays[0].shape[0]), int(arrays[0].shape[2])
        self.n_members = 0
        for row, member in enumerate(members):
            if member is not None:
                member.home, member.start = self, row
                self.n_members += 1


class MlxMemory(PaddedPool[MlxFragment, RowTailBuffer]):
    """Fragments on one device, for the thread that runs MLX; other threads use `MlxFragments`.

    Attributes:
        slot: shape of a slot.
        plan: plan of the last step, or None. It holds views, so every change here removes it first.
    """

    kind = MlxFragment

    def __init__(self, slot: SlotShape) -> None:
        super().__init__(slot.n_bytes)
        self.slot = slot
        self.plan: StepPlan | None = None

    def on_slots_moved(self) -> None:
        """Discard the step plan."""
        self.plan = None

    def on_fragments_cut(self) -> None:
        """Discard the step plan."""
        self.plan = None

    def copy_slots(self, kv: MlxFragment, capacity: int) -> Arrays:
        """Return new arrays of `capacity` slots that start with the fragment's slots."""
        if not kv.length:
            return self.slot.zeros(capacity)
        return self.slot.copy_parts(self.views(kv, kv.length), capacity)

    def concatenate(self, parts: Sequence[MlxFragment]) -> Arrays:
        """Return new arrays with the slots of several fragments, in order."""
        views = zip(*(self.views(kv, kv.length) for kv in parts), strict=True)
        joined = (mx.concatenate(list(each), axis=1) for each in views)
        return self.slot.copy_parts(joined, sum(kv.length for kv in parts))

    # `Fragments`

    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        """Copy the fragment's slots to host arrays; see `Fragments.export`."""
        kv = own(fragment, MlxFragment)
        parts = self.views(kv, kv.length) if kv.length else self.slot.zeros(0)
        mx.eval(parts)
        data: dict[str, NDArray[Any]] = {}
        for number, part in enumerate(parts):
            data[f"{'kv'[number % 2]}.{number // 2}"] = to_host(part)
        data["dtype"] = np.array(dtype_name(self.slot[0].dtype))
        return data

    def load(self, data: dict[str, NDArray[Any]]) -> MlxFragment:
        """Create a fragment from exported arrays; see `Fragments.load`."""
        parts = [
            _from_host(data, f"{'kv'[number % 2]}.{number // 2}", shape)
            for number, shape in enumerate(self.slot)
        ]
        n = int(parts[0].shape[1])
        if any(part.shape[1] != n for part in parts):
            raise ModelMismatch("the exported KV has layers of different lengths; it is broken")
        kv = MlxFragment()
        if n:
            mx.eval(parts)
            self._place(kv, parts, n)
            kv.length = n
            self._slots += n
        return kv

    # Called by steps

    def views(self, kv: MlxFragment, length: int) -> Arrays:
        """Return the first `length` slots, [K, length, D] per array, without a copy."""
        home = kv.home
        if isinstance(home, TailBuffer):
            return [array[kv.start, :, :length] for array in home.slots]
        assert home is not None
        arrays: Arrays = home.slots
        if not kv.start and length == home.capacity:
            return arrays
        return [array[:, kv.start : kv.start + length] for array in arrays]

    def padded(self, prefixes: Sequence[Sequence[tuple[MlxFragment, int]]]) -> Arrays:
        """Return padded copies of prefixes, [P, K, S, D] per array, zero after a prefix's end.

        Args:
            prefixes: consecutive spans of each prefix.
        """
        longest = max(sum(length for _, length in spans) for spans in prefixes)
        arrays = self.slot.zeros(longest, len(prefixes))
        for number, spans in enumerate(prefixes):
            at = 0
            for kv, length in spans:
                for array, part in zip(arrays, self.views(kv, length), strict=True):
                    array[number, :, at : at + length] = part
                at += length
        mx.eval(arrays)
        return arrays

    def buffer_for(self, tails: Sequence[MlxFragment], width: int) -> tuple[RowTailBuffer, int]:
        """Return the buffer of a width class with `tails` in adjacent rows, and the row of the
        first.

        It has capacity for one more slot.
        """
        longest = max(tail.length for tail in tails) + 1
        buffer = self._buffers.get(width) or RowTailBuffer(width)
        first = buffer.find(tails)
        if first is None or longest > buffer.room or buffer.is_sparse:
            first = self._add_tails(buffer, tails, longest)
        return buffer, first

    def cache(self, spans: Sequence[Span], make: Callable[[], list[Any]]) -> list[Any]:
        """Return caches of the model's own type with a copy of a path's KV, one per layer.

        spans: the path from the root. make: creates empty caches.
        """
        caches = make()
        parts = [
            self.views(own(span.fragment, MlxFragment), span.length)
            for span in spans
            if span.length
        ]
        if parts:
            joined = [mx.concatenate(list(each), axis=1) for each in zip(*parts, strict=True)]
            for layer, cache in enumerate(caches):
                cache.update_and_fetch(joined[2 * layer][None], joined[2 * layer + 1][None])
        return caches

    def append(self, kv: MlxFragment, parts: Sequence[mx.array]) -> None:
        """Write n slots after those of the fragment; `count_written` later extends its length.

        parts: arrays [K, n, D] in the order k.0, v.0, k.1, …

        The arrays are not evaluated here. The caller evaluates them together with the step's other
        arrays.
        """
        n = int(parts[0].shape[1])
        self.plan = None
        if not self._has_room(kv, n):
            self._move(kv, kv.length + (max(n, GROW_BY) if kv.length else n))
        assert isinstance(kv.home, SharedBlock)
        at = kv.start + kv.length
        for array, part in zip(kv.home.slots, parts, strict=True):
            array[:, at : at + n] = part

    def arrays_of(self, kv: MlxFragment) -> Arrays:
        """Return the arrays that contain the fragment, possibly with others."""
        return [] if kv.home is None else list(kv.home.slots)

    def _add_tails(self, buffer: RowTailBuffer, tails: Sequence[MlxFragment], length: int) -> int:
        """Move `tails` to the last rows of the buffer, with capacity for `length`; return the first
        row.

        If they do not fit, the buffer gets new arrays without holes.
        """
        self.plan = None
        named = {id(tail) for tail in tails}
        staying = [m for m in buffer.members if m is not None and id(m) not in named]
        are_new = len(staying) == buffer.n_members
        fits = len(buffer.members) + len(tails) <= buffer.n_rows and length <= buffer.room
        if are_new and fits and not buffer.is_sparse:
            members: list[PaddedFragment | None] = [*buffer.members, *tails]
            first = len(buffer.members)
            arrays = buffer.slots
            _fill(arrays, tails, first)
        else:
            members, first = [*staying, *tails], len(staying)
            n_rows = len(members) + (len(members) // 4 if buffer.members else 0)
            longest = max(length, *(m.length for m in members if m is not None))
            arrays = self.slot.zeros(
                room_for(buffer.width, n_rows, longest, self.slot_bytes), n_rows
            )
            _fill(arrays, [*staying, *tails], 0)
        mx.eval(arrays)
        for tail in tails:
            if tail.home is not buffer:
                self._remove(tail)
        buffer.set_rows(arrays, members)
        self._buffers[buffer.width] = buffer
        return first


class MlxFragments(Fragments):
    """`MlxMemory` for use by any thread: calls that access arrays run on the MLX thread.

    on_worker: runs a function on that thread and returns its result.
    """

    growth = GROW_BY

    def __init__(self, memory: MlxMemory, on_worker: Callable[[Callable[[], Any]], Any]) -> None:
        self._memory = memory
        self._on_worker = on_worker

    def new(self, parent: Fragment | None) -> MlxFragment:
        """Return an empty fragment. `parent` is unused."""
        return MlxFragment()

    def split(self, fragment: Fragment, at: int) -> MlxFragment:
        """Cut before slot `at`; return the new upper part."""
        upper: MlxFragment = self._on_worker(lambda: self._memory.split(fragment, at))
        return upper

    def join(self, upper: Fragment, lower: Fragment) -> None:
        """Move `upper`'s slots before those of `lower`."""
        self._on_worker(lambda: self._memory.join(upper, lower))

    def trim(self, fragment: Fragment, length: int) -> None:
        """Remove the slots from `length` on."""
        self._memory.trim(fragment, length)

    def settle(self, fragment: Fragment) -> None:
        """Release unused capacity of a fragment that will not grow soon."""
        self._on_worker(lambda: self._memory.settle(fragment))

    def free(self, fragment: Fragment) -> None:
        """Release all slots of the fragment."""
        home = own(fragment, MlxFragment).home
        if isinstance(home, SharedBlock) and len(home.users) > 1:  # the other users may move
            self._on_worker(lambda: self._memory.free(fragment))
        else:
            self._memory.free(fragment)

    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        """Copy the fragment's slots to host arrays; see `Fragments.export`."""
        data: dict[str, NDArray[Any]] = self._on_worker(lambda: self._memory.export(fragment))
        return data

    def load(self, data: dict[str, NDArray[Any]], parent: Fragment | None) -> MlxFragment:
        """Create a fragment from exported arrays. `parent` is unused."""
        fragment: MlxFragment = self._on_worker(lambda: self._memory.load(data))
        return fragment

    def usage(self) -> Usage:
        """Return the slots in use and the bytes allocated for them."""
        return self._memory.usage()


def _fill(arrays: Arrays, tails: Sequence[PaddedFragment], first: int) -> None:
    """Copy tails into rows first, first + 1, … of a buffer's arrays, one copy per source buffer."""
    room = int(arrays[0].shape[2])
    by_buffer: dict[int, list[int]] = {}
    for number, tail in enumerate(tails):
        if isinstance(tail.home, TailBuffer) and tail.length:
            by_buffer.setdefault(id(tail.home), []).append(number)
        elif isinstance(tail.home, SharedBlock) and tail.length:
            start, stop = tail.start, tail.start + tail.length
            for array, source in zip(arrays, tail.home.slots, strict=True):
                array[first + number, :, : tail.length] = source[:, start:stop]
    for group in by_buffer.values():
        home = tails[group[0]].home
        assert isinstance(home, TailBuffer)
        span = min(room, home.room)
        into = mx.array([first + number for number in group])
        of = mx.array([tails[number].start for number in group])
        for array, source in zip(arrays, home.slots, strict=True):
            array[into, :, :span] = source[of, :, :span]


def dtype_name(dtype: mx.Dtype) -> str:
    """Return the name of a dtype without the prefix of MLX, such as "float32"."""
    return str(dtype).rpartition(".")[2]


def to_host(array: mx.array) -> NDArray[Any]:
    """Copy to the host; bfloat16, which NumPy lacks, as its uint16 bits."""
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(bits, order="C")  # slices of MLX have strides


def _from_host(data: dict[str, NDArray[Any]], name: str, shape: KVShape) -> mx.array:
    """Return an exported array as [K, n, D]."""
    dtype = dtype_name(shape.dtype)
    if name not in data or str(data.get("dtype", "")) != dtype:
        raise ModelMismatch(
            f"the exported KV has no {dtype} array {name!r}; load it with the model and dtype that "
            "wrote it"
        )
    expected = "uint16" if shape.dtype == mx.bfloat16 else dtype
    stored = data[name]
    if str(stored.dtype) != expected:
        raise ModelMismatch(
            f"the exported KV has {stored.dtype} for {name!r}, this model needs {expected}"
        )
    if stored.ndim != 3 or (stored.shape[0], stored.shape[2]) != (shape.n_heads, shape.size):
        raise ModelMismatch(
            f"the exported KV has shape {tuple(stored.shape)} for {name!r}, this model needs "
            f"{(shape.n_heads, 'n', shape.size)}"
        )
    array = mx.array(np.ascontiguousarray(stored))
    return array.view(mx.bfloat16) if shape.dtype == mx.bfloat16 else array
