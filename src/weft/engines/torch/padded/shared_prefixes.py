"""The spans above a step's rows: met alone, or copied side by side and met at once.

A span on its own costs one product a layer, however short. A tree search steps dozens of nodes of a
dozen tokens, most with few queries: those are copied once a plan, and met at once.

    stretch   spans one below the other, with the same queries, moved one behind the other
    bundle    short stretches of few queries, none a query of two: they lie side by side
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...shared_prefixes import QuerySpan, SharedPrefix, group_prefixes, pad_queries, visible_keys
from ..input_tensors import CachedTensor
from ..kv_backend import AttentionSpec
from .attention import Mask, attend, merge
from .kv import PaddedKVFragment, PaddedKVPool


class Positions(NamedTuple):
    """Where a step's packed tokens are: on the host, and on the device, int64 [T]."""

    known: list[int]
    there: Tensor


class PrefixGroup:
    """One stretch and its queries.

    keys, values: a layer each, [1, K, S, D]: views, or copies of spans that do not lie in line.
    """

    __slots__ = ("first", "keys", "length", "start", "stop", "values")

    def __init__(self, stretch: SharedPrefix[PaddedKVFragment], store: PaddedKVPool) -> None:
        spans, self.length, self.first, self.start, self.stop = stretch
        if store.is_contiguous([fragment for fragment, _ in spans]):
            self.keys, self.values = store.views(spans[0][0], self.length)
        else:  # another stretch of this step has some of them
            self.keys, self.values = store.padded([spans])

    def through(
        self, window: int | None, group: int, positions: Positions, like: Tensor
    ) -> PrefixGroupView | None:
        """Return the keys inside a sliding window of the queries; None if there are none."""
        queries = positions.known[self.start : self.stop]
        visible = visible_keys(self.first, self.length, window, queries)
        if visible is None:
            return None
        low = visible.low
        if window is None or not visible.is_masked:
            return PrefixGroupView(self, low, None)
        last = self.first + self.length - 1
        device = like.device
        query = positions.there[self.start : self.stop].repeat_interleave(group)[:, None]
        key = torch.arange(self.first + low, last + 1, device=device)[None]
        hidden = key <= query - window
        return PrefixGroupView(self, low, Mask(mask_bias(hidden, like), hidden.all(-1)))


class PrefixGroupView(NamedTuple):
    """A part's keys from `low` on, masked or not."""

    part: PrefixGroup
    low: int
    mask: Mask | None

    def attend(
        self, layer: int, folded: Tensor, group: int, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> None:
        """Let the queries [K, T*g, D] meet these keys; merge into [T*g, K, Dv] and [T*g, K]."""
        start, stop = self.part.start * group, self.part.stop * group
        keys, values = self.part.keys[layer], self.part.values[layer]
        if self.low:
            keys, values = keys[:, :, self.low :], values[:, :, self.low :]
        other, other_lse = attend(folded[None, :, start:stop], keys, values, spec, self.mask)
        merge(
            out[start:stop], lse[start:stop], other[0].transpose(0, 1), other_lse[0].transpose(0, 1)
        )


class PrefixBatch:
    """Short stretches with few queries each, none a query of two.

    keys, values: padded copies, a layer each, [P, K, S, D].
    padded: packed index of each of P*Q query places. kept: the places that are real; None: all.
    where: the packed queries in the order of `kept`.
    """

    __slots__ = (
        "firsts",
        "keys",
        "kept",
        "lengths",
        "members",
        "n_queries",
        "padded",
        "values",
        "where",
    )

    def __init__(self, members: list[SharedPrefix[PaddedKVFragment]], store: PaddedKVPool) -> None:
        self.members = members
        self.keys, self.values = store.padded([m.spans for m in members])
        self.n_queries, padded, kept, where = pad_queries(members)
        device = store.layout.device
        self.firsts, self.lengths = CachedTensor(device), CachedTensor(device)
        self.padded = torch.tensor(padded, device=device)
        self.kept = None if kept is None else torch.tensor(kept, device=device)
        self.where: slice | Tensor = torch.tensor(where, device=device)
        if where == list(range(where[0], where[-1] + 1)):
            self.where = slice(where[0], where[-1] + 1)

    def through(
        self, window: int | None, group: int, positions: Positions, like: Tensor
    ) -> PrefixBatchView | None:
        """What padding and a window let each query see."""
        if window is not None and self._is_beyond(window, positions.known):
            return None
        lengths = [m.length for m in self.members]
        if window is None and min(lengths) == max(lengths):
            return PrefixBatchView(self, None)
        device = like.device
        slots = torch.arange(max(lengths), device=device)
        hidden = (slots[None] >= self.lengths.of(lengths)[:, None])[:, None, None]
        if window is None:
            return PrefixBatchView(self, Mask(mask_bias(hidden, like)))
        query = positions.there[self.padded].unflatten(0, (len(self.members), -1))
        key = self.firsts.of([m.first for m in self.members])[:, None] + slots
        beyond = key[:, None] <= query[:, :, None] - window
        hidden = hidden | beyond.repeat_interleave(group, 1)[:, None]
        return PrefixBatchView(self, Mask(mask_bias(hidden, like), hidden.all(-1)))

    def _is_beyond(self, window: int, positions: list[int]) -> bool:
        """Whether no query sees anything of its span."""
        return all(
            m.first + m.length - 1 <= min(positions[m.start : m.stop]) - window
            for m in self.members
        )


class PrefixBatchView(NamedTuple):
    """A bundle's keys, masked or not."""

    bundle: PrefixBatch
    mask: Mask | None

    def attend(
        self, layer: int, folded: Tensor, group: int, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> None:
        """Let the queries [K, T*g, D] meet these keys; merge into [T*g, K, Dv] and [T*g, K]."""
        bundle = self.bundle
        size = (len(bundle.members), bundle.n_queries)
        queries = folded.unflatten(1, (-1, group))[:, bundle.padded].unflatten(1, size)
        queries = queries.transpose(0, 1).flatten(2, 3)
        other, other_lse = attend(
            queries, bundle.keys[layer], bundle.values[layer], spec, self.mask
        )
        other = other.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        other_lse = other_lse.unflatten(2, (-1, group)).permute(0, 2, 3, 1).flatten(0, 1)
        if bundle.kept is not None:
            other, other_lse = other[bundle.kept], other_lse[bundle.kept]
        out, lse = out.unflatten(0, (-1, group)), lse.unflatten(0, (-1, group))
        some, some_lse = out[bundle.where], lse[bundle.where]
        merge(some, some_lse, other, other_lse)
        if not isinstance(bundle.where, slice):  # an index gave copies
            out[bundle.where], lse[bundle.where] = some, some_lse


def load_prefixes(
    query_spans: Sequence[QuerySpan[PaddedKVFragment]], store: PaddedKVPool
) -> list[PrefixGroup | PrefixBatch]:
    """Group the spans above a step's rows and return the tensors of each group."""
    singles, groups = group_prefixes(query_spans, store)
    batches = [PrefixBatch(members, store) for members in groups]
    for prefix in singles:  # all of them before any view is taken
        store.make_contiguous([fragment for fragment, _ in prefix.spans])
    return [*(PrefixGroup(prefix, store) for prefix in singles), *batches]


def mask_bias(hidden: Tensor, like: Tensor) -> Tensor:
    """0 where seen, -inf where hidden, in the dtype of `like`."""
    bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill_(hidden, -math.inf)
