"""Batches of paths for one forward: full paths together, and paths that continue a cached state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...full_sequences import FullSequence, Ids, Rows, calls, rows_of
from ..model import Head, IdentityHead, cache_name
from .state_cache import CachedState, StateBatch, StateCache

# Tokens of one model call, padding included; a longer path runs alone. A call needs working memory
# for all of them in each layer, and on a CPU more of them run no faster.
CALL_TOKENS = {"cpu": 512, "cuda": 8192}
# Tokens that a call costs at least: it reads all weights, however few they are.
CALL_COST = {"cpu": 8, "cuda": 512}

# (number of a path, its states [n, E], position of the first of them) -> None
OnStates = Callable[[int, Tensor, int], None]


class SequenceRunner:
    """Runs paths on a model. states: cache of the states after recent paths; None: disabled."""

    def __init__(self, head: Head | IdentityHead, device: torch.device) -> None:
        self.head = head
        self.states: StateCache | None = None
        self._device = device
        self._max_tokens = CALL_TOKENS.get(device.type, max(CALL_TOKENS.values()))
        self._min_cost = CALL_COST.get(device.type, max(CALL_COST.values()))
        self._cache_name = cache_name(head.base)

    @property
    def can_cache_states(self) -> bool:
        """True if the model accepts a cache that it returned."""
        return bool(self._cache_name)

    def run(
        self, tokens: Sequence[Ids], needed: Sequence[int], adapter: str | None, on_states: OnStates
    ) -> None:
        """Run paths. Equal paths run once, together with paths that are their prefixes.

        Args:
            tokens: token ids of each path.
            adapter: name of the LoRA adapter, or None.
            needed: by path, the first position whose state is needed.
            on_states: receives each path's number, its states [n, E], and the position of the first
                of them, which is at most the needed one.
        """
        rows = rows_of(tokens)
        groups = self._cached(rows, needed, adapter)
        n_groups = Counter(batch for batch, _ in groups)
        for (batch, n_new), states in groups.items():
            paths = [FullSequence(ids, rows.pop(ids)) for ids in states]
            batch_rows = [state.row for state in states.values()]
            is_only = n_groups[batch] == 1
            self._continue_from_states(
                batch, batch_rows, paths, n_new, adapter, on_states, is_only_user=is_only
            )
        min_cost = None if self.states is None else self._min_cost
        for paths in calls(rows, self._max_tokens, min_cost):
            self._run_full(paths, adapter, on_states)

    def _cached(
        self, rows: Rows, needed: Sequence[int], adapter: str | None
    ) -> dict[tuple[StateBatch, int], dict[Ids, CachedState]]:
        """Return the paths to continue from a cached state, where that is cheaper than a full run.

        Args:
            rows: row numbers by path.
            needed: by path number, the first position whose state is needed; see `run`.
            adapter: name of the LoRA adapter, or None.

        Returns:
            The cached state of each path, grouped by (batch of the state, number of new tokens).
        """
        groups: dict[tuple[StateBatch, int], dict[Ids, CachedState]] = {}
        if self.states is None:
            return groups
        for ids, numbers in rows.items():
            max_length = min(len(ids) - 1, *(needed[number] for number in numbers))
            state = self.states.find(adapter, ids, max_length)
            if state is not None:
                groups.setdefault((state.batch, len(ids) - state.length), {})[ids] = state
        budget = self.states.budget_bytes
        return {
            (batch, n_new): states
            for (batch, n_new), states in groups.items()
            if max(len(states), self._min_cost) * n_new < sum(map(len, states))
            and len(states) * batch.row_bytes <= budget
        }

    def _continue_from_states(
        self,
        batch: StateBatch,
        batch_rows: Sequence[int],
        paths: Sequence[FullSequence],
        n_new: int,
        adapter: str | None,
        on_states: OnStates,
        *,
        is_only_user: bool,
    ) -> None:
        """Run the last `n_new` tokens of paths after rows of a batch, one at a time.

        Not all caches accept several tokens: recurrent ones restart then.
        """
        assert self.states is not None
        cache: Any = self.states.take(batch, batch_rows, is_only_user=is_only_user)
        parts = []
        ids = torch.tensor([path.ids[-n_new:] for path in paths], device=self._device)
        for column in ids.split(1, 1):
            given = {self._cache_name: cache, "use_cache": True}
            states, output = self.head.run(column, **given)
            cache = getattr(output, self._cache_name, None)
            parts.append(states)
        self._keep(cache, paths, adapter)
        for path, states in zip(paths, torch.cat(parts, 1), strict=True):
            for number in path.rows:
                on_states(number, states, len(path.ids) - n_new)

    def _run_full(
        self, paths: Sequence[FullSequence], adapter: str | None, on_states: OnStates
    ) -> None:
        """Run full paths in one batch, padded on the right, where causal attention ignores it."""
        longest = max(len(path.ids) for path in paths)
        padded = [[*path.ids, *path.ids[-1:] * (longest - len(path.ids))] for path in paths]
        is_even = self.states is not None and all(len(path.ids) == longest for path in paths)
        ids = torch.tensor(padded, device=self._device)
        states, output = self.head.run(ids, use_cache=is_even)
        if is_even:
            self._keep(getattr(output, self._cache_name, None), paths, adapter, is_full_run=True)
        for path, path_states in zip(paths, states, strict=True):
            for number in path.rows:
                on_states(number, path_states, 0)

    def _keep(
        self, cache: Any, paths: Sequence[FullSequence], adapter: str | None, **how: bool
    ) -> None:
        """Cache the states after these paths. how: arguments of `StateCache.keep`."""
        assert self.states is not None
        self.states.keep(cache, [(adapter, path.ids) for path in paths], **how)
