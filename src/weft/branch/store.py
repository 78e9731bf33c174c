"""`BranchStore`: the same calls for many branches, in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .._core.remedies import Listed, remedied
from .._core.validation import check_number
from ..errors import ConfigError
from .branch import Branch
from .calls import CommitCall, PrefillCall, ReadCall, arun, check_pairs, run
from .state import BranchRegistry, Pressure, Produced, draw

if TYPE_CHECKING:
    from ..lm.lm import LM


@remedied({}, camel_case=True)
class BranchStore(Listed):
    """All branches of one LM, and calls that run many of them together.

    It holds nothing itself: any number of stores over one LM are the same.
    """

    def __init__(self, lm: LM) -> None:
        """Take calls for many branches of this LM at once."""
        if not hasattr(lm, "scheduler"):
            raise ConfigError(
                f"BranchStore takes an LM, not {type(lm).__name__}; load one with weft.load"
            )
        self.lm = lm
        self._registry = BranchRegistry.for_lm(lm)

    def commit(self, pairs: Sequence[tuple[Branch, int]]) -> None:
        """Accept a token and run it, on each branch: one forward for all, whatever their depth.

        More branches than n_batch take more passes. Atomic: on any failure no branch, sampler,
        grammar, figure or position has changed, and the same call may be made again. Raises, before
        anything ran: StaleHandle, ConfigError (a branch twice, or of another LM), ConstraintError,
        ContextOverflow; then KVFull or ForwardError.
        """
        run(CommitCall(self.lm, pairs))

    async def acommit(self, pairs: Sequence[tuple[Branch, int]]) -> None:
        """The awaitable form of `commit`."""
        await arun(CommitCall(self.lm, pairs))

    def prefill(self, pairs: Sequence[tuple[Branch, Sequence[int]]]) -> None:
        """Run tokens on each branch, in ceil(total / n_batch) forwards; atomic as `commit` is.

        Grammar, penalties and metrics do not see them.
        """
        run(PrefillCall(self.lm, pairs))

    async def aprefill(self, pairs: Sequence[tuple[Branch, Sequence[int]]]) -> None:
        """The awaitable form of `prefill`."""
        await arun(PrefillCall(self.lm, pairs))

    def produce(self, branches: Sequence[Branch]) -> list[Produced]:
        """Draw the next token of each branch, all at once; changes nothing."""
        self.lm.see_weights()
        missing = self._without_rows(branches)
        if missing:
            run(ReadCall(self.lm, missing))
        return draw(branches)

    async def aproduce(self, branches: Sequence[Branch]) -> list[Produced]:
        """The awaitable form of `produce`."""
        await self.lm.asee_weights()
        missing = self._without_rows(branches)
        if missing:
            await arun(ReadCall(self.lm, missing))
        return draw(branches)

    def _without_rows(self, branches: Sequence[Branch]) -> list[Branch]:
        check_pairs(self.lm, [(branch, None) for branch in branches], "produce")
        rows = ((branch, branch.row_for_draw()) for branch in branches if branch.drawn is None)
        read = self.lm.scheduler.logits_cache.read
        return [branch for branch, row in rows if row is not None and read(row) is None]

    def retain_only(self, branch: Branch) -> None:
        """End all other branches of the LM; this one stands alone and goes on."""
        check_pairs(self.lm, [(branch, None)], "retain_only")
        for other in list(self._registry.branches):
            if other is not branch:
                other.end(f"retain_only of {branch!r}")
        branch.become_root()

    def merge_logits(self, branch: Branch, experts: Sequence[Branch], alpha: float) -> None:
        """Add alpha times the logits of each expert to a branch's own, until its next commit.

        Contrastive decoding: experts (branch, -1), say. The experts stay as they are, and figures
        the model's, as of `Branch.set_logits`. Raises: ConfigError.
        """
        pairs = [(each, None) for each in (branch, *experts)]
        check_pairs(self.lm, pairs, "merge_logits")
        weight = check_number("alpha", alpha)
        if experts:
            total = np.sum([each.effective_logits() for each in experts], axis=0, dtype=np.float64)
            branch.set_logits(branch.effective_logits() + weight * total)

    @property
    def branches(self) -> list[Branch]:
        """The live branches, in the order they were made."""
        return sorted(self._registry.branches, key=lambda branch: branch.number)

    @property
    def available(self) -> int:
        """How many more branches may be live: `n_seq_max` (65,536 by default) minus live branches.

        Branches whose KV is not resident count too. Forks beyond it still work; then this is 0.
        """
        return self._registry.available()

    def pressure(self) -> Pressure:
        """Return how full the LM is. Cost: O(live branches)."""
        return self._registry.pressure()
