"""Attention over tree nodes: each node's keys meet all queries below it in one product.

A query's keys lie in several parts: the nodes on its path and its own new slots. Softmax over all
of them is exact without bringing them together: the largest score over the parts is known before
anything is exponentiated, so that partial sums and partial outputs, all relative to that one
maximum, merge by addition (a log-sum-exp merge whose shift is agreed beforehand).

Shapes: queries [K, N, G, D], G query heads to a KV head, N tokens of a block; scores [K, n, G, S].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Where = slice | NDArray[np.int64]

_FEW = 2  # query heads up to which a matrix-vector product each is faster (half the time, measured)


class Part(Protocol):
    """Keys and values of every layer, for the queries `where` of a block."""

    where: Where

    def scores(self, queries: Floats, layer: int) -> Floats:
        """Return a new [K, n, G, S]; -inf where a query may not look."""
        ...

    def mix(self, weights: Floats, layer: int) -> Floats:
        """Return the weighted sum of values: [K, n, G, D]."""
        ...


class SpanPart:
    """Slots seen by all of its queries: one product a span and KV head.

    spans: [L, 2, K, S, D] each, views. triangle: [n, 1, n] added to the last n slots, where they
    are the queries' own (0 up to itself, -inf after).
    """

    __slots__ = ("_keys", "_triangle", "_values", "where")

    def __init__(
        self, spans: Sequence[Floats], where: Where, triangle: Floats | None = None
    ) -> None:
        self.where: Where = where
        self._keys = list(zip(*(span[:, 0] for span in spans), strict=True))
        self._values = list(zip(*(span[:, 1] for span in spans), strict=True))
        self._triangle = triangle

    def scores(self, queries: Floats, layer: int) -> Floats:
        picked = queries[:, self.where]
        k, n, g, d = picked.shape
        flat = picked.reshape(k, n * g, d)
        pieces = [_meet(flat, keys) for keys in self._keys[layer]]
        scores: Floats = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=-1)
        scores = scores.reshape(k, n, g, -1)
        if self._triangle is not None:
            scores[..., -n:] += self._triangle
        return scores

    def mix(self, weights: Floats, layer: int) -> Floats:
        k, n, g, s = weights.shape
        flat = weights.reshape(k, n * g, s)
        first, *others = self._values[layer]
        hi = first.shape[1]
        mixed = _blend(flat[..., :hi], first)
        for values in others:
            lo, hi = hi, hi + values.shape[1]
            mixed += _blend(flat[..., lo:hi], values)
        return mixed.reshape(k, n, g, -1)


class TailPart:
    """Each query has slots of its own, padded to one length: one batched product.

    tails: [L, 2, n, K, S, D], a view. mask: [n, 1, S] added, 0 or -inf; None: all slots count.
    """

    __slots__ = ("_keys", "_mask", "_values", "where")

    def __init__(self, tails: Floats, where: slice, mask: Floats | None = None) -> None:
        self.where: Where = where
        by_head = tails.swapaxes(2, 3)[:, :, :, :, None]  # [L, 2, K, n, 1, S, D]
        self._keys = list(by_head[:, 0])
        self._values = list(by_head[:, 1])
        self._mask = mask

    def scores(self, queries: Floats, layer: int) -> Floats:
        scores: Floats = np.matvec(self._keys[layer], queries[:, self.where])
        if self._mask is not None:
            scores += self._mask
        return scores

    def mix(self, weights: Floats, layer: int) -> Floats:
        mixed: Floats = np.vecmat(weights, self._values[layer])
        return mixed


def attend(
    queries: Floats, own: Sequence[Part], shared: Sequence[Part], layer: int, out: Floats
) -> None:
    """Write the attention output of one block to `out`: [K, N, G, D].

    Args:
        own: parts that cover every query exactly once.
        shared: further parts, each for any of the queries.
    """
    top = np.empty(queries.shape[:3], np.float32)
    scored = []
    for part in own:
        scores = part.scores(queries, layer)
        top[:, part.where] = np.maximum.reduce(scores, axis=-1)
        scored.append(scores)
    for part in shared:
        scores = part.scores(queries, layer)
        top[:, part.where] = np.maximum(top[:, part.where], np.maximum.reduce(scores, axis=-1))
        scored.append(scores)
    total = np.empty_like(top)
    for index, (part, weights) in enumerate(zip([*own, *shared], scored, strict=True)):
        where = part.where
        weights -= top[:, where, :, None]
        np.exp(weights, out=weights)
        if index < len(own):
            total[:, where] = np.add.reduce(weights, axis=-1)
            out[:, where] = part.mix(weights, layer)
        else:
            total[:, where] += np.add.reduce(weights, axis=-1)
            out[:, where] += part.mix(weights, layer)
    out /= total[..., None]


def _meet(queries: Floats, keys: Floats) -> Floats:
    """[K, m, D] with [K, S, D]: [K, m, S]."""
    if queries.shape[1] <= _FEW:
        met: Floats = np.matvec(keys[:, None], queries)
        return met
    return np.matmul(queries, keys.swapaxes(1, 2))


def _blend(weights: Floats, values: Floats) -> Floats:
    """[K, m, S] with [K, S, D]: [K, m, D]."""
    if weights.shape[1] <= _FEW:
        blended: Floats = np.vecmat(weights, values[:, None])
        return blended
    return np.matmul(weights, values)
