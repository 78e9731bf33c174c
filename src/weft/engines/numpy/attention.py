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
    """Slots seen by all of its queries: one product a KV head.

    span: [L, 2, K, S, D], a view. triangle: [n, 1, n] added to the last n slots, where they are the
    queries' own (0 up to itself, -inf after).
    """

    __slots__ = ("_keys", "_triangle", "_values", "where")

    def __init__(self, span: Floats, where: Where, triangle: Floats | None = None) -> None:
        self.where: Where = where
        self._keys = list(span[:, 0].swapaxes(-1, -2))
        self._values = list(span[:, 1])
        self._triangle = triangle

    def scores(self, queries: Floats, layer: int) -> Floats:
        picked = queries[:, self.where]
        k, n, g, d = picked.shape
        scores = np.matmul(picked.reshape(k, n * g, d), self._keys[layer]).reshape(k, n, g, -1)
        if self._triangle is not None:
            scores[..., -n:] += self._triangle
        return scores

    def mix(self, weights: Floats, layer: int) -> Floats:
        k, n, g, s = weights.shape
        return np.matmul(weights.reshape(k, n * g, s), self._values[layer]).reshape(k, n, g, -1)


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
        top[:, part.where] = scores.max(axis=-1)
        scored.append(scores)
    for part in shared:
        scores = part.scores(queries, layer)
        top[:, part.where] = np.maximum(top[:, part.where], scores.max(axis=-1))
        scored.append(scores)
    total = np.empty_like(top)
    for index, (part, weights) in enumerate(zip([*own, *shared], scored, strict=True)):
        where = part.where
        weights -= top[:, where, :, None]
        np.exp(weights, out=weights)
        if index < len(own):
            total[:, where] = weights.sum(axis=-1)
            out[:, where] = part.mix(weights, layer)
        else:
            total[:, where] += weights.sum(axis=-1)
            out[:, where] += part.mix(weights, layer)
    out /= total[..., None]
