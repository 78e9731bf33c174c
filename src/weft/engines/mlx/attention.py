"""The attention products of one layer, and how partial results are put together.

Queries are [n, K, g, D]: n tokens, the g query heads of each of K KV heads, already scaled. Every
product gives its output [n, K, g, Dv] and the log-sum-exp float32 [n, K, g] of its scores. Two
results over different keys are one after `merge`, so each piece of KV is met where it lies, once.

Keys and values may be *latent* (multi-head latent attention): the values are the keys' first part,
and what is stored beside them is the rotary part of the keys. A query is then as long as both.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

# Instead of minus infinity: what is hidden from a query has no weight, and no product is a NaN.
HIDDEN = -1e30
# Scores of one product are written out: queries are cut so that they take at most this.
SCORE_BYTES = 64 << 20


class AttentionSpec(NamedTuple):
    """How one layer attends. is_latent: see the module."""

    window: int | None = None
    sinks: mx.array | None = None
    is_latent: bool = False


class PartialAttention(NamedTuple):
    """The result of a product: out [n, K, g, Dv], lse float32 [n, K, g]."""

    out: mx.array
    lse: mx.array


def scores_of(q: mx.array, k: mx.array, v: mx.array, is_latent: bool) -> mx.array:
    """Return the scores [..., Q, S] of queries [..., Q, D] against keys [..., S, D], in float32."""
    if not is_latent:
        return (q @ k.swapaxes(-1, -2)).astype(mx.float32)
    size = k.shape[-1]
    scores = q[..., :size] @ k.swapaxes(-1, -2) + q[..., size:] @ v.swapaxes(-1, -2)
    return scores.astype(mx.float32)


def meet(
    q: mx.array, k: mx.array, v: mx.array, is_latent: bool, bias: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Let queries [..., Q, D] meet keys [..., S, D]; return [..., Q, Dv] and [..., Q].

    bias: broadcasts to [..., Q, S]; 0 where a key is seen, HIDDEN where not.
    """
    scores = scores_of(q, k, v, is_latent)
    if bias is not None:
        scores = scores + bias
    weights = mx.softmax(scores, axis=-1)
    # The likeliest key's weight is exp(its score - lse): half the cost of a second pass.
    lse = scores.max(axis=-1) - mx.log(weights.max(axis=-1))
    return weights.astype(v.dtype) @ (k if is_latent else v), lse


def meet_span(
    q: mx.array, k: mx.array, v: mx.array, is_latent: bool, bias: mx.array | None
) -> PartialAttention:
    """Let queries [n, K, g, D] all meet keys [K, S, D]: one product a KV head.

    bias: [n, S].
    """
    n, heads, group, _ = q.shape
    most = max(1, SCORE_BYTES // (4 * heads * group * max(1, k.shape[1])))
    if n > most:
        cuts = [slice(at, at + most) for at in range(0, n, most)]
        parts = [
            meet_span(q[cut], k, v, is_latent, None if bias is None else bias[cut]) for cut in cuts
        ]
        return join([part.out for part in parts], [part.lse for part in parts])
    folded = q.transpose(1, 0, 2, 3).reshape(heads, n * group, -1)
    if bias is not None:
        bias = mx.repeat(bias, group, axis=0)
    out, lse = meet(folded, k, v, is_latent, bias)
    return PartialAttention(
        out.reshape(heads, n, group, -1).transpose(1, 0, 2, 3),
        lse.reshape(heads, n, group).transpose(1, 0, 2),
    )


def join(outs: list[mx.array], lses: list[mx.array]) -> PartialAttention:
    """Put results of different queries one after the other."""
    if len(outs) == 1:
        return PartialAttention(outs[0], lses[0])
    return PartialAttention(mx.concatenate(outs, axis=0), mx.concatenate(lses, axis=0))


def merge(one: PartialAttention, other: PartialAttention) -> PartialAttention:
    """Put two results of the same queries over different keys together."""
    weight = mx.sigmoid(other.lse - one.lse)[..., None]
    out = one.out + (other.out - one.out) * weight
    return PartialAttention(out, mx.logaddexp(one.lse, other.lse))


def apply_sinks(result: PartialAttention, sinks: mx.array) -> mx.array:
    """Let each query lose weight to its head's sink [H], a key without a value; return the out."""
    _, heads, group = result.lse.shape
    weight = mx.sigmoid(result.lse - sinks.reshape(heads, group))
    return result.out * weight[..., None]


def bias_of(seen: mx.array) -> mx.array:
    """Return 0 where True, HIDDEN where False, in float32."""
    return mx.where(seen, mx.array(0.0), mx.array(HIDDEN))
