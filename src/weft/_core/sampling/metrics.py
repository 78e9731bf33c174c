"""Statistics of logits: log-probabilities, entropies, ranks and sorted ids.

All are of raw logits, over the full vocabulary, in natural logarithms.

Ids fall into groups of `GROUP_SIZE`, so that one pass finds every group's largest value and few
groups need a second look. Ids 0 … 4095 are a square, 64 x 64, and a group is one of its columns.
The next 4096 ids are the next square. The grouping does not depend on the vocabulary size, so
random numbers can use it (see `rng`).

    id        0    1  …   63        group 0:  0  64  128 …
              64   65 …  127        group 1:  1  65  129 …
              …                     the last square may have shorter columns
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ...engines.base import Score, ScoreSpan
from ...errors import ForwardError

Floats = NDArray[np.float32]
# Scoring computes at most this many logits at a time, so that [T, V] is never materialized.
SCORE_NUMBERS = 1 << 22


class Moments(NamedTuple):
    """Statistics of logits [B, V] from one pass.

    peak: [B], the largest logit.

    total: [B], the sum of exp(logit - peak).

    log_total: its logarithm.

    entropies: [B], in nats.
    """

    peak: Floats
    total: Floats
    log_total: Floats
    entropies: Floats


def log_softmax(logits: Floats) -> Floats:
    """Return log-probabilities of raw logits: float32 [..., V], a new array.

    Raises: ForwardError if a row has NaN, +inf, or no finite entry at all.
    """
    with np.errstate(invalid="ignore"):
        below = logits - logits.max(axis=-1, keepdims=True)
        total = np.log(np.exp(below).sum(axis=-1, keepdims=True, dtype=np.float64))
    if not np.isfinite(total).all():
        raise broken_logits()
    logprobs: Floats = below - total.astype(np.float32)
    return logprobs


def broken_logits() -> ForwardError:
    """Return the error for a row of logits that is not a distribution."""
    return ForwardError(
        "the model gave logits with NaN or +inf, or nothing but -inf; allowed are finite ones "
        "and -inf. Load the model in float32, or check its files",
        hint="Load the model in float32, or check its files.",
    )


def moments(
    logits: Floats, buffers: BufferPool | None = None, peak: Floats | None = None
) -> Moments:
    """Return the moments of rows, with one exp per entry.

    Args:
        logits: float32 [B, V]; not modified.
        buffers: working memory, optional.
        peak: float32 [B], the largest logits, if they are known.

    Raises: ForwardError if a row has NaN, +inf, or no finite entry.
    """
    # Every reduction runs along contiguous rows without a cast: its bits do not depend on B.
    pool = BufferPool() if buffers is None else buffers
    below = pool.get("below", logits.shape, np.float32)
    weights = pool.get("weights", logits.shape, np.float32)
    with np.errstate(invalid="ignore"):
        peak = logits.max(axis=1) if peak is None else peak
        np.subtract(logits, peak[:, None], out=below)
        np.exp(below, out=weights)
        total = weights.sum(axis=1)
        np.multiply(below, weights, out=below)
        mean = below.sum(axis=1)
        if np.isnan(mean).any():
            mean = _sums_without_nan(below, total)
    return moments_from_sums(peak, total, mean)


def moments_from_sums(peak: Floats, total: Floats, mean: Floats) -> Moments:
    """Return the moments of rows from sums that an engine has computed.

    Args:
        peak: [B], the largest logits.
        total: [B], the sum of exp(logit - peak).
        mean: [B], the sum of (logit - peak) * exp(logit - peak).
    """
    log_total = np.log(total)
    entropies = np.maximum(log_total - mean / total, np.float32(0))
    return Moments(peak, total, log_total, entropies)


def surprisal(logits: Floats, token: int) -> float:
    """Return -log p of a token in nats; inf if its logit is -inf.

    logits: raw, float32 [V].
    """
    wide = logits.astype(np.float64)
    peak = wide.max()
    total = float(np.log(np.exp(wide - peak).sum()) + peak)
    value = float(wide[token])
    return max(0.0, total - value) if math.isfinite(value) else math.inf


def entropy(logits: Floats) -> float:
    """Return the entropy in nats of one distribution. logits: raw, float32 [V]."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    weights = np.exp(shifted)
    total = weights.sum()
    finite = weights > 0
    return max(0.0, float(np.log(total) - (weights[finite] * shifted[finite]).sum() / total))


def score_span(span: ScoreSpan, n_vocab: int, logits_of: Callable[[int, int], Floats]) -> Score:
    """Return the scores of a row's span, computed part by part to limit memory.

    Args:
        span: the targets, and the row's token that predicts the first of them.
        n_vocab: the vocabulary size.
        logits_of: called with (first, last); returns the raw logits of the row's tokens from
            `first` to `last` - 1, float32 [last - first, V].

    Raises: ForwardError for a target outside the vocabulary.
    """
    targets = np.array(span.targets, dtype=np.int64)
    if targets.size and not 0 <= int(targets.min()) <= int(targets.max()) < n_vocab:
        raise ForwardError(
            f"a token to score is outside the model's vocabulary of {n_vocab}; "
            f"ids are 0 to {n_vocab - 1}"
        )
    size = max(1, SCORE_NUMBERS // n_vocab)
    parts = []
    for low in range(0, max(len(targets), 1), size):
        some = targets[low : low + size]
        first = span.start + low
        parts.append(score(logits_of(first, first + len(some)), some, span.top))
    return join_scores(parts)


def join_scores(parts: Sequence[Score]) -> Score:
    """Concatenate the scores of consecutive positions into one."""
    if len(parts) == 1:
        return parts[0]
    names = ("logprobs", "entropies", "ranks", "top_ids", "top_logprobs")
    columns = [[getattr(part, name) for part in parts] for name in names]
    joined: list[Any] = [
        None if any(each is None for each in some) else np.concatenate(some) for some in columns
    ]
    return Score(*joined)


def score(logits: Floats, targets: NDArray[np.int64], top: int = 0) -> Score:
    """Return the log-probability, entropy and other statistics of one target per row.

    Args:
        logits: float32 [n, V], raw; not modified.
        targets: int64 [n], token ids.
        top: how many of the most likely ids to list per row.
    """
    stats = moments(logits)
    chosen = logits[np.arange(len(targets)), targets][:, None]
    base = (stats.peak + stats.log_total)[:, None]
    top_ids = largest(logits, top) if top else np.empty((len(targets), 0), dtype=np.int64)
    return Score(
        logprobs=(chosen - stats.peak[:, None] - stats.log_total[:, None])[:, 0],
        entropies=stats.entropies,
        ranks=_ranks(logits, targets, chosen),
        top_ids=top_ids,
        top_logprobs=np.take_along_axis(logits, top_ids, axis=1) - base,
    )


def _ranks(logits: Floats, targets: NDArray[np.int64], chosen: Floats) -> NDArray[np.int64]:
    earlier = np.arange(logits.shape[1]) < targets[:, None]
    before = (logits > chosen) | ((logits == chosen) & earlier)
    ranks: NDArray[np.int64] = before.sum(axis=1, dtype=np.int64)
    return ranks


def _sums_without_nan(products: Floats, total: Floats) -> Floats:
    """Return the sum of each row of `products`, where NaN counts as 0: float32 [B].

    Args:
        products: float32 [B, V], exp(x) * x of x = logit - peak; NaN where x is -inf. Modified.
        total: float32 [B], the sums of exp(x).

    Raises: ForwardError if a total is not finite.
    """
    if not np.isfinite(total).all():
        raise broken_logits()
    sums: Floats = np.nan_to_num(products, copy=False, nan=0.0).sum(axis=1)
    return sums


Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]

GROUP_SIZE = 64
_SQUARE = GROUP_SIZE * GROUP_SIZE
_PAD = np.int64(2**63 - 1)


def group_of(ids: Ids) -> Ids:
    """Return the group of each id: a column of its square of 64 × 64 ids."""
    return (ids >> 12 << 6) | (ids & 63)


def member_of(ids: Ids) -> Ids:
    """Return which member of its group each id is: 0 to GROUP_SIZE - 1."""
    return ids >> 6 & 63


def members(groups: Ids, n_vocab: int = _SQUARE) -> Ids:
    """Return the ids of groups [n], the columns of squares: int64 [n, M].

    The last member may be outside the vocabulary; see `has_ragged_groups`.
    """
    if n_vocab < _SQUARE:  # a group is one column
        return _line_starts(n_vocab) + groups[:, None]
    return ((groups >> 6 << 12) + (groups & 63))[:, None] + _line_starts(n_vocab)


@lru_cache(maxsize=8)
def _line_starts(n_vocab: int) -> Ids:
    lines = np.arange(0, min(_SQUARE, n_vocab), GROUP_SIZE)
    lines.flags.writeable = False
    return lines


def has_ragged_groups(n_vocab: int) -> bool:
    """Return True if some groups are shorter than others in a vocabulary of this size.

    `members` then returns ids outside the vocabulary for the shorter groups.
    """
    if n_vocab <= GROUP_SIZE:  # of one member each
        return False
    return n_vocab % (GROUP_SIZE if n_vocab <= _SQUARE else _SQUARE) != 0


def n_groups(n_vocab: int) -> int:
    """Return the number of groups of a vocabulary: 64 per full square of 4096 ids, at most 64 of
    the rest.

    A group is a column of a square, not a run of ids; see the module's docstring.
    """
    squares, rest = divmod(n_vocab, _SQUARE)
    return squares * GROUP_SIZE + min(rest, GROUP_SIZE)


def group_peaks(values: Floats) -> Floats:
    """Return the largest value of every group, a column of a square: float32 [B, groups].

    Cost: one pass.
    """
    n_rows, n_vocab = values.shape
    n_full = n_vocab // _SQUARE * _SQUARE
    parts = []
    if n_full:
        squares = values[:, :n_full].reshape(n_rows, -1, GROUP_SIZE, GROUP_SIZE)
        half = GROUP_SIZE // 2  # fold: NumPy reduces a middle axis one line at a time
        lines = np.maximum(squares[:, :, :half], squares[:, :, half:])
        while half > 1:
            half //= 2
            np.maximum(lines[:, :, :half], lines[:, :, half : 2 * half], out=lines[:, :, :half])
        parts.append(lines[:, :, 0].reshape(n_rows, -1))
    if n_full < n_vocab:
        rest = values[:, n_full:]
        n_full_lines, n_last = divmod(rest.shape[1], GROUP_SIZE)
        if n_full_lines:
            peaks = (
                rest[:, : n_full_lines * GROUP_SIZE]
                .reshape(n_rows, n_full_lines, GROUP_SIZE)
                .max(axis=1)
            )
            if n_last:
                np.maximum(peaks[:, :n_last], rest[:, -n_last:], out=peaks[:, :n_last])
        else:
            peaks = rest.copy()
        parts.append(peaks)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


class RankedIds(NamedTuple):
    """The largest entries of each row, largest first, equal values by lower id.

    ids: int64 [B, C].

    values: float32 [B, C], -inf after a row's last entry.

    n: int64 [B], number of entries.
    """

    ids: Ids
    values: Floats
    n: Ids


def rank(values: Floats, peaks: Floats, floors: Floats) -> RankedIds:
    """Return each row's finite values at or above its floor, sorted.

    Args:
        values: float32 [B, V].
        peaks: `group_peaks` of the values.
        floors: float32 [B]; -inf ranks all values of a row.
    """
    rows, ids = _entries_above(values, peaks, floors)
    n_rows = len(values)
    n = np.bincount(rows, minlength=n_rows)
    starts = np.cumsum(n) - n
    keys = np.full((n_rows, max(int(n.max(initial=0)), 1)), _PAD)
    keys[rows, np.arange(len(rows)) - starts[rows]] = _keys(values[rows, ids], ids)
    keys.sort(axis=1)
    present = np.arange(keys.shape[1]) < n[:, None]
    ids = np.where(present, keys & 0xFFFFFFFF, 0)
    taken = np.where(present, np.take_along_axis(values, ids, axis=1), np.float32(-np.inf))
    return RankedIds(ids, taken, n)


def kth_floors(peaks: Floats, wanted: Ids) -> Floats:
    """Return for each row a value that at least wanted[row] entries reach: float32 [B].

    -inf if a row has fewer groups than it wants entries.

    Args:
        peaks: `group_peaks` of the rows.
        wanted: int64 [B], numbers of entries.
    """
    n_groups = peaks.shape[1]
    if (wanted == wanted[0]).all():
        if wanted[0] > n_groups:
            return np.full(len(peaks), -np.inf, dtype=np.float32)
        at = n_groups - int(wanted[0])
        edge: Floats = np.partition(peaks, at, axis=1)[:, at]
        return edge
    ordered = np.sort(peaks, axis=1)
    at = np.maximum(n_groups - wanted, 0)[:, None]
    floors = np.take_along_axis(ordered, at, axis=1)[:, 0]
    return np.where(wanted > n_groups, np.float32(-np.inf), floors)


def largest(values: Floats, n: int) -> Ids:
    """Return the ids of each row's n largest values, largest first: int64 [B, n].

    Entries of -inf count too, by lower id. Cost: a pass, and a sort of little more than n.
    """
    n = min(n, values.shape[1])
    peaks = group_peaks(values)
    ranked = rank(values, peaks, kth_floors(peaks, np.full(len(values), n)))
    ids = ranked.ids[:, :n]
    for row in np.flatnonzero(ranked.n < n):  # fewer than n finite values
        rest = np.flatnonzero(np.isneginf(values[row]))
        ids = np.pad(ids, ((0, 0), (0, n - ids.shape[1]))) if ids.shape[1] < n else ids
        ids[row, ranked.n[row] :] = rest[: n - ranked.n[row]]
    return ids


def _entries_above(values: Floats, peaks: Floats, floors: Floats) -> tuple[Ids, Ids]:
    """Return (row, id) of all finite values at or above the row's floor; rows ascend."""
    min_value = np.maximum(floors, np.finfo(np.float32).min)
    n_vocab = values.shape[1]
    rows, groups = np.nonzero(peaks >= min_value[:, None])
    if 2 * len(rows) > peaks.size:  # a pass over all values is cheaper
        at, ids_above = np.nonzero(values >= min_value[:, None])
        return at, ids_above
    ids = members(groups, n_vocab)
    members_values = values[rows[:, None], np.minimum(ids, n_vocab - 1)]
    at, member = np.nonzero((members_values >= min_value[rows][:, None]) & (ids < n_vocab))
    return rows[at], ids[at, member]


def _keys(values: Floats, ids: Ids) -> Ids:
    """Return integers whose ascending order is: largest value first, equal values by lower id."""
    bits = (values + np.float32(0)).view(np.int32).astype(np.int64)  # -0 becomes 0
    ascending = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (~ascending << 32) | ids


# Larger arrays are not pooled: their arithmetic costs more than the page faults.
_MAX_POOLED_BYTES = 8 << 20


class BufferPool:
    """Named buffers that are reused between calls.

    New arrays cost more in page faults than the arithmetic on them. Contents are undefined. One
    thread at a time.
    """

    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers: dict[str, NDArray[Any]] = {}

    def get(self, name: str, shape: tuple[int, int], dtype: DTypeLike) -> NDArray[Any]:
        """Return an uninitialized array, valid until the next `get` with the same name."""
        kept = self._buffers.get(name)
        if kept is not None and kept.shape == shape and kept.dtype == dtype:
            return kept
        fresh: NDArray[Any] = np.empty(shape, dtype)
        if fresh.nbytes <= _MAX_POOLED_BYTES:
            self._buffers[name] = fresh
        return fresh
