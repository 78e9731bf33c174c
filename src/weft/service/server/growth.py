"""The branches of one call, on their way into a loom, and the events that tell of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._core.atomic_files import json_number
from ...lm.results import Delta
from ...loom import Heddle
from ...loom.grow import Growth, PendingBranch, delta
from ...loom.node import is_below
from .ticker import TICK_S

if TYPE_CHECKING:
    from ..._core.sched.work import FinishReason
    from .events import EventLog
    from .open_loom import OpenLoom

Json = dict[str, Any]


class Attribution(NamedTuple):
    """Whose an operation is, as the loom's log has it."""

    kind: str
    actor: str = ""
    act: str | None = None
    model: str | None = None

    @property
    def alone(self) -> Attribution:
        """The same without the act: equal for all that may be one operation."""
        return self._replace(act=None)


class GrowthTask:
    """A growth in a live loom: its nodes are there, with their numbers, from the beginning.

    author: of the operation that keeps it. first: the index of its first branch in the job.
    Everything here runs in the event loop.
    """

    def __init__(
        self, live: OpenLoom, growth: Growth, log: EventLog, author: Attribution, first: int = 0
    ) -> None:
        self.live = live
        self.growth = growth
        self.log = log
        self.author = author
        self.first = first
        self.is_over = False  # nothing of it grows, or ever will
        self.is_gone = False  # what it was to grow from, before it had begun
        self.n_tokens = 0
        self.first_token_s: float | None = None
        self._told: set[int] = set()  # shoots whose end was told
        self._tried: set[int] = set()  # and those that were to be made durable for it

    # What is there

    @property
    def nodes(self) -> list[Heddle]:
        """The nodes that grow still, or have ended and are not in the tree."""
        return [pending.child for pending in self.growth.branches if not pending.over]

    @property
    def uncommitted(self) -> list[Heddle]:
        """The nodes that grow still, and those in the tree whose operation is yet to come."""
        return [each.child for each in self.growth.branches if not each.over or each.attached]

    @property
    def ended(self) -> list[Heddle]:
        """The nodes that have grown, and are in the tree."""
        return [pending.child for pending in self.growth.branches if pending.attached]

    @property
    def parents(self) -> list[Heddle]:
        """The nodes below which something grows still."""
        return [pending.parent for pending in self.growth.branches if not pending.over]

    def insert_growing(self, node: Heddle, children: list[Heddle]) -> None:
        """Put the nodes that grow from this one among its children, where they will stand."""
        later: Heddle | None = None  # of the same call, and in the tree already
        for pending in reversed(self.growth.branches):
            if pending.parent is not node:
                continue
            if pending.attached:
                later = pending.child
            elif not pending.over:
                at = next((i for i, each in enumerate(children) if each is later), len(children))
                children.insert(at, pending.child)
                later = pending.child

    def count_below(self, node: Heddle) -> int:
        """Return how many nodes grow below this one."""
        return sum(is_below(parent, node) for parent in self.parents)

    def told(self) -> list[Json]:
        """Return what is told of the branches, in BranchObject's words."""
        number = self.live.number
        return [
            {
                "branch": self.first + pending.index,
                "node": number(pending.child),
                "id": pending.child.id,
                "parent": number(pending.parent),
                "n_tokens": len(pending.child.tokens),
                "finish_reason": pending.child.finish_reason,
            }
            for pending in self.growth.branches
        ]

    def texts(self) -> list[Json]:
        """Return the branches with all of their text so far: for who has missed events."""
        return [
            {**told, "text": pending.complete_text}
            for told, pending in zip(self.told(), self.growth.branches, strict=True)
        ]

    # Growing

    async def run(self, is_over: Callable[[], bool] | None = None) -> None:
        """Grow to the end; tokens are told as they come, `TICK_S` apart. Raises: the first error.

        is_over: asked now and then whether to end early. Where it is cancelled, what was made is in
        the tree all the same.
        """
        began = time.perf_counter()
        try:
            async with aclosing(self.growth.anews()) as steps:
                async for news in steps:
                    if not news:
                        continue
                    if self.first_token_s is None:
                        self.first_token_s = time.perf_counter() - began
                    async with self.live.lock:
                        self._take([delta(pending, events) for pending, events in news])
                    await self._end_those_over()
                    if is_over is not None and is_over():
                        self.cancel()
                    await self.live.ticker.wait(self.growth.over())
        finally:
            self._tried.clear()  # once more, for what could not be written
            try:
                await self._end_those_over()
            finally:
                self._announce_ends(self.growth.branches)

    def _take(self, news: Sequence[Delta]) -> None:
        entries: list[list[Any]] = []
        rest: list[list[Any]] = []
        for each in news:
            branch = self.first + each.branch
            self.n_tokens += len(each.token_ids)
            has_logprobs, has_entropies = bool(each.logprobs), bool(each.entropies)
            for at, token in enumerate(each.token_ids):
                logprob = json_number(each.logprobs[at]) if has_logprobs else None
                entropy = json_number(each.entropies[at]) if has_entropies else None
                entries.append([branch, token, each.texts[at], logprob, entropy])
            if left := each.text[sum(map(len, each.texts)) :]:
                rest.append([branch, None, left, None, None])
        if entries or rest:
            self.log.put("tok", {"t": entries + rest})

    async def _end_those_over(self) -> None:
        """Tell of branches that have ended, once they outlive this process as they ended.

        Each is tried once; where that cannot be written, whoever keeps the loom tries again.
        """
        over = [each for each in self.growth.branches if each.over and each.index not in self._told]
        new = [each for each in over if each.attached and each.index not in self._tried]
        self._tried.update(each.index for each in new)
        await self.live.make_durable([each.child for each in new])
        self._announce_ends(each for each in over if not each.attached or self._outlasts(each))

    def _outlasts(self, pending: PendingBranch) -> bool:
        return pending.attached and self.live.kept.outlasts(pending.child)

    def _announce_ends(self, branches: Iterable[PendingBranch]) -> None:
        for pending in branches:
            if not pending.over or pending.index in self._told:
                continue
            self._told.add(pending.index)
            child = pending.child
            self.log.put(
                "branch",
                {
                    "branch": self.first + pending.index,
                    "node": self.live.number(child),
                    "finish_reason": child.finish_reason,
                    "stop_string": child.stop_string,
                    "ended": child.terminal,
                    "n_tokens": len(child.tokens),
                    "mean_logprob": json_number(child.mean_logprob) if child.logprobs else None,
                    "kept": self._outlasts(pending),
                },
            )

    # Ending early

    def cancel(
        self, branches: Iterable[int] | None = None, reason: FinishReason = "cancelled"
    ) -> None:
        """End branches, by their index in the job; None: all. What they have is kept."""
        self.growth.reason = reason
        wanted = None if branches is None else {index - self.first for index in branches}
        for pending in self.growth.branches:
            if (wanted is None or pending.index in wanted) and not pending.over:
                self._end(pending, reason)

    def _end(self, pending: PendingBranch, reason: FinishReason) -> None:
        if pending.ticket is not None:
            pending.ticket.cancel(reason)
        elif not self.is_over:  # about to be submitted
            asyncio.get_running_loop().call_later(TICK_S, self._end, pending, reason)

    def drop_below(self, top: Heddle) -> None:
        """End what grows below a node that is about to go; nothing of it is kept."""
        self.drop([each.child for each in self.growth.branches if is_below(each.parent, top)])

    def drop(self, nodes: Sequence[Heddle]) -> None:
        """End some of the nodes that grow here; nothing of them is kept."""
        for pending in self.growth.branches:
            if not pending.over and any(pending.child is node for node in nodes):
                pending.over = True
                pending.child.finish_reason = "cancelled"
                self._end(pending, "cancelled")
                self._announce_ends([pending])
