"""Attention of one layer, and merging of partial results.

Queries are [n, K, g, D]: n tokens, K KV heads, g query heads per KV head, already scaled. Every
product returns its output [n, K, g, Dv] and the log-sum-exp float32 [n, K, g] of its scores.
`merge` combines results over different keys, so that each part of KV is attended to in place, once.

Keys and values may be *latent* (multi-head latent attention). The stored values are then the rotary
part of the keys, and the values are the first part of the keys. A query is as long as both.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

# Used instead of minus infinity: masked keys get no weight, and no product is NaN.
HIDDEN = -1e30
# Products materialize their scores: queries are split so that scores take at most this.
SCORE_BYTES = 64 << 20


class AttentionSpec(NamedTuple):
    """Attention of one layer.

    Args:
        window: size of the sliding window; None for full attention.
        sinks: attention sinks [H]; None if the layer has none.
        is_latent: keys and values are latent; see the module.
    """

    window: int | None = None
    sinks: mx.array | None = None
    is_latent: bool = False


class PartialAttention(NamedTuple):
    """Attention over some of the keys; `merge` combines results over different keys.

    out: [n, K, g, Dv]. lse: log-sum-exp of the scores, float32 [n, K, g].
    """

    out: mx.array
    lse: mx.array


def scores_of(q: mx.array, k: mx.array, v: mx.array, is_latent: bool) -> mx.array:
    """Return the scores q @ k^T, float32 [..., Q, S], of scaled queries and keys [..., S, D].

    is_latent: `v` has the rotary part of the keys, whose scores are added; see the module.
    """
    if not is_latent:
        return (q @ k.swapaxes(-1, -2)).astype(mx.float32)
    size = k.shape[-1]
    scores = q[..., :size] @ k.swapaxes(-1, -2) + q[..., size:] @ v.swapaxes(-1, -2)
    return scores.astype(mx.float32)


def attend(
    q: mx.array, k: mx.array, v: mx.array, is_latent: bool, bias: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Attend from queries [..., Q, D] to keys [..., S, D].

    Args:
        q: queries.
        k: keys.
        v: values.
        is_latent: see the module.
        bias: broadcasts to [..., Q, S]; 0 for visible keys, HIDDEN for others.

    Returns:
        Output [..., Q, Dv] and log-sum-exp [..., Q].
    """
    scores = scores_of(q, k, v, is_latent)
    if bias is not None:
        scores = scores + bias
    weights = mx.softmax(scores, axis=-1)
    # The likeliest key's weight is exp(its score - lse): half the cost of a second pass.
    lse = scores.max(axis=-1) - mx.log(weights.max(axis=-1))
    return weights.astype(v.dtype) @ (k if is_latent else v), lse


def attend_span(
    q: mx.array, k: mx.array, v: mx.array, is_latent: bool, bias: mx.array | None
) -> PartialAttention:
    """Attend from queries [n, K, g, D] to the same keys [K, S, D] for all: one product per KV head.

    Args:
        q: queries.
        k: keys.
        v: values.
        is_latent: see the module.
        bias: [n, S], added to the scores of each query; None: every query sees all keys.

    Returns:
        The n queries' attention over these keys.
    """
    n, heads, group, _ = q.shape
    max_queries = max(1, SCORE_BYTES // (4 * heads * group * max(1, k.shape[1])))
    if n > max_queries:
        cuts = [slice(at, at + max_queries) for at in range(0, n, max_queries)]
        parts = [
            attend_span(q[cut], k, v, is_latent, None if bias is None else bias[cut])
            for cut in cuts
        ]
        return concatenate_queries([part.out for part in parts], [part.lse for part in parts])
    folded = q.transpose(1, 0, 2, 3).reshape(heads, n * group, -1)
    if bias is not None:
        bias = mx.repeat(bias, group, axis=0)
    out, lse = attend(folded, k, v, is_latent, bias)
    return PartialAttention(
        out.reshape(heads, n, group, -1).transpose(1, 0, 2, 3),
        lse.reshape(heads, n, group).transpose(1, 0, 2),
    )


def concatenate_queries(outs: list[mx.array], lses: list[mx.array]) -> PartialAttention:
    """Concatenate the outputs and log-sum-exps of different queries, in order."""
    if len(outs) == 1:
        return PartialAttention(outs[0], lses[0])
    return PartialAttention(mx.concatenate(outs, axis=0), mx.concatenate(lses, axis=0))


def merge(one: PartialAttention, other: PartialAttention) -> PartialAttention:
    """Merge two results of the same queries over different keys into one over all of them."""
    weight = mx.sigmoid(other.lse - one.lse)[..., None]
    out = one.out + (other.out - one.out) * weight
    return PartialAttention(out, mx.logaddexp(one.lse, other.lse))


def apply_sinks(result: PartialAttention, sinks: mx.array) -> mx.array:
    """Rescale the output as if each query had also attended to its head's sink, a key without a
    value.

    Returns:
        The output [n, K, g, Dv].
    """
    _, heads, group = result.lse.shape
    weight = mx.sigmoid(result.lse - sinks.reshape(heads, group))
    return result.out * weight[..., None]


def mask_to_bias(visible: mx.array) -> mx.array:
    """Convert a mask to a float32 bias of scores: 0 where True, HIDDEN (-1e30) where False."""
    return mx.where(visible, mx.array(0.0), mx.array(HIDDEN))
