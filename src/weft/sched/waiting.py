"""Admitted tasks that wait for tokens to be computed or read, and what a step gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..errors import DeadEnd, WeftError
from ..kv.cursor import Cursor, resolve
from ..kv.tree import TokenTree
from ..sampling.bridge import draw_rows, join_scores
from ..sampling.chain import NOTHING
from .pack import Packer
from .rows import RowCache
from .runs import Runs
from .stays import CommitJob, Stay
from .step import Group, Piece
from .task import ExtendTask, Job, MergeKey, Need, RunTask, Task
from .work import Draw, Scores


class Waiting:
    """Tasks that `pack` forms pieces for, `deliver` brings answers to, and `promote` lets go.

    An extend ends when all its wants are answered and its path is resident. A run draws its first
    token then, and goes on among the live runs.
    """

    def __init__(
        self,
        tree: TokenTree,
        cache: RowCache,
        runs: Runs,
        fail: Callable[[Job, BaseException], None],
        ended: Callable[[Job], None],
    ) -> None:
        """fail, ended: what to do with a job that cannot go on, and with one that is answered."""
        self.tree = tree
        self.cache = cache
        self.runs = runs
        self.packer = Packer(tree, cache)
        self.tasks: list[Task] = []
        self._greedy: dict[MergeKey, RunTask] = {}  # those that wait for their first draw
        self._fail = fail
        self._ended = ended

    def add(self, task: Task) -> None:
        """Let an admitted task wait. A run that has not begun needs the logits at its place."""
        if isinstance(task, RunTask) and not task.started:
            assert task.cursor is not None
            task.needs = [Need(task, task.cursor.depth - 1, task.cursor.depth, None)]
        self.tasks.append(task)

    def remove(self, job: Job) -> None:
        """Let a job's tasks wait no longer."""
        self.tasks = [task for task in self.tasks if task.job is not job]
        for task in job.tasks:
            self._no_longer_merges(task)

    def merge(self, task: RunTask) -> bool:
        """Let an equal greedy run that has not begun carry this one; return whether it does."""
        task.merge_key = key = merge_key(task)
        if key is None:
            return False
        other = self._greedy.setdefault(key, task)
        if other is task:
            return False
        other.members += task.members
        for member in task.members:
            member.ticket.task = other
        return True

    def _no_longer_merges(self, task: Task) -> None:
        if isinstance(task, RunTask) and self._greedy.get(task.merge_key) is task:
            del self._greedy[task.merge_key]

    def pack(self, budget: int) -> list[Piece]:
        """Return the next step's pieces, at most `budget` tokens, for the oldest tasks first."""
        self.tasks.sort(key=lambda task: task.job.age)
        return self.packer.pack(self.tasks, budget)

    def waiters_for(self, piece: Piece) -> list[Job]:
        """Return the jobs whose paths go through a piece. Cost: O(tasks x nodes of a path)."""
        computed = {node for node in self.tree.up(piece.pin) if node.end > piece.start}
        return [
            task.job
            for task in self.tasks
            if task.cursor is not None and any(up in computed for up in self.tree.up(task.cursor))
        ]

    def deliver(self, group: Group) -> None:
        """Attach what a finished step computed, and hand its logits and scores to who asked."""
        output = group.output
        assert output is not None
        index = len(group.runs)
        scores = output.scores() if any(piece.scored for piece in group.pieces) else []
        for number, piece in enumerate(group.pieces, start=len(group.runs)):
            end = self._attach(piece)
            for offset in piece.logits_at():
                self._hand_out(piece, end, piece.start + offset, output.logits(index))
                index += 1
            for slot, (need, first, _) in enumerate(piece.scored):
                need.parts.append((first, scores[number][slot]))
            for need, _, _ in piece.takes:
                need.task.outstanding -= 1

    def _hand_out(self, piece: Piece, end: Cursor, at: int, logits: Any) -> None:
        self.cache.put(resolve(Cursor(end.node, at + 1)), logits)
        for need, first, _ in piece.takes:
            if need.top is None and first == at:
                need.parts.append((first, logits))

    def _attach(self, piece: Piece) -> Cursor:
        """Give a piece's slots to the nodes that have its tokens now; return its end."""
        end = self._land(piece)
        fragment = piece.fragment
        if fragment is not None:
            assert self.tree.fragments is not None
            self.tree.fragments.settle(fragment)
            piece.fragment = None  # `fill` uses it up, also when it fails
            self.tree.fill(end, piece.start, fragment)
            self.runs.to_join.append(self.tree.held(end))
        self._close(piece)
        return resolve(end)

    def _close(self, piece: Piece) -> None:
        del self.packer.open[piece]
        self.tree.unpin(piece.pin)

    def discard(self, piece: Piece) -> None:
        """Undo a piece whose step failed."""
        self._land(piece)
        if piece.fragment is not None:
            assert self.tree.fragments is not None
            self.tree.fragments.free(piece.fragment)
            piece.fragment = None
        self._close(piece)

    def discard_all(self) -> None:
        """Undo every piece that is packed or in flight, after an error that nobody foresaw."""
        for piece in list(self.packer.open):
            self.discard(piece)

    def _land(self, piece: Piece) -> Cursor:
        """A piece is no longer in flight; return the place at its end."""
        end = Cursor(piece.pin.node, piece.end)
        if piece.fragment is not None:
            for node in self.tree.up(end):
                if node.end <= piece.start:
                    break
                node.launched = False
        return end

    def promote(self) -> None:
        """Answer extends that have all they need; draw first tokens and make their runs live."""
        ready = [task for task in self.tasks if self._is_ready(task)]
        if not ready:
            return
        gone = set(ready)
        self.tasks = [task for task in self.tasks if task not in gone]
        first: list[RunTask] = []
        for task in ready:
            if isinstance(task, ExtendTask):
                self._finish(task)
            elif isinstance(task, Stay):
                assert isinstance(task.job, CommitJob)
                task.job.n_waiting -= 1
            else:
                assert isinstance(task, RunTask)
                self._no_longer_merges(task)
                (self.runs.live if task.started else first).append(task)
        if first:
            self._draw_first(first)

    def _is_ready(self, task: Task) -> bool:
        if task.needs:
            self.packer.serve_cached(task)
        if task.outstanding or not all(need.complete for need in task.needs):
            return False
        if isinstance(task, RunTask) and not task.started:
            return True
        assert task.cursor is not None
        return self.tree.fragments is None or resolve(task.cursor).node.resident

    def _draw_first(self, runs: list[RunTask]) -> None:
        """Draw the first token of runs from the logits at their places."""
        for run in runs:
            if run.sampler.needs_host:
                assert run.cursor is not None
                run.sampler.prime(self.tree.ids(run.cursor))
        try:
            result = draw_rows(
                [run.needs[0].parts[0][1] for run in runs],
                [run.sampler for run in runs],
                [run.depth for run in runs],
            )
        except WeftError as error:  # one of them cannot draw: find it, the others go on
            if len(runs) == 1:
                self._fail(runs[0].job, error)
            else:
                for run in runs:
                    self._draw_first([run])
            return
        values = (result.ids.tolist(), result.logprobs.tolist(), result.entropies.tolist())
        for run, token, logprob, entropy in zip(runs, *values, strict=True):
            run.needs = []
            self.runs.accept(run, token, logprob, entropy)
            if not run.job.done:
                (self.runs.live if self._is_ready(run) else self.tasks).append(run)

    def _finish(self, task: ExtendTask) -> None:
        """Note an extend's answers; a job's tickets are resolved together."""
        wanted = zip(task.item.wants, task.needs, strict=True)
        job = task.job
        try:
            task.ticket.value = [answer(want, need) for want, need in wanted]
        except WeftError as error:
            self._fail(job, error)
            return
        task.finished = True
        if all(isinstance(other, ExtendTask) and other.finished for other in job.tasks):
            for ticket in job.tickets():
                ticket.resolve(ticket.value)
            self._ended(job)


def answer(want: Any, need: Need) -> Any:
    """Return what an item asked for, from the parts that came in."""
    parts = [part for _, part in sorted(need.parts, key=lambda item: item[0])]
    if isinstance(want, Scores):
        return join_scores(parts)
    if isinstance(want, Draw):
        n = len(want.samplers)
        drawn = draw_rows(parts * n, want.samplers, [want.depth] * n)
        if (drawn.ids == NOTHING).any():
            raise DeadEnd(f"a constraint leaves no token after {want.depth} tokens")
        return drawn
    return parts[0].copy()


def merge_key(task: RunTask) -> MergeKey:
    """Return what greedy runs that are one run have in common; None for other runs."""
    if not task.sampler.greedy or task.started or task.cursor is None:
        return None
    if task.sampler.matcher is not None:  # which may have begun at another node of the same text
        return None
    neutral = replace(task.sampler.params, n=1, seed=None, stop=(), max_tokens=1)
    return (task.cursor, neutral, task.members[0].item.stop_ids)
