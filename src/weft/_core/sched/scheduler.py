"""The scheduler: every model call of an LM is one of its steps."""

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
from ..kv.place import resolve
from ..kv.tree import JOIN_LENGTH, TokenTree, join_chain
from .admission import Admission
from .batch import BatchPart, DecodePart, ScheduledStep, SequencePart, as_forward_error
from .engine_runs import (
    EngineRunJob,
    EngineRunQueue,
    check_raw_logits,
    check_steps_needed,
    why_not_generated,
)
from .jobs import CommitJob, CommitPart, Job, RunJob, new_job
from .logits_cache import LogitsCache
from .queues import JobQueues
from .work import Counters, Extend, Item, Run, Ticket

_log = logging.getLogger(__name__)
ENGINE_WAIT_S = 0.02  # how long a step that has nothing to run waits for runs that are abroad
CommitShare = tuple[CommitJob, int, int]  # what a step runs of a commit: lines first … last - 1


class Scheduler:
    """Takes items, runs steps, answers tickets.

    `submit` may be called by any thread; `step` by one at a time (see `driver`). The lock is held
    while planning and delivering, never during a model call.
    """

    def __init__(
        self, engine: Engine, tree: TokenTree, *, n_ctx: int, n_batch: int, row_cache_bytes: int
    ) -> None:
        """n_ctx: tokens a path may have. n_batch: tokens a step may run; where the engine says how
        many it takes (`max_num_batched_tokens`), so many beside the next ones of runs and commits.
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

    def submit(self, items: Sequence[Item], *, atomic: bool = False) -> list[Ticket]:
        """Queue items; their tickets are answered by later steps. Cost: O(items), no model call.

        atomic: all items (extends only) succeed, or all fail and nothing has changed.
        """
        tickets, jobs = self.prepare(items, atomic=atomic)
        self.enqueue(jobs)
        return tickets

    def prepare(
        self, items: Sequence[Item], *, atomic: bool = False
    ) -> tuple[list[Ticket], list[Job]]:
        """Return tickets, and the jobs that answer them once these have entered. Takes no lock."""
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
        """Return the job of tickets that are answered together."""
        item, age = group[0].item, next(self._ages)
        if self.engine_runs is not None and isinstance(item, Run):
            if why_not_generated(item.sampler, self.engine.native) is None:
                return EngineRunJob(age, group, self.engine_runs)
        return new_job(age, group)

    def enqueue(self, jobs: list[Job]) -> None:
        """Let jobs in; no step sees some of them without the others. Takes no lock."""
        if jobs:
            self._inbox.append(jobs)
            if self.engine_runs is not None:
                self.engine_runs.wake()

    @property
    def is_idle(self) -> bool:
        """Nothing is queued, waiting, live or in flight."""
        return not self._inbox and self.in_flight is None and self.queues.is_idle

    @property
    def n_queued(self) -> int:
        """How many jobs, about, have not been admitted yet."""
        return len(self._inbox) + len(self.queues.waiting)

    def step(self) -> None:
        """Run one step: take in, admit, plan, launch, land, deliver.

        An overlapping engine's step is delivered by the next call, after that has launched its own,
        which draws last: its samplers have seen every token before.
        A failed model call fails its own tickets; any other failure of the engine, say for want of
        memory, fails the work that met it. Later calls work.
        """
        try:
            self._step()
        except BaseException as error:
            self._recover(error)
            if not isinstance(error, Exception):
                raise

    def _step(self) -> None:
        started = time.perf_counter()
        with self.lock:
            n_events, n_transitions = self._admit_work()
            step = self._schedule()
        scheduled = time.perf_counter()
        to_finish, engine_s = self._launch(step)
        for launched in to_finish:
            engine_s += self._wait(launched)
            self._process_outputs(launched)
        if self.in_flight is not None:  # its samplers have accepted the previous step's tokens now
            engine_s += self._draw_overlapped(self.in_flight)
        self.counters.plan_s += scheduled - started
        self.counters.forward_s += engine_s
        self.counters.deliver_s += time.perf_counter() - scheduled - engine_s
        n_events += self.queues.n_transitions - n_transitions
        if not (step or to_finish or n_events or self.queues.running or self.is_idle):
            self._wait_for_engine_runs()

    def _admit_work(self) -> tuple[int, int]:
        """Drain the inbox and admit jobs. Return the number of events, and of transitions before
        them.
        """
        self.check_weights()
        self.admission.pressure.relax()
        n_transitions = self.queues.n_transitions
        n_events = self.drain_inbox()
        if not self._waits_for_old_weights():
            n_events += self.admission.admit(may_evict=self.in_flight is None)
        if self.in_flight is None and self.queues.admitted:
            self.admission.offload_idle(self.engine.info.idle_slots)
        if self.engine_runs is not None:
            n_events += self.engine_runs.process_events(self.queues)
            n_events += self.engine_runs.submit_waiting(self.queues)
        return n_events, n_transitions

    def _wait_for_engine_runs(self) -> None:
        """Sleep until the engine reports events of its runs; fail jobs that nothing can advance."""
        if self.engine_runs is None or self.engine_runs.is_idle:
            self._fail_stuck_jobs()
        else:
            self.engine_runs.wait(ENGINE_WAIT_S)

    # Take in ----------------------------------------------------------------------------------

    def drain_inbox(self) -> int:
        """Drain what others left: released places, cancellations, new jobs; return how many."""
        if self.sequences.released:
            self.sequences.close_released()
        self.tree.drain_released()
        n_taken = len(self._inbox)
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, list):
                self._add(entry)
            elif not entry.done:
                assert entry.job is not None
                entry.job.cancel(entry, self.queues)
        self._join_node_chains()
        return n_taken

    def _add(self, jobs: list[Job]) -> None:
        if self.sequences.opened and any(job.needs_closed_tails for job in jobs):
            self.sequences.close_idle()
        for job in jobs:
            self.queues.add(job)
            for name, message in self.dropped_namespaces.items():
                if name in job.namespaces():  # it went since this was prepared
                    self.queues.fail(job, StaleHandle(message))

    def close_idle_sequences(self) -> None:
        """Take in, and close every idle line: what is held then is what work needs."""
        self.drain_inbox()
        self.sequences.close_idle()

    def check_weights(self) -> None:
        """Forget what was computed with weights that are no longer the same.

        Under the lock. What runs now is not cut short: what is left of it goes when it has ended.
        """
        if self.in_flight is None and not self.queues.admitted and self.weights_changed():
            _log.info("the model's weights were changed: KV and logits are forgotten")
            self._weights = self.engine.weights_version()
            self._clear_caches()
            self.engine.refresh_weights()

    def _waits_for_old_weights(self) -> bool:
        """Whether work waits for what runs with other weights: it begins when all of that is gone,
        or it would meet KV of both for as long as there is always something that runs.
        """
        queues = self.queues
        return bool(queues.admitted) and queues.head() is not None and self.weights_changed()

    def weights_changed(self) -> bool:
        """Whether somebody has changed the model's weights in place since the last look."""
        return self.engine.weights_version() != self._weights

    def clear(self) -> None:
        """Forget all KV and logits that no running work needs; between steps, under the lock."""
        self.admission.pressure.reset()
        self._clear_caches()
        self.engine.clear_caches()

    def _clear_caches(self) -> None:
        self.close_idle_sequences()
        self.tree.clear()
        self.logits_cache.clear()

    # Plan -------------------------------------------------------------------------------------

    def _schedule(self) -> ScheduledStep | None:
        """Choose the rows of the next step; None when there are none, or others must land first."""
        queues = self.queues
        queues.advance()
        n_batch, n_step = self._budgets()
        # Live runs must not starve those that begin.
        others = queues.unscheduled or queues.commits
        min_prefill = min(max(n_batch // 4, 1), n_batch - 1) if others else 0
        runs = self._ready_runs(n_step - min_prefill) if queues.running else []
        shares: list[CommitShare] = []
        if queues.commits:
            used = self._n_budget_tokens(runs) + sum([len(run.forced) for run in runs])
            shares = self._shares(max(n_step - used, min_prefill))
        if runs or shares:
            before, in_flight = queues.n_transitions, self.in_flight is not None
            reserve = partial(self._reserve, runs, shares, before)
            if not self.admission.reserve_slots(reserve, in_flight=in_flight):
                return None
        sequence_parts = (
            [*self._decode_parts(runs), *self._commit_parts(shares)] if runs or shares else []
        )
        if self.queues.runs_whole_paths:
            again = [part.n_tokens() - part.n_logits() for part in sequence_parts]
            self.counters.recomputed += sum(again)
        parts: list[BatchPart] = [*sequence_parts]
        if queues.unscheduled:
            n_left = min(n_batch, n_step - sum([part.n_tokens() for part in sequence_parts]))
            if self.engine.info.no_prefix_cache:  # a long path may have been more than its share
                n_left = max(n_left, min_prefill)
            if runs and self.engine.info.device == "cpu":
                # There a token costs as much beside others as alone: those that are live would
                # stand still for as long as it takes to read a whole batch.
                n_left = min(n_left, min_prefill)
            brought = queues.prefill.plan(queues.prefill_order(n_left), n_left, queues)
            parts += [*brought, *queues.first_token_parts(brought)]
        if queues.deferred_first_draws:
            parts += queues.deferred_first_token_parts()
        computed, reread = queues.prefill.pop_counts()
        self.counters.prefilled += computed
        self.counters.recomputed += reread
        if not parts:
            queues.advance()  # what the row store just answered
            return None
        return ScheduledStep(parts)

    def _budgets(self) -> tuple[int, int]:
        """Return how many tokens of those that wait, and in all, a step may have now."""
        budget = self.admission.pressure.max_step_tokens
        if budget is None:
            return self.n_batch, self.n_step
        return min(self.n_batch, budget), min(self.n_step, budget)

    def _ready_runs(self, budget: int) -> list[RunJob]:
        """Return the runs whose next token can be run now, `budget` tokens of them.

        The oldest, so that tails are short-lived. Where whole paths run there are none: all go on
        in turn, and one longer than `budget` goes alone.
        """
        queues = self.queues
        ready = [run for run in queues.running if run.can_step(self.n_ctx)]
        if self.in_flight is not None:
            ready = [run for run in ready if run.sequence.is_open or self._can_open(run)]
        if self.queues.runs_whole_paths:
            ready.sort(key=lambda run: (run.n_drawn, run.age))
            costs = itertools.accumulate([run.sequence.depth for run in ready])
            ready = ready[: max(bisect_right(list(costs), budget), 1)]
        elif len(ready) > budget:
            ready = heapq.nsmallest(budget, ready, key=lambda run: run.age)
        # Of many runs nearly all are open, and free to draw what they like.
        begun = [
            run for run in ready if run.sampler.matcher is not None or not run.sequence.is_open
        ]
        spare = budget - self._n_budget_tokens(ready)
        for run in begun:
            if not run.sequence.is_open:
                queues.guard(run, run.sequence.open, self.tree)
            if run.sampler.matcher is not None:
                queues.guard(run, run.force, spare, queues)
                spare -= len(run.forced)
        return [run for run in ready if not run.done] if begun else ready

    def _n_budget_tokens(self, runs: list[RunJob]) -> int:
        """Return how many tokens of a step's budget the next tokens of runs take."""
        if self.queues.runs_whole_paths:
            return sum([run.sequence.depth for run in runs])
        return len(runs)

    def _can_open(self, run: RunJob) -> bool:
        """Whether nothing in flight writes where a run's line begins."""
        (claim,) = run.claims
        assert claim.cursor is not None
        return not self.queues.prefill.is_being_written(claim.cursor)

    def _shares(self, budget: int) -> list[CommitShare]:
        """Return what the step may run of the commits, `budget` tokens at most."""
        shares = []
        for job in list(self.queues.commits):
            if job.n_waiting or job.outstanding or budget <= 0:
                continue
            if self.in_flight is not None:
                cursors = (claim.cursor for claim in job.claims if claim.cursor is not None)
                if any(self.queues.prefill.is_being_written(cursor) for cursor in cursors):
                    continue
            last = job.share(budget, self.queues)
            for sequence in job.item.sequences[job.next : last]:
                self.queues.guard(job, self.sequences.open, sequence)
            if not job.done:
                shares.append((job, job.next, last))
                budget -= last - job.next
                if self.queues.runs_whole_paths:
                    budget -= sum(
                        [sequence.depth for sequence in job.item.sequences[job.next : last]]
                    )
        return shares

    def _reserve(self, runs: list[RunJob], shares: list[CommitShare], before: int) -> None:
        """Ask the room for the slots of a step, as far as its jobs are still here.

        before: the desk's count of moves when all of them were.
        """
        if self.queues.n_transitions != before:
            runs[:] = [run for run in runs if run in self.queues.running]
            shares[:] = [share for share in shares if share[0] in self.queues.commits]
        for run in runs:
            run.sequence.reserve(self.tree, 1 + len(run.forced))
        for job, first, last in shares:
            for sequence in job.item.sequences[first:last]:
                sequence.reserve(self.tree, 1)

    def _decode_parts(self, runs: list[RunJob]) -> list[SequencePart]:
        """Return a part an adapter, for runs that are still here."""
        by_name: dict[str | None, tuple[list[RunJob], list[Row]]] = {}
        for run in runs:
            try:
                row = run.row(self.queues)
            except Exception as error:
                self.queues.handle_error(run, error)
                continue
            of_name = by_name.get(row.adapter)
            if of_name is None:
                of_name = by_name[row.adapter] = ([], [])
            of_name[0].append(run)
            of_name[1].append(row)
        return [DecodePart(some, rows, self.queues) for some, rows in by_name.values()]

    def _commit_parts(self, shares: list[CommitShare]) -> list[SequencePart]:
        queues = self.queues
        parts = [queues.guard(share[0], CommitPart, *share, queues) for share in shares]
        return [part for part in parts if part is not None]

    # Launch, land, deliver --------------------------------------------------------------------

    def _launch(self, step: ScheduledStep | None) -> tuple[list[ScheduledStep], float]:
        """Call the model for a step, and put the step in flight if the engine overlaps steps.

        Returns the steps to wait for now, and the seconds that the calls took.
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
        """Start the draws of the step in flight; return the seconds spent."""
        started = time.perf_counter()
        for batch in step.batches:
            batch.draw()
        return time.perf_counter() - started

    def _wait(self, step: ScheduledStep) -> float:
        """Wait for the engine to finish a step; return the seconds spent waiting."""
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
        """Keep the rows that somebody may ask for; what goes wrong fails the call's parts, or the
        step where it was memory: then it is done again.
        """
        for batch in step.batches:
            try:
                batch.store_logits(self.logits_cache)
            except Exception as error:
                for part in batch.parts:
                    part.error = part.error or error
        step.error = step.memory_error()

    def _process_part(self, part: BatchPart) -> None:
        """Give out what a part brought; what goes wrong fails its jobs alone."""
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
        """Undo a step, and the one launched from its draws, and fail all their tickets; or do what
        wanted memory again, with less of it.
        """
        after, self.in_flight = self.in_flight, None
        steps = [step] if after is None else [step, after]
        jobs: dict[Job, None] = {}
        for each in steps:
            each.synchronize()
            for part in each.parts:
                jobs.update(dict.fromkeys(part.jobs()))
                part.discard(self.queues)
        for job in jobs:
            self.queues.guard(job, job.finish_failed_step, self.queues)
        if self.admission.pressure.reduce(raised, *step.size(), self.queues.min_slots()):
            if self.admission.pressure.max_step_tokens is not None:
                self.logits_cache.clear()  # they lie where there is no memory, mostly
            self.queues.preempt_all()
            return
        error = as_forward_error(raised)
        for job in jobs:
            self.queues.fail(job, error)

    def _join_node_chains(self) -> None:
        """Join long chains of small nodes, as far as no launched step reads them."""
        to_join = self.queues.to_join
        if not to_join:
            return
        # A place that waits may come again.
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
        """Deliver the step that is in flight, if there is one."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None:
            self._wait(in_flight)
            self._process_outputs(in_flight)

    # When something is wrong ------------------------------------------------------------------

    def _fail_stuck_jobs(self) -> None:
        """A step that could do nothing would be repeated for ever: fail what waits."""
        error = WeftError("the scheduler cannot go on with this work; please report this as a bug")
        with self.lock:
            for job in self.queues.jobs():
                self.queues.fail(job, error)

    def _recover(self, error: BaseException) -> None:
        """Fail all that is open after an error that nobody foresaw; undo what steps promised."""
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
                    _log.exception("and its work could not be undone")
                    for ticket in job.tickets():
                        ticket.resolve(error=failed)
                    self.queues.end(job)

    def abandon(self, error: BaseException) -> None:
        """Answer all tickets with an error and touch nothing else: the state may be half-made."""
        failed: BaseException = error
        if not isinstance(error, StaleHandle):
            failed = WeftError(f"the scheduler failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
        with self.lock:
            arrived = [jobs for jobs in self._inbox if isinstance(jobs, list)]
            for job in [*itertools.chain(*arrived), *self.queues.jobs()]:
                for ticket in job.tickets():
                    ticket.resolve(error=failed)

    def close(self) -> None:
        """Fail everything that is not done and forget all KV; the engine stays open."""
        self.finish_in_flight()
        with self.lock:
            self.drain_inbox()
            for job in self.queues.jobs():
                self.queues.fail(job, Cancelled("the LM was closed"))
            self.sequences.close_idle()
            self.tree.unpin_all()
            self.tree.clear()
            self.logits_cache.clear()

    # Namespaces that are gone -----------------------------------------------------------------

    def drop_namespace(self, namespace: str, message: str) -> None:
        """Fail all work in a namespace with StaleHandle, refuse it from now on, and drop its KV.

        Between steps, under the lock: no row of it is ever formed again. Cost: O(open jobs + tree).
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
            if root is not None and not root.children:  # else places still hold tokens of it
                del self.tree.roots[name]

    def _check_not_dropped(self, items: Sequence[Item]) -> None:
        """Raise StaleHandle for work in a namespace that is gone."""
        for item in items:
            for name in item.namespaces():
                if name is not None and name in self.dropped_namespaces:
                    raise StaleHandle(self.dropped_namespaces[name])
