"""What happens to logits before a draw: pure functions on [B, V] logits with one parameter a row.

Each returns a new array, with dropped tokens at -inf; the input is not modified. Rows never look at
each other, and no reduction depends on B, so a row gives the same bits alone and in a batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .metrics import log_softmax, shifted
from .order import ascending_ids, descending, largest_mask

Floats = NDArray[np.float32]
Shares = NDArray[np.float64]
Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]

# An infinite logit would make inf - inf later on; this is larger than any and still finite.
_HUGE = np.float32(1e30)
# How many of the likeliest tokens top-p looks at before it looks at all.
_HEAD = 256


def bias(logits: Floats, rows: Counts, ids: Counts, values: Floats) -> Floats:
    """Add `values` to the logits of `ids` in `rows`; no (row, id) pair may come twice."""
    out = logits.copy()
    out[rows, ids] += np.minimum(values, _HUGE)
    return out


def penalties(
    logits: Floats,
    rows: Counts,
    ids: Counts,
    counts: Counts,
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


def top_k(logits: Floats, k: Counts) -> Floats:
    """Keep the k likeliest tokens; k = 0 keeps all, ties go to the lower id."""
    n_vocab = logits.shape[1]
    wanted = np.where(k > 0, np.minimum(k, n_vocab), n_vocab)
    return _without(logits, ~largest_mask(logits, wanted, descending(logits)))


def top_p(logits: Floats, p: Shares) -> Floats:
    """Keep the smallest set of likeliest tokens whose probability reaches p, at least one."""
    ordered = descending(logits)
    wanted = _n_reaching(np.exp(ordered - ordered[:, :1]), p)
    return _without(logits, ~largest_mask(logits, wanted, ordered))


def min_p(logits: Floats, p: Shares) -> Floats:
    """Keep tokens at least p times as likely as the likeliest."""
    with np.errstate(divide="ignore"):
        floor = np.log(p).astype(np.float32)
    return _without(logits, shifted(logits) < floor[:, None])


def typical(logits: Floats, p: Shares) -> Floats:
    """Keep the smallest set of tokens with surprisal nearest the entropy that reaches p.

    Ties go to the lower id.
    """
    logprobs = log_softmax(logits)
    weights = np.exp(logprobs)
    surprisal = np.minimum(-logprobs, _HUGE)
    entropy = (weights * surprisal).sum(axis=1, keepdims=True)
    order = ascending_ids(np.abs(surprisal - entropy))
    wanted = _n_reaching(np.take_along_axis(weights, order, axis=1), p)
    dropped = np.empty(logits.shape, dtype=bool)
    np.put_along_axis(dropped, order, np.arange(logits.shape[1]) >= wanted[:, None], axis=1)
    return _without(logits, dropped)


def _without(logits: Floats, dropped: Mask) -> Floats:
    # NOTE: np.where with a scalar takes ten times as long here.
    out = logits.copy()
    out[dropped] = -np.inf
    return out


def _n_reaching(weights: Floats, p: Shares) -> Counts:
    """Return how many leading weights of each row reach p of the row's total, at least one."""
    exact = weights.astype(np.float64)
    goal = (p * exact.sum(axis=1))[:, None]
    # Mostly a few tokens reach it; a longer prefix sums to the same figures.
    mass = np.cumsum(exact[:, :_HEAD], axis=1)
    if (mass[:, -1:] < goal).any():
        mass = np.cumsum(exact, axis=1)
    # A token stays while the mass before it has not reached p of the whole.
    wanted: Counts = 1 + (mass[:, :-1] < goal).sum(axis=1)
    return wanted
