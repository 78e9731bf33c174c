"""Stays: paths that go on a token a call, and commits, which run many of them in one step."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..engines.base import EngineInfo, Row
from ..kv.cursor import Cursor, Place
from ..kv.tree import TokenTree
from ..sampling.bridge import draw_at
from ..sampling.chain import Chain, Sampler
from .kept import KeptRows, StepRows
from .task import Job, Task, new_task
from .work import Commit, Counters, Ticket

if TYPE_CHECKING:
    from ..kv.tail import Tail
    from .step import Group


class Stay(Task):
    """A path that is committed to again and again: `base`, then `tokens`.

    While it is open its tokens are in a private tail, as a run's are, and the path is pinned. Idle,
    it may be closed at any time: its tail goes into the tree, `base` is the place after it.
    """

    __slots__ = ("base", "epoch", "is_open", "keep", "own_pin", "path_ids", "row", "tail", "tokens")

    def __init__(self, base: Place) -> None:
        super().__init__()
        self.base = base
        self.tokens: list[int] = []
        self.is_open = False
        self.own_pin: Cursor | None = None
        self.tail: Tail | None = None
        self.row: Row | None = None
        self.epoch = -1
        self.path_ids: list[int] | None = None
        self.keep: Keep

    @property
    def depth(self) -> int:
        """Tokens of the path."""
        return self.base.depth + len(self.tokens)

    @property
    def is_busy(self) -> bool:
        """A commit of it is under way."""
        job = getattr(self, "job", None)
        return job is not None and job.admitted and not job.done


class Keep(weakref.ref[Any]):
    """Who goes on with a stay; its callback tells when nobody does, and is no Python code."""

    __slots__ = ("stay",)
    stay: Stay


class Committed(NamedTuple):
    """What a commit gives one stay: its logits row, now or later, and what was drawn from it.

    rows, number: see `StepRows.logits`. drawn: token, raw log-probability, and log-probability
    among what the filters left.
    """

    rows: StepRows
    number: int
    drawn: tuple[int, float, float] | None


class CommitJob(Job):
    """A commit on its way: the tokens from `next` on are still to be run.

    n_waiting: stays whose paths are still computed. outstanding: launched steps of it. error: what
    it ends with once those have landed.
    """

    __slots__ = ("error", "found", "item", "n_waiting", "next", "outstanding", "ticket")

    def __init__(self, age: int, ticket: Ticket) -> None:
        super().__init__(age, ())
        assert isinstance(ticket.item, Commit)
        self.item: Commit = ticket.item
        self.ticket = ticket
        self.found: list[Committed] = []
        self.n_waiting = 0
        self.next = 0
        self.outstanding = 0
        self.error: BaseException | None = None
        ticket.task = self

    @property
    def job(self) -> Job:
        """Itself, as its ticket's task."""
        return self

    def prepare(self) -> None:
        """Say which paths must be computed and pinned first: those of stays that are not open."""
        for stay in self.item.stays:
            stay.job = self
        self.tasks = [stay for stay in self.item.stays if not stay.is_open]
        self.n_waiting = len(self.tasks)

    def tickets(self) -> list[Ticket]:
        return [self.ticket]


def new_job(age: int, tickets: Sequence[Ticket]) -> Job:
    """Return the job of tickets that are answered together; a commit is one by itself."""
    if isinstance(tickets[0].item, Commit):
        return CommitJob(age, tickets[0])
    return Job(age, [new_task(ticket) for ticket in tickets])


class Share(NamedTuple):
    """What one step runs of a commit: stays first, first + 1, … last - 1."""

    job: CommitJob
    first: int
    last: int

    @property
    def namespace(self) -> str | None:
        """The adapter of its stays, which is one."""
        return self.job.item.stays[0].base.namespace


class Stays:
    """The stays of a scheduler. All but `begin` and `release` is called under its lock."""

    def __init__(
        self,
        tree: TokenTree,
        info: EngineInfo,
        counters: Counters,
        join: Callable[[Place], None],
        budget_bytes: int,
        ended: Callable[[Job], None],
    ) -> None:
        """join: told of places whose chains may be joined. ended: told of finished commits.

        budget_bytes: of logits rows that stay with outputs.
        """
        self.tree = tree
        self.info = info
        self.counters = counters
        self.jobs: list[CommitJob] = []
        self.opened: dict[Stay, None] = {}
        self._ended = ended
        self._join = join
        self._keeps: dict[int, Keep] = {}
        self._gone: deque[Any] = deque()
        self._rows = KeptRows(budget_bytes)
        self._chain: Chain | None = None
        self._chain_of: list[Sampler] = []

    # Beginning and ending ---------------------------------------------------------------------

    def begin(self, owner: Any, place: Place) -> Stay:
        """Return a stay at a place, for as long as `owner` lives."""
        stay = Stay(place)
        keep = stay.keep = Keep(owner, self._gone.append)
        keep.stay = stay
        self._keeps[id(keep)] = keep
        return stay

    def release(self, stay: Stay) -> Place:
        """Go on with a stay no longer; return the place at its end. Its KV is there at once."""
        with self.tree.holds.lock:
            self._gone.append(stay.keep)
            if not stay.tokens:
                return stay.base
            return Place(self.tree.holds, stay.base.namespace, stay.base, tuple(stay.tokens))

    def drain(self) -> None:
        """Close the stays that were released, or whose owners are gone."""
        busy = []
        while self._gone:
            keep = self._gone.popleft()
            if keep.stay.is_busy:
                busy.append(keep)
            elif self._keeps.pop(id(keep), None) is not None and keep.stay.is_open:
                self.close(keep.stay)
        self._gone.extend(busy)

    def relieve(self) -> bool:
        """Close all idle stays: their KV can be found, read and evicted by others.

        Returns whether there were any.
        """
        n_open = len(self.opened)
        self.drain()
        for stay in [stay for stay in self.opened if not stay.is_busy]:
            self.close(stay)
        return len(self.opened) < n_open

    def open(self, stay: Stay) -> None:
        """Pin a resident path and start a tail."""
        cursor = self.tree.cut(self.tree.place(stay.base))
        stay.own_pin = self.tree.pin(cursor)
        stay.is_open = True
        self.opened[stay] = None
        if self.tree.fragments is not None:
            stay.tail = self.tree.new_tail(cursor)
        else:
            stay.path_ids = self.tree.ids(cursor)

    def close(self, stay: Stay) -> None:
        """Move the tail into the tree and let the path go."""
        del self.opened[stay]
        stay.is_open = False
        tail, pin, tokens = stay.tail, stay.own_pin, stay.tokens
        assert pin is not None
        stay.tail = stay.row = stay.own_pin = stay.path_ids = None
        if tokens:
            # Known from here on, also when the engine fails below.
            stay.base = Place(self.tree.holds, stay.base.namespace, stay.base, tokens)
            stay.tokens = []
        try:
            if tail is not None:
                end = self.tree.end_tail(tail, tokens)
                if tokens:
                    stay.base.settle(end)
                    self._join(stay.base)
        finally:
            self.tree.unpin(pin)

    # Planning ---------------------------------------------------------------------------------

    def ready(self, most: int) -> list[Share]:
        """Return what the next step may run of the commits, `most` tokens at most."""
        shares = []
        for job in self.jobs:
            if job.n_waiting or job.outstanding or most <= 0:
                continue
            last = min(job.next + most, len(job.item.stays))
            shares.append(Share(job, job.next, last))
            most -= last - job.next
            for stay in job.item.stays[job.next : last]:
                if not stay.is_open:
                    self.open(stay)
        return shares

    def tails(self, shares: Sequence[Share]) -> list[Tail]:
        """Return the tails that a step will write to."""
        stays = [stay for job, first, last in shares for stay in job.item.stays[first:last]]
        return [stay.tail for stay in stays if stay.tail is not None]

    def reserve(self, shares: Sequence[Share]) -> None:
        """Give every tail room for one slot more."""
        for tail in self.tails(shares):
            if tail.fragment.length >= tail.reserved:
                self.tree.room.reserve(tail, tail.fragment.length + 1)

    def join_group(self, group: Group, shares: Sequence[Share]) -> None:
        """Add the rows of commits to a step's group, last, and what to draw from them."""
        group.shares = list(shares)
        index = len(group.runs) + sum(len(piece.logits_at()) for piece in group.pieces)
        samplers, rows, positions = [], [], []
        for job, first, last in shares:
            item = job.item
            job.outstanding += 1
            for number in range(first, last):
                row = self._row(item.stays[number], item.tokens[number])
                group.rows.append(row)
                sampler = item.samplers[number]
                if sampler is not None:
                    samplers.append(sampler)
                    rows.append(index)
                    positions.append(row.position + row.n_tokens)
                index += 1
        if samplers:
            group.ahead = draw_at(self._chain_for(samplers), rows, positions)

    def _chain_for(self, samplers: list[Sampler]) -> Chain:
        if self._chain is None or self._chain_of != samplers:
            self._chain, self._chain_of = Chain(samplers), samplers
        return self._chain

    def _row(self, stay: Stay, token: int) -> Row:
        tail = stay.tail
        if tail is None:
            assert stay.path_ids is not None
            ids = [*stay.path_ids, *stay.tokens, token]
            return Row((), ids, 0, None, (len(ids) - 1,), (), stay.base.namespace)
        row = stay.row
        if row is None or stay.epoch != self.tree.epoch:
            path = self.tree.path(tail.cursor)
            row = stay.row = Row(path, (), 0, tail.fragment, (0,), (), stay.base.namespace)
            stay.epoch = self.tree.epoch
        row.tokens = (token,)
        row.position = tail.cursor.depth + tail.fragment.length
        return row

    # Delivering -------------------------------------------------------------------------------

    def deliver(self, group: Group) -> None:
        """Note what a finished step gave its commits; answer those that are done."""
        if not group.shares:
            return
        drawn = self._drawn(group)
        index = len(group.runs) + sum(len(piece.logits_at()) for piece in group.pieces)
        n = sum(last - first for _, first, last in group.shares)
        assert group.output is not None
        kept = not (self.info.owner_thread or self.info.overlap)
        fetch = range(index, index + n) if not kept else ()
        n_bytes = 4 * self.info.n_vocab * (n if fetch else index + n)
        rows = self._rows.add(StepRows(group.output, n_bytes, fetch))
        self.counters.decoded += n
        for job, first, last in group.shares:
            job.outstanding -= 1
            for sampler in job.item.samplers[first:last]:
                found = next(drawn, None) if sampler is not None else None
                job.found.append(Committed(rows, index, found))
                index += 1
            job.next = last
            if job.next == len(job.item.stays) or job.error is not None:
                self._finish(job)

    def _drawn(self, group: Group) -> Any:
        if group.ahead_draws is None:
            return iter(())
        result = group.ahead_draws.result()
        if result.kept is None:
            return iter(())
        return zip(result.ids.tolist(), result.logprobs.tolist(), result.kept.tolist(), strict=True)

    def _finish(self, job: CommitJob) -> None:
        if job.error is not None:
            self.fail(job, job.error)
        else:
            for stay, token in zip(job.item.stays, job.item.tokens, strict=True):
                stay.tokens.append(token)
                if id(stay.keep) not in self._keeps:  # released while this was on its way
                    self.close(stay)
            job.ticket.resolve(job.found)
        self._ended(job)

    def fail(self, job: CommitJob, error: BaseException) -> bool:
        """Undo a commit and answer it with an error; False: once what is in flight has landed."""
        if job.outstanding:
            job.error = error
            return False
        self.undo(job)
        job.ticket.resolve(error=error)
        return True

    def land_all(self) -> None:
        """Nothing is in flight any more, after an error that nobody foresaw."""
        for job in self.jobs:
            job.outstanding = 0

    def undo(self, job: CommitJob) -> None:
        """Take back the slots that a commit's earlier passes have written."""
        job.next, job.found, job.outstanding = 0, [], 0
        if job in self.jobs:
            self.jobs.remove(job)
        for stay in job.item.stays:
            tail = stay.tail
            if tail is not None and tail.fragment.length > len(stay.tokens):
                assert self.tree.fragments is not None
                self.tree.fragments.trim(tail.fragment, len(stay.tokens))

    def park(self, job: CommitJob) -> None:
        """Undo a commit and close its stays; it begins anew when there is room."""
        self.undo(job)
        for stay in job.item.stays:
            if stay.is_open:
                self.close(stay)
