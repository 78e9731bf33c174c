"""Edits of logits by masks, biases and penalties, and the filters of rows with typical_p.

All shapes follow from shapes, so nothing waits for the device. Filters with a cutoff are in
`topk_topp_kernel`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .sampling_tensors import SamplingTensors

_HUGE = 1e30
_BLOCK = 1 << 25  # logits whose legal mass is computed together
_ID = 0xFFFFFFFF


def edited(logits: Tensor, tensors: SamplingTensors) -> Tensor:
    """Return logits after mask, bias and penalties; the same tensor if there are none.

    logits: float32 [B, V], raw; not modified.
    """
    out = logits if tensors.allowed is None else _masked(logits, tensors.allowed)
    if tensors.bias_ids is not None and tensors.bias is not None:
        out = out.scatter_add(1, tensors.bias_ids, tensors.bias.clamp(max=_HUGE))
    if tensors.penalised is not None:
        out = _penalised(out, tensors, tensors.penalised)
    return out


def legal_logmass(logits: Tensor, tensors: SamplingTensors) -> Tensor:
    """Return `DrawResult.legal_logmass` of rows with constraints: float32 [B].

    logits: [B, V], raw, of any float dtype; not modified.
    """
    assert tensors.allowed is not None
    parts = []
    for first in range(0, len(logits), max(1, _BLOCK // logits.shape[1])):
        rows = slice(first, first + max(1, _BLOCK // logits.shape[1]))
        raw = logits[rows].float()
        legal = _masked(raw, tensors.allowed[rows])
        if tensors.bias_ids is not None and tensors.bias is not None:
            bans = torch.where(tensors.bias[rows].isneginf(), -torch.inf, 0.0)
            legal = legal.scatter_add(1, tensors.bias_ids[rows], bans)
        parts.append((legal.logsumexp(1) - raw.logsumexp(1)).clamp(max=0))
    return torch.cat(parts)


def _masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return logits with -inf for forbidden tokens. allowed: int32 [B, words], a bit a token."""
    bits = allowed[:, :, None] >> torch.arange(32, device=allowed.device, dtype=torch.int32)
    inside = (bits & 1).view(len(logits), -1)[:, : logits.shape[1]]
    return torch.where(inside != 0, logits, -torch.inf)


def _penalised(logits: Tensor, tensors: SamplingTensors, penalised: Tensor) -> Tensor:
    """Return logits after repetition, frequency and presence penalties.

    penalised: token ids and their counts, [2, B, n]; a count below 0 is padding.
    """
    ids, counts = penalised[0].long(), penalised[1]
    given = logits.gather(1, ids)
    repeat = tensors.repetition[:, None]
    pushed = torch.where(given > 0, given / repeat, given * repeat)
    pushed = pushed - (
        tensors.frequency[:, None] * counts.float()
        + tensors.presence[:, None] * (counts > 0).float()
    )
    return logits.scatter(1, ids, torch.where(counts < 0, given, pushed.clamp(max=_HUGE)))


def drop_by_filters(logits: Tensor, tensors: SamplingTensors) -> Tensor:
    """Apply all filters to the rows with typical_p: -inf replaces the logits of dropped tokens.

    logits: float32 [B, V], edited; not modified.
    """
    rows = tensors.typical
    few = select_rows(logits, rows)
    ids, heights, _ = ranking(few, tensors, rows, logits.shape[1])
    values = few.gather(1, ids).masked_fill(heights.isneginf(), -torch.inf)
    return replace_rows(logits, rows, torch.full_like(few, -torch.inf).scatter(1, ids, values))


class Ranking(NamedTuple):
    """The likeliest tokens of rows after the filters, likeliest first.

    Attributes:
        ids: int64 [B, C].
        heights: float64 [B, C], tempered logits minus the largest, -inf for dropped tokens.
        log_total: float64 [B], logarithm of the sum of their exponentials.
    """

    ids: Tensor
    heights: Tensor
    log_total: Tensor


def ranking(logits: Tensor, tensors: SamplingTensors, rows: Tensor | None, depth: int) -> Ranking:
    """Return the `depth` likeliest tokens of rows after the filters.

    Args:
        logits: float32 [B, V], edited, of these rows only.
        tensors: parameters of all samplers.
        rows: numbers of the samplers of these rows; None for all.
        depth: number of tokens to rank per row.
    """
    keys = (_sortable(logits) << 32) | (_ID - torch.arange(logits.shape[1], device=logits.device))
    best = keys.topk(depth, dim=1).values  # of equals the lower id is the larger key
    ids = _ID - (best & _ID)
    values = logits.gather(1, ids).double()
    early, late = (
        select_rows(tensors.early, rows)[:, None],
        select_rows(tensors.late, rows)[:, None],
    )
    below = (values - values[:, :1]) / early
    filters = {
        name: select_rows(filter_, rows)[:, None] for name, filter_ in tensors.filters.items()
    }
    k = filters["top_k"]
    kept = (torch.arange(depth, device=ids.device) < k) | (k == 0)
    below = below.masked_fill(~kept, -torch.inf)
    kept = _typical(ids, below, filters["typical_p"]) | (filters["typical_p"] == 1)
    below = below.masked_fill(~kept, -torch.inf)
    running = below.exp().cumsum(1)
    target = filters["top_p"] * running[:, -1:]
    kept = (torch.nn.functional.pad(running[:, :-1], (1, 0)) < target) | (filters["top_p"] == 1)
    below = below.masked_fill(~kept, -torch.inf)
    largest = below.amax(1, keepdim=True)
    below = below.masked_fill(below - largest < filters["min_p"].log(), -torch.inf)
    heights = (below - below.amax(1, keepdim=True)) / late
    return Ranking(ids, heights, heights.exp().sum(1).log())


def _typical(ids: Tensor, below: Tensor, share: Tensor) -> Tensor:
    """Return the filter of typical_p: True for kept tokens.

    It keeps the smallest set of tokens, by distance of their surprisal from the entropy, whose
    probabilities reach `share`.

    ids, below: token ids and tempered logits minus the largest, -inf for dropped tokens.
    """
    weights, gone = below.exp(), below.isneginf()
    total = weights.sum(1, keepdim=True)
    surprisal = total.log() - below.masked_fill(gone, 0.0)
    entropy = (weights * surprisal).sum(1, keepdim=True) / total
    away = (surprisal - entropy).abs().masked_fill(gone, torch.inf)
    by_id = ids.argsort(1)
    order = by_id.gather(1, away.gather(1, by_id).sort(dim=1, stable=True).indices)
    running = weights.gather(1, order).cumsum(1)
    wanted = torch.nn.functional.pad(running[:, :-1], (1, 0)) < share * total
    wanted[:, 0] = True
    return torch.empty_like(wanted).scatter_(1, order, wanted)


def _sortable(logits: Tensor) -> Tensor:
    """Map logits to integers of the same order: int64, within 32 bits."""
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def select_rows(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return some rows of a tensor; None: all rows."""
    return values if rows is None else values.index_select(0, rows)


def replace_rows(tensor: Tensor, rows: Tensor | None, values: Tensor) -> Tensor:
    """Return a tensor with other values in some rows; None: in all rows."""
    return values if rows is None else tensor.index_copy(0, rows, values)
