"""Who may have KV now: pin, check room, evict, check again, and last park the youngest; and how
much there is, where an engine has less memory than was promised.
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
RELAX_S = 10.0  # then more is tried again: who had the memory may have given it back
_MAX_RELAX_S = 80.0  # if they have not, it is tried half as often each time


class Admission:
    """Gives jobs their paths, and lines the slots of their next tokens.

    A job is admitted whole or not at all; a younger one never overtakes one that waits. An admitted
    job's paths are pinned, absent tokens included, so whatever is admitted can be computed without
    asking again.
    """

    def __init__(self, queues: JobQueues) -> None:
        self.queues = queues
        self.tree: TokenTree = queues.tree
        self.pressure = MemoryPressure(
            queues.tree.budget, splits_rows=queues.tree.fragments is not None
        )

    def admit(self, *, may_evict: bool) -> int:
        """Admit from the head of the queue while there is room; return how many were looked at.

        may_evict: no step is in flight; otherwise a job that needs others' room waits for it.
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
        budget = self.tree.budget
        counts = self._pin_paths(job)
        # Others grow meanwhile, and a run will want its first slots.
        reserve = budget.growth if self.queues.admitted else 0
        if (budget.is_exceeded or self._is_short(reserve)) and self.queues.sequences.close_idle():
            self._unpin_paths(job)
            counts = self._pin_paths(job)  # its own lines may have been idle
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
        """Whether no eviction could make enough room, with a slot spare for each admitted job."""
        capacity = self.tree.budget.capacity
        return capacity is not None and self.tree.budget.unevictable + reserve > capacity

    def _pin_paths(self, job: Job) -> list[tuple[int, int]]:
        job.prepare()
        return [claim.pin_path(self.tree) for claim in job.claims]

    def _unpin_paths(self, job: Job) -> None:
        for claim in job.claims:
            claim.unpin_path(self.tree)

    def offload_idle(self, n_slots: int | None) -> None:
        """Copy unpinned KV beyond `n_slots` to the host, least recently used first.

        The copies have slots that the device has free, so none is lost. Only between steps.
        """
        if n_slots is None:
            return
        tree, budget = self.tree, self.tree.budget
        for node in tree.host.evict_excess():
            tree.forget(node)
        while budget.resident - budget.pinned > n_slots:
            victim = tree.queue.pop(is_evictable)
            if victim is None:
                return
            tree.drop(victim, offload=True)

    # Room for what the next step writes -------------------------------------------------------

    def reserve_slots(self, reserve: Callable[[], None], *, in_flight: bool) -> bool:
        """Make room for what `reserve` asks for; False: what is in flight must land first.

        Evicts, then parks the youngest job, last fails the only one; `reserve` is asked again after
        each, as jobs are gone.
        """
        if self.tree.fragments is None:
            return True
        budget = self.tree.budget
        while True:
            reserve()
            if budget.is_exceeded:
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
        """Park the youngest admitted job; the last one makes do with a slot more, or fails.

        Returns whether a job is gone.
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
        self.queues.fail(job, self.kv_full(job))
        return True

    def kv_full(self, job: Job) -> KVFull:
        """Say that a job's paths do not fit even alone."""
        budget = self.tree.budget
        capacity = budget.capacity or 0
        needed = job.longest_path()
        limit = f"the KV budget of {capacity} slots ({budget.resident} hold KV now)"
        hint = "load the model with a larger kv_budget, or use a shorter path"
        if self.pressure.limits_slots:
            limit = f"the {capacity} slots that there is memory for now"
            hint = "close what else takes memory on the device, or use a shorter path"
        by_hand = self.tree.n_user_pinned()
        if budget.max_paths is not None and (
            budget.capacity is None or needed + by_hand <= capacity
        ):
            limit = f"{budget.max_paths} resident paths"
        n = job.n_paths()
        what = "this path" if n == 1 else f"these {n} paths together"
        if by_hand:
            limit += f" beside {by_hand} slots that are pinned by hand"
            hint = f"unpin paths, {hint}"
        return KVFull(
            f"{what} of {needed} tokens cannot fit in {limit}",
            needed=needed,
            capacity=capacity,
            # What there is memory for now may be more later; what was asked for stays.
            never_fits=needed > capacity > 0 and not self.pressure.limits_slots,
            hint=hint,
        )


class MemoryPressure:
    """Keeps the steps to what an engine finds memory for, which others may take on the same device.

    most: tokens that a step may have; None: as many as ever.
    """

    def __init__(self, budget: SlotBudget, *, splits_rows: bool) -> None:
        """cuts_rows: a row may be run in parts, of which each is held."""
        self.max_step_tokens: int | None = None
        self._splits_rows = splits_rows
        self._budget = budget
        self._configured = budget.capacity
        self._is_guess = False  # that the room is smaller; else the engine has said it
        self._since: float | None = None
        self._relaxed = -_MAX_RELAX_S
        self._relax_s = RELAX_S

    @property
    def limits_slots(self) -> bool:
        """Whether the room is smaller than was asked for."""
        return self._budget.capacity != self._configured

    def reduce(self, error: BaseException, n_rows: int, n_tokens: int, min_slots: int) -> bool:
        """Ask for less, if it was memory that a step of this size wanted; False: it was not, or
        there is nothing less to ask for.

        least: slots that the oldest job needs, about. Each time it is less, so who does the step
        again comes to an end.
        """
        if isinstance(error, KVFull) and self._lower_slots(error, min_slots):
            pass
        elif isinstance(error, KVFull) or is_out_of_memory(error):
            had_less = self.max_step_tokens is not None
            is_less = self._halve_step(n_rows, n_tokens)
            # Where that does not do, or cannot be, KV that can be computed again goes.
            if (had_less or not is_less) and not self._halve_slots(min_slots) and not is_less:
                return False
        else:
            return False
        now = time.monotonic()
        if self._since is None and now - self._relaxed > self._relax_s:
            self._relax_s = RELAX_S
        self._since = now
        _log.warning(
            "no memory for a step of %d tokens, which is done again: for %d s, %s tokens a step at"
            " most, and %s slots of KV: %s",
            n_tokens,
            self._relax_s,
            self.max_step_tokens or "any number of",
            self._budget.capacity,
            error,
        )
        return True

    def _halve_step(self, n_rows: int, n_tokens: int) -> bool:
        """Halve the tokens of a step, if one can be smaller."""
        if self.max_step_tokens == 1 or (n_rows <= 1 and (n_tokens <= 1 or not self._splits_rows)):
            return False
        self.max_step_tokens = max(min(n_tokens, self.max_step_tokens or n_tokens) // 2, 1)
        return True

    def _halve_slots(self, min_slots: int) -> bool:
        """Lower the room to half of what is held: most engines give the memory of the rest back."""
        budget = self._budget
        held = budget.resident + budget.tails
        capacity = max(held // 2, min_slots + budget.growth)
        if capacity >= (held if budget.capacity is None else min(held, budget.capacity)):
            return False
        budget.capacity, self._is_guess = capacity, True
        return True

    def grow(self, needed: int) -> bool:
        """Give work that is alone the slots that it must have, if nobody knows that they are not
        there; return whether it has more now.
        """
        budget = self._budget
        limit = needed if self._configured is None else min(needed, self._configured)
        if not (self._is_guess and budget.capacity is not None and budget.capacity < limit):
            return False
        budget.capacity = limit
        return True

    def _lower_slots(self, error: KVFull, min_slots: int) -> bool:
        """Lower the room to what the engine says that it has; where that is no less, by as much as
        it lacks: something that the room does not count took them."""
        budget = self._budget
        # What would not do for the oldest job is what there is now: more may be made.
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
        """Ask for all again, if it is long enough ago."""
        if self._since is not None and time.monotonic() - self._since > self._relax_s:
            self.reset()
            self._relaxed = time.monotonic()
            self._relax_s = min(2 * self._relax_s, _MAX_RELAX_S)

    def reset(self) -> None:
        """Ask for all again."""
        self.max_step_tokens, self._budget.capacity, self._since = None, self._configured, None
