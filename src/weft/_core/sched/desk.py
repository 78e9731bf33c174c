"""Where jobs stand: queued, admitted, and what the admitted ones wait for."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from ...engines.base import Engine, RetainedRow
from ...errors import WeftError, is_out_of_memory
from ..kv.place import Place
from ..kv.tree import TokenTree
from ..sampling.sampler import Chain, DrawBatch, DrawResult, Sampler, draw_at
from .jobs import CommitJob, Job, MergeKey, RunJob
from .lines import Lines
from .reads import Claim, PathPart, Reader
from .rows import RowStore
from .step import FirstsPart, Part, as_forward_error
from .work import Counters

_log = logging.getLogger(__name__)
Value = TypeVar("Value")
Given = ParamSpec("Given")


class KeptChain:
    """The chain of the samplers that drew last: mostly the same ones draw again."""

    def __init__(self) -> None:
        self._chain: Chain | None = None

    def of(self, samplers: Sequence[Sampler]) -> Chain:
        """Return the chain of these samplers; the kept one where they step together again."""
        if self._chain is None or self._chain.samplers != tuple(samplers):
            self._chain = Chain(samplers)
        return self._chain

    def clear(self) -> None:
        """Hold nothing of samplers that are gone."""
        self._chain = None


class Desk:
    """All jobs of a scheduler, under its lock.

    queue: by age, not admitted. admitted: with their paths pinned. fresh: claims to look at.
    waiting: claims that no part works for yet. first: runs whose first token can be drawn;
    late_firsts: those of them that the next step draws. live: runs that step. commits: those under
    way.
    """

    def __init__(
        self, tree: TokenTree, engine: Engine, counters: Counters, rows: RowStore, n_ctx: int
    ) -> None:
        self.tree = tree
        self.engine = engine
        self.info = info = engine.info
        self.counters = counters
        self.n_ctx = n_ctx
        # Hidden engines are given whole paths, of which most may be known to them.
        self.runs_whole_paths = info.no_prefix_cache and not info.caches_state
        self.counts_rows_whole = self.runs_whole_paths or tree.fragments is not None
        self.rows = rows
        self.reader = Reader(
            tree, rows, n_to_run=engine.n_tokens_to_run if info.no_prefix_cache else None
        )
        self.to_join: list[Place] = []
        self.lines = Lines(tree, self.to_join.append)
        self.queue: list[tuple[int, Job]] = []
        self.admitted: dict[Job, None] = {}
        self.fresh: dict[Claim, None] = {}
        self.waiting: dict[Claim, None] = {}
        self.first: list[RunJob] = []
        self.late_firsts: list[RunJob] = []
        self.live: dict[RunJob, None] = {}
        self.commits: dict[CommitJob, None] = {}
        self.run_chains = KeptChain()
        self.commit_chains = KeptChain()
        self.n_moves = 0  # jobs that were parked or ended, claims that were complete
        self._greedy: dict[MergeKey, RunJob] = {}  # those that wait for their first draw

    @property
    def is_idle(self) -> bool:
        """No job is here."""
        return self.head() is None and not self.admitted

    def jobs(self) -> list[Job]:
        """Return all jobs, the oldest first."""
        queued = [job for _, job in self.queue if not job.done]
        return sorted([*queued, *self.admitted], key=lambda job: job.age)

    def least(self) -> int:
        """Return how many slots the oldest admitted job needs, beside what is pinned by hand."""
        if not self.admitted:
            return 0
        job = min(self.admitted, key=lambda job: job.age)
        lines = job.lines()
        ends = [claim.path() for claim in job.claims if claim.pin is not None]
        ends += [line.tail.cursor for line in lines if line.tail is not None]
        ends += [hold.cursor for hold in self.tree.pins]
        nodes = {node for end in ends for node in self.tree.up(end)}
        own = sum([len(line.tokens) + 1 for line in lines])
        return sum([len(node.tokens) for node in nodes]) + own

    # Coming and going -------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Queue a job; parked ones go back to their place by age."""
        heapq.heappush(self.queue, (job.age, job))

    def head(self) -> Job | None:
        """Return the oldest job that waits for admission."""
        while self.queue and self.queue[0][1].done:
            heapq.heappop(self.queue)
        return self.queue[0][1] if self.queue else None

    def take(self, job: Job) -> None:
        """Let the job at the head, whose paths are pinned, start."""
        heapq.heappop(self.queue)
        job.admitted = True
        self.admitted[job] = None
        try:
            job.start(self)
        except Exception as error:
            self.fault(job, error)

    def park(self, job: Job) -> None:
        """Send an admitted job back: its KV becomes evictable, what it made is kept."""
        job.park(self)
        self._let_go(job)
        self.counters.parked += 1
        self.n_moves += 1
        self.add(job)

    def begin_anew(self) -> None:
        """Send all admitted jobs back, of which nothing is in flight: they go on from what is
        known, the oldest first, as far as there is room now.
        """
        self.first, self.late_firsts = [], []
        for job in list(self.admitted):
            if job.can_park:
                self.guard(job, self.park, job)

    def fail(self, job: Job, error: WeftError) -> None:
        """End a job with an error; what it has in flight must land first."""
        if job.done:
            return
        if job.outstanding:
            job.error = job.error or error
            return
        job.stop(self)
        for ticket in job.tickets():
            ticket.resolve(error=error)
        self.end(job)

    def end(self, job: Job) -> None:
        """Take a job whose tickets are answered out of everything."""
        job.done = True
        self.n_moves += 1
        self._let_go(job)
        if not self.live:
            self.run_chains.clear()
        # No cycles: what the job held is let go now, not when the collector comes by.
        for claim in job.claims:
            claim.needs = []
        job.claims = []

    def _let_go(self, job: Job) -> None:
        fresh, waiting = self.fresh, self.waiting
        for claim in job.claims:
            if claim in fresh:
                del fresh[claim]
            if claim in waiting:
                del waiting[claim]
            claim.leave(self.tree)
        self.admitted.pop(job, None)
        job.admitted = False

    def guard(
        self, job: Job, action: Callable[Given, Value], *given: Given.args, **more: Given.kwargs
    ) -> Value | None:
        """Do something for a job; what goes wrong in it fails this job and no other."""
        if job.done:
            return None
        try:
            return action(*given, **more)
        except Exception as error:
            self.fault(job, error)
            return None

    def fault(self, job: Job, error: Exception) -> None:
        """Fail a job by what went wrong in it."""
        if not isinstance(error, WeftError):
            _log.warning("work failed outside the model call: %r", error)
        self.fail(job, as_forward_error(error))

    def place(self, place: Place) -> None:
        """Put a place into the tree; where the engine cannot split a node for it, it waits."""
        try:
            self.tree.place(place)
        except Exception as error:
            _log.warning("the engine could not split a fragment: %r", error)

    # Claims -----------------------------------------------------------------------------------

    def look_at(self, claim: Claim) -> None:
        """Something changed for a claim: see whether it has all it wants."""
        if claim.pin is not None:
            self.fresh[claim] = None

    def promote(self) -> None:
        """Let jobs go on whose claims have all they want; the others wait for parts."""
        while self.fresh or self.first:
            fresh, self.fresh = self.fresh, {}
            for claim in fresh:
                try:  # as `guard` has it: many come by here each step
                    self._promote(claim)
                except Exception as error:
                    self.fault(claim.job, error)
            first, self.first = self.first, []
            self._draw_first([run for run in first if not run.done])

    def _promote(self, claim: Claim) -> None:
        if claim.pin is None or claim.outstanding or claim.job.done:
            return
        if self.reader.is_complete(claim):
            self.n_moves += 1
            self.waiting.pop(claim, None)
            claim.job.ready(claim, self)
        else:
            self.waiting[claim] = None

    def waiting_in_turn(self, budget: int) -> list[tuple[Claim, int]]:
        """Return the claims that parts are packed for, and how many tokens each may have.

        budget: tokens of the step. The oldest first; but where it does not do for all, half of it
        goes to those that need the fewest: nobody waits for all of a book that somebody else has
        brought, and the book is read, too. Claims of one path need it once.
        """
        claims = sorted(self.waiting, key=lambda claim: claim.job.age)
        if len(claims) > 1:
            n_open = {claim: self.reader.n_open(claim) for claim in claims}
            if sum(n_open.values()) <= budget:
                return [(claim, budget) for claim in claims]
            paths = {claim: claim.path() for claim in claims}
            of_path = dict.fromkeys(paths.values(), 0)
            for claim, n in n_open.items():
                of_path[paths[claim]] = max(of_path[paths[claim]], n)
            if sum(of_path.values()) > budget > 1:
                left, first = budget // 2, []
                for claim in sorted(claims, key=lambda claim: n_open[claim]):
                    if left <= 0:
                        break
                    first.append((claim, left))
                    del n_open[claim]
                    left -= of_path.pop(paths[claim], 0)
                return first + [(claim, budget) for claim in claims if claim in n_open]
        return [(claim, budget) for claim in claims]

    # First draws ------------------------------------------------------------------------------

    def merge(self, run: RunJob) -> bool:
        """Let an equal greedy run that has not begun carry this one; return whether it does."""
        key = run.merge_key()
        if key is None:
            return False
        other = self._greedy.setdefault(key, run)
        if other is run or other.done or other.n_drawn:
            self._greedy[key] = run
            return False
        other.carry(run, self)
        return True

    def _draw_first(self, runs: list[RunJob]) -> None:
        """Draw the first token of runs from the logits at their places."""
        if not runs:
            return
        self._greedy = {key: run for key, run in self._greedy.items() if run not in set(runs)}
        for run in runs:
            self.guard(run, run.prime, self)
            if run.first_drawn is not None:
                self.guard(run, run.begin, run.first_drawn, self)
        runs = [run for run in runs if not (run.done or run.n_drawn)]
        if self.info.async_scheduling:
            self.late_firsts += [run for run in runs if not run.draws_alone]
            runs = [run for run in runs if run.draws_alone]
        if not runs:
            return
        numbers: dict[RetainedRow, int] = {}
        at = [numbers.setdefault(run.first_row(), len(numbers)) for run in runs]
        try:
            chain, ends = Chain([run.sampler for run in runs]), [run.line.depth for run in runs]
            batch = draw_at(chain, at, ends, kept=False)
            result = self._drawn(list(numbers), batch)
        except Exception as error:  # one of them cannot draw: find it, the others go on
            for run in runs if len(runs) > 1 else []:
                self._draw_first([run])
            if len(runs) == 1:
                self.fail(runs[0], as_forward_error(error))
            return
        for run, drawn in zip(runs, result.drawn(), strict=True):
            self.guard(run, run.begin, drawn, self)

    def _drawn(self, rows: Sequence[RetainedRow], batch: DrawBatch) -> DrawResult:
        try:
            return self.engine.draw(rows, batch).result()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return batch.on_host([row.logits() for row in rows])  # a row at a time

    def firsts_of(self, parts: Sequence[PathPart]) -> list[Part]:
        """Return parts that draw the first tokens of runs from the rows that these parts bring."""
        found: dict[str | None, list[tuple[RunJob, tuple[PathPart, int]]]] = {}
        for part in parts:
            for need, first, _ in part.takes:
                run = need.claim.job
                if isinstance(run, RunJob):
                    self.guard(run, run.prime, self)
                    if not run.done:
                        place = (part, first - part.start)
                        found.setdefault(part.namespace, []).append((run, place))
        return [
            FirstsPart(name, [run for run, _ in pairs], self, [place for _, place in pairs])
            for name, pairs in found.items()
        ]

    def late_firsts_part(self) -> list[Part]:
        """Return the part that draws the first tokens of runs from rows that were kept, if any."""
        runs = [run for run in self.late_firsts if run.admitted]
        self.late_firsts = []
        for run in runs:
            run.draws_alone = True  # should this go wrong
        return [FirstsPart(None, runs, self)] if runs else []
