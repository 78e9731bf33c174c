"""How the rows of one step are packed, and which spans of KV their queries meet.

Behind the lanes of `engines/packing` come rows of many tokens, each on its own.

A span on its own costs a product a layer, however short. A tree search steps dozens of nodes of a
dozen tokens, most with few queries: those are copied side by side once a plan and met at once.
Spans are met level by level: those of one level have different queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from ..base import Row
from ..packing import DecodeGroup, Packing, PrefillGroup, group_rows, visible_spans
from ..padded_pool import own
from ..shared_prefixes import (
    QuerySpan,
    SharedPrefix,
    assign_levels,
    group_prefixes,
    pad_queries,
    visible_keys,
)
from .attention import HIDDEN, AttentionSpec, PartialAttention, bias_of, join, meet, meet_span
from .kv import Arrays, MlxFragment, MlxMemory, RowTailBuffer

# A row of so many new tokens meets its path in one piece, by MLX's own attention.
LONG_ROW = 64


class LongRow(NamedTuple):
    """A row of many tokens, packed at start..stop, and the spans that it sees, its tail's too."""

    row: int
    spans: list[tuple[MlxFragment, int]]
    start: int
    stop: int


@dataclass(slots=True)
class StepPlan(Packing[MlxFragment, RowTailBuffer]):
    """How one set of rows is packed, and what they meet.

    n_lanes: packed tokens before the long rows. levels: what the others meet above them.
    """

    longs: list[LongRow] = field(default_factory=list)
    levels: list[PrefixLevel] = field(default_factory=list)
    n_lanes: int = 0


def plan_step(rows: Sequence[Row], memory: MlxMemory) -> StepPlan:
    """Return a plan for the rows, the memory's if it fits; tails move to their banks."""
    cached = memory.plan
    if cached is not None and cached.fits(rows, large_batch=memory.is_large_batch()):
        return cached
    memory.plan = None
    plan = _pack(rows, memory)
    query_spans = plan.query_spans(rows, MlxFragment, plan.n_lanes)
    plan.levels = arrange(query_spans, memory, plan.n_lanes)
    memory.plan = plan if not plan.prefill_groups and not plan.longs else None
    return plan


def _pack(rows: Sequence[Row], memory: MlxMemory) -> StepPlan:
    dests = [None if row.kv_out is None else own(row.kv_out, MlxFragment) for row in rows]
    paths = [(row.prefix, dest) for row, dest in zip(rows, dests, strict=True)]
    plan = StepPlan(paths, [], [0] * len(rows))
    stop = 0
    for (kind, size), members in group_rows(rows, dests, memory, long_row=LONG_ROW).items():
        start = stop
        for i in members:
            plan.starts[i] = stop
            stop += rows[i].n_tokens
        plan.order += members
        if kind == "decode":
            tails = [tail for i in members if (tail := dests[i]) is not None]
            plan.decode_groups.append(
                DecodeGroup(*memory.buffer_for(tails, size), tails, start, stop)
            )
        elif kind == "prefill":
            plan.prefill_groups.append(
                PrefillGroup(tuple(rows[i].n_tokens for i in members), start, stop)
            )
        else:
            for i in members:
                at = plan.starts[i]
                spans = [
                    (own(f, MlxFragment), n)
                    for f, n in visible_spans(rows[i], is_buffered=False)
                    if n
                ]
                plan.longs.append(LongRow(i, spans, at, at + rows[i].n_tokens))
        if kind != "separate":
            plan.n_lanes = stop
    return plan


class PrefixGroup:
    """One stretch and its queries start..stop; its spans are copied if they do not lie in line."""

    def __init__(self, stretch: SharedPrefix[MlxFragment], memory: MlxMemory) -> None:
        self.where = list(range(stretch.start, stretch.stop))
        self.first, self.length = stretch.first, stretch.length
        if memory.is_contiguous([fragment for fragment, _ in stretch.spans]):
            self.arrays = memory.views(stretch.spans[0][0], self.length)
        else:  # another stretch of this step has some of them
            self.arrays = [array[0] for array in memory.padded([stretch.spans])]

    def meet(
        self, layer: int, queries: mx.array, how: AttentionSpec, mask: PieceMask
    ) -> PartialAttention:
        """Return what the queries of the step see here, those of `where` in order."""
        start, stop = self.where[0], self.where[-1] + 1
        q = queries if stop - start == len(queries) else queries[start:stop]
        keys, values = self.arrays[2 * layer], self.arrays[2 * layer + 1]
        if mask.low:
            keys, values = keys[:, mask.low :], values[:, mask.low :]
        return meet_span(q, keys, values, how.is_latent, mask.bias)

    def mask(self, window: int | None, positions: Sequence[int]) -> PieceMask | None:
        """Return the keys inside a sliding window of the queries; None if there are none."""
        queries = [positions[at] for at in self.where]
        visible = visible_keys(self.first, self.length, window, queries)
        if visible is None:
            return None
        low = visible.low
        if window is None or not visible.is_masked:
            return PieceMask(low)
        last = self.first + self.length - 1
        key = mx.arange(self.first + low, last + 1)[None]
        return PieceMask(low, bias_of(key > mx.array(queries)[:, None] - window))


class PrefixBatch:
    """Short stretches with few queries each, copied side by side: [P, K, S, D].

    padded: packed index of each of P*Q query places. kept: the places that are real; None: all.
    """

    def __init__(self, members: list[SharedPrefix[MlxFragment]], memory: MlxMemory) -> None:
        self.members = members
        self.arrays: Arrays = memory.padded([m.spans for m in members])
        self.lengths = [m.length for m in members]
        self.n_queries, self.places, kept, self.where = pad_queries(members)
        self.padded = mx.array(self.places)
        self.kept = None if kept is None else mx.array(kept)
        slots = mx.arange(max(self.lengths))
        self.bias = None
        if min(self.lengths) != max(self.lengths):
            self.bias = bias_of(slots[None] < mx.array(self.lengths)[:, None])[:, None, None, None]

    def meet(
        self, layer: int, queries: mx.array, how: AttentionSpec, mask: PieceMask
    ) -> PartialAttention:
        """Return what the queries of the step see here, those of `where` in order."""
        n, n_each = len(self.members), self.n_queries
        _, heads, group, size = queries.shape
        q = queries[self.padded].reshape(n, n_each, heads, group, size)
        q = q.transpose(0, 2, 1, 3, 4).reshape(n, heads, n_each * group, size)
        bias = mask.bias
        if bias is not None:  # [P, 1, Q or 1, 1, S]
            bias = mx.broadcast_to(bias, (n, 1, n_each, group, bias.shape[-1]))
            bias = bias.reshape(n, 1, n_each * group, -1)
        keys, values = self.arrays[2 * layer], self.arrays[2 * layer + 1]
        out, lse = meet(q, keys, values, how.is_latent, bias)
        out = out.reshape(n, heads, n_each, group, -1).transpose(0, 2, 1, 3, 4)
        lse = lse.reshape(n, heads, n_each, group).transpose(0, 2, 1, 3)
        out, lse = out.reshape(n * n_each, heads, group, -1), lse.reshape(-1, heads, group)
        return (
            PartialAttention(out, lse)
            if self.kept is None
            else PartialAttention(out[self.kept], lse[self.kept])
        )

    def mask(self, window: int | None, positions: Sequence[int]) -> PieceMask | None:
        """What padding and a window let each query see."""
        if window is None:
            return PieceMask(0, self.bias)
        firsts = mx.array([m.first for m in self.members])[:, None, None]
        key = firsts + mx.arange(max(self.lengths))
        query = mx.array([positions[at] for at in self.places]).reshape(len(self.members), -1, 1)
        beyond = bias_of(key > query - window)[:, None, :, None]
        return PieceMask(0, beyond if self.bias is None else mx.minimum(beyond, self.bias))


class PieceMask(NamedTuple):
    """What of a piece is seen: keys from `low` on, of those what the bias shows."""

    low: int = 0
    bias: mx.array | None = None


class PrefixLevel:
    """Spans that have no query in common.

    index: where the result of each packed query is among the pieces' results, one after the other;
    the place after the last is of those that meet nothing. None: they come in order, all of them.
    """

    def __init__(self, pieces: list[PrefixGroup | PrefixBatch], n_queries: int) -> None:
        self.pieces = pieces
        where = [at for piece in pieces for at in piece.where]
        self.index: mx.array | None = None
        self.is_full = len(where) == n_queries
        if where != list(range(n_queries)):
            places = dict(zip(where, range(len(where)), strict=True))
            self.index = mx.array([places.get(at, len(where)) for at in range(n_queries)])

    def masks(self, window: int | None, positions: Sequence[int]) -> list[PieceMask | None]:
        """What a window shows of each piece; None: nothing."""
        return [piece.mask(window, positions) for piece in self.pieces]

    def meet(
        self, layer: int, queries: mx.array, how: AttentionSpec, masks: list[PieceMask | None]
    ) -> PartialAttention | None:
        """Return what all queries of the lanes see on this level; None: nothing."""
        if all(mask is None for mask in masks):
            return None
        outs, lses = [], []
        for piece, mask in zip(self.pieces, masks, strict=True):
            if mask is None:  # a window hides all of it
                shape = (len(piece.where), *queries.shape[1:3])
                size = piece.arrays[2 * layer + (0 if how.is_latent else 1)].shape[-1]
                outs.append(mx.zeros((*shape, size), dtype=queries.dtype))
                lses.append(mx.full(shape, HIDDEN))
            else:
                found = piece.meet(layer, queries, how, mask)
                outs.append(found.out)
                lses.append(found.lse)
        if not self.is_full:
            outs.append(mx.zeros_like(outs[0][:1]))
            lses.append(mx.full((1, *lses[0].shape[1:]), HIDDEN))
        found = join(outs, lses)
        if self.index is not None:
            found = PartialAttention(found.out[self.index], found.lse[self.index])
        return found


def arrange(
    query_spans: Sequence[QuerySpan[MlxFragment]], memory: MlxMemory, n_queries: int
) -> list[PrefixLevel]:
    """Group the spans above a step's rows; return the arrays of each group, level by level."""
    singles, batches = group_prefixes(query_spans, memory)
    for prefix in singles:  # all of them before any view is taken
        memory.make_contiguous([fragment for fragment, _ in prefix.spans])
    groups = [*([prefix] for prefix in singles), *batches]
    pieces: list[PrefixGroup | PrefixBatch] = [
        *(PrefixGroup(prefix, memory) for prefix in singles),
        *(PrefixBatch(batch, memory) for batch in batches),
    ]
    levels = assign_levels(groups, n_queries)
    return [PrefixLevel([pieces[number] for number in level], n_queries) for level in levels]
