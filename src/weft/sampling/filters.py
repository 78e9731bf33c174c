"""What happens to logits before a draw: edits of whole rows, then cuts of what is likeliest.

Edits (bias, penalties) are pure functions on [B, V] logits. Filters look at the likeliest tokens
only: `left` finds as many as they can need, in order, and says how much each weighs. Rows never
look at each other, and no sum depends on B or on a companion's length, so a row gives the same bits
alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .metrics import RankedIds, floors_of, rank
from .params import SamplingArrays

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]

# An infinite logit would make inf - inf later on; this is larger than any and still finite.
_HUGE = np.float32(1e30)
# How many of the likeliest tokens top-p looks at first; seldom are more needed.
_HEAD = 512


def bias(logits: Floats, rows: Ids, ids: Ids, values: Floats) -> Floats:
    """Add `values` to the logits of `ids` in `rows`; no (row, id) pair may come twice."""
    out = logits.copy()
    out[rows, ids] += np.minimum(values, _HUGE)
    return out


def penalties(
    logits: Floats,
    rows: Ids,
    ids: Ids,
    counts: Ids,
    repetition: Floats,
    presence: Floats,
    frequency: Floats,
) -> Floats:
    """Push down tokens that came before.

    rows, ids, counts: one entry for each token a row has seen, with how often it was generated
    (0: it is in the prompt only). repetition, presence, frequency: [B].
    Repetition divides positive logits and multiplies negative ones, for all seen tokens; presence
    and frequency are taken off generated ones.
    """
    out = logits.copy()
    seen = out[rows, ids]
    repeat = repetition[rows]
    with np.errstate(over="ignore"):
        seen = np.where(seen > 0, seen / repeat, seen * repeat)
    generated = counts.astype(np.float32)
    seen -= frequency[rows] * generated + presence[rows] * (counts > 0)
    out[rows, ids] = np.minimum(seen, _HUGE)
    return out


class Left(NamedTuple):
    """What filters leave of some rows.

    rows: int64 [B]. ids: int64 [B, C], likeliest first. heights: float64 [B, C], tempered logits
    below the row's largest; -inf for what is dropped. log_total: float64 [B], logarithm of the sum
    of their exponentials.
    """

    rows: Ids
    ids: Ids
    heights: Doubles
    log_total: Doubles


def left(
    logits: Floats, peaks: Floats, arrays: SamplingArrays, rows: Ids, totals: Doubles
) -> Iterator[Left]:
    """Yield what the filters of some rows leave, in one part or two.

    logits: float32 [R, V], edited; peaks: `order.group_peaks` of them. arrays: of all R rows.
    rows: int64, ascending. totals: `mass` of all R rows, looked at where top-p cuts first.
    """
    everyone = len(rows) == len(logits)
    some, heads = (logits, peaks) if everyone else (logits[rows], peaks[rows])
    mine, total = arrays if everyone else arrays.take(rows), totals[rows]
    sure = _sure_floors(heads, mine, total, logits.shape[1])
    likely = _likely_floors(heads, mine)
    ranked = rank(some, heads, np.maximum(sure, likely))
    if not mine.mass_first.any():
        yield _cut(rows, ranked, mine, total)
        return
    weights = np.exp(_below(ranked, mine.early))
    reached: Flags = _sums(weights) >= mine.top_p * total
    reached |= ~mine.mass_first | (likely <= sure)
    if reached.all():
        yield _cut(rows, ranked, mine, total)
        return
    floors = np.where(reached, np.maximum(sure, likely), sure)
    for chosen in (np.flatnonzero(reached), np.flatnonzero(~reached)):
        if len(chosen):
            again = rank(some[chosen], heads[chosen], floors[chosen])
            yield _cut(rows[chosen], again, mine.take(chosen), total[chosen])


def mass(logits: Floats, largest: Floats, temperature: Doubles) -> Doubles:
    """Return every row's sum of exp((logit - largest) / temperature): float64 [B]."""
    below = logits - largest[:, None]
    with np.errstate(over="ignore"):
        below /= temperature.astype(np.float32)[:, None]
    total: Doubles = np.exp(below, out=below).sum(axis=1).astype(np.float64)
    return total


def _sure_floors(peaks: Floats, arrays: SamplingArrays, total: Doubles, n_vocab: int) -> Floats:
    """Return for each row a logit that nothing below can be needed; -inf where none is known."""
    if arrays.uses.isdisjoint(("min_p", "top_p")):
        return np.full(len(peaks), -np.inf, dtype=np.float32)
    floor = arrays.log_min_p
    if len(arrays.uses) > 1:  # these two must know how much all weighs that is left to them
        whole = (arrays.typical_p < 1) | ((arrays.top_p < 1) & (arrays.top_k > 0))
        floor = np.where(whole, -np.inf, floor)
    if arrays.mass_first.any():
        # All tokens that weigh less than this are together less than what top-p drops.
        with np.errstate(divide="ignore"):
            share = np.log((1 - arrays.top_p) * total / n_vocab)
        floor = np.where(arrays.mass_first, np.maximum(floor, share), floor)
    # Rounded down, so that what lies on the floor is there.
    lowest = peaks.max(axis=1).astype(np.float64) + floor * arrays.early * (1 + 1e-6) - 1e-6
    rounded: Floats = lowest.astype(np.float32)
    return rounded


def _likely_floors(peaks: Floats, arrays: SamplingArrays) -> Floats:
    """Return for each row a logit above which there are as many tokens as it takes, as a rule."""
    if arrays.uses.isdisjoint(("top_k", "top_p")):
        return np.full(len(peaks), -np.inf, dtype=np.float32)
    n_groups = peaks.shape[1]
    head = max(1, min(_HEAD, n_groups // 2))
    wanted = np.where(arrays.mass_first, head, n_groups + 1)
    return floors_of(peaks, np.where(arrays.top_k > 0, arrays.top_k, wanted))


def _cut(rows: Ids, ranked: RankedIds, arrays: SamplingArrays, total: Doubles) -> Left:
    """Apply top-k, typical, top-p and min-p to what is ranked, then the late temperature."""
    below = _below(ranked, arrays.early)
    n = ranked.n
    if "top_k" in arrays.uses:
        n = np.where(arrays.top_k > 0, np.minimum(arrays.top_k, n), n)
    kept = np.arange(below.shape[1]) < n[:, None]
    if "typical_p" in arrays.uses:
        kept &= _typical(np.where(kept, below, -np.inf), ranked.ids, arrays.typical_p)
    if "top_p" in arrays.uses:
        running = _running(np.where(kept, np.exp(below), 0.0))
        whole = np.where(arrays.mass_first, total, running[:, -1])
        off = (arrays.top_p >= 1)[:, None]
        kept[:, 1:] &= off | (running[:, :-1] < (arrays.top_p * whole)[:, None])
    heights = np.where(kept, below, -np.inf)
    if "typical_p" in arrays.uses:  # it may have dropped the likeliest
        heights -= heights.max(axis=1, keepdims=True)
    if "min_p" in arrays.uses:
        heights[heights < arrays.log_min_p[:, None]] = -np.inf
    heights /= arrays.late[:, None]
    return Left(rows, ranked.ids, heights, np.log(_sums(np.exp(heights))))


def _typical(below: Doubles, ids: Ids, share: Doubles) -> Flags:
    """Mark the smallest set with surprisal nearest the entropy that reaches its share."""
    weights = np.exp(below)
    total = _sums(weights)[:, None]
    surprisal = np.log(total) - np.where(np.isneginf(below), 0.0, below)
    entropy = _sums(weights * surprisal)[:, None] / total
    away = np.where(np.isneginf(below), np.inf, np.abs(surprisal - entropy))
    order = np.lexsort((ids, away), axis=1)
    running = _running(np.take_along_axis(weights, order, axis=1))
    wanted = np.ones(order.shape, dtype=bool)
    wanted[:, 1:] = running[:, :-1] < share[:, None] * total
    wanted |= (share >= 1)[:, None]
    kept = np.empty_like(wanted)
    np.put_along_axis(kept, order, wanted, axis=1)
    return kept


def _below(ranked: RankedIds, temperature: Doubles) -> Doubles:
    values = ranked.values.astype(np.float64)
    below: Doubles = (values - values[:, :1]) / temperature[:, None]
    return below


def _running(weights: Doubles) -> Doubles:
    """Sum along the rows one by one: zeros behind the last change nothing, not even rounding."""
    return np.cumsum(weights, axis=1)


def _sums(weights: Doubles) -> Doubles:
    """Return every row's `_running` sum: float64 [B]."""
    whole: Doubles = _running(weights)[:, -1]
    return whole
