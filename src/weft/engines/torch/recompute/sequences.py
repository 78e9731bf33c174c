"""Which paths run together: whole ones side by side, those whose ends are known as they go on."""

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

OnStates = Callable[[int, Tensor, int], None]


class SequenceRunner:
    """Runs paths on a model. ends: the states after recent ones; None where none are kept."""

    def __init__(self, head: Head | IdentityHead, device: torch.device) -> None:
        self.head = head
        self.states: StateCache | None = None
        self._device = device
        self._most = CALL_TOKENS.get(device.type, max(CALL_TOKENS.values()))
        self._least = CALL_COST.get(device.type, max(CALL_COST.values()))
        self._cache_name = cache_name(head.base)

    @property
    def can_cache_states(self) -> bool:
        """Whether the model takes a cache that it has given."""
        return bool(self._cache_name)

    def run(
        self, tokens: Sequence[Ids], needed: Sequence[int], adapter: str | None, pick: OnStates
    ) -> None:
        """Run paths, equal ones once, and those that begin others with these.

        `pick` is told each one's number, its states [n, E], and the position of the first of them:
        that which is `needed` of it, or an earlier one.
        """
        rows = rows_of(tokens)
        groups = self._known(rows, needed, adapter)
        n_groups = Counter(batch for batch, _ in groups)
        for (batch, n_new), ends in groups.items():
            paths = [FullSequence(ids, rows.pop(ids)) for ids in ends]
            taken = [end.row for end in ends.values()]
            self._continue_from_states(
                batch, taken, paths, n_new, adapter, pick, alone=n_groups[batch] == 1
            )
        least = None if self.states is None else self._least
        for paths in calls(rows, self._most, least):
            self._run_full(paths, adapter, pick)

    def _known(
        self, rows: Rows, needed: Sequence[int], adapter: str | None
    ) -> dict[tuple[StateBatch, int], dict[Ids, CachedState]]:
        """Return what goes on from known ends, where that is cheaper than to run it whole.

        Grouped by whose rows of the cache they are, and how many tokens are new.
        """
        groups: dict[tuple[StateBatch, int], dict[Ids, CachedState]] = {}
        if self.states is None:
            return groups
        for ids, numbers in rows.items():
            most = min(len(ids) - 1, *(needed[number] for number in numbers))
            end = self.states.find(adapter, ids, most)
            if end is not None:
                groups.setdefault((end.batch, len(ids) - end.length), {})[ids] = end
        budget = self.states.budget_bytes
        return {
            (batch, n_new): ends
            for (batch, n_new), ends in groups.items()
            if max(len(ends), self._least) * n_new < sum(map(len, ends))
            and len(ends) * batch.row_bytes <= budget
        }

    def _continue_from_states(
        self,
        batch: StateBatch,
        taken: Sequence[int],
        paths: Sequence[FullSequence],
        n_new: int,
        adapter: str | None,
        pick: OnStates,
        *,
        alone: bool,
    ) -> None:
        """Run the last `n_new` tokens of paths after rows of a batch, one at a time.

        Not all caches take more at once: recurrent ones begin anew then.
        """
        assert self.states is not None
        cache: Any = self.states.take(batch, taken, alone=alone)
        found = []
        ids = torch.tensor([path.ids[-n_new:] for path in paths], device=self._device)
        for column in ids.split(1, 1):
            given = {self._cache_name: cache, "use_cache": True}
            states, output = self.head.run(column, **given)
            cache = getattr(output, self._cache_name, None)
            found.append(states)
        self._keep(cache, paths, adapter)
        for path, states in zip(paths, torch.cat(found, 1), strict=True):
            for number in path.rows:
                pick(number, states, len(path.ids) - n_new)

    def _run_full(self, paths: Sequence[FullSequence], adapter: str | None, pick: OnStates) -> None:
        """Run paths side by side, padded on the right, which no decoder sees."""
        longest = max(len(path.ids) for path in paths)
        padded = [[*path.ids, *path.ids[-1:] * (longest - len(path.ids))] for path in paths]
        is_even = self.states is not None and all(len(path.ids) == longest for path in paths)
        ids = torch.tensor(padded, device=self._device)
        states, output = self.head.run(ids, use_cache=is_even)
        if is_even:
            self._keep(getattr(output, self._cache_name, None), paths, adapter, first_hand=True)
        for path, of_path in zip(paths, states, strict=True):
            for number in path.rows:
                pick(number, of_path, 0)

    def _keep(
        self, cache: Any, paths: Sequence[FullSequence], adapter: str | None, **how: bool
    ) -> None:
        assert self.states is not None
        self.states.keep(cache, [(adapter, path.ids) for path in paths], **how)
