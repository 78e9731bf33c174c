"""Packing of one step's rows, and the arrays of the prefixes that they share.

Rows of many tokens follow the groups of `engines/packing`, each on its own. The grouping of shared
prefixes is in `engines/shared_prefixes`; this module holds the arrays of each group. Groups are
distributed over levels, so that the groups of one level have different queries.
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
from .attention import (
    HIDDEN,
    AttentionSpec,
    PartialAttention,
    attend,
    attend_span,
    concatenate_queries,
    mask_to_bias,
)
from .kv import Arrays, MlxFragment, MlxMemory, RowTailBuffer

# Rows of at least so many new tokens attend to their full path at once, by MLX's own attention.
LONG_ROW = 64


class LongRow(NamedTuple):
    """A row of many tokens, packed at start … stop - 1, and all spans that it attends to."""

    row: int
    spans: list[tuple[MlxFragment, int]]
    start: int
    stop: int


@dataclass(slots=True)
class StepPlan(Packing[MlxFragment, RowTailBuffer]):
    """Packing of one set of rows, and the prefixes that they attend to.

    Attributes:
        long_rows: rows of at least LONG_ROW tokens.
        levels: shared prefixes of the other rows.
        n_grouped: packed tokens before the long rows.
    """

    long_rows: list[LongRow] = field(default_factory=list)
    levels: list[PrefixLevel] = field(default_factory=list)
    n_grouped: int = 0


def plan_step(rows: Sequence[Row], memory: MlxMemory) -> StepPlan:
    """Return a plan for the rows: the previous one if it fits, else a new one.

    A new plan moves tails to their buffers in `memory`.
    """
    cached = memory.plan
    if cached is not None and cached.fits(rows, large_batch=memory.is_large_batch()):
        return cached
    memory.plan = None
    plan = _pack(rows, memory)
    query_spans = plan.query_spans(rows, MlxFragment, plan.n_grouped)
    plan.levels = build_levels(query_spans, memory, plan.n_grouped)
    memory.plan = plan if not plan.prefill_groups and not plan.long_rows else None
    return plan


def _pack(rows: Sequence[Row], memory: MlxMemory) -> StepPlan:
    """Group and order the rows, assign decode tails to buffers, and group the shared prefixes."""
    kv_outs = [None if row.kv_out is None else own(row.kv_out, MlxFragment) for row in rows]
    paths = [(row.prefix, kv_out) for row, kv_out in zip(rows, kv_outs, strict=True)]
    plan = StepPlan(paths, [], [0] * len(rows))
    stop = 0
    for (kind, size), members in group_rows(rows, kv_outs, memory, long_row=LONG_ROW).items():
        start = stop
        for i in members:
            plan.starts[i] = stop
            stop += rows[i].n_tokens
        plan.order += members
        if kind == "decode":
            tails = [tail for i in members if (tail := kv_outs[i]) is not None]
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
                plan.long_rows.append(LongRow(i, spans, at, at + rows[i].n_tokens))
        if kind != "separate":
            plan.n_grouped = stop
    return plan


class PrefixGroup:
    """One shared prefix; its spans are copied if they are not contiguous."""

    def __init__(self, prefix: SharedPrefix[MlxFragment], memory: MlxMemory) -> None:
        self.where = list(range(prefix.start, prefix.stop))
        self.first, self.length = prefix.first, prefix.length
        if memory.is_contiguous([fragment for fragment, _ in prefix.spans]):
            self.arrays = memory.views(prefix.spans[0][0], self.length)
        else:  # another prefix of this step shares some of the spans
            self.arrays = [array[0] for array in memory.padded([prefix.spans])]

    def attend(
        self, layer: int, queries: mx.array, spec: AttentionSpec, mask: KeyMask
    ) -> PartialAttention:
        """Return the result of the queries `where`, in this order."""
        start, stop = self.where[0], self.where[-1] + 1
        q = queries if stop - start == len(queries) else queries[start:stop]
        keys, values = self.arrays[2 * layer], self.arrays[2 * layer + 1]
        if mask.low:
            keys, values = keys[:, mask.low :], values[:, mask.low :]
        return attend_span(q, keys, values, spec.is_latent, mask.bias)

    def mask(self, window: int | None, positions: Sequence[int]) -> KeyMask | None:
        """Return the keys inside the sliding windows of the queries; None if there are none.

        window: None for full attention. positions: of the packed queries.
        """
        queries = [positions[at] for at in self.where]
        visible = visible_keys(self.first, self.length, window, queries)
        if visible is None:
            return None
        low = visible.low
        if window is None or not visible.is_masked:
            return KeyMask(low)
        last = self.first + self.length - 1
        key = mx.arange(self.first + low, last + 1)[None]
        return KeyMask(low, mask_to_bias(key > mx.array(queries)[:, None] - window))


class PrefixBatch:
    """Short prefixes with few queries each, copied and padded: [P, K, S, D].

    Attributes:
        padded: packed index of each of the P*Q padded queries.
        kept: indices of the real queries among these; None: all.
        where: packed indices of the real queries.
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
            self.bias = mask_to_bias(slots[None] < mx.array(self.lengths)[:, None])[
                :, None, None, None
            ]

    def attend(
        self, layer: int, queries: mx.array, spec: AttentionSpec, mask: KeyMask
    ) -> PartialAttention:
        """Return the result of the queries `where`, in this order."""
        n, n_each = len(self.members), self.n_queries
        _, heads, group, size = queries.shape
        q = queries[self.padded].reshape(n, n_each, heads, group, size)
        q = q.transpose(0, 2, 1, 3, 4).reshape(n, heads, n_each * group, size)
        bias = mask.bias
        if bias is not None:  # [P, 1, Q or 1, 1, S]
            bias = mx.broadcast_to(bias, (n, 1, n_each, group, bias.shape[-1]))
            bias = bias.reshape(n, 1, n_each * group, -1)
        keys, values = self.arrays[2 * layer], self.arrays[2 * layer + 1]
        out, lse = attend(q, keys, values, spec.is_latent, bias)
        out = out.reshape(n, heads, n_each, group, -1).transpose(0, 2, 1, 3, 4)
        lse = lse.reshape(n, heads, n_each, group).transpose(0, 2, 1, 3)
        out, lse = out.reshape(n * n_each, heads, group, -1), lse.reshape(-1, heads, group)
        return (
            PartialAttention(out, lse)
            if self.kept is None
            else PartialAttention(out[self.kept], lse[self.kept])
        )

    def mask(self, window: int | None, positions: Sequence[int]) -> KeyMask | None:
        """Return the mask that hides padding and keys outside a sliding window.

        window: None for full attention. positions: of the packed queries.
        """
        if window is None:
            return KeyMask(0, self.bias)
        firsts = mx.array([m.first for m in self.members])[:, None, None]
        key = firsts + mx.arange(max(self.lengths))
        query = mx.array([positions[at] for at in self.places]).reshape(len(self.members), -1, 1)
        beyond = mask_to_bias(key > query - window)[:, None, :, None]
        return KeyMask(0, beyond if self.bias is None else mx.minimum(beyond, self.bias))


class KeyMask(NamedTuple):
    """The visible keys of a prefix group.

    Args:
        low: index of the first visible key.
        bias: added to the scores of the keys from `low` on; None: all of them are visible.
    """

    low: int = 0
    bias: mx.array | None = None


class PrefixLevel:
    """Groups of prefixes without a common query.

    Attributes:
        groups: groups of the level.
        index: for each packed query, the index of its result among the concatenated results of the
            groups. Queries without a group have the index after the last result. None: the results
            are complete and in order.
        is_full: True if every query belongs to a group.
    """

    def __init__(self, groups: list[PrefixGroup | PrefixBatch], n_queries: int) -> None:
        self.groups = groups
        where = [at for group in groups for at in group.where]
        self.index: mx.array | None = None
        self.is_full = len(where) == n_queries
        if where != list(range(n_queries)):
            places = dict(zip(where, range(len(where)), strict=True))
            self.index = mx.array([places.get(at, len(where)) for at in range(n_queries)])

    def masks(self, window: int | None, positions: Sequence[int]) -> list[KeyMask | None]:
        """Return the mask of each group for a window; None for a group without visible keys.

        positions: of the packed queries.
        """
        return [group.mask(window, positions) for group in self.groups]

    def attend(
        self, layer: int, queries: mx.array, spec: AttentionSpec, masks: list[KeyMask | None]
    ) -> PartialAttention | None:
        """Attend to this level's prefixes; return one result per packed query, in packed order.

        The result of a query without a prefix here is zeros with the lse HIDDEN. Returns None if
        no key is visible.

        masks: one per group, from `masks`.
        """
        if all(mask is None for mask in masks):
            return None
        outs, lses = [], []
        for group, mask in zip(self.groups, masks, strict=True):
            if mask is None:  # outside the window
                shape = (len(group.where), *queries.shape[1:3])
                size = group.arrays[2 * layer + (0 if spec.is_latent else 1)].shape[-1]
                outs.append(mx.zeros((*shape, size), dtype=queries.dtype))
                lses.append(mx.full(shape, HIDDEN))
            else:
                result = group.attend(layer, queries, spec, mask)
                outs.append(result.out)
                lses.append(result.lse)
        if not self.is_full:
            outs.append(mx.zeros_like(outs[0][:1]))
            lses.append(mx.full((1, *lses[0].shape[1:]), HIDDEN))
        result = concatenate_queries(outs, lses)
        if self.index is not None:
            result = PartialAttention(result.out[self.index], result.lse[self.index])
        return result


def build_levels(
    query_spans: Sequence[QuerySpan[MlxFragment]], memory: MlxMemory, n_queries: int
) -> list[PrefixLevel]:
    """Group the spans above a step's rows; return the arrays of each group, level by level."""
    singles, batches = group_prefixes(query_spans, memory)
    for prefix in singles:  # all of them before any view is taken
        memory.make_contiguous([fragment for fragment, _ in prefix.spans])
    groups: list[PrefixGroup | PrefixBatch] = [
        *(PrefixGroup(prefix, memory) for prefix in singles),
        *(PrefixBatch(batch, memory) for batch in batches),
    ]
    levels = assign_levels([*([prefix] for prefix in singles), *batches], n_queries)
    return [PrefixLevel([groups[number] for number in level], n_queries) for level in levels]
