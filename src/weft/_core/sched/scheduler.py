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
from .admit import Admission
from .desk import Desk
from .jobs import CommitJob, CommitPart, Job, RunJob, new_job
from .native import Abroad, NativeJob, refuse, refuse_scaled, why_not_native
from .rows import RowStore
from .step import LinesPart, Part, RunsPart, Step, as_forward_error
from .work import Counters, Extend, Item, Run, Ticket

_log = logging.getLogger(__name__)
LISTEN_S = 0.02  # how long a step that has nothing to run waits for runs that are abroad
Share = tuple[CommitJob, int, int]  # what a step runs of a commit: lines first … last - 1


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
        self.rows = RowStore(row_cache_bytes, info.n_vocab, tree.forget, self.lock)
        self.desk = Desk(tree, engine, self.counters, self.rows, n_ctx)
        self.lines = self.desk.lines
        self.admission = Admission(self.desk)
        self.abroad = None if engine.native is None else Abroad(engine.native)
        self.flight: Step | None = None
        self.retired: dict[str, str] = {}  # namespaces that are gone, and what to say of them
        self._weights = engine.weights_version()
        self._inbox: deque[list[Job] | Ticket] = deque()
        self._ages = itertools.count(1)
        self._forward_s = 0.0

    def submit(self, items: Sequence[Item], *, atomic: bool = False) -> list[Ticket]:
        """Queue items; their tickets are answered by later steps. Cost: O(items), no model call.

        atomic: all items (extends only) succeed, or all fail and nothing has changed.
        """
        tickets, jobs = self.prepare(items, atomic=atomic)
        self.enter(jobs)
        return tickets

    def prepare(
        self, items: Sequence[Item], *, atomic: bool = False
    ) -> tuple[list[Ticket], list[Job]]:
        """Return tickets, and the jobs that answer them once these have entered. Takes no lock."""
        if atomic and not all(isinstance(item, Extend) for item in items):
            raise ConfigError("an atomic call takes extends only; submit runs on their own")
        if self.retired:
            self._refuse_retired(items)
        capabilities = self.engine.info.capabilities
        if not capabilities.steps:
            refuse(items, self.engine)
        elif not capabilities.raw_logits:
            refuse_scaled(items, self.engine)
        tickets = [Ticket(item, self._inbox) for item in items]
        groups = [tickets] if atomic else [[ticket] for ticket in tickets]
        return tickets, [self._job_of(group) for group in groups if group]

    def _job_of(self, group: list[Ticket]) -> Job:
        """Return the job of tickets that are answered together."""
        item, age = group[0].item, next(self._ages)
        if self.abroad is not None and isinstance(item, Run):
            if why_not_native(item.sampler, self.engine.native) is None:
                return NativeJob(age, group, self.abroad)
        return new_job(age, group)

    def enter(self, jobs: list[Job]) -> None:
        """Let jobs in; no step sees some of them without the others. Takes no lock."""
        if jobs:
            self._inbox.append(jobs)
            if self.abroad is not None:
                self.abroad.wake()

    @property
    def is_idle(self) -> bool:
        """Nothing is queued, waiting, live or in flight."""
        return not self._inbox and self.flight is None and self.desk.is_idle

    @property
    def n_queued(self) -> int:
        """How many jobs, about, have not been admitted yet."""
        return len(self._inbox) + len(self.desk.queue)

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
        began = time.perf_counter()
        with self.lock:
            self.see_weights()
            self.admission.shortage.ease()
            before_moves = self.desk.n_moves
            moved = self.take_in()
            if not self._awaits_weights():
                moved += self.admission.admit(may_evict=self.flight is None)
            if self.flight is None and self.desk.admitted:
                self.admission.offload_idle(self.engine.info.idle_slots)
            if self.abroad is not None:
                moved += self.abroad.hear(self.desk) + self.abroad.send(self.desk)
            step = self._plan()
        planned = time.perf_counter()
        before, self.flight = self.flight, None
        if step is not None:
            self._launch(step)
            if self._overlaps and step.error is None:
                self.flight = step
        landing = [each for each in (before, step) if each is not None and each is not self.flight]
        waited = 0.0
        for each in landing:
            waited += self._land(each)
        forward = self._forward_s + waited if step is not None else waited
        if self.flight is not None:  # what the step before has drawn is known now
            forward += self._draw_late(self.flight)
        self.counters.plan_s += planned - began
        self.counters.forward_s += forward
        self.counters.deliver_s += time.perf_counter() - planned - forward
        moved += self.desk.n_moves - before_moves
        if step or landing or moved or self.desk.live or self.is_idle:
            return
        if self.abroad is None or self.abroad.is_idle:
            self._give_up()
        else:
            self.abroad.wait(LISTEN_S)

    # Take in ----------------------------------------------------------------------------------

    def take_in(self) -> int:
        """Drain what others left: released places, cancellations, new jobs; return how many."""
        if self.lines.gone:
            self.lines.drain()
        self.tree.drain_released()
        n_taken = len(self._inbox)
        while self._inbox:
            entry = self._inbox.popleft()
            if isinstance(entry, list):
                self._add(entry)
            elif not entry.done:
                assert entry.job is not None
                entry.job.cancel(entry, self.desk)
        self._join_chains()
        return n_taken

    def _add(self, jobs: list[Job]) -> None:
        if self.lines.opened and any(job.by_content for job in jobs):
            self.lines.relieve()
        for job in jobs:
            self.desk.add(job)
            for name, message in self.retired.items():
                if name in job.namespaces():  # it went since this was prepared
                    self.desk.fail(job, StaleHandle(message))

    def settle(self) -> None:
        """Take in, and close every idle line: what is held then is what work needs."""
        self.take_in()
        self.lines.relieve()

    def see_weights(self) -> None:
        """Forget what was computed with weights that are no longer the same.

        Under the lock. What runs now is not cut short: what is left of it goes when it has ended.
        """
        if self.flight is None and not self.desk.admitted and self.has_other_weights():
            _log.info("the model's weights were changed: KV and logits are forgotten")
            self._weights = self.engine.weights_version()
            self._forget_paths()
            self.engine.refresh_weights()

    def _awaits_weights(self) -> bool:
        """Whether work waits for what runs with other weights: it begins when all of that is gone,
        or it would meet KV of both for as long as there is always something that runs.
        """
        desk = self.desk
        return bool(desk.admitted) and desk.head() is not None and self.has_other_weights()

    def has_other_weights(self) -> bool:
        """Whether somebody has changed the model's weights in place since the last look."""
        return self.engine.weights_version() != self._weights

    def clear(self) -> None:
        """Forget all KV and logits that no running work needs; between steps, under the lock."""
        self.admission.shortage.forget()
        self._forget_paths()
        self.engine.clear_caches()

    def _forget_paths(self) -> None:
        self.settle()
        self.tree.clear()
        self.rows.clear()

    # Plan -------------------------------------------------------------------------------------

    def _plan(self) -> Step | None:
        """Choose the rows of the next step; None when there are none, or others must land first."""
        desk = self.desk
        desk.promote()
        n_batch, n_step = self._sizes()
        # Live runs must not starve those that begin.
        others = desk.waiting or desk.commits
        spared = min(max(n_batch // 4, 1), n_batch - 1) if others else 0
        runs = self._ready_runs(n_step - spared) if desk.live else []
        shares: list[Share] = []
        if desk.commits:
            used = self._cost(runs) + sum([len(run.forced) for run in runs])
            shares = self._shares(max(n_step - used, spared))
        if runs or shares:
            before, in_flight = desk.n_moves, self.flight is not None
            reserve = partial(self._reserve, runs, shares, before)
            if not self.admission.fit(reserve, in_flight=in_flight):
                return None
        goers = [*self._runs_parts(runs), *self._commit_parts(shares)] if runs or shares else []
        if self.desk.runs_whole_paths:
            again = [part.n_tokens() - part.n_logits() for part in goers]
            self.counters.recomputed += sum(again)
        parts: list[Part] = [*goers]
        if desk.waiting:
            n_left = min(n_batch, n_step - sum([part.n_tokens() for part in goers]))
            if self.engine.info.no_prefix_cache:  # a long path may have been more than its share
                n_left = max(n_left, spared)
            if runs and self.engine.info.device == "cpu":
                # There a token costs as much beside others as alone: those that are live would
                # stand still for as long as it takes to read a whole batch.
                n_left = min(n_left, spared)
            brought = desk.reader.pack(desk.waiting_in_turn(n_left), n_left, desk)
            parts += [*brought, *desk.firsts_of(brought)]
        if desk.late_firsts:
            parts += desk.late_firsts_part()
        computed, reread = desk.reader.take_counts()
        self.counters.prefilled += computed
        self.counters.recomputed += reread
        if not parts:
            desk.promote()  # what the row store just answered
            return None
        return Step(parts)

    def _sizes(self) -> tuple[int, int]:
        """Return how many tokens of those that wait, and in all, a step may have now."""
        most = self.admission.shortage.most
        if most is None:
            return self.n_batch, self.n_step
        return min(self.n_batch, most), min(self.n_step, most)

    def _ready_runs(self, most: int) -> list[RunJob]:
        """Return the runs whose next token can be run now, `most` tokens of them.

        The oldest, so that tails are short-lived. Where whole paths run there are none: all go on
        in turn, and one longer than `most` goes alone.
        """
        desk = self.desk
        ready = [run for run in desk.live if run.can_step(self.n_ctx)]
        if self.flight is not None:
            ready = [run for run in ready if run.line.is_open or self._may_open(run)]
        if self.desk.runs_whole_paths:
            ready.sort(key=lambda run: (run.n_drawn, run.age))
            costs = itertools.accumulate([run.line.depth for run in ready])
            ready = ready[: max(bisect_right(list(costs), most), 1)]
        elif len(ready) > most:
            ready = heapq.nsmallest(most, ready, key=lambda run: run.age)
        # Of many runs nearly all are open, and free to draw what they like.
        begun = [run for run in ready if run.sampler.matcher is not None or not run.line.is_open]
        spare = most - self._cost(ready)
        for run in begun:
            if not run.line.is_open:
                desk.guard(run, run.line.open, self.tree)
            if run.sampler.matcher is not None:
                desk.guard(run, run.force, spare, desk)
                spare -= len(run.forced)
        return [run for run in ready if not run.done] if begun else ready

    def _cost(self, runs: list[RunJob]) -> int:
        """Return how many tokens of a step's budget the next tokens of runs take."""
        if self.desk.runs_whole_paths:
            return sum([run.line.depth for run in runs])
        return len(runs)

    def _may_open(self, run: RunJob) -> bool:
        """Whether nothing in flight writes where a run's line begins."""
        (claim,) = run.claims
        assert claim.cursor is not None
        return not self.desk.reader.is_written(claim.cursor)

    def _shares(self, most: int) -> list[Share]:
        """Return what the step may run of the commits, `most` tokens at most."""
        shares = []
        for job in list(self.desk.commits):
            if job.n_waiting or job.outstanding or most <= 0:
                continue
            if self.flight is not None:
                cursors = (claim.cursor for claim in job.claims if claim.cursor is not None)
                if any(self.desk.reader.is_written(cursor) for cursor in cursors):
                    continue
            last = job.share(most, self.desk)
            for line in job.item.lines[job.next : last]:
                self.desk.guard(job, self.lines.open, line)
            if not job.done:
                shares.append((job, job.next, last))
                most -= last - job.next
                if self.desk.runs_whole_paths:
                    most -= sum([line.depth for line in job.item.lines[job.next : last]])
        return shares

    def _reserve(self, runs: list[RunJob], shares: list[Share], before: int) -> None:
        """Ask the room for the slots of a step, as far as its jobs are still here.

        before: the desk's count of moves when all of them were.
        """
        if self.desk.n_moves != before:
            runs[:] = [run for run in runs if run in self.desk.live]
            shares[:] = [share for share in shares if share[0] in self.desk.commits]
        for run in runs:
            run.line.reserve(self.tree, 1 + len(run.forced))
        for job, first, last in shares:
            for line in job.item.lines[first:last]:
                line.reserve(self.tree, 1)

    def _runs_parts(self, runs: list[RunJob]) -> list[LinesPart]:
        """Return a part an adapter, for runs that are still here."""
        by_name: dict[str | None, tuple[list[RunJob], list[Row]]] = {}
        for run in runs:
            try:
                row = run.row(self.desk)
            except Exception as error:
                self.desk.fault(run, error)
                continue
            of_name = by_name.get(row.adapter)
            if of_name is None:
                of_name = by_name[row.adapter] = ([], [])
            of_name[0].append(run)
            of_name[1].append(row)
        return [RunsPart(some, rows, self.desk) for some, rows in by_name.values()]

    def _commit_parts(self, shares: list[Share]) -> list[LinesPart]:
        desk = self.desk
        parts = [desk.guard(share[0], CommitPart, *share, desk) for share in shares]
        return [part for part in parts if part is not None]

    # Launch, land, deliver --------------------------------------------------------------------

    def _launch(self, step: Step) -> None:
        """Call the model; time spent here is the engine's."""
        began = time.perf_counter()
        try:
            for call in step.calls:
                call.launch(self.engine, draws=not self._overlaps)
        except BaseException as error:
            step.error = error
            step.settle()  # what was launched still uses what is to be freed
        self._forward_s = time.perf_counter() - began

    def _draw_late(self, step: Step) -> float:
        """Let the step in flight draw; return the seconds spent."""
        began = time.perf_counter()
        for call in step.calls:
            call.draw()
        return time.perf_counter() - began

    def _land(self, step: Step) -> float:
        """Wait for a step and deliver it; return the seconds spent waiting for the engine."""
        began = time.perf_counter()
        if step.error is None:
            try:
                for call in step.calls:
                    call.land()
            except BaseException as error:
                step.error = error
        waited = time.perf_counter() - began
        with self.lock:
            self.counters.steps += 1
            if step.error is None:
                self._keep(step)
            if step.error is not None:
                self._crash(step, step.error)
            else:
                self._deliver(step)
            self.tree.settle_idle(self._busy)
            self._join_chains()
        if isinstance(step.error, (KeyboardInterrupt, SystemExit)):
            raise step.error
        return waited

    def _keep(self, step: Step) -> None:
        """Keep the rows that somebody may ask for; what goes wrong fails the call's parts, or the
        step where it was memory: then it is done again.
        """
        for call in step.calls:
            try:
                call.keep(self.rows)
            except Exception as error:
                for part in call.parts:
                    part.error = part.error or error
        step.error = step.wanted_memory()

    def _deliver(self, step: Step) -> None:
        for call in step.calls:
            for part in call.parts:
                self._deliver_part(part)
        self.desk.promote()

    def _deliver_part(self, part: Part) -> None:
        """Give out what a part brought; what goes wrong fails its jobs alone."""
        part_error = part.error
        if part_error is None:
            try:
                part.deliver(self.desk)
                return
            except Exception as error:
                part_error = error
        else:
            part.discard(self.desk)
        for job in list(part.jobs()):
            self.desk.fail(job, as_forward_error(part_error))

    def _crash(self, step: Step, raised: BaseException) -> None:
        """Undo a step, and the one launched from its draws, and fail all their tickets; or do what
        wanted memory again, with less of it.
        """
        after, self.flight = self.flight, None
        steps = [step] if after is None else [step, after]
        jobs: dict[Job, None] = {}
        for each in steps:
            each.settle()
            for part in each.parts:
                jobs.update(dict.fromkeys(part.jobs()))
                part.discard(self.desk)
        for job in jobs:
            self.desk.guard(job, job.conclude, self.desk)
        if self.admission.shortage.takes(raised, *step.size(), self.desk.least()):
            if self.admission.shortage.most is not None:
                self.rows.clear()  # they lie where there is no memory, mostly
            self.desk.begin_anew()
            return
        error = as_forward_error(raised)
        for job in jobs:
            self.desk.fail(job, error)

    def _join_chains(self) -> None:
        """Join long chains of small nodes, as far as no launched step reads them."""
        to_join = self.desk.to_join
        if not to_join:
            return
        # A place that waits may come again.
        places, busy = {place.cursor: place for place in to_join}, self._busy()
        to_join.clear()
        for cursor, place in places.items():
            if cursor is not None:
                chain = join_chain(resolve(cursor).node) if busy else []
                if len(chain) >= JOIN_LENGTH and any(node.fragment in busy for node in chain):
                    to_join.append(place)
                else:
                    self.tree.join(cursor)

    def _busy(self) -> set[Fragment]:
        """Return the fragments that the step in flight may read or write. Cost: O(its rows)."""
        if self.flight is None:
            return set()
        rows = [row for part in self.flight.parts for row in part.rows()]
        paths = {id(row.prefix): row.prefix for row in rows}
        busy = {span.fragment for path in paths.values() for span in path}
        busy.update([row.kv_out for row in rows if row.kv_out is not None])
        return busy

    def land_flight(self) -> None:
        """Deliver the step that is in flight, if there is one."""
        flight, self.flight = self.flight, None
        if flight is not None:
            self._land(flight)

    # When something is wrong ------------------------------------------------------------------

    def _give_up(self) -> None:
        """A step that could do nothing would be repeated for ever: fail what waits."""
        error = WeftError("the scheduler cannot go on with this work; please report this as a bug")
        with self.lock:
            for job in self.desk.jobs():
                self.desk.fail(job, error)

    def _recover(self, error: BaseException) -> None:
        """Fail all that is open after an error that nobody foresaw; undo what steps promised."""
        _log.exception("a step failed outside the model call", exc_info=error)
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.settle()
        failed = as_forward_error(error)
        with self.lock:
            for part in list(self.desk.reader.open):
                part.discard(self.desk)
            for job in self.desk.jobs():
                job.outstanding = 0
                try:
                    self.desk.fail(job, failed)
                except Exception:
                    _log.exception("and its work could not be undone")
                    for ticket in job.tickets():
                        ticket.resolve(error=failed)
                    self.desk.end(job)

    def abandon(self, error: BaseException) -> None:
        """Answer all tickets with an error and touch nothing else: the state may be half-made."""
        failed: BaseException = error
        if not isinstance(error, StaleHandle):
            failed = WeftError(f"the scheduler failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
        with self.lock:
            arrived = [jobs for jobs in self._inbox if isinstance(jobs, list)]
            for job in [*itertools.chain(*arrived), *self.desk.jobs()]:
                for ticket in job.tickets():
                    ticket.resolve(error=failed)

    def close(self) -> None:
        """Fail everything that is not done and forget all KV; the engine stays open."""
        self.land_flight()
        with self.lock:
            self.take_in()
            for job in self.desk.jobs():
                self.desk.fail(job, Cancelled("the LM was closed"))
            self.lines.relieve()
            self.tree.unpin_all()
            self.tree.clear()
            self.rows.clear()

    # Namespaces that are gone -----------------------------------------------------------------

    def retire(self, namespace: str, message: str) -> None:
        """Fail all work in a namespace with StaleHandle, refuse it from now on, and drop its KV.

        Between steps, under the lock: no row of it is ever formed again. Cost: O(open jobs + tree).
        """
        self.take_in()
        self.retired[namespace] = message
        for job in self.desk.jobs():
            if namespace in job.namespaces():
                self.desk.fail(job, StaleHandle(message))
        self.settle()
        self.tree.clear(namespace=namespace)
        for name in self.retired:
            root = self.tree.roots.get(name)
            if root is not None and not root.children:  # else places still hold tokens of it
                del self.tree.roots[name]

    def _refuse_retired(self, items: Sequence[Item]) -> None:
        """Raise StaleHandle for work in a namespace that is gone."""
        for item in items:
            for name in item.namespaces():
                if name is not None and name in self.retired:
                    raise StaleHandle(self.retired[name])
