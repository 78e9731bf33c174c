"""The states at the ends of recent paths, as the model's own cache has them.

A cache of Transformers is a batch of paths of one length, and goes on only at its end. So no tree
can be made of it; but a path that grows by a token need not run again, and a fork is a copied row.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from ...full_sequences import Ids

Key = tuple[str | None, Ids]  # an adapter, and a path


class StateBatch:
    """Paths of one length, a row of the cache each. first_hand: it was made by whole paths."""

    __slots__ = ("cache", "first_hand", "keys", "n_bytes")

    def __init__(self, cache: Cache, keys: Sequence[Key], *, first_hand: bool) -> None:
        self.cache = cache
        self.keys = keys
        self.first_hand = first_hand
        self.n_bytes = sum(tensor.nbytes for tensor in _tensors(cache))

    @property
    def row_bytes(self) -> int:
        return self.n_bytes // len(self.keys)


class CachedState(NamedTuple):
    """Where a path or its beginning is known: a row of a batch, and how many tokens that has."""

    batch: StateBatch
    row: int
    length: int


class StateCache:
    """Batches, the least recently used out first, at most `budget_bytes` of them."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._batches: OrderedDict[StateBatch, None] = OrderedDict()
        self._ends: dict[Key, CachedState] = {}
        self._lengths: dict[int, int] = {}  # how many batches have paths of a length
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def find(self, adapter: str | None, ids: Ids, most: int) -> CachedState | None:
        """Return the longest beginning of a path that is known, of at most `most` tokens."""
        for length in sorted(self._lengths, reverse=True):
            if length <= most:
                end = self._ends.get((adapter, ids[:length]))
                if end is not None:
                    return end
        return None

    def keep(self, cache: Any, keys: Sequence[Key], *, first_hand: bool = False) -> None:
        """Keep the states after paths of one length; older ones go where there is no room."""
        if not isinstance(cache, Cache):
            return
        batch = StateBatch(cache, keys, first_hand=first_hand)
        if batch.n_bytes > self.budget_bytes:
            return
        self.make_room(batch.n_bytes)
        self._batches[batch] = None
        self._used_bytes += batch.n_bytes
        length = len(keys[0][1])
        self._lengths[length] = self._lengths.get(length, 0) + 1
        for row, key in enumerate(keys):
            self._ends[key] = CachedState(batch, row, length)

    def take(self, batch: StateBatch, rows: Sequence[int], *, alone: bool) -> Cache:
        """Return a cache of these rows of a batch, which may go on: a copy, or the batch itself
        where all of it goes on and no whole path need be run for it again.

        alone: nobody else takes rows of it now.
        """
        if batch not in self._batches:  # there was no room for it any more
            return selected(batch.cache, rows)
        is_whole = list(rows) == list(range(len(batch.keys)))
        if alone and is_whole and not batch.first_hand:
            self._forget(batch)
            return batch.cache
        self._batches.move_to_end(batch)
        return selected(batch.cache, rows)

    def make_room(self, n_bytes: int) -> None:
        """Forget the least recently used until there is room for so many bytes."""
        while self._batches and self._used_bytes + n_bytes > self.budget_bytes:
            self._forget(next(iter(self._batches)))

    def clear(self) -> None:
        """Forget all."""
        for batch in list(self._batches):
            self._forget(batch)

    def _forget(self, batch: StateBatch) -> None:
        del self._batches[batch]
        self._used_bytes -= batch.n_bytes
        length = len(batch.keys[0][1])
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        for key in batch.keys:
            end = self._ends.get(key)
            if end is not None and end.batch is batch:  # else it was kept again
                del self._ends[key]


def selected(cache: Cache, rows: Sequence[int]) -> Cache:
    """Return a cache of some rows of another, in that order, any of them as often as named.

    Transformers reorders the rows of beams so; the layers of the other one stay as they are.
    """
    taken = copy.copy(cache)
    taken.layers = [_shell(layer) for layer in cache.layers]
    device = next(_tensors(cache)).device
    taken.reorder_cache(torch.tensor(rows, device=device))
    return taken


def _shell(layer: Any) -> Any:
    """A copy of a cache layer that shares its tensors until it is given others."""
    shell = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict | list):
            setattr(shell, name, copy.copy(value))
    return shell


def _tensors(cache: Cache) -> Iterator[Tensor]:
    """Yield the tensors of a cache."""
    for layer in cache.layers:
        for value in vars(layer).values():
            each = value.values() if isinstance(value, dict) else [value]
            yield from (found for found in each if isinstance(found, Tensor))
