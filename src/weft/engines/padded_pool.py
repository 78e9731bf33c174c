"""Where fragments lie when arrays have to be rectangles: settled ones in blocks, tails in banks.

A bank holds tails that grow side by side, a row each, padded to one length, so that one product
meets many of them. This file knows which fragment lies where, and counts; the engines hold the
arrays, whatever these are, and copy what is in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, Generic, TypeVar

from ..errors import ConfigError, is_out_of_memory
from .base import Fragment, Usage

GROW_BY = 32
SMALLEST = 64
# Tails that would take more than this with GROW_BY slots each are a crowd.
CROWD_BYTES = 128 << 20
# A token after a fragment at least this long goes to its block: moving it to a bank costs more.
LONG = 256
# Room and holes up to this share of a fragment's slots are left in place.
SPARE = 16


class PaddedFragment(Fragment):
    """Slots start..start+length of a block, or the head of row `start` of a bank.

    n_moves: how often it was put in line with others.
    """

    __slots__ = ("home", "n_moves", "start")
    engine: ClassVar[str]

    def __init__(self) -> None:
        super().__init__(0)
        self.home: SharedBlock | TailBuffer | None = None
        self.start = self.n_moves = 0


F = TypeVar("F", bound=PaddedFragment)


class SharedBlock:
    """Arrays of one fragment, or of several after splits; `users` share them."""

    __slots__ = ("capacity", "slots", "users")

    def __init__(self, slots: Any, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.users: list[PaddedFragment] = []


class TailBuffer:
    """Tails of one width class, one row each.

    [0, len) of a row   tokens of its fragment
    [len, room)         room to grow, up to `width`

    members: fragment of each row; None is a hole. A step's rows lie side by side, in its order.
    n_members: those that are no holes. n_rows: rows that there is memory for.
    """

    __slots__ = ("members", "n_members", "n_rows", "room", "slots", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.room = 0
        self.n_rows = 0
        self.members: list[PaddedFragment | None] = []
        self.n_members = 0
        self.slots: Any = None

    @property
    def is_sparse(self) -> bool:
        """Whether most of its rows are holes."""
        return 2 * self.n_members <= len(self.members)

    def find(self, tails: Sequence[PaddedFragment]) -> int | None:
        """Return the row of the first of `tails`, if they lie side by side in this order."""
        first = tails[0].start
        if tails[0].home is not self or first + len(tails) > len(self.members):
            return None
        found = self.members[first : first + len(tails)]
        return first if all(a is b for a, b in zip(found, tails, strict=True)) else None


B = TypeVar("B", bound=TailBuffer)


class PaddedPool(ABC, Generic[F, B]):
    """Fragments in blocks and banks. Splits share a block; growth, joins and settling copy.

    kind: the engine's fragments. slot_bytes: of one slot, all layers.
    """

    kind: type[F]

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._banks: dict[int, B] = {}
        self._slots = 0
        self._block_bytes = 0

    # What the engine's arrays do

    @abstractmethod
    def held(self, kv: F, capacity: int) -> Any:
        """Return arrays of `capacity` slots, at least one, that begin with the fragment's."""

    @abstractmethod
    def together(self, parts: Sequence[F]) -> Any:
        """Return arrays of the slots of fragments, one behind the other; none is empty."""

    @abstractmethod
    def moved(self) -> None:
        """Drop whatever says where slots lie: some lie elsewhere now."""

    @abstractmethod
    def cut(self) -> None:
        """Drop whatever copies a fragment's slots, too: fragments begin or end elsewhere now."""

    # The protocol

    def split(self, fragment: Fragment, at: int) -> F:
        lower = own(fragment, self.kind)
        if not 0 < at < lower.length:
            raise ConfigError(f"cannot split a fragment of {lower.length} slots before slot {at}")
        self.cut()
        if isinstance(lower.home, TailBuffer):
            self._move(lower, lower.length)
        block = lower.home
        assert isinstance(block, SharedBlock)
        upper = self.kind()
        upper.home, upper.start, upper.length = block, lower.start, at
        upper.n_moves = lower.n_moves
        block.users.append(upper)
        lower.start += at
        lower.length -= at
        return upper

    def join(self, upper: Fragment, lower: Fragment) -> None:
        first, second = own(upper, self.kind), own(lower, self.kind)
        self.cut()
        home = second.home
        is_next = first.start + first.length == second.start
        if not first.length:
            self._leave(first)
        elif isinstance(home, SharedBlock) and first.home is home and is_next:
            home.users.remove(first)
            second.start = first.start
            second.length += first.length
        else:
            self._join_by_copy(first, second)
        first.home, first.length = None, 0

    def trim(self, fragment: Fragment, length: int) -> None:
        kv = own(fragment, self.kind)
        if not 0 <= length <= kv.length:
            raise ConfigError(f"cannot trim a fragment of {kv.length} slots to {length}")
        self.cut()
        self._slots -= kv.length - length
        kv.length = length
        if not length:
            self._leave(kv)

    def settle(self, fragment: Fragment) -> None:
        kv = own(fragment, self.kind)
        if isinstance(kv.home, TailBuffer):
            self._move(kv, kv.length)
        elif isinstance(kv.home, SharedBlock):
            self._compact(kv.home)

    def free(self, fragment: Fragment) -> None:
        kv = own(fragment, self.kind)
        self.cut()
        self._slots -= kv.length
        block = kv.home
        self._leave(kv)
        kv.length = 0
        if isinstance(block, SharedBlock) and block.users:
            self._compact(block)

    def usage(self) -> Usage:
        n_banked = sum(bank.n_rows * bank.room for bank in self._banks.values())
        return Usage(self._slots, self._block_bytes + n_banked * self.slot_bytes)

    # What a step needs

    def is_banked(self, kv: F, n_long: int) -> bool:
        """Should one more slot of `kv` go to a bank? `n_long` fragments of the step are long."""
        if isinstance(kv.home, TailBuffer) or kv.length < LONG:
            return True
        return n_long > 3  # a few keep a product of their own; many are worth one copy

    def is_large_batch(self, n_more: int = 0) -> bool:
        """Are the tails in banks, and `n_more`, so many that none may have room to spare?"""
        n = n_more + sum(bank.n_members for bank in self._banks.values())
        return n * GROW_BY * self.slot_bytes > CROWD_BYTES

    def grew(self, kv: F, n: int) -> None:
        """Count `n` slots that a finished forward wrote."""
        kv.length += n
        self._slots += n

    def clear(self) -> None:
        """Forget everything."""
        self.cut()
        self._banks.clear()
        self._slots = self._block_bytes = 0

    def is_next(self, upper: F, lower: F) -> bool:
        """Whether the slots of one begin where those of the other end."""
        is_there = isinstance(upper.home, SharedBlock) and upper.home is lower.home
        return is_there and upper.start + upper.length == lower.start

    def is_in_line(self, fragments: Sequence[F]) -> bool:
        """Whether they all lie one behind the other."""
        return all(self.is_next(one, other) for one, other in pairwise(fragments))

    def make_contiguous(self, fragments: Sequence[F]) -> None:
        """Let fragments that do not grow lie one behind the other, so that they are met as one.

        No row of a bank changes its place. What has views of these takes them anew.
        """
        if self.is_in_line(fragments):
            return
        homes = {id(kv.home): kv.home for kv in fragments}.values()
        self._put_in_line(fragments)
        for kv in fragments:
            kv.n_moves += 1
        for home in homes:
            if isinstance(home, SharedBlock) and home.users:
                self._compact(home)

    # Moving slots

    def _join_by_copy(self, first: F, second: F) -> None:
        total = first.length + second.length
        slots = self.together([kv for kv in (first, second) if kv.length])
        homes = [first.home, second.home]
        self._leave(first)
        self._leave(second)
        self._place(second, slots, total)
        second.length = total
        for home in {id(home): home for home in homes}.values():
            if isinstance(home, SharedBlock) and home.users:
                self._compact(home)

    def _move(self, kv: F, capacity: int) -> None:
        """Give the fragment a block of its own."""
        slots = self.held(kv, capacity) if capacity else None
        self._leave(kv)
        if capacity:
            self._place(kv, slots, capacity)

    def _place(self, kv: F, slots: Any, capacity: int) -> None:
        self.moved()
        block = SharedBlock(slots, capacity)
        block.users.append(kv)
        kv.home, kv.start = block, 0
        self._block_bytes += capacity * self.slot_bytes

    def _leave(self, kv: PaddedFragment) -> None:
        """Take the fragment from its home; a home without fragments gives its memory back."""
        self.moved()
        self._take_out(kv)

    def _take_out(self, kv: PaddedFragment) -> None:
        home, kv.home = kv.home, None
        if isinstance(home, SharedBlock):
            home.users.remove(kv)
            if not home.users:
                self._block_bytes -= home.capacity * self.slot_bytes
        elif isinstance(home, TailBuffer):
            home.members[kv.start] = None
            home.n_members -= 1
            if not home.n_members:
                self._banks.pop(home.width, None)
        kv.start = 0

    def _put_in_line(self, fragments: Sequence[F]) -> None:
        """Give fragments, none of which is empty, a block of their own, in their order."""
        slots, total = self.together(fragments), sum(kv.length for kv in fragments)
        block, at = SharedBlock(slots, total), 0
        for kv in fragments:
            self._take_out(kv)
            block.users.append(kv)
            kv.home, kv.start = block, at
            at += kv.length
        self._block_bytes += total * self.slot_bytes

    def _has_room(self, kv: F, n: int) -> bool:
        block = kv.home
        if not isinstance(block, SharedBlock):
            return False
        end = kv.start + kv.length
        last = all(user.start + user.length <= end for user in block.users)
        return last and end + n <= block.capacity

    def _compact(self, block: SharedBlock) -> None:
        """Give its fragments a block of their size, if much of this one is empty.

        Where there is no memory to save memory with, they stay.
        """
        live = sum(user.length for user in block.users)
        if block.capacity - live > live // SPARE:
            self.moved()
            users = [own(user, self.kind) for user in block.users]
            for kv in users:
                if not kv.length:
                    self._take_out(kv)
            if live:
                kept = sorted((kv for kv in users if kv.length), key=lambda kv: kv.start)
                try:
                    self._put_in_line(kept)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise


def own(fragment: Fragment, kind: type[F]) -> F:
    """Return a fragment of an engine. Raises: ConfigError for one of another."""
    if not isinstance(fragment, kind):
        raise ConfigError(
            f"a {type(fragment).__name__} is not a fragment of the {kind.engine} engine"
        )
    return fragment


def width_for(length: int, *, crowd: bool = False) -> int:
    """The width class of a tail: those of one class share a bank, padded to at most double.

    Short ones share one class, so that few are copied often; a crowd cannot afford that.
    """
    return max(1 if crowd else SMALLEST, 1 << (length - 1).bit_length())


def room_for(width: int, n_rows: int, length: int, slot_bytes: int) -> int:
    """The slots that each row of a bank gets when the longest has `length`."""
    step = GROW_BY
    if n_rows * GROW_BY * slot_bytes > CROWD_BYTES:
        step = max(1, min(GROW_BY, length // 4))
    return min(width, max(1, -(-length // step)) * step)
