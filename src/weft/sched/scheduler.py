"""The scheduler: every model call of an LM is one of its steps."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

from ..engines.base import Engine
from ..errors import Cancelled, ConfigError, WeftError
from ..kv.cursor import Place
from ..kv.tree import TokenTree
from .admit import Admission, kv_full
from .fit import Fitting
from .retire import refuse_retired
from .rows import RowCache
from .runs import Runs
from .stays import CommitJob, Share, Stays, new_job
from .step import Group, Launched, Piece, as_forward_error
from .task import ExtendTask, Job, RunTask, Task
from .waiting import Waiting
from .work import Counters, Extend, Item, Ticket

_log = logging.getLogger(__name__)


class Scheduler:
    """Takes items, runs steps, answers tickets.

    `submit` may be called by any thread; `step` by one at a time (see `driver`). The lock is held
    while planning and delivering, never during a model call.
    """

    def __init__(
        self, engine: Engine, tree: TokenTree, *, n_ctx: int, n_batch: int, row_cache_bytes: int
    ) -> None:
        """n_ctx: tokens a path may have. n_batch: tokens a step may run."""
        self.engine = engine
        self.tree = tree
        self.n_ctx = n_ctx
        self.n_batch = n_batch
        self.lock = tree.holds.lock
        self.counters = Counters()
        self.cache = RowCache(row_cache_bytes, tree.forget)
        self.runs = Runs(tree, n_ctx, engine.info.n_vocab, self.counters, self._ended)
        self.stays = Stays(
            tree, engine.info, self.counters, self._to_join, row_cache_bytes, self._ended
        )
        self.admission = Admission(
            tree, self.counters, self._suspend, self._refuse, self.stays.relieve
        )
        self.fitting = Fitting(tree, self.runs, self.stays, self.admission, self._fail)
        self.waiting = Waiting(tree, self.cache, self.runs, self._fail, self._ended)
        self.flight: Launched | None = None
        self.retired: dict[str, str] = {}  # namespaces that are gone, and what to say of them
        self._inbox: deque[Job | Ticket] = deque()
        self._age = 0
        self._n_ended = 0
        self._forward_s = 0.0

    def submit(self, items: Sequence[Item], *, atomic: bool = False) -> list[Ticket]:
        """Queue items; their tickets are answered by later steps. Cost: O(items), no model call.

        atomic: all items (extends only) succeed, or all fail and nothing has changed.
        """
        if atomic and not all(isinstance(item, Extend) for item in items):
            raise ConfigError("an atomic call takes extends only; submit runs on their own")
        tickets = [Ticket(item, self._inbox) for item in items]
        groups = [tickets] if atomic else [[ticket] for ticket in tickets]
        with self.lock:
            refuse_retired(items, self.retired)
            for group in groups:
                self._age += 1
                if group:
                    self._inbox.append(new_job(self._age, group))
        return tickets

    @property
    def is_idle(self) -> bool:
        """Nothing is queued, waiting, live or in flight."""
        return not (
            self._inbox
            or self.admission.queue
            or self.waiting.tasks
            or self.runs.live
            or self.flight
            or self.admission.admitted
        )

    def step(self) -> None:
        """Run one step: take in, admit, plan, forward, deliver.

        An overlapping engine's step is delivered by the next call, after that has launched its own.
        A failed model call fails its own tickets. An error anywhere else, say of an engine that has
        no memory left for a fragment, fails all that is open; later calls work.
        """
        try:
            self._step()
        except BaseException as error:
            self._recover(error)
            if not isinstance(error, Exception):
                raise

    def _step(self) -> None:
        began = time.perf_counter()
        with self.lock:
            ended = self._n_ended
            moved = self.take_in() + self._admit()
            launched = self._plan()
        planned = time.perf_counter()
        before, self.flight = self.flight, None
        if launched is not None:
            self._launch(launched)
            if self.engine.info.overlap and launched.error is None:
                self.flight = launched
        landing = [
            step for step in (before, launched) if step is not None and step is not self.flight
        ]
        waited = 0.0
        for step in landing:
            waited += self._land(step)
        forward = self._forward_s + waited if launched is not None else waited
        self.counters.plan_s += planned - began
        self.counters.forward_s += forward
        self.counters.deliver_s += time.perf_counter() - planned - forward
        moved += ended != self._n_ended
        if not (launched or landing or moved or self.runs.live or self.is_idle):
            self._give_up()

    def _give_up(self) -> None:
        """A step that could do nothing would be repeated for ever: fail what waits."""
        error = WeftError("the scheduler cannot go on with this work; please report this as a bug")
        with self.lock:
            for job in [*self.admission.queue, *self.admission.admitted]:
                self._fail(job, error)

    def _recover(self, error: BaseException) -> None:
        """Fail all that is open and undo what steps promised, as far as the engine lets us."""
        _log.exception("a step failed outside the model call", exc_info=error)
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.settle()
        with self.lock:
            self.stays.land_all()
            for job in [*self.admission.queue, *self.admission.admitted]:
                try:
                    self._fail(job, as_forward_error(error))
                except Exception:
                    _log.exception("and its work could not be undone")
                    for ticket in job.tickets():
                        ticket.resolve(error=as_forward_error(error))
                    self._ended(job)
            self.waiting.discard_all()

    def take_in(self) -> int:
        """Drain what others left: released places, cancellations, new jobs; return how many."""
        self.stays.drain()
        self.tree.drain_released()
        n_taken = len(self._inbox)
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, Job):
                if not isinstance(entry, CommitJob):
                    self.stays.relieve()  # others find by content what stays have in their tails
                self.admission.add(entry)
            elif not entry.done:
                self._cancel(entry)
        self._join_chains()
        return n_taken

    def settle(self) -> None:
        """Take in, and close every idle stay: what is held then is what work needs."""
        self.take_in()
        self.stays.relieve()

    def _cancel(self, ticket: Ticket) -> None:
        task = ticket.task
        if isinstance(task, RunTask):
            for member in task.members:
                if member.ticket is ticket:
                    member.state.finish_reason = ticket.cancel_reason
            self.runs.settle_members(task)
        else:
            self._fail(task.job, Cancelled("the work was cancelled before it was done"))

    def _admit(self) -> int:
        """Admit what fits; return how many jobs were, one that waits for the flight included."""
        jobs, drain = self.admission.admit(may_evict=self.flight is None)
        for job in jobs:
            self._start(job)
        return len(jobs) + drain

    def _refuse(self, job: Job) -> None:
        self._fail(job, kv_full(job, self.tree))

    def _start(self, job: Job) -> None:
        """Let an admitted job's tasks wait for what they need."""
        if isinstance(job, CommitJob):
            self.stays.jobs.append(job)
        for task in job.tasks:
            if isinstance(task, RunTask):
                if task.depth >= self.n_ctx:
                    self.runs.stop(task, "context")
                    continue
                if not task.started and self.waiting.merge(task):
                    job.done = True
                    self.admission.release(job)
                    continue
            self.waiting.add(task)

    def _plan(self) -> Launched | None:
        """Choose the rows of the next step; None when there are none, or others must land first."""
        self.waiting.promote()
        # Live runs must not starve those that begin.
        others = self.waiting.tasks or self.stays.jobs
        reserve = min(max(self.n_batch // 4, 1), self.n_batch - 1) if others else 0
        runs = self.runs.ready(self.n_batch - reserve)
        used = sum(1 + len(run.forced) for run in runs)
        shares = self.stays.ready(self.n_batch - used)
        fitting = self.fitting.fit(runs, shares, in_flight=self.flight is not None)
        if fitting is None:
            return None
        runs, shares = fitting
        used += sum(last - first for _, first, last in shares)
        pieces = self.waiting.pack(self.n_batch - used)
        if not runs and not pieces and not shares:
            self.waiting.promote()  # what the cache just answered
            return None
        groups = self._groups(runs, pieces, shares)
        for run in runs:
            run.outstanding += 1
        computed, reread = self.waiting.packer.take_counts()
        self.counters.prefilled += computed
        self.counters.recomputed += reread
        return Launched(groups)

    def _groups(self, runs: list[RunTask], pieces: list[Piece], shares: list[Share]) -> list[Group]:
        """Sort rows by adapter, one model call each, runs first."""
        names = dict.fromkeys([run.namespace for run in runs] + [p.namespace for p in pieces])
        names.update(dict.fromkeys([share.namespace for share in shares]))
        groups = []
        for name in names:
            group = self.runs.group([run for run in runs if run.namespace == name])
            group.pieces = [piece for piece in pieces if piece.namespace == name]
            group.rows += [piece.row() for piece in group.pieces]
            self.stays.join_group(group, [share for share in shares if share.namespace == name])
            groups.append(group)
        return groups

    def _launch(self, launched: Launched) -> None:
        """Call the model; time spent here is the engine's."""
        began = time.perf_counter()
        try:
            for group in launched.groups:
                group.output = self.engine.forward(group.rows)
                if group.batch is not None:
                    group.draws = group.output.draw(group.batch)
                    if self.engine.info.overlap:
                        self.runs.note_late(group)
                if group.ahead is not None:
                    group.ahead_draws = group.output.draw(group.ahead)
        except BaseException as error:
            launched.error = error
            launched.settle()  # what was launched still uses what is to be freed
        self._forward_s = time.perf_counter() - began

    def _land(self, launched: Launched) -> float:
        """Wait for a step and deliver it; return the seconds spent waiting for the engine."""
        began = time.perf_counter()
        if launched.error is None:
            try:
                for group in launched.groups:
                    assert group.output is not None
                    group.output.wait()
                    for draws in (group.draws, group.ahead_draws):
                        if draws is not None:
                            draws.result()
            except BaseException as error:
                launched.error = error
        waited = time.perf_counter() - began
        with self.lock:
            self.counters.steps += 1
            if launched.error is not None:
                self._crash(launched)
            else:
                self._deliver(launched)
            self._join_chains()
        if isinstance(launched.error, (KeyboardInterrupt, SystemExit)):
            raise launched.error
        return waited

    def _deliver(self, launched: Launched) -> None:
        for group in launched.groups:
            self.runs.deliver(group)
            self.waiting.deliver(group)
            self.stays.deliver(group)
        self.waiting.promote()

    def _crash(self, launched: Launched) -> None:
        """Fail every ticket of a step, and of the one launched from its draws; undo both."""
        assert launched.error is not None
        error = as_forward_error(launched.error)
        after, self.flight = self.flight, None
        steps = [launched] if after is None else [launched, after]
        for step in steps:
            step.settle()
        jobs: dict[Job, None] = {}
        for step in steps:
            for group in step.groups:
                jobs.update(dict.fromkeys(run.job for run in group.runs))
                for share in group.shares:
                    share.job.outstanding = 0
                    jobs[share.job] = None
                for piece in group.pieces:
                    jobs.update(dict.fromkeys(need.task.job for need, _, _ in piece.takes))
                    jobs.update(dict.fromkeys(self.waiting.waiters_for(piece)))
                    self.waiting.discard(piece)
        for job in jobs:
            self._fail(job, error)

    def _fail(self, job: Job, error: BaseException) -> None:
        if job.done:
            return
        if isinstance(job, CommitJob):
            if self.stays.fail(job, error):
                self._ended(job)
            return
        for task in list(job.tasks):
            if isinstance(task, RunTask):
                self.runs.fail(task, error)
            else:
                assert isinstance(task, ExtendTask)
                task.ticket.value = None
                task.ticket.resolve(error=error)
        self._ended(job)

    def _ended(self, job: Job) -> None:
        """Take a job whose tickets are answered out of everything."""
        if job.done:
            return
        job.done = True
        self._n_ended += 1
        self.admission.release(job)
        if isinstance(job, CommitJob) and job in self.stays.jobs:
            self.stays.jobs.remove(job)
        if job in self.admission.queue:
            self.admission.queue.remove(job)
        self.waiting.remove(job)
        # No cycles: what the job held is let go now, not when the collector comes by.
        for task in job.tasks:
            task.needs = []
        job.tasks = []

    def _suspend(self, task: Task) -> None:
        """Parked: out of the live and the waiting, a run's tail into the tree."""
        self.waiting.remove(task.job)
        if isinstance(task, RunTask) and task.started:
            self.runs.suspend(task)

    def _to_join(self, place: Place) -> None:
        self.runs.to_join.append(place)

    def _join_chains(self) -> None:
        """Join long chains of small nodes, while no step reads them."""
        if self.flight is None:
            places, self.runs.to_join = self.runs.to_join, []
            for place in places:
                cursor = place.cursor
                assert cursor is not None
                self.tree.join(cursor)

    def land_flight(self) -> None:
        """Deliver the step that is in flight, if there is one."""
        flight, self.flight = self.flight, None
        if flight is not None:
            self._land(flight)

    def abandon(self, error: BaseException) -> None:
        """Answer all tickets with an error and touch nothing else: the state may be half-made."""
        failed = WeftError(f"the scheduler failed: {type(error).__name__}: {error}")
        failed.__cause__ = error
        with self.lock:
            arrived = [entry for entry in self._inbox if isinstance(entry, Job)]
            for job in [*arrived, *self.admission.queue, *self.admission.admitted]:
                for ticket in job.tickets():
                    ticket.resolve(error=failed)

    def close(self) -> None:
        """Fail everything that is not done and forget all KV; the engine stays open."""
        self.land_flight()
        with self.lock:
            self.take_in()
            error = Cancelled("the LM was closed")
            jobs = [*self.admission.queue, *self.admission.admitted]
            for job in jobs:
                self._fail(job, error)
            self.stays.relieve()
            self.tree.clear()
            self.cache.clear()
