"""Edits of logits before a draw, and filters (top-nσ, top-k, typical, top-p, min-p, XTC).

Edits (bias, penalties) are pure functions of [B, V] logits. Filters look at the most likely tokens
only: `filter_logits` ranks as many as they can need. Rows are independent, and no sum depends on B
or on another row's length. So a row gives the same bits alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .metrics import RankedIds, kth_floors, rank

if TYPE_CHECKING:
    from .sampler import SamplingArrays

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]

# An infinite logit would make inf - inf later on; this is larger than any and still finite.
_HUGE = np.float32(1e30)
# Top-p examines this many of the most likely tokens first; more are rarely needed.
_HEAD_SIZE = 512
# Shorter rows are sorted completely, which is faster than a search for a cutoff.
_MAX_RANKED = 4096
# Number of value bins in which the weights of a flat row are summed.
_N_BINS = 8192


def bias(logits: Floats, rows: Ids, ids: Ids, values: Floats) -> Floats:
    """Return a copy of logits with biases added.

    Args:
        logits: float32 [B, V]; not modified.
        rows, ids, values: one entry per bias: the row, the token id, and the number to add. No
            (row, id) pair may occur twice.
    """
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
    """Return a copy of logits with repetition, presence and frequency penalties.

    Repetition divides positive logits and multiplies negative ones, for all tokens of the history.
    Presence and frequency are subtracted for generated tokens.

    Args:
        logits: float32 [B, V]; not modified.
        rows, ids, counts: one entry per token of a row's history. A count of 0 means that the token
            is in the prompt only.
        repetition, presence, frequency: float32 [B], the penalties of each row.
    """
    out = logits.copy()
    values = out[rows, ids]
    repeat = repetition[rows]
    with np.errstate(over="ignore"):
        values = np.where(values > 0, values / repeat, values * repeat)
    generated = counts.astype(np.float32)
    values -= frequency[rows] * generated + presence[rows] * (counts > 0)
    out[rows, ids] = np.minimum(values, _HUGE)
    return out


class Filtered(NamedTuple):
    """Tokens that the filters keep, sorted.

    rows: int64 [B], indices of the filtered rows in the logits.

    ids: int64 [B, C], most likely first.

    heights: float64 [B, C], logits divided by the temperature, minus the row's largest. -inf for
    dropped tokens.

    log_total: float64 [B], log of the sum of exp(heights). So a token's log-probability is its
    height minus this.
    """

    rows: Ids
    ids: Ids
    heights: Doubles
    log_total: Doubles


class Cutoff(NamedTuple):
    """Tokens that the filters keep, as a threshold on the logits.

    rows: int64 [B], indices of the filtered rows in the logits.

    min_logit: float32 [B], the smallest logit that is kept.

    max_id: int64 [B], the highest id that is kept among logits equal to `min_logit`.
    """

    rows: Ids
    min_logit: Floats
    max_id: Ids


def filter_logits(
    logits: Floats, peaks: Floats, arrays: SamplingArrays, rows: Ids, totals: Doubles
) -> Iterator[Filtered]:
    """Yield the tokens that the filters of some rows keep.

    There are one or two results, each for a part of the rows.

    Args:
        logits: float32 [R, V], after bias and penalties.
        peaks: `metrics.group_peaks` of the logits.
        arrays: the parameters of all R rows.
        rows: int64, the rows to filter, ascending.
        totals: `mass` of all R rows. Only rows whose first filter is top-p use it.
    """
    scan = _TopScan.scan(logits, peaks, arrays, rows, totals)
    if scan.complete.all():
        yield _cut(rows, scan.ranked, scan.arrays, scan.total, scan.edges)
        return
    for chosen in (np.flatnonzero(scan.complete), np.flatnonzero(~scan.complete)):
        if len(chosen):
            yield scan.rerank(chosen)


def filter_or_cutoff(
    logits: Floats, peaks: Floats, arrays: SamplingArrays, rows: Ids, totals: Doubles
) -> Iterator[Filtered | Cutoff]:
    """Like `filter_logits`, but yields a `Cutoff` for rows that need no sort.

    These are all rows with top-nσ, min-p or both as their only filters. They are also rows with
    top-p, alone or with min-p, for which too many tokens would be sorted. The arguments are those
    of `filter_logits`.
    """
    active = arrays.active
    above = np.zeros(len(rows), dtype=bool)
    for name in active.keys() & {"top_n_sigma", "min_p"}:
        above = above | active[name][rows]
    for name in active.keys() - {"top_n_sigma", "min_p"}:
        above = above & ~active[name][rows]
    if above.any():
        subset = rows[above]
        tops = peaks[subset].max(axis=1)
        min_logit = _min_p_cutoff(
            tops, arrays.temperature_before[subset], arrays.filters["min_p"][subset]
        )
        if "top_n_sigma" in active:
            n_sigma = arrays.filters["top_n_sigma"][subset]
            min_logit = np.maximum(min_logit, _sigma_cutoff(logits[subset], tops, n_sigma))
        yield Cutoff(subset, min_logit, np.full(len(subset), logits.shape[1]))
        rows = rows[~above]
    if not len(rows):
        return
    scan = _TopScan.scan(logits, peaks, arrays, rows, totals)
    if scan.complete.all():
        yield _cut(rows, scan.ranked, scan.arrays, scan.total, scan.edges)
        return
    use_cutoff = ~scan.complete & (logits.shape[1] > _MAX_RANKED)
    for name in active.keys() - {"top_p", "min_p"}:
        use_cutoff &= ~active[name][rows]
    for part, which in ((scan.cutoff, use_cutoff), (scan.rerank, ~use_cutoff)):
        if which.any():
            yield part(np.flatnonzero(which))


class _TopScan(NamedTuple):
    """The most likely tokens of some rows, ranked as far down as filters usually need.

    rows, logits, peaks, arrays, total: as for `filter_logits`, for these rows only.

    edges: float32 [B], the smallest logit that top-nσ keeps; -inf if it is off.

    sure, floors: [B], `_sure_floors`, and the logit down to which a second scan must rank.

    ranked: the tokens ranked by this scan.

    complete: bool [B], True if the scan of a row was sufficient.
    """

    rows: Ids
    logits: Floats
    peaks: Floats
    arrays: SamplingArrays
    total: Doubles
    edges: Floats
    sure: Floats
    floors: Floats
    ranked: RankedIds
    complete: Flags

    @classmethod
    def scan(
        cls, logits: Floats, peaks: Floats, arrays: SamplingArrays, rows: Ids, totals: Doubles
    ) -> _TopScan:
        is_all = len(rows) == len(logits)
        subset, heads = (logits, peaks) if is_all else (logits[rows], peaks[rows])
        own, total = arrays if is_all else arrays.select(rows), totals[rows]
        edges = np.full(len(subset), -np.inf, dtype=np.float32)
        if "top_n_sigma" in own.active:
            edges = _sigma_cutoff(subset, heads.max(axis=1), own.filters["top_n_sigma"])
        sure = _sure_floors(heads, own, total, edges, logits.shape[1])
        likely = _likely_floors(heads, own, total)
        floors = np.maximum(sure, likely)
        ranked = rank(subset, heads, floors)
        complete: Flags = np.ones(len(rows), dtype=bool)
        if own.top_p_first.any():
            weights = np.exp(_below(ranked, own.temperature_before))
            complete = _sums(weights) >= own.filters["top_p"] * total
            complete |= ~own.top_p_first | (likely <= sure)
            floors = np.where(complete, floors, sure)
        return cls(rows, subset, heads, own, total, edges, sure, floors, ranked, complete)

    def rerank(self, chosen: Ids) -> Filtered:
        """Rank as many tokens as some of the rows need, and filter them.

        chosen: indices of these rows in the scan.
        """
        ranked = rank(self.logits[chosen], self.peaks[chosen], self.floors[chosen])
        arrays = self.arrays.select(chosen)
        return _cut(self.rows[chosen], ranked, arrays, self.total[chosen], self.edges[chosen])

    def cutoff(self, chosen: Ids) -> Cutoff:
        """Return the cutoffs of top-p, and of min-p after it, for some of the rows.

        chosen: indices of these rows in the scan.
        """
        cutoff = Cutoff(
            self.rows[chosen],
            np.empty(len(chosen), dtype=np.float32),
            np.full(len(chosen), self.logits.shape[1]),
        )
        temperature, filters = self.arrays.temperature_before, self.arrays.filters
        for i, row in enumerate(chosen.tolist()):
            wanted = filters["top_p"][row] * self.total[row]
            cutoff.min_logit[i], cutoff.max_id[i] = _find_cutoff(
                self.logits[row], self.sure[row], temperature[row], wanted
            )
        tops = self.peaks[chosen].max(axis=1)
        floor = _min_p_cutoff(tops, temperature[chosen], filters["min_p"][chosen])
        cutoff.max_id[floor > cutoff.min_logit] = self.logits.shape[1]
        return cutoff._replace(min_logit=np.maximum(cutoff.min_logit, floor))


def _find_cutoff(
    logits: Floats, floor: np.float32, temperature: float, wanted: float
) -> tuple[np.float32, int]:
    """Return the logit and the id of the token at which a row's most likely tokens reach a mass.

    Weights are summed in bins of value, and only the bin that reaches the mass is sorted.

    Args:
        logits: float32 [V].
        floor: tokens with smaller logits are ignored.
        temperature: divides the logits.
        wanted: the mass, in units of the most likely token's weight.
    """
    ids = np.flatnonzero(logits >= floor)
    values = logits[ids]
    below = (values.astype(np.float64) - values.max()) / temperature
    weights = np.exp(below)
    lowest = float(below.min()) or -1.0  # 0: all logits are equal
    bins = (below * (_N_BINS / lowest)).astype(np.int64)
    running = np.cumsum(np.bincount(bins, weights))
    at = min(int(np.searchsorted(running, wanted)), len(running) - 1)
    inside = np.flatnonzero(bins == at)
    inside = inside[np.argsort(-values[inside], kind="stable")]  # ids ascend
    before = running[at - 1] if at else 0.0
    nth = int(np.searchsorted(before + np.cumsum(weights[inside]), wanted))
    cutoff = inside[min(nth, len(inside) - 1)]
    return values[cutoff], int(ids[cutoff])


def _min_p_cutoff(tops: Floats, temperature: Doubles, min_p: Doubles) -> Floats:
    """Return the smallest logit that min-p keeps in each row: float32 [B]; -inf if it is off.

    tops: float32 [B], the largest logits.
    """
    lowest = _log(min_p)
    with np.errstate(over="ignore"):
        about = (tops + lowest * temperature).astype(np.float32)
    # `about` may be rounded up or down: test its neighbours too.
    candidates = np.stack(
        (np.nextafter(about, -np.inf), about, np.nextafter(about, np.inf)), axis=1
    )
    wide = (candidates.astype(np.float64) - tops[:, None]) / temperature[:, None]
    enough = np.where(wide >= lowest[:, None], candidates, np.inf).min(axis=1)
    cutoffs: Floats = np.where(np.isneginf(about), about, enough).astype(np.float32)
    return cutoffs


def _sigma_cutoff(logits: Floats, tops: Floats, n: Doubles) -> Floats:
    """Return the smallest logit that top-nσ keeps in each row: float32 [B]; -inf if it is off.

    The standard deviation is that of all logits above -inf.

    Args:
        logits: float32 [B, V].
        tops: float32 [B], the largest logits.
        n: float64 [B], the number of standard deviations.
    """
    cutoffs = np.full(len(logits), -np.inf, dtype=np.float32)
    for row in np.flatnonzero(n).tolist():
        values = logits[row].astype(np.float64)
        if values.min() == -np.inf:
            values = values[values > -np.inf]
        edge = float(tops[row]) - n[row] * values.std()
        # The smallest float32 that is not below the edge.
        nearest = np.float32(max(edge, -_HUGE))
        cutoffs[row] = nearest if nearest >= edge else np.nextafter(nearest, np.float32(np.inf))
    return cutoffs


def mass(logits: Floats, largest: Floats, temperature: Doubles) -> Doubles:
    """Return each row's sum of exp((logit - largest) / temperature): float64 [B].

    largest: float32 [B], the largest logit of each row.
    """
    below = logits - largest[:, None]
    with np.errstate(over="ignore"):
        below /= temperature.astype(np.float32)[:, None]
    total: Doubles = np.exp(below, out=below).sum(axis=1).astype(np.float64)
    return total


def top_choices(logits: Floats, top: np.float32, temperature: float, wanted: float) -> Ids:
    """Return the tokens of at least a weight, most likely first, equal logits by id: int64 [n].

    Args:
        logits: float32 [V].
        top: the largest logit.
        temperature: divides the logits.
        wanted: the weight, in units of the most likely token's weight.
    """
    with np.errstate(divide="ignore", over="ignore"):
        # Rounded down; the exact comparison follows.
        floor = np.float32(float(top) + np.log(wanted) * temperature * (1 + 1e-6) - 1e-6)
    ids = np.flatnonzero((logits >= floor) & (logits > -np.inf))
    below = (logits[ids].astype(np.float64) - float(top)) / temperature
    is_top = np.exp(below) >= wanted
    ids, below = ids[is_top], below[is_top]
    ranked: Ids = ids[np.argsort(-below, kind="stable")]
    return ranked


def _sure_floors(
    peaks: Floats, arrays: SamplingArrays, total: Doubles, edges: Floats, n_vocab: int
) -> Floats:
    """Return for each row a logit: tokens below it change no filter's result. float32 [B].

    The filters drop these tokens, so they need no ranking. -inf if no such logit is known.

    Args:
        peaks: float32 [B, groups], `metrics.group_peaks` of the rows.
        total: float64 [B], `mass` of each row.
        edges: float32 [B], the smallest logit that top-nσ keeps, which is the first filter.
    """
    active = arrays.active
    if active.keys().isdisjoint(("min_p", "top_p")):
        return edges
    floor = _log(arrays.filters["min_p"])
    for name, rows in active.items():  # these filters need the mass of all remaining tokens
        if name not in _WITH_FLOOR:
            floor = np.where(rows, -np.inf, floor)
    for name in active.keys() & {"top_n_sigma", "top_k"} if "top_p" in active else ():
        floor = np.where(active[name] & active["top_p"], -np.inf, floor)
    if arrays.top_p_first.any():
        # All tokens that weigh less than this are together less than what top-p drops.
        share = _log((1 - arrays.filters["top_p"]) * total / n_vocab)
        floor = np.where(arrays.top_p_first, np.maximum(floor, share), floor)
    # Rounded down, so that tokens exactly at the floor are included.
    lowest = (
        peaks.max(axis=1).astype(np.float64) + floor * arrays.temperature_before * (1 + 1e-6) - 1e-6
    )
    rounded: Floats = np.maximum(lowest.astype(np.float32), edges)
    return rounded


def _likely_floors(peaks: Floats, arrays: SamplingArrays, total: Doubles) -> Floats:
    """Return for each row a logit: tokens at or above it usually suffice for top-k and top-p.

    -inf without these filters.

    total: float64 [B], `mass` of each row.
    """
    active, first = arrays.active, arrays.top_p_first
    out = np.full(len(peaks), -np.inf, dtype=np.float32)
    if "top_k" in active:
        top_k = arrays.filters["top_k"]
        out = kth_floors(peaks, np.where(top_k > 0, top_k, peaks.shape[1] + 1))
    if first.any():
        out[first] = _head_floors(
            peaks[first],
            arrays.temperature_before[first],
            arrays.filters["top_p"][first] * total[first],
        )
    return out


def _head_floors(peaks: Floats, temperature: Doubles, wanted: Doubles) -> Floats:
    """Return for each row the logit at which its most likely tokens reach a mass: float32 [B].

    It looks at the largest tokens of the groups only, at most `_HEAD_SIZE` of them. If these do not
    reach the mass, it returns the smallest of them, because other tokens of the groups may suffice.

    wanted: float64 [B], the mass, in units of the most likely token's weight.
    """
    n = max(1, min(_HEAD_SIZE, peaks.shape[1] // 2))
    best = -np.sort(np.partition(-peaks, n - 1, axis=1)[:, :n], axis=1)
    weights = np.exp((best.astype(np.float64) - best[:, :1]) / temperature[:, None])
    at = np.minimum((_running(weights) < wanted[:, None]).sum(axis=1), n - 1)
    floors: Floats = best[np.arange(len(best)), at]
    return floors


def _cut(
    rows: Ids, ranked: RankedIds, arrays: SamplingArrays, total: Doubles, edges: Floats
) -> Filtered:
    """Apply all active filters to ranked tokens, and divide by the temperature if it comes last.

    Args:
        total: float64 [B], `mass` of each row, for top-p as the first filter.
        edges: float32 [B], the smallest logit that top-nσ keeps.
    """
    below = _below(ranked, arrays.temperature_before)
    below[np.arange(below.shape[1]) >= ranked.n[:, None]] = -np.inf
    mass = np.where(arrays.top_p_first, total, 0.0)
    top = ranked.values[:, 0].astype(np.float64)
    edge = (edges.astype(np.float64) - top) / arrays.temperature_before
    for name, row_flags in arrays.active.items():
        candidates = Candidates(ranked.ids, below, mass, edge, arrays.xtc_threshold)
        keep = CUTS[name](candidates, arrays.filters[name])
        if not row_flags.all():
            keep |= ~row_flags[:, None]
        below = np.where(keep, below, -np.inf)
    heights = below - below.max(axis=1, keepdims=True)  # a filter may drop the likeliest
    heights /= arrays.temperature_after[:, None]
    return Filtered(rows, ranked.ids, heights, np.log(_sums(np.exp(heights))))


class Candidates(NamedTuple):
    """Tokens that earlier filters have kept; a filter does not modify them.

    ids: int64 [B, C], most likely first, equal logits by id.

    below: float64 [B, C], logits minus the row's largest; -inf for dropped tokens.

    top_p_mass: float64 [B], for top-p only: the mass of the full row if no filter came before it,
    else 0.

    edge: float64 [B], for top-nσ only: the smallest `below` that it keeps.

    xtc_threshold: float64 [B], for XTC only.
    """

    ids: Ids
    below: Doubles
    top_p_mass: Doubles
    edge: Doubles
    xtc_threshold: Doubles


# Filters take the candidates and their parameter, [B], and return what to keep: bool [B, C]. Rows
# that do not use a filter ignore its result.


def _top_n_sigma(candidates: Candidates, n: Doubles) -> Flags:
    """Return True for tokens at most `n` standard deviations below the largest: bool [B, C].

    `Candidates.edge` is computed from `n`, because the standard deviation is that of full rows.
    """
    keep: Flags = candidates.below >= candidates.edge[:, None]
    return keep


def _top_k(candidates: Candidates, k: Ids) -> Flags:
    """Return True for the `k` most likely tokens of each row: bool [B, C]. k: int64 [B]."""
    keep: Flags = np.arange(candidates.ids.shape[1]) < k[:, None]
    return keep


def _typical(candidates: Candidates, share: Doubles) -> Flags:
    """Return True for the tokens of locally typical sampling: bool [B, C].

    Tokens whose surprisal is nearest to the entropy are kept first, until their probabilities reach
    the share.

    share: float64 [B].
    """
    weights = np.exp(candidates.below)
    total = _sums(weights)[:, None]
    surprisal = np.log(total) - np.where(np.isneginf(candidates.below), 0.0, candidates.below)
    entropy = _sums(weights * surprisal)[:, None] / total
    away = np.where(np.isneginf(candidates.below), np.inf, np.abs(surprisal - entropy))
    order = np.lexsort((candidates.ids, away), axis=1)
    running = _running(np.take_along_axis(weights, order, axis=1))
    wanted = np.ones(order.shape, dtype=bool)
    wanted[:, 1:] = running[:, :-1] < share[:, None] * total
    keep = np.empty_like(wanted)
    np.put_along_axis(keep, order, wanted, axis=1)
    return keep


def _top_p(candidates: Candidates, share: Doubles) -> Flags:
    """Return True for the most likely tokens that together reach a share: bool [B, C].

    share: float64 [B], 0 to 1, of the summed probability of the candidates.
    """
    running = _running(np.exp(candidates.below))
    total = np.where(candidates.top_p_mass > 0, candidates.top_p_mass, running[:, -1])
    keep = np.ones(running.shape, dtype=bool)
    keep[:, 1:] = running[:, :-1] < (share * total)[:, None]
    return keep


def _min_p(candidates: Candidates, share: Doubles) -> Flags:
    """Return True for tokens with a share of the most likely token's probability: bool [B, C].

    share: float64 [B], the smallest ratio of the two probabilities that is kept.
    """
    largest = candidates.below.max(axis=1, keepdims=True)
    keep: Flags = candidates.below - largest >= _log(share)[:, None]
    return keep


def _xtc(candidates: Candidates, _: Doubles) -> Flags:
    """Return True for all but the top choices, of which the least likely stays: bool [B, C].

    Top choices are tokens of at least the threshold's probability. `SamplingArrays.with_xtc_drawn`
    has decided which rows use this filter.
    """
    weights = np.exp(candidates.below)
    wanted = candidates.xtc_threshold[:, None] * _sums(weights)[:, None]
    is_top = (weights >= wanted) & ~np.isneginf(candidates.below)
    n_top = np.cumsum(is_top, axis=1)
    keep: Flags = ~is_top | (n_top == n_top[:, -1:])
    return keep


# By parameter name; filters run in the order of `params.PARAMETERS`.
CUTS: Mapping[str, Callable[[Candidates, NDArray[Any]], Flags]] = {
    "top_n_sigma": _top_n_sigma,
    "top_k": _top_k,
    "typical_p": _typical,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc_probability": _xtc,
}
# Filters whose result for a token depends on more likely tokens only. Min-p's floor may remove less
# likely tokens before them. A filter that needs a sum over all candidates is not among them: its
# rows are ranked completely. XTC, which runs after min-p, needs only what min-p keeps.
_WITH_FLOOR = {"top_n_sigma", "top_k", "top_p", "min_p", "xtc_probability"}


def _below(ranked: RankedIds, temperature: Doubles) -> Doubles:
    values = ranked.values.astype(np.float64)
    below: Doubles = (values - values[:, :1]) / temperature[:, None]
    return below


def _running(weights: Doubles) -> Doubles:
    """Return cumulative sums along each row.

    Terms are added strictly in order, so that trailing zeros do not change the rounding.
    """
    return np.cumsum(weights, axis=1)


def _sums(weights: Doubles) -> Doubles:
    """Return the sum of each row, rounded as the last entry of `_running`: float64 [B]."""
    total: Doubles = _running(weights)[:, -1]
    return total


def _log(shares: Doubles) -> Doubles:
    """Return logarithms; -inf for 0, without a warning."""
    with np.errstate(divide="ignore"):
        logs: Doubles = np.log(shares)
    return logs
