"""Where the NumPy engine keeps KV: fragments in blocks, growing tails in a bank.

A fragment is a *body*, a range of a block that several fragments may share after a split, then a
*tail*, a row of the bank, while it grows token by token::

    block   │░░░ another fragment ░░░│■■■■■ body ■■■■■│        bank row   │■■■ tail ■■■│· · ·│
                                      start            start + body

Bodies are immutable once written, but for the free end of a block with one owner.

The padded bank has the growing tails of all live leaves in one array::

        slots →  0 1 2 3 4 5 …            width
    row 0        ■ ■ ■ ■ ■ · · · · ·
    row 1        ■ ■ · · · · · · · ·      ■ holds a token, · zero or stale, masked
    row 2        ■ ■ ■ ■ ■ ■ ■ · · ·

Rows are dense (0 … n-1) and change hands: `BankTail.row` is right until the bank's next change of
rows. A few rows have room for 32 slots at a time, so that they are seldom copied; thousands of them
have a quarter more than they need, as all are as wide as the widest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelMismatch
from ..base import Fragment, Fragments, Usage
from .config import LlamaConfig, halve, interleave

GROWTH = 32
# A bank that would be larger than this with `GROWTH` slots a row is crowded.
CROWDED_BYTES = 128 << 20


class BankTail(Protocol):
    """What the bank knows of a fragment: its row (-1: none) and how many slots hold tokens."""

    row: int

    @property
    def tail(self) -> int: ...


class TailBank:
    """float32 [L, 2, R, K, S, D], keys at 0 and values at 1 of axis 1; empty without rows."""

    def __init__(self, n_layers: int, n_kv_heads: int, head_dim: int) -> None:
        self._shape = (n_layers, 2, 0, n_kv_heads, 0, head_dim)
        self.data: NDArray[np.float32] = np.zeros(self._shape, np.float32)
        self.rows: list[BankTail] = []
        self._slot_bytes = 4 * n_layers * 2 * n_kv_heads * head_dim

    @property
    def is_crowded(self) -> bool:
        """There are so many rows that none may be wider than it must."""
        return self._step(len(self.rows), 1) < GROWTH

    @property
    def width(self) -> int:
        return self.data.shape[4]

    def row(self, index: int) -> NDArray[np.float32]:
        """One row's slots, a view: [L, 2, K, S, D]; valid until rows or width change."""
        return self.data[:, :, index]

    def add(self, tails: Sequence[BankTail]) -> None:
        """Give rows to tails that have none. Changes the array only if there is no room."""
        needed = len(self.rows) + len(tails)
        capacity = self.data.shape[2]
        if needed > capacity:
            rows = max(needed, capacity + capacity // 4)
            self._resize(rows, self._rounded(rows, self._longest()))
        for tail in tails:
            tail.row = len(self.rows)
            self.rows.append(tail)

    def remove(self, tail: BankTail) -> None:
        """Take a row back; the last row moves into its place."""
        last = self.rows.pop()
        if last is not tail:
            self.data[:, :, tail.row, :, : last.tail] = self.data[:, :, last.row, :, : last.tail]
            self.rows[tail.row] = last
            last.row = tail.row
        tail.row = -1
        if not self.rows:
            self.data = np.zeros(self._shape, np.float32)
        elif len(self.rows) <= self.data.shape[2] // 2:
            with suppress(MemoryError):  # there is none to save some with
                self._resize(len(self.rows), self._rounded(len(self.rows), self._longest()))

    def widen(self, width: int) -> None:
        """Make room for `width` slots in every row."""
        if width > self.width:
            self._resize(self.data.shape[2], self._rounded(len(self.rows), width))

    def bring_together(self, tails: Collection[BankTail]) -> bool:
        """Give `tails` rows side by side, in any order; whether rows changed hands.

        Those that step together stay where they are. Cost: one copy of two tails for each that
        stood apart.
        """
        if not tails:
            return False
        n = len(tails)
        first = min(min(tail.row for tail in tails), len(self.rows) - n)
        apart = [tail for tail in tails if not first <= tail.row < first + n]
        if not apart:
            return False
        wanted = set(map(id, tails))
        strangers = [tail for tail in self.rows[first : first + n] if id(tail) not in wanted]
        for tail, stranger in zip(apart, strangers, strict=True):
            self._swap(tail, stranger)
        return True

    def _swap(self, one: BankTail, other: BankTail) -> None:
        both = [one.row, other.row]
        n = max(one.tail, other.tail)
        self.data[:, :, both, :, :n] = self.data[:, :, both[::-1], :, :n]
        one.row, other.row = other.row, one.row
        self.rows[one.row], self.rows[other.row] = one, other

    def _longest(self) -> int:
        return max((row.tail for row in self.rows), default=1) or 1

    def _step(self, n_rows: int, width: int) -> int:
        """Return how many slots a row grows by."""
        if n_rows * GROWTH * self._slot_bytes <= CROWDED_BYTES:
            return GROWTH
        return max(1, min(GROWTH, width // 4))

    def _rounded(self, n_rows: int, width: int) -> int:
        step = self._step(n_rows, width)
        return -(-width // step) * step

    def _resize(self, capacity: int, width: int) -> None:
        n_layers, _, _, n_kv_heads, _, head_dim = self._shape
        # NOTE: zeros, not empty: a masked slot is multiplied by weight 0, and 0 * NaN is NaN.
        data = np.zeros((n_layers, 2, capacity, n_kv_heads, width, head_dim), np.float32)
        n_rows, n_slots = len(self.rows), min(width, self.width)
        data[:, :, :n_rows, :, :n_slots] = self.data[:, :, :n_rows, :, :n_slots]
        self.data = data


_MAX_WASTE = 1.10  # allocated slots per live slot that a settled block may have
_SMALL = 64  # bodies below this move into the bank when they start to grow by single tokens
_WIDE = 256  # bank width from which a few long tails are folded rather than all rows widened


class Block:
    """KV of consecutive tokens: float32 [L, 2, K, S, D], and the fragments that see parts of it."""

    __slots__ = ("data", "owners")

    def __init__(self, data: NDArray[np.float32]) -> None:
        self.data = data
        self.owners: set[NumpyFragment] = set()

    @property
    def n_slots(self) -> int:
        return self.data.shape[3]


class NumpyFragment(Fragment):
    """`length` is body + tail; `row` is the tail's row in the bank, -1 without one."""

    __slots__ = ("block", "body", "row", "start")

    def __init__(self) -> None:
        super().__init__(0)
        self.block: Block | None = None
        self.start = 0
        self.body = 0
        self.row = -1

    @property
    def tail(self) -> int:
        return self.length - self.body


class NumpyFragments(Fragments):
    """`version` changes whenever a view taken before may have become stale."""

    growth = GROWTH

    def __init__(self, config: LlamaConfig) -> None:
        self._shape = (config.n_layers, 2, config.n_kv_heads, 0, config.head_dim)
        self.bank = TailBank(config.n_layers, config.n_kv_heads, config.head_dim)
        self.version = 0
        self._block_bytes = 0
        self._n_slots = 0

    # ---- the protocol

    def new(self, parent: Fragment | None) -> NumpyFragment:
        """Make an empty fragment; the parent does not matter here."""
        return NumpyFragment()

    def split(self, fragment: Fragment, at: int) -> NumpyFragment:
        """Cut before slot `at`: return the new upper part. Only a tail in the bank is copied."""
        lower = _own(fragment)
        if not 0 < at < lower.length:
            raise ValueError(f"cannot cut {lower.length} slots before slot {at}")
        self._fold(lower)
        block = cast(Block, lower.block)
        upper = NumpyFragment()
        upper.block, upper.start = block, lower.start
        upper.body = upper.length = at
        block.owners.add(upper)
        lower.start += at
        lower.body -= at
        lower.length -= at
        self.version += 1
        return upper

    def join(self, upper: Fragment, lower: Fragment) -> None:
        """Put `upper`'s slots before `lower`'s; copied unless they lie side by side already."""
        first, second = _own(upper), _own(lower)
        self._fold(first)
        self._fold(second)
        if first.block is second.block and first.start + first.body == second.start:
            second.start = first.start
            second.body += first.body
            second.length = second.body
            self._n_slots += first.body
        elif first.body:
            self._rewrite(second, [self._body(first), self._body(second)])
        self.free(first)

    def trim(self, fragment: Fragment, length: int) -> None:
        """Forget the slots from `length` on."""
        own = _own(fragment)
        if not 0 <= length <= own.length:
            raise ValueError(f"cannot trim {own.length} slots to {length}")
        self._n_slots -= own.length - length
        own.body = min(own.body, length)
        own.length = length
        if own.row >= 0 and not own.tail:
            self.bank.remove(own)
        self._tidy(own)

    def settle(self, fragment: Fragment) -> None:
        """Move the tail out of the bank and give spare room back."""
        own = _own(fragment)
        self._fold(own)
        self._tidy(own)

    def free(self, fragment: Fragment) -> None:
        """Give all slots back; who shared a block with them may move out of it."""
        self.trim(fragment, 0)

    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        """Copy the slots: float32, heads in the order of the model's own files."""
        own = _own(fragment)
        kv = np.concatenate(self.views(own, own.length), axis=3)
        data: dict[str, NDArray[Any]] = {}
        for layer, (keys, values) in enumerate(kv):
            data[f"k.{layer}"], data[f"v.{layer}"] = halve(keys), values.copy()
        data["dtype"] = np.array("float32")
        return data

    def load(self, data: dict[str, NDArray[Any]], parent: Fragment | None) -> NumpyFragment:
        """Make a fragment from what `export` gave; the arrays are copied."""
        n_slots = data["k.0"].shape[1] if "k.0" in data and data["k.0"].ndim == 3 else -1
        expected = (self._shape[2], n_slots, self._shape[4])
        names = [f"{kind}.{layer}" for layer in range(self._shape[0]) for kind in "kv"]
        kv = np.empty((*self._shape[:3], max(n_slots, 0), self._shape[4]), np.float32)
        for name in names:
            array = data.get(name)
            if array is None or array.shape != expected or array.dtype != np.float32:
                raise ModelMismatch(
                    f"the KV data is not of this model, which has float32 {name!r} of shape "
                    f"{[self._shape[2], 'any', self._shape[4]]}; drop it and recompute"
                )
            kind, _, layer = name.partition(".")
            kv[int(layer), "kv".index(kind)] = interleave(array) if kind == "k" else array
        fragment = NumpyFragment()
        self._rewrite(fragment, [kv])
        return fragment

    def usage(self) -> Usage:
        """Return what is held now; bytes are those of all arrays, the bank's padding included."""
        return Usage(self._n_slots, self._block_bytes + self.bank.data.nbytes)

    # ---- for the engine

    def views(self, fragment: NumpyFragment, length: int) -> list[NDArray[np.float32]]:
        """Views of the first `length` slots, one or two: [L, 2, K, S, D]; for this `version`."""
        n_body = min(length, fragment.body)
        views = [self._body(fragment)[:, :, :, :n_body]] if n_body or not length else []
        if length > n_body:
            views.append(self.bank.row(fragment.row)[:, :, :, : length - n_body])
        return views

    def reserve_tails(self, fragments: list[NumpyFragment]) -> None:
        """Make room for one more slot in the bank for each, and give them rows side by side."""
        newcomers = [fragment for fragment in fragments if fragment.row < 0]
        if newcomers:
            self.bank.add(newcomers)
            self._thaw(newcomers)
            self.version += 1
        self._widen(fragments)
        if self.bank.bring_together(fragments):
            self.version += 1

    def reserve_body(self, fragment: NumpyFragment, n_tokens: int) -> NDArray[np.float32]:
        """Make room for `n_tokens` more in the body; return the body with them: [L, 2, K, S, D]."""
        self._fold(fragment)
        needed = fragment.body + n_tokens
        block = fragment.block
        alone = block is not None and len(block.owners) == 1
        if block is None or not alone or fragment.start + needed > block.n_slots:
            room = needed + needed // 4 if fragment.body else needed
            self._rewrite(fragment, [self._body(fragment)], room=room)
        block = cast(Block, fragment.block)
        return block.data[:, :, :, fragment.start : fragment.start + needed]

    def appended(self, fragment: NumpyFragment, n_tokens: int, *, to_body: bool) -> None:
        """Count slots that were written into reserved room."""
        fragment.length += n_tokens
        self._n_slots += n_tokens
        if to_body:
            fragment.body += n_tokens

    # ---- blocks

    def _body(self, fragment: NumpyFragment) -> NDArray[np.float32]:
        if fragment.block is None:
            return np.empty(self._shape, np.float32)
        return fragment.block.data[:, :, :, fragment.start : fragment.start + fragment.body]

    def _detach(self, fragment: NumpyFragment) -> None:
        """Leave the block; the slots stay counted."""
        block, fragment.block = fragment.block, None
        if block is not None:
            block.owners.remove(fragment)
            self._compact(block)

    def _compact(self, block: Block) -> None:
        """Drop a block without live slots; move the owners out of one that wastes too much."""
        live = sum(owner.body for owner in block.owners)
        if live and block.n_slots <= _MAX_WASTE * live:
            return
        for owner in block.owners:
            body = self._body(owner).copy() if owner.body else None
            owner.block, owner.start = None, 0
            if body is not None:
                self._adopt(owner, Block(body))
        block.owners.clear()
        self._block_bytes -= block.data.nbytes
        self.version += 1

    def _adopt(self, fragment: NumpyFragment, block: Block) -> None:
        fragment.block, fragment.start = block, 0
        block.owners.add(fragment)
        self._block_bytes += block.data.nbytes

    def _rewrite(
        self, fragment: NumpyFragment, parts: Iterable[NDArray[np.float32]], *, room: int = 0
    ) -> None:
        """Give the fragment a block of its own that holds `parts` and has room for `room` slots."""
        pieces = list(parts)
        n_slots = sum(piece.shape[3] for piece in pieces)
        shape = (*self._shape[:3], max(room, n_slots), self._shape[4])
        block = Block(np.empty(shape, np.float32))
        np.concatenate(pieces, axis=3, out=block.data[:, :, :, :n_slots])
        self._detach(fragment)
        self._adopt(fragment, block)
        self._n_slots += n_slots - fragment.length
        fragment.body = fragment.length = n_slots
        self.version += 1

    def _tidy(self, fragment: NumpyFragment) -> None:
        """After slots went: leave an empty body, give back what is mostly waste."""
        self.version += 1
        if not fragment.body:
            self._detach(fragment)
        elif fragment.block is not None:
            self._compact(fragment.block)

    # ---- the bank

    def _fold(self, fragment: NumpyFragment) -> None:
        """Move the tail from the bank to the body's end."""
        if fragment.row < 0:
            return
        if fragment.tail:
            self._rewrite(fragment, self.views(fragment, fragment.length))
        self.bank.remove(fragment)
        self.version += 1

    def _thaw(self, newcomers: list[NumpyFragment]) -> None:
        """Move small bodies into the new bank rows: left outside each costs a product a layer."""
        largest = max(_SMALL, self.bank.width)
        small = [fragment for fragment in newcomers if 0 < fragment.body < largest]
        widest = max((fragment.body for fragment in small), default=0)
        if widest > self.bank.width and not self._may_widen(widest, sum(f.body for f in small)):
            small = [fragment for fragment in small if fragment.body <= self.bank.width]
            widest = 0
        self.bank.widen(widest)
        for fragment in small:
            n_body = fragment.body
            self.bank.row(fragment.row)[:, :, :, :n_body] = self._body(fragment)
            fragment.body = 0
            self._detach(fragment)

    def _may_widen(self, width: int, n_more: int) -> bool:
        """Whether a bank as wide as that would be half full at least, or is small anyway."""
        n_slots = sum(row.tail for row in self.bank.rows) + n_more
        return not self.bank.is_crowded or width * len(self.bank.rows) <= 2 * n_slots

    def _widen(self, fragments: list[NumpyFragment]) -> None:
        """Give every row one more slot; when only a few outgrow a wide bank, fold those instead."""
        width = self.bank.width
        full = [fragment for fragment in fragments if fragment.tail >= width]
        if not full:
            return
        self.version += 1
        needed = 1 + max(fragment.tail for fragment in full)
        if self.bank.is_crowded:
            few = not self._may_widen(needed, len(full))
        else:
            few = width >= _WIDE and 4 * len(full) < len(self.bank.rows)
        if few:
            for fragment in full:
                self._fold(fragment)
            self.bank.add(full)
        self.bank.widen(1 + max(fragment.tail for fragment in fragments))


def _own(fragment: Fragment) -> NumpyFragment:
    if not isinstance(fragment, NumpyFragment):
        raise TypeError(f"{type(fragment).__name__} is not a fragment of the NumPy engine")
    return fragment
