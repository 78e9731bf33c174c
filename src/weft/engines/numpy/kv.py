"""KV memory of the NumPy engine: fragments in blocks, growing tails in a padded buffer.

A fragment is a *body*, a range of a block, and a *tail*. The tail is a row of the tail buffer while
the fragment grows token by token. After a split, several fragments share a block::

    block   │░░░ another fragment ░░░│■■■■■ body ■■■■■│        buffer row   │■■■ tail ■■■│· · ·│
                                      start            start + body

Written bodies are immutable, except for the free end of a block with one user.

The tail buffer holds the growing tails of all leaves in one array::

        slots →  0 1 2 3 4 5 …            width
    row 0        ■ ■ ■ ■ ■ · · · · ·
    row 1        ■ ■ · · · · · · · ·      ■ holds a token, · zero or stale, masked
    row 2        ■ ■ ■ ■ ■ ■ ■ · · ·

Rows are dense (0 … n-1) and may change: `BufferedTail.row` is valid until the buffer's next change
of rows. A few rows grow by 32 slots at a time, so that they are seldom copied. Thousands of rows
have at most a quarter more than they need, because all are as wide as the widest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelMismatch
from ..base import Fragment, Fragments, Usage
from .config import LlamaConfig, deinterleave, interleave

GROWTH = 32
# A buffer is large if GROWTH slots per row would exceed this.
LARGE_BYTES = 128 << 20


class BufferedTail(Protocol):
    """The part of a fragment that `TailBuffer` uses.

    `row`: the fragment's row in the buffer, -1 if it has none. `tail`: its slots in that row.
    """

    row: int

    @property
    def tail(self) -> int: ...


class TailBuffer:
    """KV of fragments that grow token by token, one fragment per row, padded to one width.

    `data`: float32 [L, 2, R, K, S, D] for R rows of S slots. Axis 1: keys, values. One batched
    product covers all rows.
    """

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int) -> None:
        self._shape = (n_layers, 2, 0, n_kv_heads, 0, head_dim)
        self.data: NDArray[np.float32] = np.zeros(self._shape, np.float32)
        self.rows: list[BufferedTail] = []
        self._slot_bytes = 4 * n_layers * 2 * n_kv_heads * head_dim

    @property
    def is_large(self) -> bool:
        """True if GROWTH spare slots in each row would take too much memory."""
        return self._width_step(len(self.rows), 1) < GROWTH

    @property
    def width(self) -> int:
        """Allocated slots of every row."""
        return self.data.shape[4]

    def row(self, index: int) -> NDArray[np.float32]:
        """Return a view of one row: [L, 2, K, S, D]; valid until rows or width change."""
        return self.data[:, :, index]

    def add(self, tails: Sequence[BufferedTail]) -> None:
        """Assign rows to tails that have none; the caller writes their KV.

        Reallocates the array only if it is full.
        """
        needed = len(self.rows) + len(tails)
        capacity = self.data.shape[2]
        if needed > capacity:
            rows = max(needed, capacity + capacity // 4)
            self._resize(rows, self._round_up_width(rows, self._longest_tail()))
        for tail in tails:
            tail.row = len(self.rows)
            self.rows.append(tail)

    def remove(self, tail: BufferedTail) -> None:
        """Release the row of `tail`; the last row moves into its place."""
        last = self.rows.pop()
        if last is not tail:
            self.data[:, :, tail.row, :, : last.tail] = self.data[:, :, last.row, :, : last.tail]
            self.rows[tail.row] = last
            last.row = tail.row
        tail.row = -1
        if not self.rows:
            self.data = np.zeros(self._shape, np.float32)
        elif len(self.rows) <= self.data.shape[2] // 2:
            with suppress(MemoryError):  # the smaller copy needs memory, too
                self._resize(
                    len(self.rows), self._round_up_width(len(self.rows), self._longest_tail())
                )

    def widen(self, width: int) -> None:
        """Reserve `width` slots in every row."""
        if width > self.width:
            self._resize(self.data.shape[2], self._round_up_width(len(self.rows), width))

    def make_adjacent(self, tails: Collection[BufferedTail]) -> bool:
        """Move `tails` into adjacent rows, in any order. Return True if rows changed.

        Tails that stepped together before stay in place. Cost: one copy of two tails per tail to
        move.
        """
        if not tails:
            return False
        n = len(tails)
        first = min(min(tail.row for tail in tails), len(self.rows) - n)
        outside = [tail for tail in tails if not first <= tail.row < first + n]
        if not outside:
            return False
        members = set(map(id, tails))
        others = [tail for tail in self.rows[first : first + n] if id(tail) not in members]
        for tail, other in zip(outside, others, strict=True):
            self._swap(tail, other)
        return True

    def _swap(self, one: BufferedTail, other: BufferedTail) -> None:
        """Exchange the rows of two tails."""
        both = [one.row, other.row]
        n = max(one.tail, other.tail)
        self.data[:, :, both, :, :n] = self.data[:, :, both[::-1], :, :n]
        one.row, other.row = other.row, one.row
        self.rows[one.row], self.rows[other.row] = one, other

    def _longest_tail(self) -> int:
        """Return the number of slots of the longest tail, at least 1."""
        return max((row.tail for row in self.rows), default=1) or 1

    def _width_step(self, n_rows: int, width: int) -> int:
        """Return the number of slots by which a buffer of this size is widened."""
        if n_rows * GROWTH * self._slot_bytes <= LARGE_BYTES:
            return GROWTH
        return max(1, min(GROWTH, width // 4))

    def _round_up_width(self, n_rows: int, width: int) -> int:
        """Round `width` up to a multiple of `_width_step`."""
        step = self._width_step(n_rows, width)
        return -(-width // step) * step

    def _resize(self, capacity: int, width: int) -> None:
        """Reallocate the array for `capacity` rows of `width` slots, and copy the contents."""
        n_layers, _, _, n_kv_heads, _, head_dim = self._shape
        # NOTE: zeros, not empty: a masked slot is multiplied by weight 0, and 0 * NaN is NaN.
        data = np.zeros((n_layers, 2, capacity, n_kv_heads, width, head_dim), np.float32)
        n_rows, n_slots = len(self.rows), min(width, self.width)
        data[:, :, :n_rows, :, :n_slots] = self.data[:, :, :n_rows, :, :n_slots]
        self.data = data


_MAX_WASTE = 1.10  # allocated slots per used slot in a block
_SMALL = 64  # bodies below this move into the buffer when they start to grow by single tokens
_WIDE = 256  # buffer width from which a few long tails become bodies instead of all rows growing


class Block:
    """KV of consecutive tokens, float32 [L, 2, K, S, D], and the fragments that use parts of it."""

    __slots__ = ("data", "users")

    def __init__(self, data: NDArray[np.float32]) -> None:
        self.data = data
        self.users: set[NumpyFragment] = set()

    @property
    def n_slots(self) -> int:
        """Allocated slots, used or not."""
        return self.data.shape[3]


class NumpyFragment(Fragment):
    """A fragment's slots: a body (range of a block), then a tail (row of the tail buffer).

    `block`: block of the body, None if it is empty. `start`, `body`: first slot in the block, and
    number of slots. `row`: row of the tail, -1 if there is none. `length`: slots of body and tail.
    """

    __slots__ = ("block", "body", "row", "start")

    def __init__(self) -> None:
        super().__init__(0)
        self.block: Block | None = None
        self.start = 0
        self.body = 0
        self.row = -1

    @property
    def tail(self) -> int:
        """Number of slots in the tail buffer; the other `body` slots are in `block`."""
        return self.length - self.body


class NumpyFragments(Fragments):
    """The engine's KV memory: creates, cuts, joins and frees fragments, and gives views of their
    slots.

    `version` changes whenever earlier views may have become invalid.
    """

    growth = GROWTH

    def __init__(self, config: LlamaConfig) -> None:
        self._shape = (config.n_layers, 2, config.n_kv_heads, 0, config.head_dim)
        self.buffer = TailBuffer(config.n_layers, config.n_kv_heads, config.head_dim)
        self.version = 0
        self._block_bytes = 0
        self._n_slots = 0

    # ---- the protocol

    def new(self, parent: Fragment | None) -> NumpyFragment:
        """Return an empty fragment. `parent` is unused."""
        return NumpyFragment()

    def split(self, fragment: Fragment, at: int) -> NumpyFragment:
        """Cut before slot `at`; return the new upper part. Copies only a tail in the buffer."""
        lower = _as_numpy_fragment(fragment)
        if not 0 < at < lower.length:
            raise ValueError(f"cannot cut {lower.length} slots before slot {at}")
        self._move_tail_to_body(lower)
        block = cast(Block, lower.block)
        upper = NumpyFragment()
        upper.block, upper.start = block, lower.start
        upper.body = upper.length = at
        block.users.add(upper)
        lower.start += at
        lower.body -= at
        lower.length -= at
        self.version += 1
        return upper

    def join(self, upper: Fragment, lower: Fragment) -> None:
        """Move `upper`'s slots before those of `lower`. Copies unless both are adjacent in one
        block.
        """
        first, second = _as_numpy_fragment(upper), _as_numpy_fragment(lower)
        self._move_tail_to_body(first)
        self._move_tail_to_body(second)
        if first.block is second.block and first.start + first.body == second.start:
            second.start = first.start
            second.body += first.body
            second.length = second.body
            self._n_slots += first.body
        elif first.body:
            self._rewrite(second, [self._body(first), self._body(second)])
        self.free(first)

    def trim(self, fragment: Fragment, length: int) -> None:
        """Remove the slots from `length` on."""
        own = _as_numpy_fragment(fragment)
        if not 0 <= length <= own.length:
            raise ValueError(f"cannot trim {own.length} slots to {length}")
        self._n_slots -= own.length - length
        own.body = min(own.body, length)
        own.length = length
        if own.row >= 0 and not own.tail:
            self.buffer.remove(own)
        self._release_unused(own)

    def settle(self, fragment: Fragment) -> None:
        """Move the tail out of the buffer and release unused capacity."""
        own = _as_numpy_fragment(fragment)
        self._move_tail_to_body(own)
        self._release_unused(own)

    def free(self, fragment: Fragment) -> None:
        """Release all slots. Other users of the block may move to a smaller one."""
        self.trim(fragment, 0)

    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        """Copy the slots: float32, head dimensions in the order of the model's files."""
        own = _as_numpy_fragment(fragment)
        kv = np.concatenate(self.views(own, own.length), axis=3)
        data: dict[str, NDArray[Any]] = {}
        for layer, (keys, values) in enumerate(kv):
            data[f"k.{layer}"], data[f"v.{layer}"] = deinterleave(keys), values.copy()
        data["dtype"] = np.array("float32")
        return data

    def load(self, data: dict[str, NDArray[Any]], parent: Fragment | None) -> NumpyFragment:
        """Create a fragment from exported arrays, which are copied."""
        n_slots = data["k.0"].shape[1] if "k.0" in data and data["k.0"].ndim == 3 else -1
        expected = (self._shape[2], n_slots, self._shape[4])
        names = [f"{kind}.{layer}" for layer in range(self._shape[0]) for kind in "kv"]
        kv = np.empty((*self._shape[:3], max(n_slots, 0), self._shape[4]), np.float32)
        for name in names:
            array = data.get(name)
            if array is None or array.shape != expected or array.dtype != np.float32:
                raise ModelMismatch(
                    f"the KV data is not of this model, which has float32 {name!r} of shape "
                    f"{[self._shape[2], 'any', self._shape[4]]}; discard it and recompute"
                )
            kind, _, layer = name.partition(".")
            kv[int(layer), "kv".index(kind)] = interleave(array) if kind == "k" else array
        fragment = NumpyFragment()
        self._rewrite(fragment, [kv])
        return fragment

    def usage(self) -> Usage:
        """Return the memory in use, including the buffer's padding."""
        return Usage(self._n_slots, self._block_bytes + self.buffer.data.nbytes)

    # ---- for the engine

    def views(self, fragment: NumpyFragment, length: int) -> list[NDArray[np.float32]]:
        """Return read access to the first `length` slots: views [L, 2, K, S, D] of the body and the
        tail.

        Empty parts are left out. The views are valid until `version` changes.
        """
        n_body = min(length, fragment.body)
        views = [self._body(fragment)[:, :, :, :n_body]] if n_body or not length else []
        if length > n_body:
            views.append(self.buffer.row(fragment.row)[:, :, :, : length - n_body])
        return views

    def reserve_tails(self, fragments: list[NumpyFragment]) -> None:
        """Reserve a slot in the buffer for each fragment, and give them adjacent rows."""
        newcomers = [fragment for fragment in fragments if fragment.row < 0]
        if newcomers:
            self.buffer.add(newcomers)
            self._move_bodies_to_buffer(newcomers)
            self.version += 1
        self._widen(fragments)
        if self.buffer.make_adjacent(fragments):
            self.version += 1

    def reserve_body(self, fragment: NumpyFragment, n_tokens: int) -> NDArray[np.float32]:
        """Reserve `n_tokens` slots in the body; return the body with them: [L, 2, K, S, D]."""
        self._move_tail_to_body(fragment)
        needed = fragment.body + n_tokens
        block = fragment.block
        is_only_user = block is not None and len(block.users) == 1
        if block is None or not is_only_user or fragment.start + needed > block.n_slots:
            room = needed + needed // 4 if fragment.body else needed
            self._rewrite(fragment, [self._body(fragment)], room=room)
        block = cast(Block, fragment.block)
        return block.data[:, :, :, fragment.start : fragment.start + needed]

    def count_written(self, fragment: NumpyFragment, n_tokens: int, *, to_body: bool) -> None:
        """Extend a fragment by `n_tokens` slots that were written into reserved capacity.

        to_body: they are in the body, else in the tail buffer.
        """
        fragment.length += n_tokens
        self._n_slots += n_tokens
        if to_body:
            fragment.body += n_tokens

    # ---- blocks

    def _body(self, fragment: NumpyFragment) -> NDArray[np.float32]:
        """Return a view of the fragment's slots in its block: [L, 2, K, S, D]."""
        if fragment.block is None:
            return np.empty(self._shape, np.float32)
        return fragment.block.data[:, :, :, fragment.start : fragment.start + fragment.body]

    def _detach(self, fragment: NumpyFragment) -> None:
        """Remove the fragment's slots from its block, and compact or release that block if needed.

        Copy the slots first: they may be freed. `body` and `length` keep their values.
        """
        block, fragment.block = fragment.block, None
        if block is not None:
            block.users.remove(fragment)
            self._compact(block)

    def _compact(self, block: Block) -> None:
        """Release a block without slots; move users out of a block that wastes memory."""
        live = sum(user.body for user in block.users)
        if live and block.n_slots <= _MAX_WASTE * live:
            return
        for user in block.users:
            body = self._body(user).copy() if user.body else None
            user.block, user.start = None, 0
            if body is not None:
                self._set_block(user, Block(body))
        block.users.clear()
        self._block_bytes -= block.data.nbytes
        self.version += 1

    def _set_block(self, fragment: NumpyFragment, block: Block) -> None:
        """Make `fragment` the first user of a new block, whose slots start with the fragment's."""
        fragment.block, fragment.start = block, 0
        block.users.add(fragment)
        self._block_bytes += block.data.nbytes

    def _rewrite(
        self, fragment: NumpyFragment, parts: Iterable[NDArray[np.float32]], *, room: int = 0
    ) -> None:
        """Replace the fragment's slots by copies of `parts`, in order, in a new block.

        room: minimum capacity of the block in slots, including those of `parts`.
        """
        pieces = list(parts)
        n_slots = sum(piece.shape[3] for piece in pieces)
        shape = (*self._shape[:3], max(room, n_slots), self._shape[4])
        block = Block(np.empty(shape, np.float32))
        np.concatenate(pieces, axis=3, out=block.data[:, :, :, :n_slots])
        self._detach(fragment)
        self._set_block(fragment, block)
        self._n_slots += n_slots - fragment.length
        fragment.body = fragment.length = n_slots
        self.version += 1

    def _release_unused(self, fragment: NumpyFragment) -> None:
        """Release an empty body, or unused capacity, after slots were removed."""
        self.version += 1
        if not fragment.body:
            self._detach(fragment)
        elif fragment.block is not None:
            self._compact(fragment.block)

    # ---- the buffer

    def _move_tail_to_body(self, fragment: NumpyFragment) -> None:
        """Copy body and tail into a new block, and release the row of the tail buffer."""
        if fragment.row < 0:
            return
        if fragment.tail:
            self._rewrite(fragment, self.views(fragment, fragment.length))
        self.buffer.remove(fragment)
        self.version += 1

    def _move_bodies_to_buffer(self, newcomers: list[NumpyFragment]) -> None:
        """Move small bodies into the new buffer rows, where they cost no product of their own."""
        largest = max(_SMALL, self.buffer.width)
        small = [fragment for fragment in newcomers if 0 < fragment.body < largest]
        widest = max((fragment.body for fragment in small), default=0)
        if widest > self.buffer.width and not self._may_widen(widest, sum(f.body for f in small)):
            small = [fragment for fragment in small if fragment.body <= self.buffer.width]
            widest = 0
        self.buffer.widen(widest)
        for fragment in small:
            n_body = fragment.body
            self.buffer.row(fragment.row)[:, :, :, :n_body] = self._body(fragment)
            fragment.body = 0
            self._detach(fragment)

    def _may_widen(self, width: int, n_more: int) -> bool:
        """Return True if a buffer of this width would be at least half full, or is small.

        n_more: slots to be added to those in use.
        """
        n_slots = sum(row.tail for row in self.buffer.rows) + n_more
        return not self.buffer.is_large or width * len(self.buffer.rows) <= 2 * n_slots

    def _widen(self, fragments: list[NumpyFragment]) -> None:
        """Give the tails of `fragments` room for one more slot in the tail buffer.

        If only a few of them fill a wide buffer, their tails move to their bodies (blocks of their
        own) instead.
        """
        width = self.buffer.width
        full = [fragment for fragment in fragments if fragment.tail >= width]
        if not full:
            return
        self.version += 1
        needed = 1 + max(fragment.tail for fragment in full)
        if self.buffer.is_large:
            few = not self._may_widen(needed, len(full))
        else:
            few = width >= _WIDE and 4 * len(full) < len(self.buffer.rows)
        if few:
            for fragment in full:
                self._move_tail_to_body(fragment)
            self.buffer.add(full)
        self.buffer.widen(1 + max(fragment.tail for fragment in fragments))


def _as_numpy_fragment(fragment: Fragment) -> NumpyFragment:
    """Return `fragment`. Raise TypeError if it belongs to another engine."""
    if not isinstance(fragment, NumpyFragment):
        raise TypeError(f"{type(fragment).__name__} is not a fragment of the NumPy engine")
    return fragment
