"""`BranchStore`: commit, prefill and draw for many branches in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .._core.remedies import HidesRemedies, remedied
from .._core.validation import check_number
from ..errors import ConfigError
from .branch import Branch
from .calls import CommitCall, PrefillCall, ReadCall, arun, check_pairs, run
from .state import BranchRegistry, Pressure, Produced, draw

if TYPE_CHECKING:
    from ..lm.lm import LM


@remedied({}, camel_case=True)
class BranchStore(HidesRemedies):
    """Batched calls on branches of one LM: commit, prefill and draw many in one forward.

    A store has no state of its own: any number of stores over one LM are equivalent.
    """

    def __init__(self, lm: LM) -> None:
        """Create a store over an LM."""
        if not hasattr(lm, "scheduler"):
            raise ConfigError(
                f"BranchStore takes an LM, not {type(lm).__name__}; load one with weft.load"
            )
        self.lm = lm
        self._registry = BranchRegistry.for_lm(lm)

    def commit(self, pairs: Sequence[tuple[Branch, int]]) -> None:
        """Append a token to each branch and run the model on all of them, in one forward.

        Branches may differ in depth. More branches than `n_batch` take more forwards. Atomic: on
        any failure no branch has changed, and the same call can be repeated.

        Args:
            pairs: (branch, token id) pairs; each branch once.

        Raises:
            StaleHandle, ConfigError, ConstraintError, ContextOverflow: before anything ran.
            KVFull, ForwardError: the step failed.
        """
        run(CommitCall(self.lm, pairs))

    async def acommit(self, pairs: Sequence[tuple[Branch, int]]) -> None:
        """The async form of `commit`."""
        await arun(CommitCall(self.lm, pairs))

    def prefill(self, pairs: Sequence[tuple[Branch, Sequence[int]]]) -> None:
        """Append prompt tokens to each branch and run them, in ceil(total / n_batch) forwards.

        Atomic, as `commit` is. Grammar, penalties and metrics ignore these tokens.

        Args:
            pairs: (branch, token ids) pairs; each branch once.
        """
        run(PrefillCall(self.lm, pairs))

    async def aprefill(self, pairs: Sequence[tuple[Branch, Sequence[int]]]) -> None:
        """The async form of `prefill`."""
        await arun(PrefillCall(self.lm, pairs))

    def produce(self, branches: Sequence[Branch]) -> list[Produced]:
        """Draw the next token of each branch in one batch. Changes nothing.

        Returns: one `Produced` per branch.

        Raises: DeadEnd, with the branches that have no allowed token.
        """
        self.lm.see_weights()
        missing = self._without_rows(branches)
        if missing:
            run(ReadCall(self.lm, missing))
        return draw(branches)

    async def aproduce(self, branches: Sequence[Branch]) -> list[Produced]:
        """The async form of `produce`."""
        await self.lm.asee_weights()
        missing = self._without_rows(branches)
        if missing:
            await arun(ReadCall(self.lm, missing))
        return draw(branches)

    def _without_rows(self, branches: Sequence[Branch]) -> list[Branch]:
        """Return the branches whose logits must be computed before they can draw."""
        check_pairs(self.lm, [(branch, None) for branch in branches], "produce")
        rows = ((branch, branch.row_for_draw()) for branch in branches if branch.drawn is None)
        read = self.lm.scheduler.logits_cache.read
        return [branch for branch, row in rows if row is not None and read(row) is None]

    def retain_only(self, branch: Branch) -> None:
        """End all other branches of the LM; this one becomes a root."""
        check_pairs(self.lm, [(branch, None)], "retain_only")
        for other in list(self._registry.branches):
            if other is not branch:
                other.end(f"retain_only of {branch!r}")
        branch.become_root()

    def merge_logits(self, branch: Branch, experts: Sequence[Branch], alpha: float) -> None:
        """Add alpha times the logits of each expert to a branch's own, until its next commit.

        For contrastive decoding, for example: experts (branch, -1). The experts do not change, and
        the branch's metrics remain those of the model, as with `Branch.set_logits`.

        Raises: ConfigError.
        """
        pairs = [(member, None) for member in (branch, *experts)]
        check_pairs(self.lm, pairs, "merge_logits")
        weight = check_number("alpha", alpha)
        if experts:
            logits = [expert.effective_logits() for expert in experts]
            total = np.sum(logits, axis=0, dtype=np.float64)
            branch.set_logits(branch.effective_logits() + weight * total)

    @property
    def branches(self) -> list[Branch]:
        """The live branches, in the order of their creation."""
        return sorted(self._registry.branches, key=lambda branch: branch.number)

    @property
    def available(self) -> int:
        """How many more branches may be live: `n_seq_max` (65,536 by default) minus live branches.

        Branches without resident KV count too. At 0, forks still work.
        """
        return self._registry.available()

    def pressure(self) -> Pressure:
        """Return how full the LM is. Cost: O(live branches)."""
        return self._registry.pressure()
