"""What happens to logits before a draw: edits of whole rows, then cuts of what is likeliest.

Edits (bias, penalties) are pure functions on [B, V] logits. Filters look at the likeliest tokens
only: `left` finds as many as they can need, in order, and says how much each weighs. Rows never
look at each other, and no sum depends on B or on a companion's length, so a row gives the same bits
alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .metrics import RankedIds, floors_of, rank

if TYPE_CHECKING:
    from .sampler import SamplingArrays

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
Flags = NDArray[np.bool_]

# An infinite logit would make inf - inf later on; this is larger than any and still finite.
_HUGE = np.float32(1e30)
# How many of the likeliest tokens top-p looks at first; seldom are more needed.
_HEAD = 512
# Rows no longer than this are ranked whole sooner than an edge is found in them.
_RANKED_WHOLE = 4096
# Into so many ranges of value a flat row's weights are added up.
_N_RANGES = 8192


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


class Edge(NamedTuple):
    """What filters leave of some rows where a logit's value says it, not its place in an order.

    rows: int64 [B]. least: float32 [B], the smallest logit that is kept. last: int64 [B], the
    highest id that is kept of those equal to it.
    """

    rows: Ids
    least: Floats
    last: Ids


def left(
    logits: Floats, peaks: Floats, arrays: SamplingArrays, rows: Ids, totals: Doubles
) -> Iterator[Left]:
    """Yield what the filters of some rows leave, in one part or two.

    logits: float32 [R, V], edited; peaks: `metrics.group_peaks` of them. arrays: of all R rows.
    rows: int64, ascending. totals: `mass` of all R rows, looked at where top-p cuts first.
    """
    look = _Look.at(logits, peaks, arrays, rows, totals)
    if look.reached.all():
        yield _cut(rows, look.ranked, look.arrays, look.total)
        return
    for chosen in (np.flatnonzero(look.reached), np.flatnonzero(~look.reached)):
        if len(chosen):
            yield look.again(chosen)


def left_or_edge(
    logits: Floats, peaks: Floats, arrays: SamplingArrays, rows: Ids, totals: Doubles
) -> Iterator[Left | Edge]:
    """Yield the same, but an `Edge` of flat rows: they keep too much for an order to be made of it.

    That is what asks for min-p alone, and where the head of a row does not reach top-p's share.
    """
    asked = arrays.asked
    none = np.zeros(len(rows), dtype=bool)
    above = asked["min_p"][rows] if "min_p" in asked else none
    for name in asked.keys() - {"min_p"}:
        above = above & ~asked[name][rows]
    if above.any():
        some = rows[above]
        tops = peaks[some].max(axis=1)
        least = _least_kept(tops, arrays.early[some], arrays.filters["min_p"][some])
        yield Edge(some, least, np.full(len(some), logits.shape[1]))
        rows = rows[~above]
    if not len(rows):
        return
    look = _Look.at(logits, peaks, arrays, rows, totals)
    if look.reached.all():
        yield _cut(rows, look.ranked, look.arrays, look.total)
        return
    by_value = ~look.reached & (logits.shape[1] > _RANKED_WHOLE)
    for name in asked.keys() - {"top_p", "min_p"}:
        by_value &= ~asked[name][rows]
    for part, which in ((look.edge, by_value), (look.again, ~by_value)):
        if which.any():
            yield part(np.flatnonzero(which))


class _Look(NamedTuple):
    """A first look at some rows: as many of the likeliest as it takes as a rule.

    reached: whether that was enough. The rest is as `left` has it, of these rows alone.
    """

    rows: Ids
    logits: Floats
    peaks: Floats
    arrays: SamplingArrays
    total: Doubles
    sure: Floats
    floors: Floats
    ranked: RankedIds
    reached: Flags

    @classmethod
    def at(
        cls, logits: Floats, peaks: Floats, arrays: SamplingArrays, rows: Ids, totals: Doubles
    ) -> _Look:
        everyone = len(rows) == len(logits)
        some, heads = (logits, peaks) if everyone else (logits[rows], peaks[rows])
        mine, total = arrays if everyone else arrays.take(rows), totals[rows]
        sure = _sure_floors(heads, mine, total, logits.shape[1])
        likely = _likely_floors(heads, mine, total)
        floors = np.maximum(sure, likely)
        ranked = rank(some, heads, floors)
        reached: Flags = np.ones(len(rows), dtype=bool)
        if mine.mass_first.any():
            weights = np.exp(_below(ranked, mine.early))
            reached = _sums(weights) >= mine.filters["top_p"] * total
            reached |= ~mine.mass_first | (likely <= sure)
            floors = np.where(reached, floors, sure)
        return cls(rows, some, heads, mine, total, sure, floors, ranked, reached)

    def again(self, chosen: Ids) -> Left:
        """Cut some of the rows, ranked as far down as it takes them."""
        ranked = rank(self.logits[chosen], self.peaks[chosen], self.floors[chosen])
        return _cut(self.rows[chosen], ranked, self.arrays.take(chosen), self.total[chosen])

    def edge(self, chosen: Ids) -> Edge:
        """Find where top-p, and min-p after it, cut some of the rows."""
        edge = Edge(
            self.rows[chosen],
            np.empty(len(chosen), dtype=np.float32),
            np.full(len(chosen), self.logits.shape[1]),
        )
        early, filters = self.arrays.early, self.arrays.filters
        for i, row in enumerate(chosen.tolist()):
            wanted = filters["top_p"][row] * self.total[row]
            edge.least[i], edge.last[i] = _where_reached(
                self.logits[row], self.sure[row], early[row], wanted
            )
        tops = self.peaks[chosen].max(axis=1)
        floor = _least_kept(tops, early[chosen], filters["min_p"][chosen])
        edge.last[floor > edge.least] = self.logits.shape[1]
        return edge._replace(least=np.maximum(edge.least, floor))


def _where_reached(
    logits: Floats, floor: np.float32, early: float, wanted: float
) -> tuple[np.float32, int]:
    """Return the logit and the id at which the likeliest tokens of a row reach what is wanted.

    Nothing below the floor is needed. Weights are added up by value in many small ranges, and only
    what lies in the range that reaches it is put in order.
    """
    ids = np.flatnonzero(logits >= floor)
    values = logits[ids]
    below = (values.astype(np.float64) - values.max()) / early
    weights = np.exp(below)
    lowest = float(below.min()) or -1.0  # 0: all are level, and min-p's floor is above the rest
    ranges = (below * (_N_RANGES / lowest)).astype(np.int64)
    running = np.cumsum(np.bincount(ranges, weights))
    at = min(int(np.searchsorted(running, wanted)), len(running) - 1)
    inside = np.flatnonzero(ranges == at)
    inside = inside[np.argsort(-values[inside], kind="stable")]  # ids ascend
    before = running[at - 1] if at else 0.0
    nth = int(np.searchsorted(before + np.cumsum(weights[inside]), wanted))
    edge = inside[min(nth, len(inside) - 1)]
    return values[edge], int(ids[edge])


def _least_kept(tops: Floats, early: Doubles, min_p: Doubles) -> Floats:
    """Return the least logit of each row that min-p keeps: float32 [B]; -inf where it is off."""
    lowest = _logs(min_p)
    with np.errstate(over="ignore"):
        about = (tops + lowest * early).astype(np.float32)
    # Rounding may have gone either way.
    tried = np.stack((np.nextafter(about, -np.inf), about, np.nextafter(about, np.inf)), axis=1)
    wide = (tried.astype(np.float64) - tops[:, None]) / early[:, None]
    enough = np.where(wide >= lowest[:, None], tried, np.inf).min(axis=1)
    found: Floats = np.where(np.isneginf(about), about, enough).astype(np.float32)
    return found


def mass(logits: Floats, largest: Floats, temperature: Doubles) -> Doubles:
    """Return every row's sum of exp((logit - largest) / temperature): float64 [B]."""
    below = logits - largest[:, None]
    with np.errstate(over="ignore"):
        below /= temperature.astype(np.float32)[:, None]
    total: Doubles = np.exp(below, out=below).sum(axis=1).astype(np.float64)
    return total


def _sure_floors(peaks: Floats, arrays: SamplingArrays, total: Doubles, n_vocab: int) -> Floats:
    """Return for each row a logit that nothing below can be needed; -inf where none is known."""
    asked = arrays.asked
    if asked.keys().isdisjoint(("min_p", "top_p")):
        return np.full(len(peaks), -np.inf, dtype=np.float32)
    floor = _logs(arrays.filters["min_p"])
    for name, rows in asked.items():  # who must know how much all weighs that is left to it
        if name not in _WITH_FLOOR:
            floor = np.where(rows, -np.inf, floor)
    if "top_k" in asked and "top_p" in asked:
        floor = np.where(asked["top_k"] & asked["top_p"], -np.inf, floor)
    if arrays.mass_first.any():
        # All tokens that weigh less than this are together less than what top-p drops.
        share = _logs((1 - arrays.filters["top_p"]) * total / n_vocab)
        floor = np.where(arrays.mass_first, np.maximum(floor, share), floor)
    # Rounded down, so that what lies on the floor is there.
    lowest = peaks.max(axis=1).astype(np.float64) + floor * arrays.early * (1 + 1e-6) - 1e-6
    rounded: Floats = lowest.astype(np.float32)
    return rounded


def _likely_floors(peaks: Floats, arrays: SamplingArrays, total: Doubles) -> Floats:
    """Return for each row a logit above which there are as many tokens as it takes, as a rule."""
    asked, first = arrays.asked, arrays.mass_first
    out = np.full(len(peaks), -np.inf, dtype=np.float32)
    if "top_k" in asked:
        top_k = arrays.filters["top_k"]
        out = floors_of(peaks, np.where(top_k > 0, top_k, peaks.shape[1] + 1))
    if first.any():
        out[first] = _heads(
            peaks[first], arrays.early[first], arrays.filters["top_p"][first] * total[first]
        )
    return out


def _heads(peaks: Floats, early: Doubles, wanted: Doubles) -> Floats:
    """Return for each row a logit down to which its likeliest tokens weigh what is wanted.

    The largest tokens of groups alone are added up; where a good many of them are not enough, it is
    the last of these, and the tokens beside them may be.
    """
    n = max(1, min(_HEAD, peaks.shape[1] // 2))
    best = -np.sort(np.partition(-peaks, n - 1, axis=1)[:, :n], axis=1)
    weights = np.exp((best.astype(np.float64) - best[:, :1]) / early[:, None])
    at = np.minimum((_running(weights) < wanted[:, None]).sum(axis=1), n - 1)
    floors: Floats = best[np.arange(len(best)), at]
    return floors


def _cut(rows: Ids, ranked: RankedIds, arrays: SamplingArrays, total: Doubles) -> Left:
    """Apply every filter that is asked for to what is ranked, then the late temperature."""
    below = _below(ranked, arrays.early)
    below[np.arange(below.shape[1]) >= ranked.n[:, None]] = -np.inf
    mass = np.where(arrays.mass_first, total, 0.0)
    for name, asking in arrays.asked.items():
        kept = CUTS[name](Remaining(ranked.ids, below, mass), arrays.filters[name])
        if not asking.all():
            kept |= ~asking[:, None]
        below = np.where(kept, below, -np.inf)
    heights = below - below.max(axis=1, keepdims=True)  # a filter may drop the likeliest
    heights /= arrays.late[:, None]
    return Left(rows, ranked.ids, heights, np.log(_sums(np.exp(heights))))


class Remaining(NamedTuple):
    """What filters before this one have left of some rows, which it looks at and does not change.

    ids: int64 [B, C], likeliest first, equals by id. below: float64 [B, C], how far the logits lie
    below the row's largest; -inf for what is dropped. top_p_mass: float64 [B], for top-p alone: the
    sum of the whole row's exponentials where no filter came before it; else 0.
    """

    ids: Ids
    below: Doubles
    top_p_mass: Doubles


# Filters take what is left and their parameter, [B], and mark what to keep: bool [B, C]. What they
# mark for rows that do not ask for them has no effect.


def _top_k(left: Remaining, k: Ids) -> Flags:
    """Mark the k likeliest."""
    marked: Flags = np.arange(left.ids.shape[1]) < k[:, None]
    return marked


def _typical(left: Remaining, share: Doubles) -> Flags:
    """Mark the smallest set with surprisal nearest the entropy that reaches its share."""
    weights = np.exp(left.below)
    total = _sums(weights)[:, None]
    surprisal = np.log(total) - np.where(np.isneginf(left.below), 0.0, left.below)
    entropy = _sums(weights * surprisal)[:, None] / total
    away = np.where(np.isneginf(left.below), np.inf, np.abs(surprisal - entropy))
    order = np.lexsort((left.ids, away), axis=1)
    running = _running(np.take_along_axis(weights, order, axis=1))
    wanted = np.ones(order.shape, dtype=bool)
    wanted[:, 1:] = running[:, :-1] < share[:, None] * total
    kept = np.empty_like(wanted)
    np.put_along_axis(kept, order, wanted, axis=1)
    return kept


def _top_p(left: Remaining, share: Doubles) -> Flags:
    """Mark the likeliest until they reach their share."""
    running = _running(np.exp(left.below))
    whole = np.where(left.top_p_mass > 0, left.top_p_mass, running[:, -1])
    kept = np.ones(running.shape, dtype=bool)
    kept[:, 1:] = running[:, :-1] < (share * whole)[:, None]
    return kept


def _min_p(left: Remaining, share: Doubles) -> Flags:
    """Mark what weighs no less than this share of the likeliest that is left."""
    largest = left.below.max(axis=1, keepdims=True)
    kept: Flags = left.below - largest >= _logs(share)[:, None]
    return kept


# By the parameter's name; they cut in the order of its table.
CUTS: Mapping[str, Callable[[Remaining, NDArray[Any]], Flags]] = {
    "top_k": _top_k,
    "typical_p": _typical,
    "top_p": _top_p,
    "min_p": _min_p,
}
# Those whose mark on a token depends on the likelier ones only: min-p's floor may cut what lies
# below before they look. A filter that needs a sum or a mean over all that is left to it is not
# among them: rows that ask for it are ranked as far down as tokens can reach.
_WITH_FLOOR = {"top_k", "top_p", "min_p"}


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


def _logs(shares: Doubles) -> Doubles:
    """Return logarithms; of 0 it is -inf."""
    with np.errstate(divide="ignore"):
        logs: Doubles = np.log(shares)
    return logs
