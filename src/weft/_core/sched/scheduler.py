"""The scheduler: every model call of an LM is one of its steps.

A step reads as in vLLM and SGLang: schedule, launch, wait, process outputs (`Scheduler.step`).
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from functools import partial

from ...engines.base import Engine, Fragment, Row
from ...errors import Cancelled, ConfigError, StaleHandle, WeftError
from ..kv.joining import JOIN_LENGTH, join_chain
from ..kv.place import resolve
from ..kv.tree import TokenTree
from .admission import Admission
from .batch import (
    BatchPart,
    DecodePart,
    ScheduledStep,
    SequencePart,
    VerifyPart,
    VerifyRow,
    as_forward_error,
)
from .commits import CommitJob, CommitPart
from .draft_model import DraftModel
from .engine_runs import (
    EngineRunJob,
    EngineRunQueue,
    check_raw_logits,
    check_steps_needed,
    why_not_generated,
)
from .jobs import ExtendJob, Job, RunJob
from .logits_cache import LogitsCache
from .queues import JobQueues
from .sequences import TokenSequence
from .speculation import MAX_RUNS, CommitRow, Draft, Speculation, StepCosts
from .work import Commit, Counters, Extend, Item, Run, Ticket

_log = logging.getLogger(__name__)
_KINDS: dict[type[Item], type[Job]] = {Extend: ExtendJob, Run: RunJob, Commit: CommitJob}
# A step without work waits this long for events of runs that the engine generates.
ENGINE_WAIT_S = 0.02
# A commit, and the indices of its sequences that a step runs.
CommitShare = tuple[CommitJob, list[int]]
Drafts = dict[TokenSequence, Draft]  # draft tokens that a step verifies


class Scheduler:
    """Turns submitted work items into steps (batched model calls) and resolves their tickets.

    `submit` may be called by any thread. `step` is called by one thread at a time (see `driver`).
    The scheduler holds the lock while it schedules and processes outputs, never during a model
    call.
    """

    def __init__(
        self, engine: Engine, tree: TokenTree, *, n_ctx: int, n_batch: int, row_cache_bytes: int
    ) -> None:
        """Create the scheduler of one engine.

        Args:
            engine: runs the steps.
            tree: the token tree, empty.
            n_ctx: maximum tokens of a path.
            n_batch: maximum prefill tokens of a step. If the engine has `max_num_batched_tokens`,
                decoded tokens come on top, up to that limit.
            row_cache_bytes: budget of the logits cache.
        """
        self.engine = engine
        self.tree = tree
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.n_step = max(n_batch, engine.info.max_num_batched_tokens or 0)
        self.lock = tree.holds.lock
        self.counters = Counters()
        info = engine.info
        self._overlaps = info.async_scheduling
        self.logits_cache = LogitsCache(row_cache_bytes, info.n_vocab, tree.forget, self.lock)
        self.queues = JobQueues(tree, engine, self.counters, self.logits_cache, n_ctx)
        self.sequences = self.queues.sequences
        self.admission = Admission(self.queues)
        self.engine_runs = None if engine.native is None else EngineRunQueue(engine.native)
        self.in_flight: ScheduledStep | None = None
        self.dropped_namespaces: dict[
            str, str
        ] = {}  # namespaces that are gone, and what to say of them
        self._weights = engine.weights_version()
        self._inbox: deque[list[Job] | Ticket] = deque()
        self._ages = itertools.count(1)
        self._step_costs = StepCosts()
        self._clock = time.process_time if info.device == "cpu" else time.perf_counter
        self._last_finished: float | None = None  # when a step finished, if others follow it

    def submit(self, items: Sequence[Item], *, atomic: bool = False) -> list[Ticket]:
        """Queue items; return one ticket per item, which later steps resolve.

        Cost: O(items), no model call.

        atomic: all items succeed, or all fail and nothing changes. All must be extends.
        """
        tickets, jobs = self.prepare(items, atomic=atomic)
        self.enqueue(jobs)
        return tickets

    def prepare(
        self, items: Sequence[Item], *, atomic: bool = False
    ) -> tuple[list[Ticket], list[Job]]:
        """Validate items; return one ticket per item, and the jobs to pass to `enqueue`.

        Nothing is queued yet. Takes no lock.

        atomic: as for `submit`.
        """
        if atomic and not all(isinstance(item, Extend) for item in items):
            raise ConfigError("an atomic call takes extends only; submit runs on their own")
        if self.dropped_namespaces:
            self._check_not_dropped(items)
        capabilities = self.engine.info.capabilities
        if not capabilities.steps:
            check_steps_needed(items, self.engine)
        elif not capabilities.raw_logits:
            check_raw_logits(items, self.engine)
        tickets = [Ticket(item, self._inbox) for item in items]
        groups = [tickets] if atomic else [[ticket] for ticket in tickets]
        return tickets, [self._job_of(group) for group in groups if group]

    def _job_of(self, group: list[Ticket]) -> Job:
        """Return a new job for tickets that are resolved together: one ticket, or an atomic call.

        If the engine can generate a run by itself, that is an EngineRunJob.
        """
        item, age = group[0].item, next(self._ages)
        if self.engine_runs is not None and isinstance(item, Run):
            if why_not_generated(item.sampler, self.engine.native) is None:
                return EngineRunJob(age, group, self.engine_runs)
        return _KINDS[type(item)](age, group)

    def enqueue(self, jobs: list[Job]) -> None:
        """Add jobs to the inbox; a step sees all of them or none. Takes no lock."""
        if jobs:
            self._inbox.append(jobs)
            if self.engine_runs is not None:
                self.engine_runs.wake()

    @property
    def is_idle(self) -> bool:
        """True if nothing is queued, waiting, running or in flight."""
        return not self._inbox and self.in_flight is None and self.queues.is_idle

    @property
    def n_queued(self) -> int:
        """The approximate number of jobs that are not admitted yet."""
        return len(self._inbox) + len(self.queues.waiting)

    def step(self) -> None:
        """Run one step: admit, schedule, launch, wait, process outputs.

        An engine with `async_scheduling` overlaps steps. The next call of `step` then processes the
        outputs of this step, after it has launched its own step. The draws of that step start last,
        so that samplers have accepted every earlier token.

        A failed model call fails its own tickets. Any other error of the engine, such as running
        out of memory, fails only the work that caused it. Later calls work.
        """
        try:
            self._step()
        except BaseException as error:
            self._recover(error)
            if not isinstance(error, Exception):
                raise

    def _step(self) -> None:
        """The body of `step`."""
        started, measured_from = time.perf_counter(), 0.0
        speculation = self.queues.speculation
        if speculation is not None:
            if speculation.model is not None:
                self._propose_drafts(speculation, speculation.model)
            measured_from = self._clock()
        with self.lock:
            n_events, n_transitions = self._receive_and_admit()
            step = self._schedule()
        scheduled = time.perf_counter()
        to_finish, engine_s = self._launch(step)
        for launched in to_finish:
            engine_s += self._wait(launched)
            self._process_outputs(launched)
        if self.in_flight is not None:  # its samplers have accepted the previous step's tokens now
            engine_s += self._draw_overlapped(self.in_flight)
        if speculation is not None:
            self._measure_decoding(speculation, to_finish, measured_from)
        self.counters.plan_s += scheduled - started
        self.counters.forward_s += engine_s
        self.counters.deliver_s += time.perf_counter() - scheduled - engine_s
        n_events += self.queues.n_transitions - n_transitions
        if not (step or to_finish or n_events or self.queues.running or self.is_idle):
            self._wait_for_engine_runs()

    def _propose_drafts(self, speculation: Speculation, model: DraftModel) -> None:
        """Let the draft model draw tokens for the runs of the next step."""
        with self.lock:
            runs = [run for run in self.queues.running if run.can_step(self.n_ctx)]
        if len(runs) <= MAX_RUNS:
            model.propose(runs, speculation.costs, speculation.min_gain)

    def _measure_decoding(
        self, speculation: Speculation, finished: list[ScheduledStep], started: float
    ) -> None:
        """Record the time of a finished step that only decoded.

        Steps with forced tokens are left out, because these have no logits and are cheaper.

        Args:
            speculation: stores the time.
            finished: the steps that this call has finished.
            started: the time when this call started. Overlapped steps count from the end of the
                last one.
        """
        now = self._clock()
        since = self._last_finished if self._overlaps else started
        self._last_finished = now if finished and not self.is_idle else None
        if since is None or len(finished) != 1:
            return
        (step,) = finished
        is_decoding = all(isinstance(part, SequencePart) for part in step.parts)
        if step.error is None and is_decoding and not step.has_scores():
            speculation.costs.measure(step.size()[1], now - since)

    def _receive_and_admit(self) -> tuple[int, int]:
        """Receive new work, admit jobs, and process events of engine runs, at the start of a step.

        Returns: the number of inbox entries, jobs and events that it processed, 0 if there was
        nothing to do; and `JobQueues.n_transitions` before it started.
        """
        self.check_weights()
        self.admission.pressure.relax()
        n_transitions = self.queues.n_transitions
        n_events = self.drain_inbox()
        if self.queues.waiting and not self._waits_for_old_weights():
            n_events += self.admission.admit(may_evict=self.in_flight is None)
        if self.in_flight is None and self.queues.admitted:
            self.admission.offload_idle(self.engine.info.idle_slots)
        if self.engine_runs is not None:
            n_events += self.engine_runs.process_events(self.queues)
            n_events += self.engine_runs.submit_waiting(self.queues)
        return n_events, n_transitions

    def _wait_for_engine_runs(self) -> None:
        """Wait for events of the engine's own runs; without such runs, fail all jobs as stuck.

        Called if a step had nothing to do although there are jobs.
        """
        if self.engine_runs is None or self.engine_runs.is_idle:
            self._fail_stuck_jobs()
        else:
            self.engine_runs.wait(ENGINE_WAIT_S)

    # Inbox ------------------------------------------------------------------------------------

    def drain_inbox(self) -> int:
        """Process released places and sequences, cancellations, and new jobs.

        Returns: the number of cancellations and submissions.
        """
        if self.sequences.released:
            self.sequences.close_released()
        self.tree.drain_released()
        n_taken = len(self._inbox)
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, list):
                self._enqueue_new(entry)
            elif not entry.done:
                assert entry.job is not None
                entry.job.cancel(entry, self.queues)
        self._join_node_chains()
        return n_taken

    def _enqueue_new(self, jobs: list[Job]) -> None:
        """Queue new jobs for admission; fail those of dropped adapters."""
        if self.sequences.opened and any(job.needs_closed_tails for job in jobs):
            self.sequences.close_idle()
        for job in jobs:
            self.queues.add(job)
            for name, message in self.dropped_namespaces.items():
                if name in job.namespaces():  # dropped after the job was prepared
                    self.queues.fail(job, StaleHandle(message))

    def close_idle_sequences(self) -> None:
        """Drain the inbox and close idle sequences.

        After that, only running work and pins by users make KV unevictable.
        """
        self.drain_inbox()
        self.sequences.close_idle()
        # Closed sequences release places of their own.
        self._join_node_chains()
        self.tree.drain_released()

    def check_weights(self) -> None:
        """Drop KV and logits that were computed with weights that have changed since.

        Called under the lock. Running work is not interrupted; its caches are dropped after it has
        ended.
        """
        if self.in_flight is None and not self.queues.admitted and self.weights_changed():
            _log.info("the model's weights have changed: cached KV and logits are dropped")
            self._weights = self.engine.weights_version()
            self._clear_caches()
            self.engine.refresh_weights()

    def _waits_for_old_weights(self) -> bool:
        """Return True if new jobs must wait, because running jobs started with older weights.

        Without the wait, a steady stream of jobs would mix KV of both versions without end.
        """
        queues = self.queues
        return bool(queues.admitted) and queues.head() is not None and self.weights_changed()

    def weights_changed(self) -> bool:
        """Return True if the model's weights were changed in place since the last check."""
        return self.engine.weights_version() != self._weights

    def speculate(self, *, lookup: bool = False, model: DraftModel | None = None) -> None:
        """Start or stop verifying draft tokens. Call it under the lock.

        Args:
            lookup: take drafts from the n-grams of the token tree.
            model: take drafts from this model. With neither, there are no drafts.
        """
        self.tree.on_insert = self.queues.speculation = None
        if lookup or model is not None:
            self.queues.speculation = Speculation(self.tree, self._step_costs, model)

    def clear(self) -> None:
        """Drop all KV and logits that no running work needs. Between steps, under the lock."""
        self.admission.pressure.reset()
        self._clear_caches()
        self.engine.clear_caches()

    def _clear_caches(self) -> None:
        """Drop unpinned KV and all cached logits."""
        self.close_idle_sequences()
        self.tree.clear()
        self.logits_cache.clear()

    # Schedule ---------------------------------------------------------------------------------

    def _schedule(self) -> ScheduledStep | None:
        """Choose the rows of the next step.

        Returns None if there are none, or if the step in flight must finish first.
        """
        queues = self.queues
        queues.advance()
        n_batch, n_step = self._budgets()
        # Keep a part of the budget for prefill, so that running requests do not starve new ones.
        others = queues.unscheduled or queues.commits
        min_prefill = min(max(n_batch // 4, 1), n_batch - 1) if others else 0
        runs = self._ready_runs(n_step - min_prefill) if queues.running else []
        drafts: Drafts = {}
        shares: list[CommitShare] = []
        if queues.commits:
            used = self._n_budget_tokens(runs) + sum([len(run.forced) for run in runs])
            shares = self._commit_shares(max(n_step - used, min_prefill))
        if queues.speculation is not None and (runs or shares):
            drafts = self._plan_drafts(queues.speculation, runs, shares, n_step - min_prefill)
        sequence_parts: list[SequencePart] = []
        if runs or shares:
            n_before, in_flight = queues.n_transitions, self.in_flight is not None
            reserve = partial(self._reserve, runs, drafts, shares, n_before)
            if not self.admission.reserve_slots(reserve, in_flight=in_flight):
                return None
            sequence_parts = self._decode_parts(runs, drafts) if runs else []
            if shares:
                sequence_parts += self._commit_parts(shares, drafts)
        if queues.runs_full_paths:
            n_recomputed = [part.n_tokens() - part.n_logits() for part in sequence_parts]
            self.counters.recomputed += sum(n_recomputed)
        parts: list[BatchPart] = [*sequence_parts]
        if queues.unscheduled:
            n_left = min(n_batch, n_step - sum([part.n_tokens() for part in sequence_parts]))
            if self.engine.info.no_prefix_cache:  # one long path may exceed the budget of decoding
                n_left = max(n_left, min_prefill)
            if runs and self.engine.info.device == "cpu":
                # Tokens of a batch cost as much as single ones on a CPU: prefill of a full batch
                # would delay all running requests. If more requests wait than run, they get more:
                # rows of a larger decoding batch cost less.
                n_waiting_per_run = len(queues.unscheduled) // len(runs)
                n_left = min(n_left, min_prefill * max(1, n_waiting_per_run))
            brought = queues.prefill.plan(queues.prefill_order(n_left), n_left, queues)
            parts += [*brought, *queues.first_token_parts(brought)]
        if queues.deferred_first_draws:
            parts += queues.deferred_first_token_parts()
        computed, reread = queues.prefill.pop_counts()
        self.counters.prefilled += computed
        self.counters.recomputed += reread
        if not parts:
            queues.advance()  # the cache may have answered some requests
            return None
        return ScheduledStep(parts)

    def _budgets(self) -> tuple[int, int]:
        """Return the token budgets of the next step: for prefill, and in total."""
        budget = self.admission.pressure.max_step_tokens
        if budget is None:
            return self.n_batch, self.n_step
        return min(self.n_batch, budget), min(self.n_step, budget)

    def _ready_runs(self, budget: int) -> list[RunJob]:
        """Return the runs that decode in the next step, and open their sequences.

        If there are too many, the oldest decode first, so that tails are short-lived. Engines that
        get the full path in every row have no tails: all runs take turns, and a path longer than
        `budget` runs alone.

        budget: maximum tokens, forced tokens included.
        """
        queues = self.queues
        ready = [run for run in queues.running if run.can_step(self.n_ctx)]
        if self.in_flight is not None:
            ready = [run for run in ready if run.sequence.is_open or self._can_open(run)]
        if self.queues.runs_full_paths:
            ready.sort(key=lambda run: (run.n_drawn, run.age))
            costs = itertools.accumulate([run.sequence.depth for run in ready])
            ready = ready[: max(bisect_right(list(costs), budget), 1)]
        elif len(ready) > budget:
            ready = heapq.nsmallest(budget, ready, key=lambda run: run.age)
        # Most runs are open already and have no constraint: skip the loop for them.
        begun = [
            run for run in ready if run.sampler.matcher is not None or run.sequence.pin is None
        ]
        spare = budget - self._n_budget_tokens(ready)
        for run in begun:
            if not run.sequence.is_open:
                queues.guard(run, run.open_sequence, queues)
            if run.sampler.matcher is not None:
                queues.guard(run, run.force, spare, queues)
                spare -= len(run.forced)
        return [run for run in ready if not run.done] if begun else ready

    def _n_budget_tokens(self, runs: list[RunJob]) -> int:
        """Return how many tokens of the budget one step of these runs uses, without forced ones."""
        if self.queues.runs_full_paths:
            return sum([run.sequence.depth for run in runs])
        return len(runs)

    def _can_open(self, run: RunJob) -> bool:
        """Return True if the run's sequence can be opened: no step in flight writes its last node.

        The run has one claim, which ends where its sequence starts.
        """
        (claim,) = run.claims
        assert claim.cursor is not None
        return not self.queues.prefill.is_being_written(claim.cursor)

    def _commit_shares(self, budget: int) -> list[CommitShare]:
        """Return the part of each commit that the next step runs, and open its sequences.

        budget: maximum tokens.

        Returns: the commits, each with the indices of its sequences.
        """
        shares = []
        for job in list(self.queues.commits):
            if job.n_waiting or job.outstanding or budget <= 0:
                continue
            if self.in_flight is not None:
                cursors = (claim.cursor for claim in job.claims if claim.cursor is not None)
                if any(self.queues.prefill.is_being_written(cursor) for cursor in cursors):
                    continue
            numbers = job.share(budget, self.queues)
            sequences = [job.item.sequences[number] for number in numbers]
            for sequence in sequences:
                if not sequence.is_open:
                    self.queues.guard(job, job.open_sequence, sequence, self.queues)
            if not job.done:
                shares.append((job, numbers))
                budget -= len(numbers)
                if self.queues.runs_full_paths:
                    budget -= sum([sequence.depth for sequence in sequences])
        return shares

    def _plan_drafts(
        self,
        speculation: Speculation,
        runs: list[RunJob],
        shares: list[CommitShare],
        budget: int,
    ) -> Drafts:
        """Return the draft tokens that the step verifies. They preempt no job.

        budget: maximum tokens of runs and commits.
        """
        n_rows = len(runs) + sum([len(numbers) for _, numbers in shares])
        if n_rows > MAX_RUNS:
            return {}
        rows: list[RunJob | CommitRow] = [*runs]
        for job, numbers in shares:
            rows += job.draft_rows(numbers, self.queues)
        spare = budget - n_rows - sum([len(run.forced) for run in runs])
        kv = self.tree.budget
        if kv.capacity is not None:
            n_growing = len(runs) + sum([len(job.to_run) for job in self.queues.commits])
            spare = min(spare, kv.capacity - kv.unevictable - kv.growth * (n_growing + 1))
        if shares:  # their steps store all logits: two steps fit, so that drafts evict none in use
            spare = min(spare, self.logits_cache.max_rows // 2 - n_rows)
        return speculation.plan(rows, spare, self.n_ctx)

    def _reserve(
        self, runs: list[RunJob], drafts: Drafts, shares: list[CommitShare], n_before: int
    ) -> None:
        """Reserve the slots of a step; first remove jobs that are not admitted any more.

        Args:
            runs: runs that decode; jobs are removed from this list in place.
            drafts: draft tokens of some sequences.
            shares: parts of commits; those of removed jobs are removed from this list in place.
            n_before: `JobQueues.n_transitions` when the lists were created. If it is still equal,
                all jobs are admitted.
        """
        if self.queues.n_transitions != n_before:
            runs[:] = [run for run in runs if run in self.queues.running]
            shares[:] = [share for share in shares if share[0] in self.queues.commits]
        tree = self.tree
        for run in runs:
            n = 1 + len(run.forced)
            if drafts and run.sequence in drafts:
                n += len(drafts[run.sequence].tokens)
            run.sequence.reserve(tree, n)
        for job, numbers in shares:
            sequences = job.item.sequences
            for number in numbers:
                sequence = sequences[number]
                n = 1 + len(drafts[sequence].tokens) if drafts and sequence in drafts else 1
                sequence.reserve(tree, n)

    def _decode_parts(self, runs: list[RunJob], drafts: Drafts) -> list[SequencePart]:
        """Return one DecodePart and one VerifyPart per LoRA adapter.

        A run whose row cannot be created fails.

        drafts: draft tokens of some of the sequences.
        """
        queues = self.queues
        by_name: dict[str | None, tuple[list[RunJob], list[Row]]] = {}
        verified: dict[str | None, list[VerifyRow]] = {}
        for run in runs:
            try:
                if drafts and (draft := drafts.get(run.sequence)) is not None:
                    entry = run.verify_row(draft, queues)
                    if entry is not None:
                        verified.setdefault(entry.row.adapter, []).append(entry)
                        continue
                row = run.row(queues)
            except Exception as error:
                queues.handle_error(run, error)
                continue
            of_name = by_name.get(row.adapter)
            if of_name is None:
                of_name = by_name[row.adapter] = ([], [])
            of_name[0].append(run)
            of_name[1].append(row)
        parts: list[SequencePart] = [
            DecodePart(some, rows, queues) for some, rows in by_name.values()
        ]
        if verified:
            parts += [VerifyPart(entries, queues) for entries in verified.values()]
        return parts

    def _commit_parts(self, shares: list[CommitShare], drafts: Drafts) -> list[SequencePart]:
        """Return one CommitPart per share.

        drafts: draft tokens of some of the sequences.
        """
        queues = self.queues
        parts = [
            queues.guard(job, CommitPart, job, numbers, drafts, queues) for job, numbers in shares
        ]
        return [part for part in parts if part is not None]

    # Launch, wait, process outputs ------------------------------------------------------------

    def _launch(self, step: ScheduledStep | None) -> tuple[list[ScheduledStep], float]:
        """Call the model for a step; if the engine overlaps steps, put the step in flight.

        Draws are started too, except for a step in flight; see `_draw_overlapped`.

        step: None calls nothing, but the step in flight still has to finish.

        Returns: the steps to wait for now, and the seconds that the calls took.
        """
        previous, self.in_flight, seconds = self.in_flight, None, 0.0
        to_finish = [previous] if previous is not None else []
        if step is None:
            return to_finish, seconds
        started = time.perf_counter()
        try:
            for batch in step.batches:
                batch.launch(self.engine, draws=not self._overlaps)
        except BaseException as error:
            step.error = error
            step.synchronize()  # the batches that were launched still use fragments to be freed
        seconds = time.perf_counter() - started
        if self._overlaps and step.error is None:
            self.in_flight = step
        else:
            to_finish.append(step)
        return to_finish, seconds

    def _draw_overlapped(self, step: ScheduledStep) -> float:
        """Start the draws of the step in flight, after earlier steps finished; return the seconds
        spent.
        """
        started = time.perf_counter()
        for batch in step.batches:
            batch.draw()
        return time.perf_counter() - started

    def _wait(self, step: ScheduledStep) -> float:
        """Wait for the model calls and draws of a step; store an error of a call in the step.

        Does nothing if the step has failed already. Returns: the seconds spent waiting.
        """
        started = time.perf_counter()
        if step.error is None:
            try:
                for batch in step.batches:
                    batch.wait()
            except BaseException as error:
                step.error = error
        return time.perf_counter() - started

    def _process_outputs(self, step: ScheduledStep) -> None:
        """Store the logits of a finished step and give its outputs to the jobs."""
        with self.lock:
            self.counters.steps += 1
            if step.error is None:
                self._store_logits(step)
            if step.error is not None:
                self._fail_step(step, step.error)
            else:
                for batch in step.batches:
                    for part in batch.parts:
                        self._process_part(part)
                self.queues.advance()
            self.tree.finalize_idle_leaves(self._fragments_in_flight)
            self._join_node_chains()
        if isinstance(step.error, (KeyboardInterrupt, SystemExit)):
            raise step.error

    def _store_logits(self, step: ScheduledStep) -> None:
        """Add the step's logits rows to the cache.

        An error fails the parts of the batch. If memory is short, it fails the step, which is then
        retried.
        """
        for batch in step.batches:
            try:
                batch.store_logits(self.logits_cache)
            except Exception as error:
                for part in batch.parts:
                    part.error = part.error or error
        step.error = step.memory_error()

    def _process_part(self, part: BatchPart) -> None:
        """Give the outputs of a part to its jobs; an error fails only these jobs."""
        part_error = part.error
        if part_error is None:
            try:
                part.process_outputs(self.queues)
                return
            except Exception as error:
                part_error = error
        else:
            part.discard(self.queues)
        for job in list(part.jobs()):
            self.queues.fail(job, as_forward_error(part_error))

    def _fail_step(self, step: ScheduledStep, raised: BaseException) -> None:
        """Undo a failed step, and the step in flight that runs its drawn tokens.

        Their jobs fail. If memory was short, all jobs are preempted instead, and retried with
        smaller steps or fewer slots.

        raised: the error of the step.
        """
        after, self.in_flight = self.in_flight, None
        steps = [step] if after is None else [step, after]
        jobs: dict[Job, None] = {}
        for failed_step in steps:
            failed_step.synchronize()
            for part in failed_step.parts:
                jobs.update(dict.fromkeys(part.jobs()))
                part.discard(self.queues)
        for job in jobs:
            self.queues.guard(job, job.finish_failed_step, self.queues)
        if self.admission.pressure.reduce(raised, *step.size(), self.queues.min_slots()):
            if self.admission.pressure.max_step_tokens is not None:
                self.logits_cache.clear()  # cached logits usually occupy the memory that is short
            self.queues.preempt_all()
            return
        error = as_forward_error(raised)
        for job in jobs:
            self.queues.fail(job, error)

    def _join_node_chains(self) -> None:
        """Join long chains of short nodes, except nodes that a launched step reads."""
        to_join = self.queues.to_join
        if not to_join:
            return
        # A place may be queued more than once.
        places, busy = {place.cursor: place for place in to_join}, self._fragments_in_flight()
        to_join.clear()
        for cursor, place in places.items():
            if cursor is not None:
                chain = join_chain(resolve(cursor).node) if busy else []
                if len(chain) >= JOIN_LENGTH and any(node.fragment in busy for node in chain):
                    to_join.append(place)
                else:
                    self.tree.join(cursor)

    def _fragments_in_flight(self) -> set[Fragment]:
        """Return the fragments that the step in flight may read or write. Cost: O(its rows)."""
        if self.in_flight is None:
            return set()
        rows = [row for part in self.in_flight.parts for row in part.rows()]
        paths = {id(row.prefix): row.prefix for row in rows}
        busy = {span.fragment for path in paths.values() for span in path}
        busy.update([row.kv_out for row in rows if row.kv_out is not None])
        return busy

    def finish_in_flight(self) -> None:
        """Wait for the step in flight, if there is one, and process its outputs."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None:
            self._wait(in_flight)
            self._process_outputs(in_flight)

    # Errors -----------------------------------------------------------------------------------

    def _fail_stuck_jobs(self) -> None:
        """Fail all jobs, because a step could do nothing for any of them: a bug in Weft."""
        error = WeftError("the scheduler cannot go on with this work; please report this as a bug")
        with self.lock:
            for job in self.queues.jobs():
                self.queues.fail(job, error)

    def _recover(self, error: BaseException) -> None:
        """Fail all jobs after an error outside the model call, and discard all chunks.

        The scheduler can be used afterwards.
        """
        _log.exception("a step failed outside the model call", exc_info=error)
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None:
            in_flight.synchronize()
        failed = as_forward_error(error)
        with self.lock:
            for part in list(self.queues.prefill.active):
                part.discard(self.queues)
            for job in self.queues.jobs():
                job.outstanding = 0
                try:
                    self.queues.fail(job, failed)
                except Exception:
                    _log.exception("and the state of its job could not be undone")
                    for ticket in job.tickets():
                        ticket.resolve(error=failed)
                    self.queues.end(job)

    def abandon(self, error: BaseException) -> None:
        """Resolve all tickets with an error; the scheduler cannot be used afterwards.

        Nothing else is changed, because the state may be inconsistent.
        """
        failed: BaseException = error
        if not isinstance(error, StaleHandle):
            failed = WeftError(f"the scheduler failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
        with self.lock:
            queued = [jobs for jobs in self._inbox if isinstance(jobs, list)]
            for job in [*itertools.chain(*queued), *self.queues.jobs()]:
                for ticket in job.tickets():
                    ticket.resolve(error=failed)

    def close(self) -> None:
        """Fail all unfinished jobs and drop all KV; the engine stays open."""
        self.finish_in_flight()
        with self.lock:
            self.drain_inbox()
            for job in self.queues.jobs():
                self.queues.fail(job, Cancelled("the LM was closed"))
            self.sequences.close_idle()
            self.tree.unpin_all()
            self.tree.clear()
            self.logits_cache.clear()

    # Dropped namespaces -----------------------------------------------------------------------

    def drop_namespace(self, namespace: str, message: str) -> None:
        """Fail all work in a namespace with StaleHandle, reject later work, and drop its KV.

        Call it between steps, under the lock. No later step has a row of the namespace. Cost:
        O(open jobs + tree).

        Args:
            namespace: the name of a LoRA adapter.
            message: the message of the errors.
        """
        self.drain_inbox()
        self.dropped_namespaces[namespace] = message
        for job in self.queues.jobs():
            if namespace in job.namespaces():
                self.queues.fail(job, StaleHandle(message))
        self.close_idle_sequences()
        self.tree.clear(namespace=namespace)
        for name in self.dropped_namespaces:
            root = self.tree.roots.get(name)
            if root is not None and not root.children:  # else places still refer to its tokens
                del self.tree.roots[name]

    def _check_not_dropped(self, items: Sequence[Item]) -> None:
        """Raise StaleHandle for items in a dropped namespace."""
        for item in items:
            for name in item.namespaces():
                if name is not None and name in self.dropped_namespaces:
                    raise StaleHandle(self.dropped_namespaces[name])
