"""Room for what the next step writes: evict, then park the youngest, last fail the only one."""

from __future__ import annotations

from collections.abc import Callable

from ..kv.tree import TokenTree
from .admit import Admission, kv_full
from .runs import Runs
from .stays import CommitJob, Share, Stays
from .task import Job, RunTask

Chosen = tuple[list[RunTask], list[Share]]


class Fitting:
    """Gives runs and commits the slots of their next tokens, or takes some out of a step."""

    def __init__(
        self,
        tree: TokenTree,
        runs: Runs,
        stays: Stays,
        admission: Admission,
        fail: Callable[[Job, BaseException], None],
    ) -> None:
        self.tree = tree
        self.runs = runs
        self.stays = stays
        self.admission = admission
        self._fail = fail

    def fit(self, runs: list[RunTask], shares: list[Share], *, in_flight: bool) -> Chosen | None:
        """Return those that have room for a slot more each; None: what is in flight goes first."""
        if self.tree.fragments is None:
            return runs, shares
        room = self.tree.room
        while True:
            self.runs.reserve(runs)
            self.stays.reserve(shares)
            if room.is_over:
                self.stays.relieve()
            if not room.is_over:
                return runs, shares
            if in_flight:
                return None
            if (room.capacity is None or room.must <= room.capacity) and self.tree.make_room():
                return runs, shares
            job = self._sacrifice(runs, shares)
            runs = [run for run in runs if run.job is not job]
            shares = [share for share in shares if share.job is not job]

    def _sacrifice(self, runs: list[RunTask], shares: list[Share]) -> Job | None:
        """Park the youngest admitted job. The last one makes do with a slot more, or fails."""
        jobs = self.admission.admitted
        job = max(jobs, key=lambda job: job.age)
        if len(jobs) > 1:
            if isinstance(job, CommitJob):
                self.stays.park(job)
            self.admission.park(job)
            return job
        room = self.tree.room
        for tail in [run.tail for run in runs] + self.stays.tails(shares):
            assert tail is not None
            room.tighten(tail, tail.fragment.length + 1)
        may_fit = room.capacity is not None and room.must <= room.capacity
        if may_fit and self.tree.make_room():
            return None
        self._fail(job, kv_full(job, self.tree))
        return job
