"""LRU cache of the model's own cache objects at the ends of recent paths.

A cache object of Transformers is a batch of paths of one length, and can only be extended. It
cannot form a tree. But a path that grows by a token need not run again, and a fork copies a row.
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
    """Paths of one length, one row of the cache object each.

    is_full_run: full paths produced it, so dropping it would be expensive.
    """

    __slots__ = ("cache", "is_full_run", "keys", "n_bytes")

    def __init__(self, cache: Cache, keys: Sequence[Key], *, is_full_run: bool) -> None:
        self.cache = cache
        self.keys = keys
        self.is_full_run = is_full_run
        self.n_bytes = sum(tensor.nbytes for tensor in _tensors(cache))

    @property
    def row_bytes(self) -> int:
        """Bytes of one path's state."""
        return self.n_bytes // len(self.keys)


class CachedState(NamedTuple):
    """The cached state of a path or a prefix: a row of a batch, and the number of tokens."""

    batch: StateBatch
    row: int
    length: int


class StateCache:
    """LRU cache of batches, with at most `budget_bytes` of memory."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._batches: OrderedDict[StateBatch, None] = OrderedDict()
        self._states: dict[Key, CachedState] = {}
        self._lengths: dict[int, int] = {}  # number of batches by path length
        self._used_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def find(self, adapter: str | None, ids: Ids, max_length: int) -> CachedState | None:
        """Return the state of the longest cached prefix with at most `max_length` tokens."""
        for length in sorted(self._lengths, reverse=True):
            if length <= max_length:
                state = self._states.get((adapter, ids[:length]))
                if state is not None:
                    return state
        return None

    def keep(self, cache: Any, keys: Sequence[Key], *, is_full_run: bool = False) -> None:
        """Store the states after paths of one length; evict older ones if needed."""
        if not isinstance(cache, Cache):
            return
        batch = StateBatch(cache, keys, is_full_run=is_full_run)
        if batch.n_bytes > self.budget_bytes:
            return
        self.make_room(batch.n_bytes)
        self._batches[batch] = None
        self._used_bytes += batch.n_bytes
        length = len(keys[0][1])
        self._lengths[length] = self._lengths.get(length, 0) + 1
        for row, key in enumerate(keys):
            self._states[key] = CachedState(batch, row, length)

    def take(self, batch: StateBatch, rows: Sequence[int], *, is_only_user: bool) -> Cache:
        """Return a cache object of these rows that may be extended.

        It is a copy, or the batch itself if all its rows continue and a full run need not be
        repeated.

        is_only_user: no other group of this forward uses the batch.
        """
        if batch not in self._batches:  # evicted meanwhile
            return select_rows(batch.cache, rows)
        is_complete = list(rows) == list(range(len(batch.keys)))
        if is_only_user and is_complete and not batch.is_full_run:
            self._evict(batch)
            return batch.cache
        self._batches.move_to_end(batch)
        return select_rows(batch.cache, rows)

    def make_room(self, n_bytes: int) -> None:
        """Evict the least recently used batches until `n_bytes` fit."""
        while self._batches and self._used_bytes + n_bytes > self.budget_bytes:
            self._evict(next(iter(self._batches)))

    def clear(self) -> None:
        """Evict all batches."""
        for batch in list(self._batches):
            self._evict(batch)

    def _evict(self, batch: StateBatch) -> None:
        """Remove a batch from the cache."""
        del self._batches[batch]
        self._used_bytes -= batch.n_bytes
        length = len(batch.keys[0][1])
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]
        for key in batch.keys:
            state = self._states.get(key)
            if state is not None and state.batch is batch:  # else a newer batch has this path
                del self._states[key]


def select_rows(cache: Cache, rows: Sequence[int]) -> Cache:
    """Return a cache of these rows of another one, in this order, with repetitions.

    It uses Transformers' reordering of beams; the layers of the original do not change.
    """
    taken = copy.copy(cache)
    taken.layers = [_shell(layer) for layer in cache.layers]
    device = next(_tensors(cache)).device
    taken.reorder_cache(torch.tensor(rows, device=device))
    return taken


def _shell(layer: Any) -> Any:
    """Return a copy of a cache layer that shares its tensors until they are replaced."""
    shell = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict | list):
            setattr(shell, name, copy.copy(value))
    return shell


def _tensors(cache: Cache) -> Iterator[Tensor]:
    """Yield all tensors of a cache object."""
    for layer in cache.layers:
        for value in vars(layer).values():
            values = value.values() if isinstance(value, dict) else [value]
            yield from (tensor for tensor in values if isinstance(tensor, Tensor))
