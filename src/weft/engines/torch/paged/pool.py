"""One pool of slots a layer. Fragments are lists of slots, so split, join and free only edit lists.

    slots of a fragment   ├── length: tokens ──┤── spare: reserved, at most GROW_BY - 1 ──┤

    the pool              the same numbers in every layer, [S + 1, K, D] and [S + 1, K, Dv]

    the table             all lists that a step attends to, concatenated, on the device

The pool's last slot is a dummy: padding tokens of a captured step are written there.

Adjacent slots have no meaning, so the pool has no holes: returned slots are taken again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....errors import ConfigError, KVFull, ModelMismatch
from ...base import Fragment, Usage
from ..cuda import copy_to_device, free_bytes, to_device
from ..execution import on_engine_stream
from ..kv_backend import KVBackend
from ..kv_offload import HostTransfer, from_host, to_host
from ..layout import LayerShape, Layout

GROW_BY = 32
SMALLEST_POOL = 256  # slots
SPARE = 32  # the pool grows by at least this fraction of itself
_REGION = 256  # table entries that a growing list gets at least
_TABLE = 4096
_FEW = 64  # ranges of the table that are copied one by one
# On a GPU, a table or pool that moves invalidates all CUDA graphs, so both start large.
_GPU_TABLE = 1 << 20
_GPU_POOL = 1 << 14  # slots
_SHARE_OF_FREE = 4  # the pool grows by half, and by at most this fraction of the free memory

Ints = NDArray[np.int32]
_NONE: Ints = np.empty(0, np.int32)


class PagedFragment(Fragment):
    """A fragment as a list of slot numbers: the slots of its tokens, then spare ones.

    at, room: its region of the table, valid while the table's age is `table_age`.
    """

    __slots__ = ("at", "room", "slots", "table_age")

    def __init__(self) -> None:
        super().__init__(0)
        self.slots = _NONE
        self.table_age = -1
        self.at = self.room = 0


class SlotTable:
    """Device copy of the slot lists that steps attend to: one int32 tensor.

    Lists get regions one after the other. Released regions stay unused until half of the table is
    unused. Then all regions are invalid, and `age` increases.

    moved: lists whose region was released, moved or shortened. The user of the table drops what it
        has computed from these regions, and then clears the set.
    """

    def __init__(self, device: torch.device) -> None:
        self.age = 0
        self.moved: set[PagedFragment] = set()
        self._device = device
        self._host = np.zeros(_TABLE if device.type == "cpu" else _GPU_TABLE, np.int32)
        self._on_device = torch.zeros(len(self._host), dtype=torch.int32, device=device)
        self._end = self._waste = 0
        # Alternating starts and ends of the ranges to copy to the device.
        self._written: list[int] = []

    def has(self, kv: PagedFragment) -> bool:
        """Return True if the fragment's slot list has a valid region of the table."""
        return kv.table_age == self.age

    def place(self, kv: PagedFragment, room: int) -> None:
        """Assign a region of `room` entries to a list that has none, and write it."""
        if self._end + room > len(self._host):
            fresh = np.zeros(max(2 * len(self._host), self._end + room), np.int32)
            fresh[: self._end] = self._host[: self._end]
            self._host, self._on_device = fresh, torch.zeros(0, dtype=torch.int32)
        kv.at, kv.room, kv.table_age = self._end, room, self.age
        self._end += room
        self.write(kv, 0)

    def write(self, kv: PagedFragment, first: int) -> None:
        """Write the list's slots from entry `first` on into its region."""
        low, high = kv.at + first, kv.at + len(kv.slots)
        self._host[low:high] = kv.slots[first:]
        self._written += (low, high)

    def drop(self, kv: PagedFragment) -> None:
        """Release a list's region."""
        if self.has(kv):
            self._waste += kv.room
            self.moved.add(kv)
        kv.table_age = -1

    @property
    def is_fragmented(self) -> bool:
        """True if most of the table is unused; new metadata then compacts it."""
        return self._waste > max(_TABLE, self._end // 2)

    def compact(self) -> None:
        """Invalidate all regions if most of the table is unused."""
        if self.is_fragmented:
            self.age += 1
            self._end = self._waste = 0
            self._written.clear()

    def on_device(self) -> Tensor:
        """Upload all writes since the last call, and return the table on the device."""
        if len(self._on_device) != len(self._host):
            self._on_device = to_device(self._host, self._device)
        elif 2 < len(self._written) <= 2 * _FEW:  # scattered writes, as leaves take new slots
            low, high = np.array(self._written).reshape(-1, 2).T
            ends = (high - low).cumsum()
            at = np.arange(int(ends[-1])) + (high - ends).repeat(high - low)
            sent = to_device(np.concatenate([at, self._host.take(at)]), self._device)
            self._on_device.index_copy_(0, sent[: len(at)], sent[len(at) :].int())
        elif self._written:
            first, end = min(self._written), max(self._written)
            copy_to_device(self._on_device[first:end], self._host[first:end])
        self._written.clear()
        return self._on_device


class SlotPool(KVBackend):
    """KV pool of one engine: fragments are lists of slot numbers. `PagedBackend` adds the steps.

    Attributes:
        keys, values: by layer, [S + 1, K, D] and [S + 1, K, Dv]; replaced when the pool grows.
        n_moves: changes when the tensors are replaced.
        chunk: slots of an item; None: the metadata chooses.
    """

    growth = GROW_BY
    chunk: int | None = None

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.table = SlotTable(layout.device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._shapes = _shapes_of(layout)
        self._copies = HostTransfer(layout.device)
        self._capacity = self.n_moves = 0
        # Returns a callback that drops what depends on these tensors before they are replaced.
        self.before_moving: Callable[[], Callable[[], None] | None] = lambda: None
        self._free = _NONE  # a stack; its first `_n_free` entries are free slots
        self._n_free = 0
        self._slots = 0  # number of slots with tokens

    # The protocol

    def new(self, parent: Fragment | None) -> PagedFragment:
        """Return an empty fragment. `parent` is unused."""
        return PagedFragment()

    def split(self, fragment: Fragment, at: int) -> PagedFragment:
        """Cut before slot `at`; return the new upper part. Only the lists change."""
        lower, upper = as_paged(fragment), PagedFragment()
        if not 0 < at < lower.length:
            raise ConfigError(f"cannot split a fragment of {lower.length} slots before slot {at}")
        upper.slots, lower.slots = lower.slots[:at], lower.slots[at:]
        upper.length = at
        lower.length -= at
        if self.table.has(lower):  # both keep their entries
            upper.at, upper.room, upper.table_age = lower.at, at, lower.table_age
            lower.at += at
            lower.room -= at
            self.table.moved.add(lower)
        return upper

    def join(self, upper: Fragment, lower: Fragment) -> None:
        """Prepend `upper`'s slots to `lower`; `upper` is empty then. Only the lists change."""
        first, second = as_paged(upper), as_paged(lower)
        self._return(first, first.length)
        if not first.length:
            self.table.drop(first)
            return
        slots = np.concatenate([first.slots, second.slots])
        has_both = self.table.has(first) and self.table.has(second)
        if has_both and first.at + first.room == second.at and first.room == first.length:
            second.at, second.room = first.at, first.room + second.room
            self.table.moved.update((first, second))
            first.table_age = -1
        else:
            self.table.drop(second)
        self.table.drop(first)
        second.slots = slots
        second.length += first.length
        first.slots, first.length = _NONE, 0

    def trim(self, fragment: Fragment, length: int) -> None:
        """Return the slots from `length` on to the pool."""
        kv = as_paged(fragment)
        if not 0 <= length <= kv.length:
            raise ConfigError(f"cannot trim a fragment of {kv.length} slots to {length}")
        self._slots -= kv.length - length
        kv.length = length
        self._return(kv, length)

    def settle(self, fragment: Fragment) -> None:
        """Return the fragment's spare slots to the pool."""
        kv = as_paged(fragment)
        self._return(kv, kv.length)

    def free(self, fragment: Fragment) -> None:
        """Return all slots of the fragment to the pool."""
        kv = as_paged(fragment)
        self._slots -= kv.length
        kv.length = 0
        self._return(kv, 0)
        self.table.drop(kv)

    @torch.inference_mode()
    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        """Copy the fragment's slots to host arrays; see `Fragments.export`."""
        kv = as_paged(fragment)
        data: dict[str, NDArray[Any]] = {}
        with self._copies.copying_out():
            # Layer by layer, because there is little memory for copies.
            for layer, pair in enumerate(self._layers(kv, kv.length)):
                for name, tensor in zip("kv", pair, strict=True):
                    data[f"{name}.{layer}"] = to_host(tensor.transpose(0, 1))
        data["dtype"] = np.array(self.layout.dtype)
        return data

    @torch.inference_mode()
    def load(self, data: dict[str, NDArray[Any]], parent: Fragment | None) -> PagedFragment:
        """Create a fragment from exported arrays. `parent` is unused."""
        kinds: list[list[Tensor]] = [[], []]
        for layer, shape in enumerate(self._shapes):
            for name, like, tensors in zip("kv", self._empty(shape, 0), kinds, strict=True):
                tensors.append(from_host(data, f"{name}.{layer}", like))
        (n, *others) = {tensor.shape[1] for kind in kinds for tensor in kind}
        if others:
            raise ModelMismatch("the exported KV has layers of different lengths; it is broken")
        kv = PagedFragment()
        if not n:
            return kv
        with on_engine_stream(self.layout.device):
            self.reserve(kv, n)
        try:
            with self._copies.copying_in(kinds[0] + kinds[1]):
                index = self._index(kv.slots[:n])
                for targets, sources in zip((self.keys, self.values), kinds, strict=True):
                    for tensor, loaded in zip(targets, sources, strict=True):
                        moved = loaded.to(tensor.device, non_blocking=True)
                        tensor.index_copy_(0, index, moved.transpose(0, 1))
        except Exception:
            self._return(kv, 0)
            raise
        self._return(kv, n)
        self.grew(kv, n)
        return kv

    def usage(self) -> Usage:
        """Return the slots with tokens, and the bytes of fragments' slots with spare ones.

        The pool may be larger. On a GPU the pool stays when all slots are free, because CUDA
        graphs read it: see `release_unused`.
        """
        n_reserved = self._capacity - self._n_free
        return Usage(self._slots, n_reserved * self.layout.slot_bytes)

    def clear(self) -> None:
        """Remove all fragments and release the pool's memory."""
        self._slots = 0
        self._release()

    # What a step needs

    @property
    def dummy_slot(self) -> int:
        """The slot that no list has."""
        return self._capacity

    def reserve(self, kv: PagedFragment, n: int) -> None:
        """Extend `kv.slots` to hold `n` more tokens, rounded up to a multiple of GROW_BY.

        `kv.length` does not change.
        """
        n_slots, needed = len(kv.slots), kv.length + n
        if needed <= n_slots:
            return
        kv.slots = np.concatenate([kv.slots, self._take(-(-needed // GROW_BY) * GROW_BY - n_slots)])
        if self.table.has(kv):
            if len(kv.slots) <= kv.room:
                self.table.write(kv, n_slots)
            else:
                self.table.drop(kv)

    def region_start(self, kv: PagedFragment) -> int:
        """Return where the fragment's list starts in the table; add a missing list to the table."""
        if not self.table.has(kv):
            self.table.place(kv, len(kv.slots))
        return kv.at

    def regions(self, lists: Sequence[PagedFragment]) -> NDArray[np.int64]:
        """Return the regions of growing lists in the table: [3, n], start, room and filled slots.

        Lists without a valid region, or with a full one, get a new region. It has room for twice
        the list.
        """
        age = self.table.age
        for kv in lists:
            if kv.table_age != age or kv.room == len(kv.slots):
                self.table.drop(kv)
                self.table.place(kv, max(_REGION, 2 * len(kv.slots)))
        regions = [[kv.at for kv in lists], [kv.room for kv in lists], [kv.length for kv in lists]]
        return np.array(regions, np.int64)

    def grew(self, kv: PagedFragment, n: int) -> None:
        """Count `n` reserved slots of a fragment as filled: its length increases."""
        kv.length += n
        self._slots += n

    def grow_all_by_one(self, lists: Sequence[PagedFragment]) -> None:
        """Count one more reserved slot of each list as filled; see `reserve` and `grew`."""
        for kv in lists:
            kv.length += 1
        self._slots += len(lists)

    @torch.inference_mode()
    def views(self, fragment: Fragment, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return copies of the first `length` slots, by layer: [1, K, length, D]."""
        pairs = list(self._layers(as_paged(fragment), length))
        keys, values = ([pair[kind].transpose(0, 1)[None] for pair in pairs] for kind in (0, 1))
        return keys, values

    def _layers(self, kv: PagedFragment, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Copy the first slots of a list, layer by layer: [length, K, D] and [length, K, Dv]."""
        index = self._index(kv.slots[:length])
        layers: Iterable[tuple[Tensor, Tensor]] = zip(self.keys, self.values, strict=True)
        if not self._capacity:
            layers = (self._empty(shape, 0) for shape in self._shapes)
        for keys, values in layers:
            yield keys[index], values[index]

    # Slots

    def _take(self, n: int) -> Ints:
        """Remove n free slots from the pool and return their numbers; enlarge it if needed."""
        if n > self._n_free:
            self._grow(n - self._n_free)
        self._n_free -= n
        return self._free[self._n_free : self._n_free + n][::-1].copy()

    def _return(self, kv: PagedFragment, length: int) -> None:
        """Remove the slots of a list from entry `length` on, and return them to the pool."""
        n = len(kv.slots) - length
        if n > 0:
            self._free[self._n_free : self._n_free + n] = kv.slots[length:][::-1]
            self._n_free += n
            kv.slots = kv.slots[:length]
            if self.table.has(kv):
                self.table.moved.add(kv)
            if self.layout.device.type == "cpu":
                self.release_unused()

    def _grow(self, n: int) -> None:
        """Add at least `n` slots. Raises: KVFull without memory; the pool is unchanged then."""
        old, left = self._capacity, self._n_slots_left()
        if left is not None and left < n:  # do not invalidate CUDA graphs in vain
            raise self._full(n, left)
        preferred = max(n, self._spare(left))
        if preferred > n:
            with suppress(torch.OutOfMemoryError):
                self._enlarge(old + preferred)
                return
        try:
            self._enlarge(old + n)
        except torch.OutOfMemoryError as error:
            raise self._full(n, 0) from error

    def _full(self, n: int, left: int) -> KVFull:
        """Return the error for n missing slots. left: slots that free memory has room for."""
        capacity = self._capacity + left
        return KVFull(
            f"there is memory for the KV of {capacity} tokens, and {n - left} more are wanted",
            needed=n - left,
            capacity=capacity,
            hint="free memory on the device, or use shorter or fewer paths"
            " (docs/troubleshooting.md#out-of-memory)",
        )

    def _n_slots_left(self) -> int | None:
        """Return the number of slots that free GPU memory has room for; None on a CPU."""
        device = self.layout.device
        if device.type == "cpu":
            return None
        return free_bytes(device) // self.layout.slot_bytes

    def _spare(self, left: int | None) -> int:
        """Return the preferred number of slots to grow by.

        left: slots that free GPU memory has room for; None on a CPU.
        """
        n = self._capacity
        minimum = max(n // SPARE, SMALLEST_POOL - n)
        if left is None:
            return minimum
        return max(minimum, min(max(n // 2, _GPU_POOL - n), left // _SHARE_OF_FREE))

    @torch.inference_mode()
    def _enlarge(self, new: int) -> None:
        """Enlarge the pool to `new` slots, layer by layer: only one layer is copied at a time."""
        old = self._capacity
        self._move()
        try:
            self._resize(new)
        except torch.OutOfMemoryError:
            if old:
                with suppress(torch.OutOfMemoryError):  # layers that are larger stay valid
                    self._resize(old)
            else:
                self.keys, self.values = [], []
            raise
        free = np.empty(new, np.int32)
        free[: new - old] = np.arange(new - 1, old - 1, -1)
        # Slots that were already free are used first.
        free[new - old : new - old + self._n_free] = self._free[: self._n_free]
        self._free, self._n_free, self._capacity = free, self._n_free + new - old, new

    def _resize(self, n: int) -> None:
        """Allocate n slots in all layers, and copy the present ones."""
        n_old = self._capacity
        for layer, shape in enumerate(self._shapes):
            if layer < len(self.keys) and len(self.keys[layer]) == n + 1:
                continue
            fresh = self._empty(shape, n + 1)
            if layer == len(self.keys):
                self.keys.append(fresh[0])
                self.values.append(fresh[1])
                continue
            for tensors, tensor in zip((self.keys, self.values), fresh, strict=True):
                tensor[:n_old] = tensors[layer][:n_old]
                tensors[layer] = tensor

    def release_unused(self) -> None:
        """Release the pool's memory if all slots are free."""
        if self._n_free == self._capacity:
            self._release()

    def _move(self) -> None:
        """Announce that the pool's tensors are about to be replaced: CUDA graphs are dropped."""
        self.n_moves += 1
        if (forget := self.before_moving()) is not None:
            forget()

    def _release(self) -> None:
        """Release the memory of all slots."""
        self._move()
        self.keys, self.values = [], []
        self._free, self._n_free, self._capacity = _NONE, 0, 0

    def _empty(self, shape: LayerShape, n: int) -> tuple[Tensor, Tensor]:
        """Allocate keys [n, K, D] and values [n, K, Dv] of one layer."""
        device = self.layout.device
        return (
            torch.empty(n, shape.n_heads, shape.key_dim, dtype=shape.key_dtype, device=device),
            torch.empty(n, shape.n_heads, shape.value_dim, dtype=shape.value_dtype, device=device),
        )

    def _index(self, slots: Ints) -> Tensor:
        """Upload slot numbers as an index tensor."""
        return to_device(slots.astype(np.int64), self.layout.device)


def as_paged(fragment: Fragment) -> PagedFragment:
    """Return a fragment of this backend. Raises: ConfigError for one of another backend."""
    if not isinstance(fragment, PagedFragment):
        raise ConfigError(
            f"a {type(fragment).__name__} is not a fragment of the torch engine's paged memory"
        )
    return fragment


def _shapes_of(layout: Layout) -> Sequence[LayerShape]:
    """Return the shape of each layer, in layer order."""
    by_layer = {layer: shape for shape, layers in layout.groups for layer in layers}
    return [by_layer[layer] for layer in range(layout.n_layers)]
