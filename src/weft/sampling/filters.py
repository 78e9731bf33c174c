"""What happens to logits before a draw: pure functions on [B, V] logits with one parameter a row.

Each returns a new array, with dropped tokens at -inf; the input is not modified. Rows never look at each
other, and no reduction depends on B, so a row gives the same bits alone and in a batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .metrics import log_softmax, shifted

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]
Shares = NDArray[np.float64]

# An infinite bias would make inf - inf later on; this is larger than any logit and still finite.
_HUGE = np.float32(1e30)


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

    rows, ids, counts: one entry for each token a row has seen, with how often it was generated (0: it is in
    the prompt only). repetition, presence, frequency: [B].
    Repetition divides positive logits and multiplies negative ones, for all seen tokens; presence and
    frequency are taken off generated ones.
    """
    out = logits.copy()
    seen = out[rows, ids]
    repeat = repetition[rows]
    seen = np.where(seen > 0, seen / repeat, seen * repeat)
    seen -= frequency[rows] * counts + presence[rows] * (counts > 0)
    out[rows, ids] = seen
    return out


def top_k(logits: Floats, k: Counts) -> Floats:
    """Keep the k likeliest tokens; k = 0 keeps all, ties go to the lower id."""
    n_vocab = logits.shape[1]
    return _keep_largest(logits, np.where(k > 0, np.minimum(k, n_vocab), n_vocab), _descending(logits))


def top_p(logits: Floats, p: Shares) -> Floats:
    """Keep the smallest set of likeliest tokens whose probability reaches p, at least one."""
    ordered = _descending(logits)
    mass = np.cumsum(np.exp(shifted(ordered)), axis=1, dtype=np.float64)
    # A token stays while the mass before it has not reached p of the whole.
    reached = mass[:, :-1] >= (p * mass[:, -1])[:, None]
    return _keep_largest(logits, logits.shape[1] - reached.sum(axis=1), ordered)


def min_p(logits: Floats, p: Shares) -> Floats:
    """Keep tokens at least p times as likely as the likeliest."""
    with np.errstate(divide="ignore"):
        floor = np.log(p).astype(np.float32)
    return np.where(shifted(logits) >= floor[:, None], logits, np.float32(-np.inf))


def typical(logits: Floats, p: Shares) -> Floats:
    """Keep the smallest set of tokens whose surprisal is nearest the entropy, with probability p or more."""
    logprobs = log_softmax(logits)
    weights = np.exp(logprobs)
    surprisal = np.minimum(-logprobs, _HUGE)
    entropy = (weights * surprisal).sum(axis=1, keepdims=True)
    order = np.argsort(np.abs(surprisal - entropy), axis=1, kind="stable")
    mass = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1, dtype=np.float64)
    dropped = np.zeros(logits.shape, dtype=bool)
    dropped[:, 1:] = mass[:, :-1] >= (p * mass[:, -1])[:, None]
    out = logits.copy()
    np.put_along_axis(out, order, np.where(dropped, -np.inf, np.take_along_axis(out, order, 1)), 1)
    return out


def largest(logits: Floats, n: int) -> NDArray[np.int64]:
    """Return the ids of the n largest logits of every row, largest first, ties by lower id: int64 [B, n]."""
    n_rows, n_vocab = logits.shape
    wanted = np.full(n_rows, min(n, n_vocab))
    kept = _largest_mask(logits, wanted, _descending(logits))
    ids = np.nonzero(kept)[1].reshape(n_rows, -1)
    order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1)


def _descending(logits: Floats) -> Floats:
    return np.sort(logits, axis=1)[:, ::-1]


def _keep_largest(logits: Floats, n: Counts, ordered: Floats) -> Floats:
    return np.where(_largest_mask(logits, n, ordered), logits, np.float32(-np.inf))


def _largest_mask(logits: Floats, n: Counts, ordered: Floats) -> NDArray[np.bool_]:
    """Mark the n largest of every row, ties by lower id; `ordered` holds the row's values, largest first."""
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
