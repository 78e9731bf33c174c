"""Attention products of one layer, and the merge of partial results.

Every product returns its output and the log-sum-exp of its scores. `merge` combines two results
over different keys, so KV stays in place and each part is read once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..kv_backend import AttentionSpec

# Queries a block when scores must be written out: bounds memory at n_heads * 256 * S floats.
QUERY_BLOCK = 256


class Mask(NamedTuple):
    """The bias of scores, and the queries that then see no key.

    Attributes:
        bias: broadcasts to [B, K, Q, S], 0 or -inf, in the queries' dtype.
        dead: broadcasts to [B, K, Q], True if all keys are hidden; None: no such query.
    """

    bias: Tensor
    dead: Tensor | None = None


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Mask | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention of all queries to all keys.

    Args:
        q: [B, K, Q, D], all queries of a KV head together; k: [B, K, S, D]; v: [B, K, S, Dv].

    Returns:
        Output [B, K, Q, Dv] and log-sum-exp float32 [B, K, Q]; zeros and -inf for a dead query.
    """
    if can_use_flash(q, v, spec):
        return _attend_flash(q, k, v, spec.scale, mask)
    return plain(q, k, v, spec, mask)


def plain(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Mask | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `attend` in elementary operations, for devices and shapes without a fused operation.

    It also supports soft-capped scores and any head sizes.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(spec.scale)
    if spec.softcap is not None:
        scores = scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    if mask is not None:
        scores = scores + mask.bias
    lse = torch.logsumexp(scores, -1)
    base = lse if mask is None or mask.dead is None else lse.masked_fill(lse == -math.inf, 0.0)
    weights = scores.sub_(base.unsqueeze(-1)).exp_()
    return torch.matmul(weights.to(v.dtype), v), lse


def attend_causal(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, bands: list[CausalBand] | None
) -> tuple[Tensor, Tensor]:
    """Return the attention of token i of each row to tokens 0..i of its row.

    Args:
        q: [R, H, n, D]; k: [R, K, n, D]; v: [R, K, n, Dv]; H is a multiple of K.
        bands: `causal_bands(n, window)` for a window, or if `can_use_flash` is False.

    Returns:
        Output [R, H, n, Dv] and log-sum-exp float32 [R, H, n].
    """
    n_rows, n_heads, n, _ = q.shape
    group = n_heads // k.shape[1]
    if bands is None and can_use_flash(q, v, spec):
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, True, attn_mask=None, scale=spec.scale
        )
        return out, lse
    blocks = []
    for band in bands if bands is not None else causal_bands(n, None, q):
        folded = q[:, :, band.start : band.stop].reshape(n_rows, k.shape[1], -1, q.shape[-1])
        keys, values = k[:, :, band.first : band.stop], v[:, :, band.first : band.stop]
        # Query heads of one KV head are adjacent, each with the band's tokens.
        out, lse = attend(folded, keys, values, spec, Mask(band.bias.repeat(group, 1)))
        size = band.stop - band.start
        blocks.append((out.reshape(n_rows, n_heads, size, -1), lse.reshape(n_rows, n_heads, size)))
    if len(blocks) == 1:
        return blocks[0]
    return torch.cat([b[0] for b in blocks], 2), torch.cat([b[1] for b in blocks], 2)


class CausalBand(NamedTuple):
    """A block of queries in causal attention, and the keys that any of them attends to.

    Queries are start … stop - 1, keys first … stop - 1. bias: [queries, keys], 0 or -inf.
    """

    start: int
    stop: int
    first: int
    bias: Tensor


def causal_bands(n: int, window: int | None, like: Tensor) -> list[CausalBand]:
    """Split causal attention of n tokens to each other into blocks of queries.

    Args:
        window: size of the sliding window; None for full attention.
        like: the biases get its dtype and device.
    """
    bands = []
    for start in range(0, n, QUERY_BLOCK):
        stop = min(n, start + QUERY_BLOCK)
        first = 0 if window is None else max(0, start - window + 1)
        behind = torch.arange(start, stop)[:, None] - torch.arange(first, stop)[None]
        hidden = behind < 0
        if window is not None:
            hidden |= behind >= window
        bias = torch.zeros(hidden.shape).masked_fill_(hidden, -math.inf)
        bands.append(CausalBand(start, stop, first, bias.to(like.device, like.dtype)))
    return bands


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge another result over the same queries into `out` [..., Dv] and `lse` [...], in place.

    `lse` must be finite; `other_lse` may be -inf where `other` is finite.
    """
    weight = torch.sigmoid(other_lse - lse)
    out.lerp_(other.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, other_lse, out=lse)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Reduce each query's weights by its head's sink, a key without a value; in place, once.

    sinks: one score a head; broadcasts against `lse`.
    """
    out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1).to(out.dtype))


def can_use_flash(q: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Return True if `attend` can use PyTorch's flash attention, which is used on CPUs only.

    It supports no softcap, and only keys and values of the same size.
    """
    return q.device.type == "cpu" and spec.softcap is None and q.shape[-1] == v.shape[-1]


def _attend_flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Mask | None
) -> tuple[Tensor, Tensor]:
    """Compute `attend` by PyTorch's flash attention for CPUs. scale: factor of the scores."""
    # NOTE: the one CPU operation of PyTorch that also returns the log-sum-exp has a private name;
    # tests/engines/test_torch_attend.py compares it with `plain`.
    n_queries = q.shape[2]
    if n_queries == 1 and q.dtype != torch.float32:
        q = q.expand(-1, -1, 2, -1)  # a single half-precision query takes a path seven times slower
    bias = None if mask is None else mask.bias.expand(*q.shape[:3], k.shape[2])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )
    if q.shape[2] != n_queries:
        out, lse = out[:, :, :n_queries], lse[:, :, :n_queries]
    if mask is not None and mask.dead is not None:
        lse = lse.masked_fill(mask.dead, -math.inf)  # the operation returns 0 there
    return out, lse
