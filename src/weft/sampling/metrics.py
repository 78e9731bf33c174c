"""Log-probabilities and entropies: raw logits, full vocabulary, natural log."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engines.base import Score, ScoreSpan
from ..errors import ForwardError
from .order import largest
from .scratch import Scratch

Floats = NDArray[np.float32]
# Logits of scored positions are made this many numbers at a time, so that [T, V] never exists.
SCORE_NUMBERS = 1 << 22


class Moments(NamedTuple):
    """What one pass over logits [B, V] gives.

    peak: [B], the largest logit. total: [B], the sum of exp(logit - peak). log_total: its
    logarithm. entropies: [B], nats.
    """

    peak: Floats
    total: Floats
    log_total: Floats
    entropies: Floats


def log_softmax(logits: Floats) -> Floats:
    """Return log-probabilities of raw logits: float32 [..., V], a new array."""
    below = logits - logits.max(axis=-1, keepdims=True)
    total = np.log(np.exp(below).sum(axis=-1, keepdims=True, dtype=np.float64))
    logprobs: Floats = below - total.astype(np.float32)
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


def surprisal(logits: Floats, token: int) -> float:
    """Return -log p of a token in nats, by raw logits over all tokens; inf where banned."""
    wide = logits.astype(np.float64)
    peak = wide.max()
    total = float(np.log(np.exp(wide - peak).sum()) + peak)
    value = float(wide[token])
    return max(0.0, total - value) if math.isfinite(value) else math.inf


def entropy(logits: Floats) -> float:
    """Return the entropy in nats of raw logits over the full vocabulary."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    weights = np.exp(shifted)
    total = weights.sum()
    finite = weights > 0
    return max(0.0, float(np.log(total) - (weights[finite] * shifted[finite]).sum() / total))


def score_span(span: ScoreSpan, n_vocab: int, logits_of: Callable[[int, int], Floats]) -> Score:
    """Score a row's span part by part. logits_of: raw logits of the row's tokens first … last - 1.

    Raises: ForwardError for a target outside of the vocabulary.
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
    """Put the scores of consecutive positions together."""
    if len(parts) == 1:
        return parts[0]
    return Score(
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("logprobs", "entropies", "ranks", "top_ids", "top_logprobs")
        )
    )


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
