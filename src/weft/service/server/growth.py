"""A growth in an open loom: publishes tokens as events and saves the nodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._core.atomic_files import json_number
from ...lm.results import Delta
from ...loom import Heddle
from ...loom.grow import MODEL, Growth, delta
from ...loom.node import is_below
from ...loom.pending_branch import PendingBranch
from .errors import serialize_error
from .ticker import TICK_S

if TYPE_CHECKING:
    from ..._core.sched.work import FinishReason
    from .events import EventLog
    from .open_loom import OpenLoom

Json = dict[str, Any]


class Attribution(NamedTuple):
    """Author and kind of an operation, for the loom's log.

    Args:
        kind: the operation in one word: "grow" or "run" (a search).
        actor: who did it.
        act: name of the group of operations that are undone together; None without one.
        model: the model that generated the nodes; None means the loom's.
    """

    kind: str
    actor: str = ""
    act: str | None = None
    model: str | None = None

    @property
    def alone(self) -> Attribution:
        """This attribution without `act`. Tasks with equal values can share one operation."""
        return self._replace(act=None)


class GrowthTask:
    """Branches growing in an open loom; their nodes have numbers from the start.

    Runs in the event loop.

    Args:
        live: the open loom.
        growth: the planned branches.
        log: receives the events.
        author: attribution of the commit.
        first: the job's index of the first branch.
    """

    def __init__(
        self, live: OpenLoom, growth: Growth, log: EventLog, author: Attribution, first: int = 0
    ) -> None:
        self.live = live
        self.growth = growth
        self.log = log
        self.author = author
        self.first = first
        self.is_over = False  # nothing grows any more
        self.parent_removed = False  # the parent was removed before the start
        self.n_tokens = 0
        self.first_token_s: float | None = None
        self._announced: set[int] = set()  # branches whose end was published
        self._flushed: set[int] = set()  # ended branches whose tokens were written once

    # Nodes

    @property
    def nodes(self) -> list[Heddle]:
        """The nodes of branches that have not ended, or have ended and are not in the tree yet."""
        return [pending.child for pending in self.growth.branches if not pending.over]

    @property
    def uncommitted(self) -> list[Heddle]:
        """The growing nodes, and the ended ones in the tree."""
        return [each.child for each in self.growth.branches if not each.over or each.attached]

    @property
    def ended(self) -> list[Heddle]:
        """The ended nodes in the tree."""
        return [pending.child for pending in self.growth.branches if pending.attached]

    @property
    def parents(self) -> list[Heddle]:
        """The nodes below which branches are growing, one for each branch."""
        return [pending.parent for pending in self.growth.branches if not pending.over]

    def insert_growing(self, node: Heddle, children: list[Heddle]) -> None:
        """Insert the growing children of `node` into `children`, which is changed in place.

        children: the children of the node in the tree. The result has their final order.
        """
        later: Heddle | None = None  # the next sibling of the same call
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
        """Return the number of growing descendants of a node."""
        return sum(is_below(parent, node) for parent in self.parents)

    def to_dicts(self) -> list[Json]:
        """Return the branches as dicts, with the fields of `api.jobs.BranchObject`."""
        number = self.live.number
        return [
            {
                "branch": self.first + pending.index,
                "node": number(pending.child),
                "id": pending.child.id,
                "parent": number(pending.parent),
                "n_tokens": len(pending.child.tokens),
                "finish_reason": pending.child.finish_reason,
                "model": pending.child.meta.get(MODEL),
            }
            for pending in self.growth.branches
        ]

    def texts(self) -> list[Json]:
        """Return each branch's text so far, for readers of events that have missed some."""
        return [
            {**data, "text": pending.complete_text}
            for data, pending in zip(self.to_dicts(), self.growth.branches, strict=True)
        ]

    # Growing

    async def run(self, is_over: Callable[[], bool] | None = None) -> None:
        """Generate until all branches have ended, and publish new tokens every `TICK_S` at most.

        is_over: polled; True ends the generation early. None: never.
        Tokens generated so far stay in the tree, even after a cancellation or an error.
        Raises: the first error of a branch.
        """
        began = time.perf_counter()
        try:
            async with aclosing(self.growth.aupdates()) as steps:
                async for step in steps:
                    if not step:
                        continue
                    if self.first_token_s is None:
                        self.first_token_s = time.perf_counter() - began
                    self.n_tokens += sum(each.token is not None for _, new in step for each in new)
                    async with self.live.lock:
                        self._publish_tokens([delta(pending, events) for pending, events in step])
                        _keep_failed(pending for pending, _ in step)
                    await self._flush_ended()
                    if is_over is not None and is_over():
                        self.cancel()
                    await self.live.ticker.wait(self.growth.when_done())
        finally:
            self._flushed.clear()  # retry branches whose write failed
            try:
                await self._flush_ended()
            finally:
                self._announce_ends(self.growth.branches)

    def _publish_tokens(self, deltas: Sequence[Delta]) -> None:
        """Publish new tokens of branches as events."""
        entries: list[list[Any]] = []
        rest: list[list[Any]] = []
        for change in deltas:
            branch = self.first + change.branch
            has_logprobs, has_entropies = bool(change.logprobs), bool(change.entropies)
            for at, token in enumerate(change.token_ids):
                logprob = json_number(change.logprobs[at]) if has_logprobs else None
                entropy = json_number(change.entropies[at]) if has_entropies else None
                entries.append([branch, token, change.texts[at], logprob, entropy])
            if left := change.text[sum(map(len, change.texts)) :]:
                rest.append([branch, None, left, None, None])
        if entries or rest:
            self.log.put("tok", {"t": entries + rest})

    async def _flush_ended(self) -> None:
        """Write the tokens of ended branches to the database, then publish their ends.

        Each write is tried once; the commit retries it.
        """
        finished = [
            each for each in self.growth.branches if each.over and each.index not in self._announced
        ]
        new = [each for each in finished if each.attached and each.index not in self._flushed]
        self._flushed.update(each.index for each in new)
        await self.live.make_durable([each.child for each in new])
        self._announce_ends(each for each in finished if not each.attached or self._is_saved(each))

    def _is_saved(self, pending: PendingBranch) -> bool:
        """Return True if all tokens of an ended branch are in the database."""
        return pending.attached and self.live.stored.is_durable(pending.child)

    def _announce_ends(self, branches: Iterable[PendingBranch]) -> None:
        """Publish the ends of branches, with their nodes, as events."""
        for pending in branches:
            if not pending.over or pending.index in self._announced:
                continue
            self._announced.add(pending.index)
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
                    "kept": self._is_saved(pending),
                },
            )

    # Ending early

    def cancel(
        self, branches: Iterable[int] | None = None, reason: FinishReason = "cancelled"
    ) -> None:
        """End branches; the tokens generated so far stay in the loom.

        branches: their indices in the job; None means all. reason: their finish reason.
        """
        self.growth.reason = reason
        wanted = None if branches is None else {index - self.first for index in branches}
        for pending in self.growth.branches:
            if (wanted is None or pending.index in wanted) and not pending.over:
                self._cancel_branch(pending, reason)

    def _cancel_branch(self, pending: PendingBranch, reason: FinishReason) -> None:
        """End one branch with this finish reason, if it has not ended."""
        if pending.ticket is not None:
            pending.ticket.cancel(reason)
        elif not self.is_over:  # not submitted yet: retry
            asyncio.get_running_loop().call_later(TICK_S, self._cancel_branch, pending, reason)

    def drop_below(self, top: Heddle) -> None:
        """Cancel the growing descendants of a node that is about to be removed.

        Their tokens are discarded. `top` itself is not cancelled.
        """
        self.drop([each.child for each in self.growth.branches if is_below(each.parent, top)])

    def drop(self, nodes: Sequence[Heddle]) -> None:
        """Cancel these nodes if they are growing, and discard their tokens."""
        for pending in self.growth.branches:
            if not pending.over and any(pending.child is node for node in nodes):
                pending.over = True
                pending.child.finish_reason = "cancelled"
                self._cancel_branch(pending, "cancelled")
                self._announce_ends([pending])


def _keep_failed(branches: Iterable[PendingBranch]) -> None:
    """Attach failed branches that have tokens, with the error's message in `meta`."""
    for pending in branches:
        child, error = pending.child, pending.ticket and pending.ticket.error
        if child.finish_reason == "error" and pending.n_tokens and isinstance(error, Exception):
            child.meta["error"] = serialize_error(error)[1]["message"]
            pending.keep("error")
