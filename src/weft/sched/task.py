"""An item on its way: what it still needs, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..kv.cursor import Cursor
from .work import Draw, Extend, Logits, Run, RunState, Scores, Ticket

if TYPE_CHECKING:
    from ..engines.base import LateTokens, Row
    from ..kv.tail import Tail

MergeKey = tuple[object, ...] | None  # what greedy runs that are one run have in common


class Need:
    """Logits or scores at token indices [first, last) of a path; index i gives token i + 1.

    top: None for one logits row, else how many likeliest ids a score lists. `parts` collects the
    answers.
    """

    __slots__ = ("first", "last", "parts", "task", "todo", "top")

    def __init__(self, task: Task, first: int, last: int, top: int | None) -> None:
        self.task = task
        self.first = first
        self.last = last
        self.top = top
        self.todo: list[tuple[int, int]] = [(first, last)]
        self.parts: list[tuple[int, Any]] = []

    def take(self, first: int, last: int) -> list[tuple[int, int]]:
        """Take what lies in [first, last) out of the open ranges."""
        taken, left = [], []
        for a, b in self.todo:
            low, high = max(a, first), min(b, last)
            if low >= high:
                left.append((a, b))
                continue
            taken.append((low, high))
            left += [(x, y) for x, y in ((a, low), (high, b)) if x < y]
        self.todo = left
        return taken

    @property
    def complete(self) -> bool:
        """All answers are there."""
        return sum(len_part(part, self.top) for _, part in self.parts) == self.last - self.first


def len_part(part: Any, top: int | None) -> int:
    """Return how many positions an answer covers."""
    return 1 if top is None else len(part.logprobs)


class Task:
    """Base of what the scheduler works on; `cursor` is its path's end once it is in the tree.

    pin: what `TokenTree.pin` returned while admitted. outstanding: launched steps that work for it.
    """

    __slots__ = ("cursor", "job", "needs", "outstanding", "pin", "seen")

    def __init__(self) -> None:
        self.cursor: Cursor | None = None
        self.pin: Cursor | None = None
        self.needs: list[Need] = []
        self.outstanding = 0
        self.seen = False
        self.job: Job

    def open_needs(self) -> list[Need]:
        """Return the needs that no step has taken on yet."""
        return [need for need in self.needs if need.todo]


class ExtendTask(Task):
    """An Extend on its way."""

    __slots__ = ("finished", "item", "ticket")

    def __init__(self, ticket: Ticket, item: Extend) -> None:
        super().__init__()
        self.ticket = ticket
        self.item = item
        self.finished = False
        self.needs = [self._need(want) for want in item.wants]

    def _need(self, want: Logits | Scores | Draw) -> Need:
        if isinstance(want, Scores):
            return Need(self, want.first - 1, want.last - 1, want.top)
        return Need(self, want.depth - 1, want.depth, None)


class Member:
    """One ticket of a run; equal greedy runs from one place are one run with several members."""

    __slots__ = ("item", "state", "ticket")

    def __init__(self, ticket: Ticket, item: Run) -> None:
        self.ticket = ticket
        self.item = item
        self.state = RunState()


class RunTask(Task):
    """A Run on its way: waiting for its first draw, then live in a tail, now and then parked.

    tokens: drawn and kept so far; settled: how many of them are in the tree (before `cursor`).
    anchor, anchor_ids: the held place that `cursor` is remade from.
    late: the draw that is still in flight. ending: ends once that has landed. row: reused every
    step. merge_key: see Waiting.merge.
    """

    __slots__ = (
        "anchor",
        "anchor_ids",
        "ending",
        "epoch",
        "forced",
        "late",
        "members",
        "merge_key",
        "namespace",
        "path_ids",
        "row",
        "sampler",
        "settled",
        "tail",
        "tokens",
    )

    def __init__(self, ticket: Ticket, item: Run) -> None:
        super().__init__()
        self.members = [Member(ticket, item)]
        self.sampler = item.sampler
        self.namespace = item.place.namespace
        self.anchor = item.place
        self.anchor_ids: Sequence[int] = item.tokens
        self.tokens: list[int] = []
        self.forced: list[int] = []  # run with the next row, as the constraint leaves no choice
        self.settled = 0
        self.ending = False
        self.late: LateTokens | None = None
        self.tail: Tail | None = None
        self.row: Row | None = None
        self.path_ids: list[int] | None = None
        self.merge_key: MergeKey = None
        self.epoch = -1

    @property
    def started(self) -> bool:
        """Its first token was drawn."""
        return bool(self.tokens)

    @property
    def depth(self) -> int:
        """Tokens of its path so far, the pending one included."""
        return self.anchor.depth + len(self.anchor_ids) + len(self.tokens) - self.settled

    @property
    def limit(self) -> int:
        """The most tokens that any of its members wants."""
        return max(member.item.max_tokens for member in self.members)


class Job:
    """What is admitted, parked and failed together: one task, or all of an atomic call.

    A job's tickets are resolved together. `age` orders the queue.
    """

    __slots__ = ("admitted", "age", "done", "tasks")

    def __init__(self, age: int, tasks: Sequence[Task]) -> None:
        self.age = age
        self.tasks = list(tasks)
        self.admitted = False
        self.done = False
        for task in tasks:
            task.job = self

    def tickets(self) -> list[Ticket]:
        """Return the tickets of all tasks."""
        out: list[Ticket] = []
        for task in self.tasks:
            if isinstance(task, RunTask):
                out += [member.ticket for member in task.members]
            else:
                assert isinstance(task, ExtendTask)
                out.append(task.ticket)
        return out


def new_task(ticket: Ticket) -> Task:
    """Return the task for a ticket's item."""
    item = ticket.item
    task: Task
    if isinstance(item, Run):
        task = RunTask(ticket, item)
    else:
        assert isinstance(item, Extend)
        task = ExtendTask(ticket, item)
    ticket.task = task
    return task
