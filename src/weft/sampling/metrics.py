"""Log-probabilities and entropies: raw logits, full vocabulary, natural log."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engines.base import Score
from ..errors import ForwardError
from .order import largest
from .scratch import Scratch

Floats = NDArray[np.float32]


class Moments(NamedTuple):
    """What one pass over logits [B, V] gives.

    peak: [B], the largest logit. total: [B], the sum of exp(logit - peak). log_total: its
    logarithm. entropies: [B], nats.
    """

    peak: Floats
    total: Floats
    log_total: Floats
    entropies: Floats


def shifted(logits: Floats) -> Floats:
    """Return the logits minus their row's largest."""
    below: Floats = logits - logits.max(axis=1, keepdims=True)
    return below


def log_softmax(logits: Floats) -> Floats:
    """Return log-probabilities: float32 [B, V]."""
    below = shifted(logits)
    logprobs: Floats = below - np.log(np.exp(below).sum(axis=1, keepdims=True))
    return logprobs


def moments(logits: Floats, scratch: Scratch | None = None) -> Moments:
    """Return what a draw and its figures share, with one exp an entry.

    logits: float32 [B, V]; not modified. scratch: working memory, if given.
    Raises: ForwardError if a row has NaN, +inf, or no finite entry at all.
    """
    # Every reduction runs along contiguous rows without a cast: its bits do not depend on B.
    space = Scratch() if scratch is None else scratch
    below = space.take("below", logits.shape, np.float32)
    weights = space.take("weights", logits.shape, np.float32)
    with np.errstate(invalid="ignore"):
        peak = logits.max(axis=1)
        np.subtract(logits, peak[:, None], out=below)
        np.exp(below, out=weights)
        total = weights.sum(axis=1)
        np.multiply(below, weights, out=below)
        mean = below.sum(axis=1)
        if np.isnan(mean).any():
            mean = _repaired(below, total)
    log_total = np.log(total)
    entropies = np.maximum(log_total - mean / total, np.float32(0))
    return Moments(peak, total, log_total, entropies)


def score(logits: Floats, targets: NDArray[np.int64], top: int = 0) -> Score:
    """Score one target a row. logits: float32 [n, V], raw; not modified."""
    found = moments(logits)
    chosen = logits[np.arange(len(targets)), targets][:, None]
    base = (found.peak + found.log_total)[:, None]
    top_ids = largest(logits, top) if top else np.empty((len(targets), 0), dtype=np.int64)
    return Score(
        logprobs=(chosen - found.peak[:, None] - found.log_total[:, None])[:, 0],
        entropies=found.entropies,
        ranks=_ranks(logits, targets, chosen),
        top_ids=top_ids,
        top_logprobs=np.take_along_axis(logits, top_ids, axis=1) - base,
    )


def _ranks(logits: Floats, targets: NDArray[np.int64], chosen: Floats) -> NDArray[np.int64]:
    earlier = np.arange(logits.shape[1]) < targets[:, None]
    before = (logits > chosen) | ((logits == chosen) & earlier)
    ranks: NDArray[np.int64] = before.sum(axis=1, dtype=np.int64)
    return ranks


def _repaired(products: Floats, total: Floats) -> Floats:
    """Return the row sums of weight * shifted logit, where -inf logits made 0 * -inf = NaN."""
    if not np.isfinite(total).all():
        raise ForwardError(
            "the model gave logits with NaN or +inf, or nothing but -inf; allowed are finite ones "
            "and -inf. Load the model in float32, or check its files",
            hint="Load the model in float32, or check its files.",
        )
    sums: Floats = np.nan_to_num(products, copy=False, nan=0.0).sum(axis=1)
    return sums
