"""Admission of jobs: pin paths, check the slot budget, evict, and as a last resort preempt.

`MemoryPressure` lowers the limits while an engine has less memory than it reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...errors import KVFull, is_out_of_memory
from ..kv.budget import SlotBudget
from ..kv.tree import TokenTree, is_evictable
from .batch import as_forward_error
from .jobs import Job
from .queues import JobQueues

_log = logging.getLogger(__name__)
RELAX_S = 10.0  # after this time the limits are removed: other processes may have freed memory
_MAX_RELAX_S = 80.0  # the time doubles up to this each time that memory is still short


class Admission:
    """Admits waiting jobs when their KV fits: pins their paths, evicts idle KV, preempts jobs.

    A job is admitted completely or not at all. A younger job never overtakes one that waits. The
    paths of an admitted job are pinned, absent tokens included, so everything admitted can be
    computed without checking the budget again.
    """

    def __init__(self, queues: JobQueues) -> None:
        self.queues = queues
        self.tree: TokenTree = queues.tree
        self.pressure = MemoryPressure(
            queues.tree.budget, splits_rows=queues.tree.fragments is not None
        )

    def admit(self, *, may_evict: bool) -> int:
        """Admit waiting jobs, oldest first, until one must wait for slots.

        Args:
            may_evict: True if no step is in flight, so that KV can be evicted. If False, the first
                job that needs eviction waits until that step has finished.

        Returns: how many jobs were processed: admitted, failed, or waiting for the step in flight.
        """
        n = 0
        while (job := self.queues.head()) is not None:
            try:
                verdict = self._try_admit(job, may_evict)
            except Exception as error:
                self._unpin_paths(job)
                self.queues.fail(job, as_forward_error(error))
                verdict = "failed"
            if verdict == "wait":
                return n
            n += 1
            if verdict == "drain":
                return n
            if verdict == "never":
                self.queues.fail(job, self.kv_full(job))
            elif verdict == "admitted":
                self.queues.admit(job)
        return n

    def _try_admit(self, job: Job, may_evict: bool) -> str:
        """Pin the job's paths and make room for them; unpin them again if there is none.

        Returns: "admitted". "drain": the step in flight must finish first. "wait": other jobs must
        end
        first. "never": the job does not fit even alone.
        """
        budget = self.tree.budget
        counts = self._pin_paths(job)
        # Admitted jobs grow, and a run needs its first slots.
        reserve = budget.growth if self.queues.admitted else 0
        if (budget.is_exceeded or self._is_short(reserve)) and self.queues.sequences.close_idle():
            self._unpin_paths(job)
            counts = self._pin_paths(job)  # the sequences that were closed may be its own
        if budget.is_exceeded or self._is_short(reserve):
            if not may_evict:
                self._unpin_paths(job)
                return "drain"
            if self._is_short(reserve) or not self.tree.make_room():
                has_more = not self.queues.admitted and self.pressure.grow(budget.unevictable)
                self._unpin_paths(job)
                if has_more:
                    return self._try_admit(job, may_evict)
                return "wait" if self.queues.admitted else "never"
        counters = self.queues.counters
        for claim, (reused, missing) in zip(job.claims, counts, strict=True):
            if not claim.was_admitted:
                if self.tree.fragments is not None:
                    counters.reused += reused
                    job.note_reused(claim, reused)
                claim.was_admitted = True
            else:
                counters.recomputed += missing
        return "admitted"

    def _is_short(self, reserve: int) -> bool:
        """Return True if even evicting all other KV leaves less than `reserve` slots free."""
        capacity = self.tree.budget.capacity
        return capacity is not None and self.tree.budget.unevictable + reserve > capacity

    def _pin_paths(self, job: Job) -> list[tuple[int, int]]:
        """Pin all paths of a job; return (cached slots, slots to compute) of each."""
        job.prepare(self.tree)
        return [claim.pin_path(self.tree) for claim in job.claims]

    def _unpin_paths(self, job: Job) -> None:
        """Unpin all paths of a job."""
        for claim in job.claims:
            claim.unpin_path(self.tree)

    def offload_idle(self, n_slots: int | None) -> None:
        """Move unpinned KV to the host, least recently used first, until `n_slots` are left.

        Call it only between steps. Copies beyond the host's limit are freed first.

        n_slots: unpinned slots that may stay on the device. None moves nothing.
        """
        if n_slots is None:
            return
        tree, budget = self.tree, self.tree.budget
        for node in tree.host.evict_excess():
            tree.forget(node)
        while budget.resident - budget.pinned > n_slots and (
            victim := tree.queue.pop(is_evictable)
        ):
            tree.drop(victim, offload=True)

    # Slots for the next step ------------------------------------------------------------------

    def reserve_slots(self, reserve: Callable[[], None], *, in_flight: bool) -> bool:
        """Reserve the slots of the next step, and make room for them.

        It first evicts KV, then preempts the youngest jobs. If a single job is left and does not
        fit, it fails. Jobs can end on the way, so `reserve` is called repeatedly.

        Args:
            reserve: reserves the slots of all jobs that are still admitted; may exceed the budget.
            in_flight: a step is in flight, so nothing may be evicted now.

        Returns: False if the step in flight must finish first, else True.
        """
        if self.tree.fragments is None:
            return True
        budget = self.tree.budget
        while True:
            reserve()
            if not budget.is_exceeded:
                return True
            self.queues.sequences.close_idle()
            if not budget.is_exceeded:
                return True
            if in_flight:
                return False
            if (
                budget.capacity is None or budget.unevictable <= budget.capacity
            ) and self.tree.make_room():
                return True
            if not self._preempt_youngest():
                return True

    def _preempt_youngest(self) -> bool:
        """Preempt the youngest admitted job, if there are several.

        A single job keeps running if one more slot per tail can be freed. Otherwise it fails, or is
        preempted if that frees draft tokens.

        Returns: True if a job was preempted or has failed.
        """
        job = max(self.queues.admitted, key=lambda job: job.age)
        if len(self.queues.admitted) > 1:
            self.queues.preempt(job)
            return True
        budget = self.tree.budget
        for tail in self.tree.tails:
            budget.shrink_reservation(tail, tail.fragment.length + 1)
        self.pressure.grow(budget.unevictable)
        may_fit = budget.capacity is not None and budget.unevictable <= budget.capacity
        if may_fit and self.tree.make_room():
            return False
        if job.has_drafts():
            self.queues.preempt(job)
        else:
            self.queues.fail(job, self.kv_full(job))
        return True

    def kv_full(self, job: Job) -> KVFull:
        """Return the KVFull error for a job that does not fit even alone."""
        budget = self.tree.budget
        capacity = budget.capacity or 0
        needed = job.longest_path()
        limit = f"the KV budget of {capacity} slots ({budget.resident} hold KV now)"
        hint = "load the model with a larger kv_budget, or use a shorter path"
        if self.pressure.limits_slots:
            limit = f"the {capacity} slots that fit into memory now"
            hint = "free memory on the device, or use a shorter path"
        by_hand = self.tree.n_user_pinned()
        if budget.max_paths is not None and (
            budget.capacity is None or needed + by_hand <= capacity
        ):
            limit = f"{budget.max_paths} resident paths"
        n = job.n_paths()
        what = "this path" if n == 1 else f"these {n} paths together"
        if by_hand:
            limit += f" next to {by_hand} slots that are pinned by hand"
            hint = f"unpin paths, {hint}"
        return KVFull(
            f"{what} of {needed} tokens cannot fit in {limit}",
            needed=needed,
            capacity=capacity,
            # The limit of a memory shortage may rise later; the configured budget does not.
            never_fits=needed > capacity > 0 and not self.pressure.limits_slots,
            hint=f"{hint} (docs/troubleshooting.md#out-of-memory)",
        )


class MemoryPressure:
    """Lowers step size and KV slots after out-of-memory errors of the engine.

    Other programs may use memory of the same device. So `relax` removes the limits after some
    seconds.

    max_step_tokens: maximum tokens of a step; None means no limit.
    """

    def __init__(self, budget: SlotBudget, *, splits_rows: bool) -> None:
        """Start without limits.

        Args:
            budget: its `capacity` is lowered, and restored later.
            splits_rows: a long row can be run as several chunks, because KV is kept between steps.
        """
        self.max_step_tokens: int | None = None
        self._splits_rows = splits_rows
        self._budget = budget
        self._configured = budget.capacity
        self._is_guess = False  # True if Weft lowered the budget, False if the engine reported it
        self._since: float | None = None
        self._relaxed = -_MAX_RELAX_S
        self._relax_s = RELAX_S

    @property
    def limits_slots(self) -> bool:
        """True if the budget is smaller than configured."""
        return self._budget.capacity != self._configured

    def reduce(self, error: BaseException, n_rows: int, n_tokens: int, min_slots: int) -> bool:
        """Lower the limits after an error of a step of this size.

        Each call lowers them further, so retries come to an end.

        Args:
            error: what the step raised.
            n_rows, n_tokens: the size of the step.
            min_slots: approximate slots that the oldest job needs; the budget stays above them.

        Returns: False if the error is not about memory, or nothing can be lowered further. The
            caller then fails the step instead of retrying it.
        """
        if isinstance(error, KVFull) and self._lower_slots(error, min_slots):
            pass
        elif isinstance(error, KVFull) or is_out_of_memory(error):
            had_less = self.max_step_tokens is not None
            is_less = self._halve_step(n_rows, n_tokens)
            # If smaller steps do not help or are impossible, drop KV that can be recomputed.
            if (had_less or not is_less) and not self._halve_slots(min_slots) and not is_less:
                return False
        else:
            return False
        now = time.monotonic()
        if self._since is None and now - self._relaxed > self._relax_s:
            self._relax_s = RELAX_S
        self._since = now
        _log.warning(
            "no memory for a step of %d tokens, which is retried: for %d s, at most %s tokens a"
            " step and %s slots of KV: %s",
            n_tokens,
            self._relax_s,
            self.max_step_tokens or "any number of",
            self._budget.capacity,
            error,
        )
        return True

    def _halve_step(self, n_rows: int, n_tokens: int) -> bool:
        """Limit steps to half of the failed step's tokens; return False if it cannot be smaller.

        n_rows, n_tokens: the size of the failed step.
        """
        if self.max_step_tokens == 1 or (n_rows <= 1 and (n_tokens <= 1 or not self._splits_rows)):
            return False
        self.max_step_tokens = max(min(n_tokens, self.max_step_tokens or n_tokens) // 2, 1)
        return True

    def _halve_slots(self, min_slots: int) -> bool:
        """Lower the budget to half of the used slots, but not below what the oldest job needs.

        Most engines free the memory of the other slots when their KV is evicted.

        min_slots: slots that the oldest job needs.

        Returns: False, and nothing is lowered, if that is not less than now.
        """
        budget = self._budget
        used = budget.resident + budget.tails
        capacity = max(used // 2, min_slots + budget.growth)
        if capacity >= (used if budget.capacity is None else min(used, budget.capacity)):
            return False
        budget.capacity, self._is_guess = capacity, True
        return True

    def grow(self, needed: int) -> bool:
        """Raise the budget to `needed` slots, but not above the configured budget.

        Only if Weft had lowered it by a guess, not to a capacity that the engine reported.

        needed: slots that a single admitted job needs.

        Returns: True if the budget was raised.
        """
        budget = self._budget
        limit = needed if self._configured is None else min(needed, self._configured)
        if not (self._is_guess and budget.capacity is not None and budget.capacity < limit):
            return False
        budget.capacity = limit
        return True

    def _lower_slots(self, error: KVFull, min_slots: int) -> bool:
        """Lower the budget to the capacity that the engine reports.

        If the budget is that low already, something that it does not count uses memory. It is then
        lowered by the slots that the engine reports as missing.

        Args:
            error: the engine's error, with its capacity and the slots that it needed.
            min_slots: slots that the oldest job needs.

        Returns: False, and nothing is lowered, if the budget has no limit or would fall below
            `min_slots`.
        """
        budget = self._budget
        # A capacity below the oldest job's need is temporary: KV can be freed.
        if budget.capacity is None or error.capacity < min_slots:
            return False
        capacity, is_guess = min(budget.capacity, error.capacity), False
        if capacity == budget.capacity:
            capacity, is_guess = min(capacity, budget.used) - max(error.needed, 1), True
            if capacity < min_slots:
                return False
        budget.capacity, self._is_guess = capacity, is_guess
        return True

    def relax(self) -> None:
        """Remove the limits if the last memory error was some seconds ago.

        If memory soon runs out again, the next limits last twice as long.
        """
        if self._since is not None and time.monotonic() - self._since > self._relax_s:
            self.reset()
            self._relaxed = time.monotonic()
            self._relax_s = min(2 * self._relax_s, _MAX_RELAX_S)

    def reset(self) -> None:
        """Remove the limits now: restore the configured budget."""
        self.max_step_tokens, self._budget.capacity, self._since = None, self._configured, None
