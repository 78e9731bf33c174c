"""Draft tokens from a smaller model, which draws with the random numbers of the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

from ...errors import WeftError
from ..kv.place import Cursor, Place, common_prefix
from ..kv.tree import is_evictable
from ..sampling.sampler import Sampler
from .ngrams import Acceptance
from .work import Run

if TYPE_CHECKING:
    from .driver import Driver
    from .jobs import RunJob
    from .speculation import StepCosts

_log = logging.getLogger(__name__)
MAX_DRAFT = 8  # draft tokens of a run in a step
_LENGTH = 6  # `Acceptance` counts by length of match; a model's drafts all count as this length
_KEPT = 0.97  # of a run's counts after a step without drafts, so that they are tried later


class ModelDrafts:
    """The draft tokens of one run that a smaller model has drawn, and their acceptance."""

    def __init__(self, acceptance: Acceptance) -> None:
        self.acceptance = acceptance
        self._tokens: list[int] = []

    def replace(self, tokens: Sequence[int]) -> None:
        """Replace the draft tokens by those that follow the last token of the run."""
        self._tokens = list(tokens)

    def push(self, token: int, *, is_forced: bool = False) -> None:
        """Append a token of the run. If the first draft token differs, all are dropped.

        is_forced: the constraint allowed only this token, so that it does not count as accepted.
        """
        if self._tokens:
            is_hit = self._tokens[0] == token
            if not is_forced:
                self.acceptance.count(_LENGTH, is_hit)
            self._tokens = self._tokens[1:] if is_hit else []

    def draft(self, n: int) -> list[int]:
        """Return at most `n` draft tokens."""
        return self._tokens[:n]

    def chances(self, forced: Sequence[bool]) -> list[float]:
        """Return, for each draft token, the probability that all up to it are accepted.

        forced: for each of these tokens, True if the constraint allows only that token.
        """
        rate = self.acceptance.rate(_LENGTH)
        return list(accumulate([1.0 if is_forced else rate for is_forced in forced], mul))


class DraftModel:
    """A smaller model with the same vocabulary, which drafts tokens for the runs of a larger one.

    It draws with the parameters and the random stream of each run, without constraint,
    penalties and DRY. Its KV of rejected tokens is freed before its next drafts.

    is_usable: False after an error of the smaller model.
    """

    def __init__(self, driver: Driver) -> None:
        """driver: runs the smaller model."""
        self.is_usable = True
        self._driver = driver
        self._seconds: float | None = None  # of one draft token of all runs
        self._offered: list[tuple[RunJob, Place, list[int]]] = []

    def propose(self, runs: Sequence[RunJob], costs: StepCosts, min_gain: float) -> None:
        """Draw draft tokens for the runs of the next step, as many as raise the expected speed.

        Runs the smaller model. Do not hold the lock of the larger one's scheduler.
        """
        if not (runs and self.is_usable and costs.is_known(len(runs))):
            return
        try:
            if self._offered:
                self._driver.exclusive(self._free_rejected)
            wanted = [
                (run, run.drafts, n)
                for run in runs
                if isinstance(run.drafts, ModelDrafts)
                and (n := self._n_draft(run, run.drafts, len(runs), costs, min_gain))
            ]
            if wanted:
                self._draw(wanted)
        except WeftError as error:
            _log.warning("the draft model is not used any more: %s", error)
            self.is_usable = False

    def _n_draft(
        self, run: RunJob, drafts: ModelDrafts, n_runs: int, costs: StepCosts, min_gain: float
    ) -> int:
        """Return the number of draft tokens with the most expected tokens per second."""
        scheduler = self._driver.scheduler
        room = min(MAX_DRAFT, run.room(scheduler.n_ctx) - 1)
        if room <= 0 or drafts.draft(1) or not run.can_verify:
            return 0
        plain = costs.estimate(n_runs)
        seconds = 0.2 * plain if self._seconds is None else self._seconds
        best, best_rate, n_expected = 0, min_gain / plain, 1.0
        for n, chance in enumerate(drafts.chances([False] * room), 1):
            n_expected += chance
            rate = n_expected / (costs.estimate(n_runs * (1 + n)) + n * seconds)
            if rate > best_rate:
                best, best_rate = n, rate
        if not best:
            drafts.acceptance.decay(_KEPT)
        return best

    def _draw(self, wanted: Sequence[tuple[RunJob, ModelDrafts, int]]) -> None:
        """Draw the draft tokens of some runs together, and store them in `ModelDrafts`."""
        scheduler = self._driver.scheduler
        began, items = time.perf_counter(), []
        for run, _, n in wanted:
            params = replace(
                run.sampler.params,
                constraint=None,
                repetition_penalty=1.0,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                dry_multiplier=0.0,
            )
            place = Place(scheduler.tree.holds, None, None, run.sequence.end().ids())
            items.append(Run(place, Sampler(params, run.sampler.stream), max_tokens=n))
        tickets = self._driver.submit(items)
        self._driver.drive(tickets)
        for (run, drafts, _), ticket in zip(wanted, tickets, strict=True):
            result = ticket.result()
            drafts.replace(result.tokens)
            self._offered.append((run, result.end, result.tokens))
        seconds = (time.perf_counter() - began) / max(n for _, _, n in wanted)
        known = self._seconds or seconds
        self._seconds = known + 0.2 * (min(seconds, 2 * known) - known)

    def _free_rejected(self) -> None:
        """Free the smaller model's KV of draft tokens that their runs did not accept.

        Call it between its steps, under its lock.
        """
        tree, offered, self._offered = self._driver.scheduler.tree, self._offered, []
        for run, end, tokens in offered:
            start, cursor = end.depth - len(tokens), end.cursor
            n_valid = common_prefix(tokens, run.sequence.end().ids(), start)
            if n_valid == len(tokens) or cursor is None:
                continue
            end_of_valid = start + n_valid
            tree.cut(Cursor(cursor.node, end_of_valid))
            for node in [node for node in tree.up(cursor) if node.start >= end_of_valid]:
                if is_evictable(node):
                    tree.drop(node)
