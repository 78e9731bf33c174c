"""KV memory in rectangular arrays: finished fragments in blocks, growing tails in padded buffers.

A tail buffer holds tails that grow together, one per row, padded to one length. One attention call
covers all of them. This module records where each fragment is and counts slots. The engines
allocate the arrays and copy their contents.
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
# A batch is large if GROW_BY slots for each of its tails exceed this.
LARGE_BATCH_BYTES = 128 << 20
# A token after a fragment at least this long is appended to its block: a move to a buffer costs
# more.
LONG = 256
# Unused slots up to this fraction (1 / SPARE) of a block are not compacted.
SPARE = 16


class PaddedFragment(Fragment):
    """Slots start … start + length of a block, or the first `length` slots of row `start` of a
    buffer.

    Attributes:
        home: the block or buffer; None if the fragment is empty.
        start: first slot in the block, or row of the buffer.
        n_moves: number of times that it was moved next to other fragments.
    """

    __slots__ = ("home", "n_moves", "start")
    engine: ClassVar[str]

    def __init__(self) -> None:
        super().__init__(0)
        self.home: SharedBlock | TailBuffer | None = None
        self.start = self.n_moves = 0


F = TypeVar("F", bound=PaddedFragment)


class SharedBlock:
    """Arrays of one fragment, or of several fragments after splits.

    Attributes:
        slots: the engine's arrays.
        capacity: number of slots.
        users: fragments in the block.
    """

    __slots__ = ("capacity", "slots", "users")

    def __init__(self, slots: Any, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.users: list[PaddedFragment] = []


class TailBuffer:
    """Tails of one width class, one per row.

    [0, len) of a row   tokens of its fragment
    [len, room)         capacity to grow, up to `width`

    Attributes:
        width: maximum length of a tail.
        room: allocated slots per row.
        n_rows: allocated rows.
        members: fragment of each used row; None for a hole. Rows of a step are adjacent and in its
            order.
        n_members: number of members without holes.
        slots: the engine's arrays.
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
        """True if at least half of its rows are holes."""
        return 2 * self.n_members <= len(self.members)

    def find(self, tails: Sequence[PaddedFragment]) -> int | None:
        """Return the row of the first tail if `tails` occupy adjacent rows in this order; else
        None.
        """
        first = tails[0].start
        if tails[0].home is not self or first + len(tails) > len(self.members):
            return None
        members = self.members[first : first + len(tails)]
        return first if all(a is b for a, b in zip(members, tails, strict=True)) else None


B = TypeVar("B", bound=TailBuffer)


class PaddedPool(ABC, Generic[F, B]):
    """Fragments in blocks and tail buffers.

    Fragments share a block after a split. Growth, joins and `settle` copy slots.

    Args:
        slot_bytes: bytes of one slot over all layers.

    Attributes:
        kind: the engine's fragment class.
    """

    kind: type[F]

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self._buffers: dict[int, B] = {}
        self._slots = 0
        self._block_bytes = 0

    # Implemented by the engines

    @abstractmethod
    def copy_slots(self, kv: F, capacity: int) -> Any:
        """Return new arrays of `capacity` slots (at least one) that start with the fragment's
        slots.
        """

    @abstractmethod
    def concatenate(self, parts: Sequence[F]) -> Any:
        """Return new arrays with the slots of the fragments `parts`, in order; none is empty."""

    @abstractmethod
    def on_slots_moved(self) -> None:
        """Clear cached positions of slots; called when slots move."""

    @abstractmethod
    def on_fragments_cut(self) -> None:
        """Clear cached positions and copies of slots; called when fragments change their extent."""

    # `Fragments`

    def split(self, fragment: Fragment, at: int) -> F:
        """Cut before slot `at`; return the new upper part. Both parts then share the block."""
        lower = own(fragment, self.kind)
        if not 0 < at < lower.length:
            raise ConfigError(f"cannot split a fragment of {lower.length} slots before slot {at}")
        self.on_fragments_cut()
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
        """Move `upper`'s slots before those of `lower`. Copies unless they are adjacent."""
        first, second = own(upper, self.kind), own(lower, self.kind)
        self.on_fragments_cut()
        home = second.home
        is_adjacent = first.start + first.length == second.start
        if not first.length:
            self._remove(first)
        elif isinstance(home, SharedBlock) and first.home is home and is_adjacent:
            home.users.remove(first)
            second.start = first.start
            second.length += first.length
        else:
            self._join_by_copy(first, second)
        first.home, first.length = None, 0

    def trim(self, fragment: Fragment, length: int) -> None:
        """Remove the slots from `length` on."""
        kv = own(fragment, self.kind)
        if not 0 <= length <= kv.length:
            raise ConfigError(f"cannot trim a fragment of {kv.length} slots to {length}")
        self.on_fragments_cut()
        self._slots -= kv.length - length
        kv.length = length
        if not length:
            self._remove(kv)

    def settle(self, fragment: Fragment) -> None:
        """Move a tail out of its buffer, into a block without spare capacity."""
        kv = own(fragment, self.kind)
        if isinstance(kv.home, TailBuffer):
            self._move(kv, kv.length)
        elif isinstance(kv.home, SharedBlock):
            self._compact(kv.home)

    def free(self, fragment: Fragment) -> None:
        """Release all slots of the fragment."""
        kv = own(fragment, self.kind)
        self.on_fragments_cut()
        self._slots -= kv.length
        block = kv.home
        self._remove(kv)
        kv.length = 0
        if isinstance(block, SharedBlock) and block.users:
            self._compact(block)

    def usage(self) -> Usage:
        """Return the slots in use and the bytes allocated for them."""
        n_buffered = sum(buffer.n_rows * buffer.room for buffer in self._buffers.values())
        return Usage(self._slots, self._block_bytes + n_buffered * self.slot_bytes)

    # Called by steps

    def is_buffered(self, kv: F, n_long: int) -> bool:
        """Return True if the next slot of `kv` belongs in a tail buffer.

        Args:
            kv: fragment that grows.
            n_long: number of long fragments that grow in this step.
        """
        if isinstance(kv.home, TailBuffer) or kv.length < LONG:
            return True
        return n_long > 3  # a few get an attention call each; for more, one copy is cheaper

    def is_large_batch(self, n_more: int = 0) -> bool:
        """Return True if GROW_BY spare slots for each buffered tail would take too much memory.

        n_more: tails to add to the buffered ones.
        """
        n = n_more + sum(buffer.n_members for buffer in self._buffers.values())
        return n * GROW_BY * self.slot_bytes > LARGE_BATCH_BYTES

    def count_written(self, kv: F, n: int) -> None:
        """Extend a fragment by `n` slots that a finished forward wrote."""
        kv.length += n
        self._slots += n

    def clear(self) -> None:
        """Remove all fragments."""
        self.on_fragments_cut()
        self._buffers.clear()
        self._slots = self._block_bytes = 0

    def is_adjacent(self, upper: F, lower: F) -> bool:
        """Return True if the slots of `lower` start where those of `upper` end."""
        is_one_block = isinstance(upper.home, SharedBlock) and upper.home is lower.home
        return is_one_block and upper.start + upper.length == lower.start

    def is_contiguous(self, fragments: Sequence[F]) -> bool:
        """Return True if each fragment's slots start where those of the one before end."""
        return all(self.is_adjacent(one, other) for one, other in pairwise(fragments))

    def make_contiguous(self, fragments: Sequence[F]) -> None:
        """Move fragments that do not grow into one block, in order, for one attention call over all
        of them.

        Rows of tail buffers stay in place. Views of these fragments become invalid.
        """
        if self.is_contiguous(fragments):
            return
        homes = {id(kv.home): kv.home for kv in fragments}.values()
        self._move_to_new_block(fragments)
        for kv in fragments:
            kv.n_moves += 1
        for home in homes:
            if isinstance(home, SharedBlock) and home.users:
                self._compact(home)

    # Moving slots

    def _join_by_copy(self, first: F, second: F) -> None:
        """Copy the slots of both fragments into a new block, which becomes that of `second`."""
        total = first.length + second.length
        slots = self.concatenate([kv for kv in (first, second) if kv.length])
        homes = [first.home, second.home]
        self._remove(first)
        self._remove(second)
        self._place(second, slots, total)
        second.length = total
        for home in {id(home): home for home in homes}.values():
            if isinstance(home, SharedBlock) and home.users:
                self._compact(home)

    def _move(self, kv: F, capacity: int) -> None:
        """Move the fragment into a block of its own with `capacity` slots; 0: it has no slots."""
        slots = self.copy_slots(kv, capacity) if capacity else None
        self._remove(kv)
        if capacity:
            self._place(kv, slots, capacity)

    def _place(self, kv: F, slots: Any, capacity: int) -> None:
        """Put the fragment at the start of a new block.

        slots: the engine's arrays, of `capacity` slots.
        """
        self.on_slots_moved()
        block = SharedBlock(slots, capacity)
        block.users.append(kv)
        kv.home, kv.start = block, 0
        self._block_bytes += capacity * self.slot_bytes

    def _remove(self, kv: PaddedFragment) -> None:
        """Remove the fragment from its block or buffer, and release the memory of an empty one."""
        self.on_slots_moved()
        self._detach(kv)

    def _detach(self, kv: PaddedFragment) -> None:
        """Remove the fragment from its block or buffer."""
        home, kv.home = kv.home, None
        if isinstance(home, SharedBlock):
            home.users.remove(kv)
            if not home.users:
                self._block_bytes -= home.capacity * self.slot_bytes
        elif isinstance(home, TailBuffer):
            home.members[kv.start] = None
            home.n_members -= 1
            if not home.n_members:
                self._buffers.pop(home.width, None)
        kv.start = 0

    def _move_to_new_block(self, fragments: Sequence[F]) -> None:
        """Move fragments, none of which is empty, into one new block in this order."""
        slots, total = self.concatenate(fragments), sum(kv.length for kv in fragments)
        block, at = SharedBlock(slots, total), 0
        for kv in fragments:
            self._detach(kv)
            block.users.append(kv)
            kv.home, kv.start = block, at
            at += kv.length
        self._block_bytes += total * self.slot_bytes

    def _has_room(self, kv: F, n: int) -> bool:
        """Return True if `n` slots fit after the fragment's slots in its block, without a copy."""
        block = kv.home
        if not isinstance(block, SharedBlock):
            return False
        end = kv.start + kv.length
        last = all(user.start + user.length <= end for user in block.users)
        return last and end + n <= block.capacity

    def _compact(self, block: SharedBlock) -> None:
        """Move a block's fragments into a smaller one if much of it is unused.

        If there is no memory for the copy, they stay.
        """
        live = sum(user.length for user in block.users)
        if block.capacity - live > live // SPARE:
            self.on_slots_moved()
            users = [own(user, self.kind) for user in block.users]
            for kv in users:
                if not kv.length:
                    self._detach(kv)
            if live:
                kept = sorted((kv for kv in users if kv.length), key=lambda kv: kv.start)
                try:
                    self._move_to_new_block(kept)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise


def own(fragment: Fragment, kind: type[F]) -> F:
    """Check that a fragment belongs to this engine, and return it as the engine's class.

    Raises:
        ConfigError: it belongs to another engine.
    """
    if not isinstance(fragment, kind):
        raise ConfigError(
            f"a {type(fragment).__name__} is not a fragment of the {kind.engine} engine"
        )
    return fragment


def width_class(length: int, *, large_batch: bool = False) -> int:
    """Return the width of the buffer for a tail: its length, rounded up to a power of two.

    Tails of up to SMALLEST slots share one class, so that small batches are rarely copied.

    Args:
        length: slots of the tail, including the next one.
        large_batch: see `PaddedPool.is_large_batch`; short tails get narrower buffers then.
    """
    return max(1 if large_batch else SMALLEST, 1 << (length - 1).bit_length())


def room_for(width: int, n_rows: int, length: int, slot_bytes: int) -> int:
    """Return the number of slots to allocate per row of a tail buffer.

    It is the length of the longest tail, rounded up to leave room for growth, and at most `width`.

    Args:
        width: width class of the buffer.
        n_rows: rows of the buffer; many rows get less room for growth.
        length: slots of the longest tail.
        slot_bytes: bytes of one slot over all layers.
    """
    step = GROW_BY
    if n_rows * GROW_BY * slot_bytes > LARGE_BATCH_BYTES:
        step = max(1, min(GROW_BY, length // 4))
    return min(width, max(1, -(-length // step)) * step)
