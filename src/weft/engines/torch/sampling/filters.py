"""`sampling.filters` in torch: edits of logits, and what of each row is left to draw from.

All shapes follow from shapes, so nothing waits for the device. Where NumPy's filters look at as
many of the likeliest as it takes, there are two ways here. A row that asks for the k likeliest has
them ranked. A row that does not needs no order: min-p is a floor, and the edge of top-p is found by
adding up weights by the leading bits of the logits, then by those that follow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .sampling_tensors import SamplingTensors

_HUGE = 1e30
_TOGETHER = 1 << 25  # logits whose legal mass is added up at once
_ID = 0xFFFFFFFF
# The edge of top-p is looked for in the 32 bits of a float, so many at a time from the left.
_DIGITS = (11, 11, 10)
# Weights are added up as whole numbers of this part of the largest: sums are the same in any order,
# and 2**22 tokens may weigh as much as the largest.
_UNIT = float(1 << 40)


def edited(logits: Tensor, seats: SamplingTensors) -> Tensor:
    """Return logits after mask, bias and penalties; themselves where nothing is to do.

    logits: float32 [B, V], raw; not modified.
    """
    out = logits if seats.allowed is None else _masked(logits, seats.allowed)
    if seats.bias_ids is not None and seats.bias is not None:
        out = out.scatter_add(1, seats.bias_ids, seats.bias.clamp(max=_HUGE))
    if seats.seen is not None:
        out = _penalised(out, seats, seats.seen)
    return out


def legal_logmass(logits: Tensor, seats: SamplingTensors) -> Tensor:
    """Return `DrawResult.legal_logmass`: float32 [B]. The seats have constraints.

    logits: [B, V], raw, of any float dtype; not modified.
    """
    assert seats.allowed is not None
    parts = []
    for first in range(0, len(logits), max(1, _TOGETHER // logits.shape[1])):
        rows = slice(first, first + max(1, _TOGETHER // logits.shape[1]))
        raw = logits[rows].float()
        legal = _masked(raw, seats.allowed[rows])
        if seats.bias_ids is not None and seats.bias is not None:
            bans = torch.where(seats.bias[rows].isneginf(), -torch.inf, 0.0)
            legal = legal.scatter_add(1, seats.bias_ids[rows], bans)
        parts.append((legal.logsumexp(1) - raw.logsumexp(1)).clamp(max=0))
    return torch.cat(parts)


def _masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return logits with -inf for forbidden tokens. allowed: int32 [B, words], a bit a token."""
    bits = allowed[:, :, None] >> torch.arange(32, device=allowed.device, dtype=torch.int32)
    inside = (bits & 1).view(len(logits), -1)[:, : logits.shape[1]]
    return torch.where(inside != 0, logits, -torch.inf)


def _penalised(logits: Tensor, seats: SamplingTensors, seen: Tensor) -> Tensor:
    ids, counts = seen[0].long(), seen[1]
    given = logits.gather(1, ids)
    repeat = seats.repetition[:, None]
    pushed = torch.where(given > 0, given / repeat, given * repeat)
    pushed = pushed - (
        seats.frequency[:, None] * counts.float() + seats.presence[:, None] * (counts > 0).float()
    )
    return logits.scatter(1, ids, torch.where(counts < 0, given, pushed.clamp(max=_HUGE)))


def left_of_typical(logits: Tensor, seats: SamplingTensors) -> Tensor:
    """Return logits, -inf for what filters drop of the rows that ask for typical_p.

    logits: float32 [B, V], edited; not modified.
    """
    rows = seats.typical
    few = some(logits, rows)
    ids, heights, _ = ranking(few, seats, rows, logits.shape[1])
    values = few.gather(1, ids).masked_fill(heights.isneginf(), -torch.inf)
    return put(logits, rows, torch.full_like(few, -torch.inf).scatter(1, ids, values))


def left_of_wide(logits: Tensor, seats: SamplingTensors) -> Tensor:
    """Return the logits of the rows that are not ranked, -inf for what top-p and min-p drop."""
    assert seats.wide is not None
    rows, top = seats.wide.rows, logits.amax(1)
    early = some(seats.early, rows)
    if seats.nucleus is not None:
        among = seats.nucleus.rows
        few = some(logits, among)
        share = some(some(seats.filters["top_p"], rows), among)
        inside = nucleus(few, some(top, among), some(early, among), share)
        logits = put(logits, among, few.masked_fill(~inside, -torch.inf))
    if seats.lowest:
        least = floors(top, early, some(seats.filters["min_p"], rows))
        logits = logits.masked_fill(logits < least[:, None], -torch.inf)
    return logits


class Ranking(NamedTuple):
    """The likeliest tokens of rows that filters have been over, likeliest first.

    ids: int64 [B, C]. heights: float64 [B, C], tempered logits below the largest, -inf for what is
    dropped. log_total: float64 [B], logarithm of the sum of their exponentials.
    """

    ids: Tensor
    heights: Tensor
    log_total: Tensor


def ranking(logits: Tensor, seats: SamplingTensors, rows: Tensor | None, depth: int) -> Ranking:
    """Return what the filters leave of rows that ask for no more than their `depth` likeliest.

    logits: float32 [B, V], edited, of these rows alone; rows: which of the seats they are.
    """
    keys = (_ordered(logits) << 32) | (_ID - torch.arange(logits.shape[1], device=logits.device))
    best = keys.topk(depth, dim=1).values  # of equals the lower id is the larger key
    ids = _ID - (best & _ID)
    values = logits.gather(1, ids).double()
    early, late = some(seats.early, rows)[:, None], some(seats.late, rows)[:, None]
    below = (values - values[:, :1]) / early
    asked = {name: some(filter_, rows)[:, None] for name, filter_ in seats.filters.items()}
    k = asked["top_k"]
    kept = (torch.arange(depth, device=ids.device) < k) | (k == 0)
    below = below.masked_fill(~kept, -torch.inf)
    kept = _typical(ids, below, asked["typical_p"]) | (asked["typical_p"] == 1)
    below = below.masked_fill(~kept, -torch.inf)
    running = below.exp().cumsum(1)
    whole = asked["top_p"] * running[:, -1:]
    kept = (torch.nn.functional.pad(running[:, :-1], (1, 0)) < whole) | (asked["top_p"] == 1)
    below = below.masked_fill(~kept, -torch.inf)
    largest = below.amax(1, keepdim=True)
    below = below.masked_fill(below - largest < asked["min_p"].log(), -torch.inf)
    heights = (below - below.amax(1, keepdim=True)) / late
    return Ranking(ids, heights, heights.exp().sum(1).log())


def _typical(ids: Tensor, below: Tensor, share: Tensor) -> Tensor:
    """Mark the smallest set with surprisal nearest the entropy that reaches its share."""
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


def floors(top: Tensor, early: Tensor, min_p: Tensor) -> Tensor:
    """Return the least logit that min-p keeps: float32 [B].

    top: float32 [B], the largest. early: float64 [B], what logits are divided by before. min_p:
    float64 [B].
    """
    least = min_p.log()
    about = (top.double() + least * early).float()
    down = torch.nextafter(about, torch.full_like(about, -torch.inf))
    up = torch.nextafter(about, torch.full_like(about, torch.inf))
    each = torch.stack((down, about, up), dim=1)  # rounding may have gone either way
    enough = (each.double() - top.double()[:, None]) / early[:, None] >= least[:, None]
    found = each.masked_fill(~enough, torch.inf).amin(1)
    return torch.where(found.isinf(), about, found)


def nucleus(logits: Tensor, top: Tensor, early: Tensor, share: Tensor) -> Tensor:
    """Mark the likeliest tokens until they reach their share of the row: bool [B, V].

    logits: float32 [B, V], edited; top: float32 [B], their largest. early, share: float64 [B].
    """
    scale = (1 / early).float()[:, None]
    weights = (((logits - top[:, None]) * scale).exp() * _UNIT).to(torch.int64)
    falling = 0x7FFFFFFF - _ordered(logits)  # 0 to 2**32 - 1, the largest logit first
    wanted = share * weights.sum(1).double()
    before = torch.zeros_like(weights[:, 0])
    edge = torch.zeros_like(before)
    left = 32
    for n_bits in _DIGITS:
        left -= n_bits
        digits = falling >> left
        inside = digits >> n_bits == edge[:, None]
        sums = weights.new_zeros((len(weights), 1 << n_bits))
        sums.scatter_add_(1, digits & ((1 << n_bits) - 1), torch.where(inside, weights, 0))
        running = sums.cumsum(1)
        reached = (before[:, None] + running).double() >= wanted[:, None]
        # The first that reaches; the last with any weight where rounding lets none.
        last = (running < running[:, -1:]).sum(1)
        digit = torch.minimum((~reached).sum(1), last)[:, None]
        before = before + (running - sums).gather(1, digit)[:, 0]
        edge = (edge << n_bits) | digit[:, 0]
    return _up_to(falling, edge, weights, wanted - before.double())


def _up_to(falling: Tensor, edge: Tensor, weights: Tensor, missing: Tensor) -> Tensor:
    """Mark what comes before the edge, and of the equals on it the first that make up the rest."""
    level = falling == edge[:, None]
    weight = torch.where(level, weights, 0).amax(1).double()
    n = (missing / weight.clamp(min=1)).ceil().clamp(min=1)
    nth = level.to(torch.int32).cumsum(1, dtype=torch.int32)
    return (falling < edge[:, None]) | (level & (nth <= n[:, None]))


def _ordered(logits: Tensor) -> Tensor:
    """Return whole numbers that ascend with the logits: int64, within 32 bits."""
    bits = (logits + 0.0).view(torch.int32)  # -0 becomes 0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def some(values: Tensor, rows: Tensor | None) -> Tensor:
    """Return some rows of values; None: all."""
    return values if rows is None else values.index_select(0, rows)


def put(into: Tensor, rows: Tensor | None, values: Tensor) -> Tensor:
    """Return `into` with other values for some rows; None: for all."""
    return values if rows is None else into.index_copy(0, rows, values)
