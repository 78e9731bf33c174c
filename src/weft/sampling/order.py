"""Order among the values of a row: groups of ids with their largest, and what is above a floor.

Ids fall into groups of `MEMBERS` so that one pass finds every group's largest value and few groups
need a second look. Ids 0 … 4095 are a square, 64 x 64, and a group is a column of it; so are the
next 4096, and so on. The grouping does not depend on the vocabulary, so that random numbers may
follow it (see `gumbel`).

    id        0    1  …   63        group 0:  0  64  128 …
              64   65 …  127        group 1:  1  65  129 …
              …                     a vocabulary that ends inside a square has shorter columns
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

MEMBERS = 64
_SQUARE = MEMBERS * MEMBERS
_PAD = np.int64(2**63 - 1)


def group_of(ids: Ids) -> Ids:
    """Return the groups of ids."""
    return (ids >> 12 << 6) | (ids & 63)


def member_of(ids: Ids) -> Ids:
    """Return which member of its group each id is: 0 to MEMBERS - 1."""
    return ids >> 6 & 63


def members(groups: Ids, n_vocab: int = _SQUARE) -> Ids:
    """Return the ids of groups [n]: int64 [n, M], as many lines of a square as there are.

    The last may lie outside the vocabulary.
    """
    lines = np.arange(0, min(_SQUARE, n_vocab), MEMBERS)
    return ((groups >> 6 << 12) + (groups & 63))[:, None] + lines


def n_groups(n_vocab: int) -> int:
    """Return how many groups a vocabulary has."""
    squares, rest = divmod(n_vocab, _SQUARE)
    return squares * MEMBERS + min(rest, MEMBERS)


def group_peaks(values: Floats) -> Floats:
    """Return the largest value of every group: float32 [B, groups]. Cost: one pass."""
    n_rows, n_vocab = values.shape
    whole = n_vocab // _SQUARE * _SQUARE
    parts = []
    if whole:
        squares = values[:, :whole].reshape(n_rows, -1, MEMBERS, MEMBERS)
        parts.append(squares.max(axis=2).reshape(n_rows, -1))
    if whole < n_vocab:
        rest = values[:, whole:]
        n_lines, n_last = divmod(rest.shape[1], MEMBERS)
        if n_lines:
            lines = rest[:, : n_lines * MEMBERS].reshape(n_rows, n_lines, MEMBERS)
            peaks = lines.max(axis=1)
            if n_last:
                np.maximum(peaks[:, :n_last], rest[:, -n_last:], out=peaks[:, :n_last])
        else:
            peaks = rest.copy()
        parts.append(peaks)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


class Ranked(NamedTuple):
    """The largest entries of every row, largest first, equals by lower id.

    ids: int64 [B, C]. values: float32 [B, C], -inf behind a row's last. n: int64 [B], entries.
    """

    ids: Ids
    values: Floats
    n: Ids


def rank(values: Floats, peaks: Floats, floors: Floats) -> Ranked:
    """Return each row's finite values at or above its floor, in order; `peaks` of `group_peaks`."""
    rows, ids = _at_least(values, peaks, floors)
    n_rows = len(values)
    n = np.bincount(rows, minlength=n_rows)
    starts = np.cumsum(n) - n
    keys = np.full((n_rows, max(int(n.max(initial=0)), 1)), _PAD)
    keys[rows, np.arange(len(rows)) - starts[rows]] = _keys(values[rows, ids], ids)
    keys.sort(axis=1)
    there = np.arange(keys.shape[1]) < n[:, None]
    found = np.where(there, keys & 0xFFFFFFFF, 0)
    taken = np.where(there, np.take_along_axis(values, found, axis=1), np.float32(-np.inf))
    return Ranked(found, taken, n)


def floors_of(peaks: Floats, wanted: Ids) -> Floats:
    """Return for each row a value that at least wanted[row] entries reach; -inf for too many."""
    n_groups = peaks.shape[1]
    if (wanted == wanted[0]).all():
        if wanted[0] > n_groups:
            return np.full(len(peaks), -np.inf, dtype=np.float32)
        at = n_groups - int(wanted[0])
        edge: Floats = np.partition(peaks, at, axis=1)[:, at]
        return edge
    ordered = np.sort(peaks, axis=1)
    at = np.maximum(n_groups - wanted, 0)[:, None]
    found = np.take_along_axis(ordered, at, axis=1)[:, 0]
    return np.where(wanted > n_groups, np.float32(-np.inf), found)


def largest(values: Floats, n: int) -> Ids:
    """Return the ids of every row's n largest values, largest first: int64 [B, n].

    What is -inf counts too, by lower id. Cost: a pass, and a sort of little more than n.
    """
    n = min(n, values.shape[1])
    peaks = group_peaks(values)
    ranked = rank(values, peaks, floors_of(peaks, np.full(len(values), n)))
    ids = ranked.ids[:, :n]
    for row in np.flatnonzero(ranked.n < n):  # not so many finite ones
        rest = np.flatnonzero(np.isneginf(values[row]))
        ids = np.pad(ids, ((0, 0), (0, n - ids.shape[1]))) if ids.shape[1] < n else ids
        ids[row, ranked.n[row] :] = rest[: n - ranked.n[row]]
    return ids


def _at_least(values: Floats, peaks: Floats, floors: Floats) -> tuple[Ids, Ids]:
    """Return (row, id) of all finite values at or above the row's floor; rows ascend."""
    least = np.maximum(floors, np.finfo(np.float32).min)
    n_vocab = values.shape[1]
    rows, groups = np.nonzero(peaks >= least[:, None])
    if 2 * len(rows) > peaks.size:  # then a look at every value is cheaper
        at, found_ids = np.nonzero(values >= least[:, None])
        return at, found_ids
    ids = members(groups, n_vocab)
    found = values[rows[:, None], np.minimum(ids, n_vocab - 1)]
    at, member = np.nonzero((found >= least[rows][:, None]) & (ids < n_vocab))
    return rows[at], ids[at, member]


def _keys(values: Floats, ids: Ids) -> Ids:
    """Return integers that ascend as values fall, equals by id."""
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)  # -0 becomes 0
    ascending = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (~ascending << 32) | ids
