"""Shared prefixes above a step's rows: attended one by one, or copied into a batch.

A prefix of its own costs one product a layer, however short it is. A tree search has dozens of
short prefixes with few queries. Those are copied once a plan, and attended in one product.
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
    """Positions of a step's packed tokens: on the host, and on the device, int64 [T]."""

    on_host: list[int]
    on_device: Tensor


class PrefixGroup:
    """One shared prefix and the packed queries start … stop - 1 that attend to it.

    first: position of its first slot. length: number of slots.
    keys, values: by layer, [1, K, S, D]: views, or copies if the spans are not contiguous.
    """

    __slots__ = ("first", "keys", "length", "start", "stop", "values")

    def __init__(self, prefix: SharedPrefix[PaddedKVFragment], store: PaddedKVPool) -> None:
        spans, self.length, self.first, self.start, self.stop = prefix
        if store.is_contiguous([fragment for fragment, _ in spans]):
            self.keys, self.values = store.views(spans[0][0], self.length)
        else:  # another prefix of this step needs the fragments in other blocks
            self.keys, self.values = store.padded([spans])

    def visible(
        self, window: int | None, group: int, positions: Positions, like: Tensor
    ) -> PrefixGroupView | None:
        """Return the keys inside the queries' sliding window, with a mask; None if there are none.

        Args:
            window: size of the sliding window; None for full attention.
            group: query heads per KV head.
            positions: positions of the step's tokens.
            like: the queries; the mask gets their dtype and device.
        """
        queries = positions.on_host[self.start : self.stop]
        visible = visible_keys(self.first, self.length, window, queries)
        if visible is None:
            return None
        low = visible.low
        if window is None or not visible.is_masked:
            return PrefixGroupView(self, low, None)
        last = self.first + self.length - 1
        device = like.device
        query = positions.on_device[self.start : self.stop].repeat_interleave(group)[:, None]
        key = torch.arange(self.first + low, last + 1, device=device)[None]
        hidden = key <= query - window
        return PrefixGroupView(self, low, Mask(mask_bias(hidden, like), hidden.all(-1)))


class PrefixGroupView(NamedTuple):
    """Visible keys of a prefix: those from index `low` on. mask: None if all queries see them."""

    part: PrefixGroup
    low: int
    mask: Mask | None

    def attend(
        self, layer: int, folded: Tensor, group: int, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> None:
        """Attend to these keys, and merge the results into `out` and `lse`.

        Args:
            layer: number of the layer.
            folded: queries of all packed tokens, [K, T*g, D].
            group: g, query heads per KV head.
            out: results so far, [T*g, K, Dv]; changed in place.
            lse: their log-sum-exp, [T*g, K]; changed in place.
            spec: parameters of the attention.
        """
        start, stop = self.part.start * group, self.part.stop * group
        keys, values = self.part.keys[layer], self.part.values[layer]
        if self.low:
            keys, values = keys[:, :, self.low :], values[:, :, self.low :]
        other, other_lse = attend(folded[None, :, start:stop], keys, values, spec, self.mask)
        merge(
            out[start:stop], lse[start:stop], other[0].transpose(0, 1), other_lse[0].transpose(0, 1)
        )


class PrefixBatch:
    """Short prefixes with few queries each; no query belongs to two of them.

    Attributes:
        keys, values: padded copies by layer, [P, K, S, D].
        padded: packed index of each of P*Q padded queries.
        kept: padded queries that exist; None: all.
        where: packed queries in the order of `kept`.
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

    def visible(
        self, window: int | None, group: int, positions: Positions, like: Tensor
    ) -> PrefixBatchView | None:
        """Return the keys that padding and a window leave visible; None if there are none.

        Args:
            window: size of the sliding window; None for full attention.
            group: query heads per KV head.
            positions: positions of the step's tokens.
            like: the queries; the mask gets their dtype and device.
        """
        if window is not None and self._is_beyond(window, positions.on_host):
            return None
        lengths = [m.length for m in self.members]
        if window is None and min(lengths) == max(lengths):
            return PrefixBatchView(self, None)
        device = like.device
        slots = torch.arange(max(lengths), device=device)
        hidden = (slots[None] >= self.lengths.of(lengths)[:, None])[:, None, None]
        if window is None:
            return PrefixBatchView(self, Mask(mask_bias(hidden, like)))
        query = positions.on_device[self.padded].unflatten(0, (len(self.members), -1))
        key = self.firsts.of([m.first for m in self.members])[:, None] + slots
        beyond = key[:, None] <= query[:, :, None] - window
        hidden = hidden | beyond.repeat_interleave(group, 1)[:, None]
        return PrefixBatchView(self, Mask(mask_bias(hidden, like), hidden.all(-1)))

    def _is_beyond(self, window: int, positions: list[int]) -> bool:
        """Return True if every prefix is outside the windows of its queries.

        positions: of the packed tokens.
        """
        return all(
            m.first + m.length - 1 <= min(positions[m.start : m.stop]) - window
            for m in self.members
        )


class PrefixBatchView(NamedTuple):
    """Keys of a batch of prefixes. mask: None if all queries see all keys of their prefix."""

    batch: PrefixBatch
    mask: Mask | None

    def attend(
        self, layer: int, folded: Tensor, group: int, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> None:
        """Attend to these keys, and merge the results into `out` and `lse`.

        Args:
            layer: number of the layer.
            folded: queries of all packed tokens, [K, T*g, D].
            group: g, query heads per KV head.
            out: results so far, [T*g, K, Dv]; changed in place.
            lse: their log-sum-exp, [T*g, K]; changed in place.
            spec: parameters of the attention.
        """
        batch = self.batch
        size = (len(batch.members), batch.n_queries)
        queries = folded.unflatten(1, (-1, group))[:, batch.padded].unflatten(1, size)
        queries = queries.transpose(0, 1).flatten(2, 3)
        other, other_lse = attend(queries, batch.keys[layer], batch.values[layer], spec, self.mask)
        other = other.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        other_lse = other_lse.unflatten(2, (-1, group)).permute(0, 2, 3, 1).flatten(0, 1)
        if batch.kept is not None:
            other, other_lse = other[batch.kept], other_lse[batch.kept]
        out, lse = out.unflatten(0, (-1, group)), lse.unflatten(0, (-1, group))
        part, part_lse = out[batch.where], lse[batch.where]
        merge(part, part_lse, other, other_lse)
        if not isinstance(batch.where, slice):  # indexing returned copies
            out[batch.where], lse[batch.where] = part, part_lse


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
    """Return 0 for visible and -inf for hidden keys, in the dtype of `like`."""
    bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill_(hidden, -math.inf)
