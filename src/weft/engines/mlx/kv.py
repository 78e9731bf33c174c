"""The KV memory: settled fragments in blocks, growing tails side by side in banks.

Arrays of MLX are values: writing into one copies it, unless nothing else refers to it, lazily or
not. So what grows is written in one place, whoever holds a view of it lets go first (`plan`), and
what leaves a bank or a block gets arrays of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, ModelMismatch
from ..base import Fragment, Fragments, Span, Usage

if TYPE_CHECKING:
    from .plan import StepPlan

# One array of keys and one of values a layer: k.0, v.0, k.1, v.1, …
Arrays = list[mx.array]

GROW_BY = 32
SMALLEST = 64
# Tails that would take more than this with GROW_BY slots each are a crowd.
CROWD_BYTES = 128 << 20
# A token after a fragment at least this long goes to its block: moving it to a bank costs more.
LONG = 256
# Room and holes up to this share of a fragment's slots are left in place.
SPARE = 16


class KVShape(NamedTuple):
    """Keys or values of one token in one layer."""

    n_heads: int
    size: int
    dtype: mx.Dtype

    @property
    def n_bytes(self) -> int:
        return self.n_heads * self.size * self.dtype.size


class SlotShape(tuple[KVShape, ...]):
    """One slot: the shapes of k.0, v.0, k.1, v.1, …"""

    @property
    def n_layers(self) -> int:
        return len(self) // 2

    @property
    def n_bytes(self) -> int:
        return sum(each.n_bytes for each in self)

    def zeros(self, room: int, *rows: int) -> Arrays:
        """Return arrays [*rows, K, room, D]."""
        return [mx.zeros((*rows, each.n_heads, room, each.size), dtype=each.dtype) for each in self]

    def hold(self, parts: Iterable[mx.array], room: int) -> Arrays:
        """Return arrays [K, room, D] of their own that begin with `parts` [K, n, D]."""
        held = self.zeros(room)
        for array, part in zip(held, parts, strict=True):
            array[:, : part.shape[1]] = part
        mx.eval(held)
        return held


class ArrayBlock:
    """Arrays [K, capacity, D] of one fragment, or of several after splits; `users` share them."""

    __slots__ = ("arrays", "capacity", "users")

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.capacity = int(arrays[0].shape[1])
        self.users: list[MlxFragment] = []


class RowBank:
    """Tails of one width class, one row each, in arrays [R, K, room, D].

    [0, len) of a row   tokens of its fragment
    [len, room)         room to grow, up to `width`

    members: fragment of each row; None is a hole. A step's rows lie side by side, in its order.
    """

    __slots__ = ("arrays", "members", "n_members", "room", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.room = 0
        self.members: list[MlxFragment | None] = []
        self.n_members = 0
        self.arrays: Arrays = []

    @property
    def n_rows(self) -> int:
        """Rows that there is memory for."""
        return int(self.arrays[0].shape[0]) if self.arrays else 0

    @property
    def is_sparse(self) -> bool:
        """Whether most of its rows are holes."""
        return 2 * self.n_members <= len(self.members)

    def find(self, tails: Sequence[MlxFragment]) -> int | None:
        """Return the row of the first of `tails`, if they lie side by side in this order."""
        first = tails[0].start
        if tails[0].home is not self or first + len(tails) > len(self.members):
            return None
        found = self.members[first : first + len(tails)]
        return first if all(a is b for a, b in zip(found, tails, strict=True)) else None

    def hold(self, arrays: Arrays, members: list[MlxFragment | None]) -> None:
        """Take these arrays, whose rows are these fragments."""
        self.arrays, self.members = arrays, members
        self.room = int(arrays[0].shape[2])
        self.n_members = 0
        for row, member in enumerate(members):
            if member is not None:
                member.home, member.start = self, row
                self.n_members += 1


class MlxFragment(Fragment):
    """Slots start..start+length of a block, or the head of row `start` of a bank."""

    __slots__ = ("home", "start")

    def __init__(self) -> None:
        super().__init__(0)
        self.home: ArrayBlock | RowBank | None = None
        self.start = 0


class MlxMemory:
    """Fragments on one device, for the thread that runs MLX; others use `MlxFragments`.

    Splits share a block; growth, joins and settling copy.

    plan: how the last step was laid out; it holds views, and every change here drops it first.
    """

    def __init__(self, slot: SlotShape) -> None:
        self.slot = slot
        self.plan: StepPlan | None = None
        self._banks: dict[int, RowBank] = {}
        self._slots = 0
        self._block_bytes = 0

    # The protocol

    def split(self, fragment: Fragment, at: int) -> MlxFragment:
        lower = own(fragment)
        if not 0 < at < lower.length:
            raise ConfigError(f"cannot split a fragment of {lower.length} slots before slot {at}")
        self.plan = None
        if isinstance(lower.home, RowBank):
            self._move(lower, lower.length)
        block = lower.home
        assert isinstance(block, ArrayBlock)
        upper = MlxFragment()
        upper.home, upper.start, upper.length = block, lower.start, at
        block.users.append(upper)
        lower.start += at
        lower.length -= at
        return upper

    def join(self, upper: Fragment, lower: Fragment) -> None:
        first, second = own(upper), own(lower)
        self.plan = None
        if not first.length:
            self._leave(first)
        elif (
            isinstance(second.home, ArrayBlock)
            and first.home is second.home
            and first.start + first.length == second.start
        ):
            second.home.users.remove(first)
            second.start = first.start
            second.length += first.length
        else:
            self._join_by_copy(first, second)
        first.home, first.length = None, 0

    def trim(self, fragment: Fragment, length: int) -> None:
        kv = own(fragment)
        if not 0 <= length <= kv.length:
            raise ConfigError(f"cannot trim a fragment of {kv.length} slots to {length}")
        self.plan = None
        self._slots -= kv.length - length
        kv.length = length
        if not length:
            self._leave(kv)

    def settle(self, fragment: Fragment) -> None:
        kv = own(fragment)
        if isinstance(kv.home, RowBank):
            self._move(kv, kv.length)
        elif isinstance(kv.home, ArrayBlock):
            self._compact(kv.home)

    def free(self, fragment: Fragment) -> None:
        kv = own(fragment)
        self._slots -= kv.length
        block = kv.home
        self._leave(kv)
        kv.length = 0
        if isinstance(block, ArrayBlock) and block.users:
            self._compact(block)

    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        kv = own(fragment)
        parts = self.views(kv, kv.length) if kv.length else self.slot.zeros(0)
        mx.eval(parts)
        data: dict[str, NDArray[Any]] = {}
        for number, part in enumerate(parts):
            data[f"{'kv'[number % 2]}.{number // 2}"] = to_host(part)
        data["dtype"] = np.array(dtype_name(self.slot[0].dtype))
        return data

    def load(self, data: dict[str, NDArray[Any]]) -> MlxFragment:
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
            self._place(kv, parts)
            kv.length = n
            self._slots += n
        return kv

    def usage(self) -> Usage:
        n_banked = sum(bank.n_rows * bank.room for bank in self._banks.values())
        return Usage(self._slots, self._block_bytes + n_banked * self.slot.n_bytes)

    # What a step needs

    def views(self, kv: MlxFragment, length: int) -> Arrays:
        """Return the first `length` slots, [K, length, D] each; nothing is copied."""
        home = kv.home
        if isinstance(home, RowBank):
            return [array[kv.start, :, :length] for array in home.arrays]
        assert home is not None
        if not kv.start and length == home.capacity:
            return home.arrays
        return [array[:, kv.start : kv.start + length] for array in home.arrays]

    def padded(self, spans: Sequence[tuple[MlxFragment, int]]) -> Arrays:
        """Return copies of spans side by side, [P, K, S, D] each, zero past a span's end."""
        together = self.slot.zeros(max(length for _, length in spans), len(spans))
        for number, (kv, length) in enumerate(spans):
            for array, part in zip(together, self.views(kv, length), strict=True):
                array[number, :, :length] = part
        mx.eval(together)
        return together

    def is_banked(self, kv: MlxFragment, n_long: int) -> bool:
        """Should one more slot of `kv` go to a bank? `n_long` fragments of the step are long."""
        if isinstance(kv.home, RowBank) or kv.length < LONG:
            return True
        return n_long > 3  # a few keep a product of their own; many are worth one copy

    def is_crowd(self, n_more: int = 0) -> bool:
        """Are the tails in banks, and `n_more`, so many that none may have room to spare?"""
        n = n_more + sum(bank.n_members for bank in self._banks.values())
        return n * GROW_BY * self.slot.n_bytes > CROWD_BYTES

    def bank_for(self, tails: Sequence[MlxFragment], width: int) -> tuple[RowBank, int]:
        """Return the bank of a width class with `tails` side by side, and the row of the first.

        There is room for one slot more.
        """
        longest = max(tail.length for tail in tails) + 1
        bank = self._banks.get(width) or RowBank(width)
        first = bank.find(tails)
        if first is None or longest > bank.room or bank.is_sparse:
            first = self._seat(bank, tails, longest)
        return bank, first

    def cache(self, spans: Sequence[Span], make: Callable[[], list[Any]]) -> list[Any]:
        """Return caches of the model's own kind that hold a copy of a path's KV."""
        caches = make()
        parts = [self.views(own(span.fragment), span.length) for span in spans if span.length]
        if parts:
            whole = [mx.concatenate(list(each), axis=1) for each in zip(*parts, strict=True)]
            for layer, cache in enumerate(caches):
                cache.update_and_fetch(whole[2 * layer][None], whole[2 * layer + 1][None])
        return caches

    def append(self, kv: MlxFragment, parts: Sequence[mx.array]) -> None:
        """Write slots [K, n, D] after the fragment's; `grew` counts them.

        The arrays are not evaluated yet: the caller does, with what else the step made.
        """
        n = int(parts[0].shape[1])
        self.plan = None
        if not self._has_room(kv, n):
            self._move(kv, kv.length + (max(n, GROW_BY) if kv.length else n))
        assert isinstance(kv.home, ArrayBlock)
        at = kv.start + kv.length
        for array, part in zip(kv.home.arrays, parts, strict=True):
            array[:, at : at + n] = part

    def arrays_of(self, kv: MlxFragment) -> Arrays:
        """Return the arrays that hold the fragment, and perhaps others."""
        return [] if kv.home is None else kv.home.arrays

    def grew(self, kv: MlxFragment, n: int) -> None:
        """Count `n` slots that a finished forward wrote."""
        kv.length += n
        self._slots += n

    def clear(self) -> None:
        """Forget everything."""
        self.plan = None
        self._banks.clear()
        self._slots = self._block_bytes = 0

    # Moving slots

    def _seat(self, bank: RowBank, tails: Sequence[MlxFragment], length: int) -> int:
        """Make `tails` the last rows of the bank, with room for `length`; return the first.

        Where they do not fit, the bank gets new arrays, without holes.
        """
        self.plan = None
        named = {id(tail) for tail in tails}
        staying = [m for m in bank.members if m is not None and id(m) not in named]
        are_new = len(staying) == bank.n_members
        fits = len(bank.members) + len(tails) <= bank.n_rows and length <= bank.room
        if are_new and fits and not bank.is_sparse:
            members, first = [*bank.members, *tails], len(bank.members)
            arrays = bank.arrays
            _fill(arrays, tails, first)
        else:
            members, first = [*staying, *tails], len(staying)
            n_rows = len(members) + (len(members) // 4 if bank.members else 0)
            longest = max(length, *(m.length for m in members if m is not None))
            arrays = self.slot.zeros(self._room_for(bank.width, n_rows, longest), n_rows)
            _fill(arrays, [*staying, *tails], 0)
        mx.eval(arrays)
        for tail in tails:
            if tail.home is not bank:
                self._leave(tail)
        bank.hold(arrays, members)
        self._banks[bank.width] = bank
        return first

    def _room_for(self, width: int, n_rows: int, length: int) -> int:
        step = GROW_BY
        if n_rows * GROW_BY * self.slot.n_bytes > CROWD_BYTES:
            step = max(1, min(GROW_BY, length // 4))
        return min(width, -(-length // step) * step)

    def _join_by_copy(self, first: MlxFragment, second: MlxFragment) -> None:
        parts = self.views(first, first.length)
        if second.length:
            tail = self.views(second, second.length)
            parts = [mx.concatenate(list(each), axis=1) for each in zip(parts, tail, strict=True)]
        total = first.length + second.length
        arrays = self.slot.hold(parts, total)
        homes = [first.home, second.home]
        self._leave(first)
        self._leave(second)
        self._place(second, arrays)
        second.length = total
        for home in {id(home): home for home in homes}.values():
            if isinstance(home, ArrayBlock) and home.users:
                self._compact(home)

    def _move(self, kv: MlxFragment, capacity: int) -> None:
        """Give the fragment a block of its own."""
        arrays = self.slot.zeros(capacity)
        if kv.length:
            arrays = self.slot.hold(self.views(kv, kv.length), capacity)
        self._leave(kv)
        if capacity:
            self._place(kv, arrays)

    def _place(self, kv: MlxFragment, arrays: Arrays) -> None:
        self.plan = None
        block = ArrayBlock(arrays)
        block.users.append(kv)
        kv.home, kv.start = block, 0
        self._block_bytes += block.capacity * self.slot.n_bytes

    def _leave(self, kv: MlxFragment) -> None:
        """Take the fragment from its home; a home without fragments gives its memory back."""
        self.plan = None
        home, kv.home = kv.home, None
        if isinstance(home, ArrayBlock):
            home.users.remove(kv)
            if not home.users:
                self._block_bytes -= home.capacity * self.slot.n_bytes
        elif isinstance(home, RowBank):
            home.members[kv.start] = None
            home.n_members -= 1
            if not home.n_members:
                self._banks.pop(home.width, None)
        kv.start = 0

    def _has_room(self, kv: MlxFragment, n: int) -> bool:
        block = kv.home
        if not isinstance(block, ArrayBlock):
            return False
        end = kv.start + kv.length
        last = all(user.start + user.length <= end for user in block.users)
        return last and end + n <= block.capacity

    def _compact(self, block: ArrayBlock) -> None:
        """Give every fragment of the block arrays of its own size, if much of it is empty."""
        live = sum(user.length for user in block.users)
        if block.capacity - live > live // SPARE:
            for kv in list(block.users):
                self._move(kv, kv.length)


class MlxFragments(Fragments):
    """The memory as the scheduler sees it, from any thread: what touches arrays goes to theirs."""

    growth = GROW_BY

    def __init__(self, memory: MlxMemory, on_owner: Callable[[Callable[[], Any]], Any]) -> None:
        self._memory = memory
        self._on_owner = on_owner

    def new(self, parent: Fragment | None) -> MlxFragment:
        return MlxFragment()

    def split(self, fragment: Fragment, at: int) -> MlxFragment:
        found: MlxFragment = self._on_owner(lambda: self._memory.split(fragment, at))
        return found

    def join(self, upper: Fragment, lower: Fragment) -> None:
        self._on_owner(lambda: self._memory.join(upper, lower))

    def trim(self, fragment: Fragment, length: int) -> None:
        self._memory.trim(fragment, length)

    def settle(self, fragment: Fragment) -> None:
        self._on_owner(lambda: self._memory.settle(fragment))

    def free(self, fragment: Fragment) -> None:
        home = own(fragment).home
        if isinstance(home, ArrayBlock) and len(home.users) > 1:  # the others may move together
            self._on_owner(lambda: self._memory.free(fragment))
        else:
            self._memory.free(fragment)

    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        data: dict[str, NDArray[Any]] = self._on_owner(lambda: self._memory.export(fragment))
        return data

    def load(self, data: dict[str, NDArray[Any]], parent: Fragment | None) -> MlxFragment:
        found: MlxFragment = self._on_owner(lambda: self._memory.load(data))
        return found

    def usage(self) -> Usage:
        return self._memory.usage()


def width_for(length: int, *, crowd: bool = False) -> int:
    """The width class of a tail: those of one class share a bank, padded to at most double.

    Short ones share one class, so that few are copied often; a crowd cannot afford that.
    """
    return max(1 if crowd else SMALLEST, 1 << (length - 1).bit_length())


def own(fragment: Fragment) -> MlxFragment:
    """Return a fragment of this engine. Raises: ConfigError for one of another."""
    if not isinstance(fragment, MlxFragment):
        raise ConfigError(f"a {type(fragment).__name__} is not a fragment of the mlx engine")
    return fragment


def _fill(arrays: Arrays, tails: Sequence[MlxFragment], first: int) -> None:
    """Copy tails into rows first, first + 1, … of a bank's arrays; those of one bank together."""
    room = int(arrays[0].shape[2])
    by_bank: dict[int, list[int]] = {}
    for number, tail in enumerate(tails):
        if isinstance(tail.home, RowBank) and tail.length:
            by_bank.setdefault(id(tail.home), []).append(number)
        elif isinstance(tail.home, ArrayBlock) and tail.length:
            start, stop = tail.start, tail.start + tail.length
            for array, source in zip(arrays, tail.home.arrays, strict=True):
                array[first + number, :, : tail.length] = source[:, start:stop]
    for group in by_bank.values():
        home = tails[group[0]].home
        assert isinstance(home, RowBank)
        span = min(room, home.room)
        into = mx.array([first + number for number in group])
        of = mx.array([tails[number].start for number in group])
        for array, source in zip(arrays, home.arrays, strict=True):
            array[into, :, :span] = source[of, :, :span]


def dtype_name(dtype: mx.Dtype) -> str:
    """Return a dtype's name as the other engines write it: "float32"."""
    return str(dtype).rpartition(".")[2]


def to_host(array: mx.array) -> NDArray[Any]:
    """Copy to the host; bfloat16, which NumPy lacks, as its uint16 bits."""
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return np.array(bits, order="C")  # a slice of MLX brings its strides


def _from_host(data: dict[str, NDArray[Any]], name: str, shape: KVShape) -> mx.array:
    """Read one exported array as [K, n, D]."""
    dtype = dtype_name(shape.dtype)
    if name not in data or str(data.get("dtype", "")) != dtype:
        raise ModelMismatch(
            f"the exported KV has no {dtype} array {name!r}; load it with the model and dtype that "
            "wrote it"
        )
    held = "uint16" if shape.dtype == mx.bfloat16 else dtype
    found = data[name]
    if str(found.dtype) != held:
        raise ModelMismatch(
            f"the exported KV has {found.dtype} for {name!r}, this model needs {held}"
        )
    if found.ndim != 3 or (found.shape[0], found.shape[2]) != (shape.n_heads, shape.size):
        raise ModelMismatch(
            f"the exported KV has shape {tuple(found.shape)} for {name!r}, this model needs "
            f"{(shape.n_heads, 'n', shape.size)}"
        )
    array = mx.array(np.ascontiguousarray(found))
    return array.view(mx.bfloat16) if shape.dtype == mx.bfloat16 else array
