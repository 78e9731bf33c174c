"""Order among the values of a row, ties by lower id: what filters and scores share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]


def largest(logits: Floats, n: int) -> NDArray[np.int64]:
    """Return the ids of every row's n largest logits, largest first: int64 [B, n]."""
    n_rows, n_vocab = logits.shape
    wanted = np.full(n_rows, min(n, n_vocab))
    kept = largest_mask(logits, wanted, descending(logits))
    ids = np.nonzero(kept)[1].reshape(n_rows, -1)
    order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1)


def largest_mask(logits: Floats, n: Counts, ordered: Floats) -> Mask:
    """Mark the n largest of every row; `ordered` holds the row's values, largest first."""
    edge = np.take_along_axis(ordered, n[:, None] - 1, axis=1)
    kept = logits >= edge
    surplus = np.flatnonzero(kept.sum(axis=1) > n)
    if surplus.size:
        rows, row_edge = logits[surplus], edge[surplus]
        above = rows > row_edge
        room = n[surplus] - above.sum(axis=1)
        tied = rows == row_edge
        kept[surplus] = above | (tied & (np.cumsum(tied, axis=1) <= room[:, None]))
    return kept


def descending(logits: Floats) -> Floats:
    """Return every row's values, largest first."""
    return -np.sort(-logits, axis=1)


def ascending_ids(values: Floats) -> Counts:
    """Return a stable argsort of values >= 0, by sorting (bits of the value, id) as one integer."""
    keys = values.view(np.uint32).astype(np.int64) << 32
    keys |= np.arange(values.shape[1])
    keys.sort(axis=1)
    return keys & 0xFFFFFFFF
