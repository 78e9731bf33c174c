"""One row that steps alone: its whole path in one piece, so that a layer has one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..base import Row
from .attend import Spec, attend

if TYPE_CHECKING:
    from .store import KV, Store

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
