"""Who may have KV now: pin, check room, evict, check again, and last park the youngest."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import KVFull
from ..kv.cursor import Cursor
from ..kv.tree import TokenTree
from .stays import CommitJob, Stay
from .task import ExtendTask, Job, RunTask, Task
from .work import Counters


class Admission:
    """The queue of jobs in order of age, and those admitted.

    A job is admitted whole or not at all; a younger one never overtakes one that waits. An admitted
    job's paths are pinned, absent tokens included, so whatever is admitted can be computed without
    asking again.
    """

    def __init__(
        self,
        tree: TokenTree,
        counters: Counters,
        suspend: Callable[[Task], None],
        refuse: Callable[[Job], None],
        relieve: Callable[[], bool],
    ) -> None:
        """suspend: stops work on a task; a live run's tail goes into the tree, where it can be
        evicted. refuse: answers a job that can never fit, and takes it off the queue. relieve: lets
        idle stays go, whose KV can be evicted then.
        """
        self.tree = tree
        self.counters = counters
        self.suspend = suspend
        self.refuse = refuse
        self.relieve = relieve
        self.queue: list[Job] = []
        self.admitted: list[Job] = []

    def add(self, job: Job) -> None:
        """Queue a job; parked ones go back to their place by age."""
        at = len(self.queue)
        while at and self.queue[at - 1].age > job.age:
            at -= 1
        self.queue.insert(at, job)

    def admit(self, *, may_evict: bool) -> tuple[list[Job], bool]:
        """Admit from the head of the queue while there is room.

        may_evict: no step is in flight; otherwise a job that needs others' room waits.
        Returns: jobs admitted, and whether one waits for the flight to end.
        """
        admitted: list[Job] = []
        while self.queue:
            job = self.queue[0]
            verdict = self._try(job, may_evict)
            if verdict == "wait" or verdict == "drain":
                return admitted, verdict == "drain"
            if verdict == "never":
                self.refuse(job)
            else:
                self.queue.pop(0)
                admitted.append(job)
        return admitted, False

    def release(self, job: Job) -> None:
        """Unpin a job's paths and take it off the list of admitted ones."""
        self._undo(job)
        if job.admitted:
            job.admitted = False
            self.admitted.remove(job)

    def park(self, job: Job) -> None:
        """Send an admitted job back: its KV becomes evictable, what it made is kept."""
        for task in job.tasks:
            self.suspend(task)
        self.release(job)
        self.counters.parked += 1
        self.add(job)

    def _try(self, job: Job, may_evict: bool) -> str:
        room = self.tree.room
        counts = self._enter_all(job)
        # Others grow meanwhile, and a run will want its first slots.
        reserve = self.tree.room.growth if self.admitted else 0
        if (room.is_over or self._is_short(reserve)) and self.relieve():
            self._undo(job)
            counts = self._enter_all(job)  # its own stays may have been idle
        if room.is_over or self._is_short(reserve):
            if not may_evict:
                self._undo(job)
                return "drain"
            if self._is_short(reserve) or not self.tree.make_room():
                self._undo(job)
                return "wait" if self.admitted else "never"
        job.admitted = True
        self.admitted.append(job)
        for task, (reused, missing) in zip(job.tasks, counts, strict=True):
            if not task.seen:
                self.counters.reused += reused
                task.seen = True
            else:
                self.counters.recomputed += missing
        return "admitted"

    def _is_short(self, reserve: int) -> bool:
        """Whether no eviction could make enough room, with a slot spare for each admitted job."""
        capacity = self.tree.room.capacity
        return capacity is not None and self.tree.room.must + reserve > capacity

    def _enter_all(self, job: Job) -> list[tuple[int, int]]:
        if isinstance(job, CommitJob):
            job.prepare()
        return [self._enter(task) for task in job.tasks]

    def _enter(self, task: Task) -> tuple[int, int]:
        """Put a task's path into the tree and pin it; return slots found, and slots to compute."""
        tree, promised = self.tree, self.tree.room.promised
        task.cursor = enter(task, tree)
        task.pin = tree.pin(task.cursor)
        missing = tree.room.promised - promised
        return task.cursor.depth - missing, missing

    def _undo(self, job: Job) -> None:
        for task in job.tasks:
            if task.pin is not None:
                self.tree.unpin(task.pin)
            task.pin = task.cursor = None


def enter(task: Task, tree: TokenTree) -> Cursor:
    """Return a task's cursor in the tree; a run's is the end of a node, where a tail starts.

    An extend may end inside a resident node, which is then pinned whole; but paths that must fit
    together are counted exactly.
    """
    if isinstance(task, ExtendTask):
        end = tree.extend(tree.place(task.item.place), task.item.tokens)
        node = end.node
        return end if node.resident and len(task.job.tasks) == 1 else tree.cut(end)
    if isinstance(task, Stay):
        return tree.cut(tree.place(task.base))
    assert isinstance(task, RunTask)
    return tree.cut(tree.extend(tree.place(task.anchor), task.anchor_ids))


def kv_full(job: Job, tree: TokenTree) -> KVFull:
    """Say that a job's paths do not fit even alone."""
    capacity = tree.room.capacity or 0
    needed = max((path_length(task) for task in job.tasks), default=0)
    limit = f"the KV budget of {capacity} slots ({tree.room.resident} hold KV now)"
    if tree.room.max_paths is not None and needed <= capacity:
        limit = f"{tree.room.max_paths} resident paths"
    what = "this path" if len(job.tasks) == 1 else f"these {len(job.tasks)} paths together"
    return KVFull(
        f"{what} of {needed} tokens cannot fit in {limit}",
        needed=needed,
        capacity=capacity,
        hint="load the model with a larger kv_budget, or use a shorter path",
    )


def path_length(task: Task) -> int:
    """Return how many slots a task's own path needs now."""
    if isinstance(task, ExtendTask):
        return task.item.place.depth + len(task.item.tokens)
    if isinstance(task, Stay):
        return task.depth + 1
    assert isinstance(task, RunTask)
    return task.anchor.depth + len(task.anchor_ids) + len(task.tokens) - task.settled
