"""The jobs of a scheduler by state: waiting, admitted, running; and their open claims."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from ...engines.base import Engine, RetainedRow
from ...errors import WeftError, is_out_of_memory
from ..kv.place import Place
from ..kv.tree import TokenTree
from ..sampling.sampler import BatchSampler, DrawBatch, DrawResult, Sampler, draw_at
from .batch import BatchPart, FirstTokenPart, as_forward_error
from .commits import CommitJob
from .jobs import Job, MergeKey, RunJob
from .logits_cache import LogitsCache
from .prefill import PathClaim, PrefillChunk, PrefillPlanner
from .sequences import SequenceRegistry
from .speculation import Speculation
from .work import Counters

_log = logging.getLogger(__name__)
Value = TypeVar("Value")
Given = ParamSpec("Given")


class BatchSamplerCache:
    """Cache of one BatchSampler, because successive steps usually draw with the same samplers."""

    def __init__(self) -> None:
        self._sampler: BatchSampler | None = None

    def get(self, samplers: Sequence[Sampler]) -> BatchSampler:
        """Return the BatchSampler of these samplers, the cached one if they are the same."""
        if self._sampler is None or self._sampler.samplers != tuple(samplers):
            self._sampler = BatchSampler(samplers)
        return self._sampler

    def clear(self) -> None:
        """Drop the cached sampler."""
        self._sampler = None


class JobQueues:
    """All jobs of a scheduler by state, with the components that move jobs between states.

    Call the methods under the scheduler's lock.
    """

    def __init__(
        self,
        tree: TokenTree,
        engine: Engine,
        counters: Counters,
        logits_cache: LogitsCache,
        n_ctx: int,
    ) -> None:
        self.tree = tree
        self.engine = engine
        self.info = info = engine.info
        self.counters = counters
        self.n_ctx = n_ctx
        # Engines that hide their KV get the full path in every row.
        self.runs_full_paths = info.no_prefix_cache and not info.caches_state
        self.counts_full_rows = self.runs_full_paths or tree.fragments is not None
        self.logits_cache = logits_cache
        self.prefill = PrefillPlanner(
            tree, logits_cache, n_to_run=engine.n_tokens_to_run if info.no_prefix_cache else None
        )
        self.to_join: list[Place] = []  # places whose node chains may be joined
        self.sequences = SequenceRegistry(tree, self.to_join.append)
        self.waiting: list[tuple[int, Job]] = []  # heap of jobs without admission, by age
        self.admitted: dict[Job, None] = {}  # jobs whose paths are pinned
        self.to_check: dict[PathClaim, None] = {}  # claims that may have become complete
        self.unscheduled: dict[PathClaim, None] = {}  # claims that no chunk works for yet
        self.first_draws: list[RunJob] = []  # runs that can draw their first token
        self.deferred_first_draws: list[RunJob] = []  # runs whose first draw the next step does
        self.running: dict[RunJob, None] = {}  # runs that decode in every step
        self.commits: dict[CommitJob, None] = {}  # admitted commits
        self.run_samplers = BatchSamplerCache()
        self.commit_samplers = BatchSamplerCache()
        self.speculation: Speculation | None = None  # proposes draft tokens of runs
        self.n_transitions = 0  # count of preempted and ended jobs and of completed claims
        self._greedy: dict[MergeKey, RunJob] = {}  # runs that wait for their first draw

    @property
    def is_idle(self) -> bool:
        """True if there is no job."""
        return self.head() is None and not self.admitted

    def jobs(self) -> list[Job]:
        """Return all jobs, oldest first."""
        queued = [job for _, job in self.waiting if not job.done]
        return sorted([*queued, *self.admitted], key=lambda job: job.age)

    def min_slots(self) -> int:
        """Return how many slots the oldest admitted job and the pins by users need together.

        0 if no job is admitted.
        """
        if not self.admitted:
            return 0
        job = min(self.admitted, key=lambda job: job.age)
        sequences = job.sequences()
        ends = [claim.path() for claim in job.claims if claim.pin is not None]
        ends += [sequence.tail.cursor for sequence in sequences if sequence.tail is not None]
        ends += [hold.cursor for hold in self.tree.pins]
        nodes = {node for end in ends for node in self.tree.up(end)}
        own = sum([len(sequence.tokens) + 1 for sequence in sequences])
        return sum([len(node.tokens) for node in nodes]) + own

    # Job states -------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Queue a job for admission, by age: a preempted job comes before all younger ones."""
        heapq.heappush(self.waiting, (job.age, job))

    def head(self) -> Job | None:
        """Return the oldest job that waits for admission; None if none does."""
        while self.waiting and self.waiting[0][1].done:
            heapq.heappop(self.waiting)
        return self.waiting[0][1] if self.waiting else None

    def admit(self, job: Job) -> None:
        """Move the job at the head of the queue to the admitted ones and start it.

        Its paths must be pinned.
        """
        heapq.heappop(self.waiting)
        job.admitted = True
        self.admitted[job] = None
        self.guard(job, job.start, self)

    def preempt(self, job: Job) -> None:
        """Return an admitted job to the queue: its KV becomes evictable, its tokens stay."""
        job.preempt(self)
        self._release(job)
        self.counters.preempted += 1
        self.n_transitions += 1
        self.add(job)

    def preempt_all(self) -> None:
        """Preempt all admitted jobs; none may have a part in flight.

        They continue from their known tokens, oldest first, as far as memory allows.
        """
        self.first_draws, self.deferred_first_draws = [], []
        for job in list(self.admitted):
            if job.can_preempt:
                self.guard(job, self.preempt, job)

    def fail(self, job: Job, error: WeftError) -> None:
        """End a job with an error; if it has parts in flight, after these have finished."""
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
        """Remove a job from all states and unpin its paths. Its tickets must be resolved."""
        job.done = True
        self.n_transitions += 1
        self._release(job)
        if not self.running:
            self.run_samplers.clear()
        # Break reference cycles, so that the job's objects are freed now.
        for claim in job.claims:
            claim.requests = []
        job.claims = []

    def _release(self, job: Job) -> None:
        """Remove a job from the admitted ones, and unpin its paths."""
        fresh, waiting = self.to_check, self.unscheduled
        for claim in job.claims:
            if claim in fresh:
                del fresh[claim]
            if claim in waiting:
                del waiting[claim]
            claim.unpin_path(self.tree)
        self.admitted.pop(job, None)
        job.admitted = False

    def guard(
        self, job: Job, action: Callable[Given, Value], *args: Given.args, **kwargs: Given.kwargs
    ) -> Value | None:
        """Call `action` on behalf of a job: an exception fails only this job.

        Returns: the result of `action`. None if it raised, or if the job was done already (no
        call).
        """
        if job.done:
            return None
        try:
            return action(*args, **kwargs)
        except Exception as error:
            self.handle_error(job, error)
            return None

    def handle_error(self, job: Job, error: Exception) -> None:
        """Fail a job because of an exception; log exceptions that are no WeftError."""
        if not isinstance(error, WeftError):
            _log.warning("work failed outside the model call: %r", error)
        self.fail(job, as_forward_error(error))

    def insert(self, place: Place) -> None:
        """Insert a place into the tree. If the engine cannot split a node, the place stays pending.

        That error is only logged.
        """
        try:
            self.tree.place(place)
        except Exception as error:
            _log.warning("the engine could not split a fragment: %r", error)

    # Claims -----------------------------------------------------------------------------------

    def recheck(self, claim: PathClaim) -> None:
        """Let `advance` check a claim, which may be complete now. Unpinned claims are ignored."""
        if claim.pin is not None:
            self.to_check[claim] = None

    def advance(self) -> None:
        """Check the changed claims: continue jobs of complete ones, queue the others for chunks.

        Also draws first tokens whose logits are available.
        """
        while self.to_check or self.first_draws:
            fresh, self.to_check = self.to_check, {}
            for claim in fresh:
                try:  # inlined `guard`: this runs for many claims in each step
                    self._advance_claim(claim)
                except Exception as error:
                    self.handle_error(claim.job, error)
            first, self.first_draws = self.first_draws, []
            self._draw_first_tokens([run for run in first if not run.done])

    def _advance_claim(self, claim: PathClaim) -> None:
        """Continue the claim's job if the claim is complete, else queue the claim for chunks."""
        if claim.pin is None or claim.outstanding or claim.job.done:
            return
        if self.prefill.is_complete(claim):
            self.n_transitions += 1
            self.unscheduled.pop(claim, None)
            claim.job.ready(claim, self)
        else:
            self.unscheduled[claim] = None

    def prefill_order(self, budget: int) -> list[tuple[PathClaim, int]]:
        """Return the claims to plan chunks for, in this order, each with its token budget.

        The oldest claims come first. If the budget is too small for all, half of it goes to the
        claims with the fewest tokens first. Claims of one path count once.

        budget: prefill tokens of the step.
        """
        claims = sorted(self.unscheduled, key=lambda claim: claim.job.age)
        if len(claims) > 1:
            n_remaining = {claim: self.prefill.n_remaining(claim) for claim in claims}
            if sum(n_remaining.values()) <= budget:
                return [(claim, budget) for claim in claims]
            paths = {claim: claim.path() for claim in claims}
            of_path = dict.fromkeys(paths.values(), 0)
            for claim, n in n_remaining.items():
                of_path[paths[claim]] = max(of_path[paths[claim]], n)
            if sum(of_path.values()) > budget > 1:
                left, first = budget // 2, []
                for claim in sorted(claims, key=lambda claim: n_remaining[claim]):
                    if left <= 0:
                        break
                    first.append((claim, left))
                    del n_remaining[claim]
                    left -= of_path.pop(paths[claim], 0)
                return first + [(claim, budget) for claim in claims if claim in n_remaining]
        return [(claim, budget) for claim in claims]

    # First draws ------------------------------------------------------------------------------

    def merge_greedy(self, run: RunJob) -> bool:
        """Merge a greedy run into an equal one that has drawn no token yet.

        Returns: True if `run` was merged and has ended. False if there is no such run.
        """
        key = run.merge_key()
        if key is None:
            return False
        other = self._greedy.setdefault(key, run)
        if other is run or other.done or other.n_drawn:
            self._greedy[key] = run
            return False
        other.absorb(run, self)
        return True

    def _draw_first_tokens(self, runs: list[RunJob]) -> None:
        """Draw the first tokens of runs, and let the runs decode.

        Runs whose token is drawn already only start to decode. If the engine overlaps steps, the
        next step draws instead. An error fails only the run that caused it.
        """
        if not runs:
            return
        self._greedy = {key: run for key, run in self._greedy.items() if run not in set(runs)}
        for run in runs:
            self.guard(run, run.prime, self)
            if run.first_drawn is not None:
                self.guard(run, run.start_decoding, run.first_drawn, self)
        runs = [run for run in runs if not (run.done or run.n_drawn)]
        if self.info.async_scheduling:
            self.deferred_first_draws += [run for run in runs if not run.draws_alone]
            runs = [run for run in runs if run.draws_alone]
        if not runs:
            return
        numbers: dict[RetainedRow, int] = {}
        at = [numbers.setdefault(run.first_row(), len(numbers)) for run in runs]
        try:
            sampler, ends = (
                BatchSampler([run.sampler for run in runs]),
                [run.sequence.depth for run in runs],
            )
            batch = draw_at(sampler, at, ends, kept=sampler.reports_kept)
            result = self._draw_from(list(numbers), batch)
        except Exception as error:  # retry one by one, so that only the failing run fails
            for run in runs if len(runs) > 1 else []:
                self._draw_first_tokens([run])
            if len(runs) == 1:
                self.fail(runs[0], as_forward_error(error))
            return
        for run, drawn in zip(runs, result.drawn(), strict=True):
            self.guard(run, run.start_decoding, drawn, self)

    def _draw_from(self, rows: Sequence[RetainedRow], batch: DrawBatch) -> DrawResult:
        """Draw one token from each row, on the device if the engine can."""
        try:
            return self.engine.draw(rows, batch).result()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return batch.on_host([row.logits() for row in rows])  # copies one row at a time

    def first_token_parts(self, parts: Sequence[PrefillChunk]) -> list[BatchPart]:
        """Return parts that draw first tokens of runs in the same step as their prompts' last rows.

        parts: the step's chunks; those that compute the last row of a run's prompt are used.
        """
        by_name: dict[str | None, list[tuple[RunJob, tuple[PrefillChunk, int]]]] = {}
        for part in parts:
            for request, first, _ in part.answers_for:
                run = request.claim.job
                if isinstance(run, RunJob):
                    self.guard(run, run.prime, self)
                    if not run.done:
                        place = (part, first - part.start)
                        by_name.setdefault(part.namespace, []).append((run, place))
        return [
            FirstTokenPart(name, [run for run, _ in pairs], self, [place for _, place in pairs])
            for name, pairs in by_name.items()
        ]

    def deferred_first_token_parts(self) -> list[BatchPart]:
        """Return one part that draws the deferred first tokens from cached rows; [] if none are.

        If that draw fails, each run draws alone later.
        """
        runs = [run for run in self.deferred_first_draws if run.admitted]
        self.deferred_first_draws = []
        for run in runs:
            run.draws_alone = True  # if this draw fails
        return [FirstTokenPart(None, runs, self)] if runs else []
