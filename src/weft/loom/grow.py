"""Generate many branches of many nodes in one batch, and attach them in branch order."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .._core.remedies import OF_BRANCHES, HidesRemedies, remedied
from .._core.sampling.params import SamplingParams
from .._core.sampling.rng import fresh_seed, stream_of
from .._core.sched.driver import Channel, deferred_interrupt
from .._core.sched.work import FinishReason, Run, Ticket
from ..errors import ConfigError, ConstraintError, Terminal
from ..lm.results import Delta
from .author_note import note_of, place_with_note
from .constrained_text import allow_moved_spaces, constrained_tokens, warn_of_prompt_before
from .node import (
    is_place_known,
    lm_of,
    new_child,
)
from .pending_branch import PendingBranch, RecodedBranch, SiblingOrder
from .stop_strings import Event, StopWatcher

if TYPE_CHECKING:
    from ..lm.lm import LM
    from .heddle import Heddle

MODEL = "model"  # key in a node's meta: the name of the model that grew it, if not the loom's
_SCREEN = 20  # branches that a representation lists before it counts the rest
_FEW = 8  # branches that `plan` handles in well under a millisecond


@remedied(OF_BRANCHES)
class Branches(HidesRemedies, list["Heddle"]):
    """The children that one call generated, in branch order: a list of heddles.

    Attributes:
        skipped: terminal nodes that the call did not grow.
        failed: the errors of branches that are missing because their constraint allowed no token.
            If all branches fail, the call raises instead.
    """

    def __init__(
        self,
        children: Iterable[Heddle] = (),
        *,
        skipped: Iterable[Heddle] = (),
        failed: Iterable[ConstraintError] = (),
    ) -> None:
        super().__init__(children)
        self.skipped: list[Heddle] = list(skipped)
        self.failed: list[ConstraintError] = list(failed)

    def __repr__(self) -> str:
        first = self[:_SCREEN]
        means = [
            f"{math.exp(node.mean_logprob):.2f}" if node.logprobs else "   -" for node in first
        ]
        lines = [f"[{at}] {means[at]}  {node!r}" for at, node in enumerate(first)]
        lines += [f"… {len(self) - _SCREEN} more"] * (len(self) > _SCREEN)
        lines += [f"{len(self.skipped)} terminal nodes left alone"] * bool(self.skipped)
        lines += [f"failed: {error}" for error in self.failed]
        return "\n".join(lines) or "no branches"

    def _repr_html_(self) -> str:
        from ..viz.notebook import branches_card

        return branches_card(self)


_log = logging.getLogger(__name__)

BranchEvents = tuple[PendingBranch, list[Event]]


class OtherModel(NamedTuple):
    """Another model than the loom's, which grows nodes of a loom.

    Attributes:
        lm: the LM of the other model.
        name: its name, which the children have as `meta["model"]`.
        contexts: for each node to grow, the token ids of its path for this model.
        earlier: growths of the same nodes by other models, whose branches precede these.
    """

    lm: LM
    name: str
    contexts: Sequence[Sequence[int]]
    earlier: Sequence[Growth] = ()


class Growth:
    """All branches that one call of `grow` or `stream` generates.

    Plan them with `add`. Then call one of `run`, `arun`, `updates` and `aupdates`, once.

    Args:
        lm: the LM of all nodes.
        streamed: prepare for `updates`, `aupdates` or a display, which need each token.
    """

    def __init__(self, lm: LM, *, streamed: bool = False) -> None:
        self.lm = lm
        self.branches: list[PendingBranch] = []
        self.skipped: list[Heddle] = []
        self._runs: list[Run] = []
        self._tickets: list[Ticket] = []
        self._channel = Channel() if streamed else None
        self._failed: list[ConstraintError] = []
        self._done: asyncio.Future[None] | None = None
        self.reason: FinishReason = "cancelled"  # of branches that have not ended when it closes

    def add(
        self,
        node: Heddle,
        params: SamplingParams,
        *,
        first: int = 0,
        context: Sequence[int] | None = None,
        siblings: SiblingOrder | None = None,
    ) -> list[PendingBranch]:
        """Plan `params.n` branches of a node; return them. Nothing runs yet.

        Args:
            node: the node to continue.
            params: the sampling parameters, with a seed.
            first: number of the first branch; the numbers select the random streams.
            context: the token ids of the node's path for this growth's model, if the loom has
                another model. None: the node belongs to this model.
            siblings: the order of the node's new children, shared with another growth that has
                other numbers. None: a new one.

        Raises: ConfigError for a node of another LM, or one with an empty path.
        """
        if context is None and lm_of(node) is not self.lm:
            raise ConfigError(
                "the nodes of one call must belong to one model; grow the others apart"
            )
        origin = node.place
        if not origin.depth:
            raise ConfigError("the node's path is empty: there are no tokens to continue. Add text")
        if params.constraint is not None:
            warn_of_prompt_before(node, params.constraint)
        if context is not None:
            start = self.lm.place(context)
        else:
            note = note_of(node.path[0].meta)
            start = origin if note is None else place_with_note(node, note)
        branch_class = PendingBranch if has_vocab_of(node, self.lm) else RecodedBranch
        siblings = siblings or SiblingOrder(node)
        for branch in range(params.n):
            child = new_child(node)
            child.params, child.lineage = params, (first + branch,)
            # Without a sink the host does no work per token.
            watched = params.stop or self._channel is not None
            index = len(self.branches)
            watch = StopWatcher(index, self.lm, params, self._channel) if watched else None
            pending = branch_class(index, child, node, origin, start, watch, siblings)
            if self._channel is not None:
                pending.text = self.lm.text.stream()
            self._runs.append(self._create_run(child, pending))
            self.branches.append(pending)
        return self.branches[-params.n :]

    def _create_run(self, child: Heddle, pending: PendingBranch) -> Run:
        """Return the scheduler's work item of a branch, with its sampler and stop rules."""
        params = child.params
        assert params is not None
        assert params.seed is not None
        compiled = params
        if params.constraint is not None:
            pending.stop_ids = params.constraint.stop_ids
            constraint = allow_moved_spaces(pending.parent, params.constraint)
            compiled = replace(params, constraint=constraint)
        sampler = self.lm.sampler(compiled, stream_of(params.seed, child.lineage))
        if sampler.matcher is not None:
            resumed = constrained_tokens(pending.parent, params.constraint)
            if isinstance(pending, RecodedBranch):
                resumed = self.lm.text.continuation(lm_of(pending.parent).text.decode(resumed))
            for token in resumed:
                sampler.matcher.accept(token)
                sampler.resumed = True
        return Run(
            pending.start,
            sampler,
            stop_ids=self.lm.text.stop_ids | pending.stop_ids,
            max_tokens=params.max_tokens,
            sink=pending.watch,
        )

    @property
    def children(self) -> Branches:
        """The attached children, in branch order."""
        attached = (pending.child for pending in self.branches if pending.attached)
        return Branches(attached, skipped=self.skipped, failed=self._failed)

    # All at once

    def run(self, display: GrowthDisplay | None = None) -> Branches:
        """Generate all branches, attach the children and return them.

        On an error no child is attached; see also `Branches.failed`.

        display: shows the branches meanwhile, which needs `streamed=True`. None: no display.
        """
        try:
            self._submit()
            if display is not None:
                self._run_with_display(display)
            self.lm.drive(self._tickets)
            return self._finish_all()
        except KeyboardInterrupt:
            try:
                self._cancel("interrupted")
                self.lm.drive(self._tickets)
            finally:
                self._finish_successful()
            raise

    def _run_with_display(self, display: GrowthDisplay) -> None:
        """Run the branches and pass new tokens to the display."""
        assert self._channel is not None
        try:
            display.open()
            for events in self.lm.pump(self._channel, self._tickets):
                for pending, branch_events in self._group_by_branch(events):
                    display.push(pending.index, *pending.new_texts(branch_events))
        finally:
            display.close()

    async def arun(self) -> Branches:
        """Async version of `run`, without a display.

        If the task is cancelled, branches keep their tokens, with finish_reason "cancelled".
        """
        await self._asubmit()
        try:
            await self.lm.adrive(self._tickets)
        except asyncio.CancelledError:
            self._cancel("cancelled")
            await self.lm.adrive(self._tickets)
            self._finish_successful()
            raise
        return self._finish_all()

    @deferred_interrupt()  # an interrupt here would leave runs without a ticket to cancel them
    def _submit(self) -> None:
        """Submit all runs to the scheduler."""
        if self._runs:
            self._register_tickets(self.lm.submit(self._runs))

    async def _asubmit(self) -> None:
        """Async version of `_submit`."""
        if self._runs:
            self._register_tickets(await self.lm.asubmit(self._runs))

    def _register_tickets(self, tickets: list[Ticket]) -> None:
        """Store the scheduler's ticket of each branch."""
        self._tickets = tickets
        for pending, ticket in zip(self.branches, self._tickets, strict=True):
            pending.ticket = ticket
            if pending.watch is not None:
                ticket.on_done(pending.watch.on_end)

    @deferred_interrupt()
    def _finish_all(self) -> Branches:
        """Attach all children and return them; raise the first error instead."""
        self._raise_errors()
        self._finish_successful()
        return self.children

    @deferred_interrupt()
    def _finish_successful(self) -> None:
        """Attach the children of all runs that have finished without an error."""
        for pending in self.branches:
            if pending.ticket is not None and pending.ticket.done and pending.ticket.error is None:
                pending.finish()

    def _cancel(self, reason: FinishReason) -> None:
        """Cancel all runs; `reason` becomes their finish reason."""
        for ticket in self._tickets:
            ticket.cancel(reason)

    # Step by step

    def updates(self) -> Generator[list[BranchEvents], None, None]:
        """Run the branches; yield the events of each step, grouped by branch.

        The caller passes the events of each branch to `delta`, which applies them to the child. If
        the generator is closed early, branches are attached with the tokens that `delta` applied.
        """
        assert self._channel is not None
        try:
            self._submit()
            for events in self.lm.pump(self._channel, self._tickets):
                yield self._group_by_branch(events)
            yield self._group_by_branch(self._final_events())
        except KeyboardInterrupt:
            self.abandon("interrupted")
            raise
        finally:
            self.abandon("cancelled")
        self._raise_errors()

    async def aupdates(self) -> AsyncGenerator[list[BranchEvents], None]:
        """Async version of `updates`."""
        assert self._channel is not None
        try:
            await self._asubmit()
            async for events in self.lm.apump(self._channel, self._tickets):
                yield self._group_by_branch(events)
            yield self._group_by_branch(self._final_events())
        finally:
            self.abandon(self.reason)
        self._raise_errors()

    def when_done(self) -> asyncio.Future[None]:
        """Return a future of the running loop that is set when all branches have ended.

        Call it after `aupdates` has started. A caller that collects events of several steps uses it
        to stop waiting for more.
        """
        if self._done is None:
            self._done = self.lm.when_done(self._tickets)
        return self._done

    @deferred_interrupt()
    def abandon(self, reason: FinishReason) -> None:
        """Cancel the branches that have not ended, and attach them with the tokens applied so far.

        reason: their finish reason.
        """
        # Do not wait here: the garbage collector may close a generator on any thread. The
        # scheduler drops cancelled runs in its next step.
        self._cancel(reason)
        for pending in self.branches:
            if not pending.over:
                pending.keep(reason)

    def _final_events(self) -> list[Event]:
        """Return an end event for each branch that has not ended yet."""
        return [Event(pending.index, None) for pending in self.branches if not pending.over]

    def _group_by_branch(self, events: Iterable[Event]) -> list[BranchEvents]:
        """Group events by their branch, without those of branches that have ended."""
        by_branch: dict[int, list[Event]] = {}
        for event in events:
            if not self.branches[event.branch].over:
                by_branch.setdefault(event.branch, []).append(event)
        return [(self.branches[index], events) for index, events in by_branch.items()]

    def _raise_errors(self) -> None:
        """Raise the first error of a branch.

        If constraints failed some branches but not all, store these errors for `Branches.failed`.
        """
        errors = [ticket.error for ticket in self._tickets if ticket.error and not ticket.cancelled]
        failed = [error for error in errors if isinstance(error, ConstraintError)]
        for error in errors:
            if len(failed) in (0, len(self._tickets)) or not isinstance(error, ConstraintError):
                raise error
        self._failed = failed
        if failed:
            _log.warning("%d of %d branches failed: %s", len(failed), len(self.branches), failed[0])


def deltas(growth: Growth | None) -> Generator[Delta, None, Branches]:
    """Run a growth and yield its deltas one by one; return the children.

    growth: the planned branches; None: there are none.
    """
    if growth is None:
        return Branches()
    with closing(growth.updates()) as steps:
        try:
            for step in steps:
                for pending, events in step:
                    yield delta(pending, events)
        except KeyboardInterrupt:
            growth.abandon("interrupted")
            raise
    return growth.children


async def adeltas(growth: Growth | None) -> AsyncGenerator[Delta, None]:
    """Async version of `deltas`."""
    if growth is None:
        return
    async with aclosing(growth.aupdates()) as steps:
        async for step in steps:
            for pending, events in step:
                yield delta(pending, events)


def delta(pending: PendingBranch, events: list[Event]) -> Delta:
    """Apply new events of a branch to its child, and return them as a `Delta`.

    On Ctrl-C the child gets all new tokens and statistics, or none of them. If an event ends the
    branch, the child is attached to its parent.

    Args:
        pending: the branch.
        events: its new events, as `Growth.updates` yields them.
    """
    child, text = pending.child, pending.text
    assert text is not None
    assert pending.ticket is not None
    is_over = events[-1].token is None
    new = events[:-1] if is_over else events
    _, tokens, logprobs, entropies, stops, legal = zip(*new, strict=True) if new else ((),) * 6
    logprobs, entropies, legal = _reported(logprobs), _reported(entropies), _reported(legal)
    texts = tuple([text.push(token) for token in tokens])
    piece = "".join(texts) + (text.flush() if is_over else "")
    pending.append(tokens, (logprobs, entropies, legal), piece)
    if new:
        pending.stop = stops[-1]
    if is_over:
        _end_branch(pending)
    reason = child.finish_reason
    if isinstance(pending, RecodedBranch):  # the ids belong to another vocabulary
        return Delta(pending.index, child, (), piece, (), reason, (), ())
    return Delta(pending.index, child, tokens, piece, logprobs, reason, entropies, texts)


def _reported(values: tuple[Any, ...]) -> tuple[float, ...]:
    """Return the values without None, which stands for one that the engine does not report."""
    return values if None not in values else tuple([value for value in values if value is not None])


@deferred_interrupt()
def _end_branch(pending: PendingBranch) -> None:
    """Mark the branch as failed if its run failed; else attach its child."""
    if pending.ticket is not None and pending.ticket.error is not None:
        pending.over, pending.child.finish_reason = True, "error"
    else:
        pending.finish()


def has_vocab_of(node: Heddle, lm: LM) -> bool:
    """Return True if the token ids of a node mean the same in this LM."""
    own, other = lm_of(node).text, lm.text
    return own is other or (
        own.vocab_bytes == other.vocab_bytes and own.special_ids == other.special_ids
    )


def plan(
    nodes: list[Heddle],
    params: SamplingParams,
    *,
    force: bool,
    streamed: bool,
    first: int = 0,
    other: OtherModel | None = None,
) -> Growth:
    """Plan the branches of one call; return them as a `Growth`. Nothing runs yet.

    Args:
        nodes: the nodes to continue, at least one.
        params: the sampling parameters; `n` branches for each node.
        force: continue terminal nodes too. Otherwise they are in `skipped`, and the log warns.
        streamed: as for `Growth`.
        first: number of the first branch; the numbers select the random streams.
        other: the model that grows the nodes; None: the loom's own. Needs `streamed`.
    """
    params = with_seed(params)
    lm = lm_of(nodes[0]) if other is None else other.lm
    growth = Growth(lm, streamed=streamed)
    for place, node in enumerate(nodes):
        if node.terminal and not force:
            growth.skipped.append(node)
            continue
        number = first + place * params.n
        if other is None:
            growth.add(node, params, first=number)
            continue
        earlier = (branch for each in other.earlier for branch in each.branches)
        order = next((branch.siblings for branch in earlier if branch.parent is node), None)
        context = other.contexts[place]
        for branch in growth.add(node, params, first=number, context=context, siblings=order):
            branch.child.meta[MODEL] = other.name
    if growth.skipped:
        _log.warning("%d terminal nodes were not grown; force=True grows them", len(growth.skipped))
    return growth


def is_quick(nodes: list[Heddle], params: SamplingParams) -> bool:
    """Return True if `plan` takes under a millisecond, so that it may run on an event loop.

    There are then few branches, no constraint to compile, and no place to compute.
    """
    is_few = params.n * len(nodes) <= _FEW and params.constraint is None
    return is_few and all(map(is_place_known, nodes))


def with_seed(params: SamplingParams) -> SamplingParams:
    """Return the parameters with a seed; draw a random one if they have none."""
    return params if params.seed is not None else replace(params, seed=fresh_seed())


def check_not_terminal(node: Heddle, how: str = "force=True") -> None:
    """Raise Terminal for a node that an end token or a complete constraint ended.

    how: the option that continues such a node anyway, for the message.
    """
    if node.terminal:
        raise Terminal(
            "an end token or a complete constraint ended this node. "
            f"Grow it anyway with {how}, or add text to it",
            hint=how,
        )


class GrowthDisplay(Protocol):
    """Shows the branches of a call while they are generated."""

    def open(self) -> None:
        """Show the display, when the call starts."""
        ...

    def push(
        self, branch: int, pieces: list[tuple[str, float | None]], ended: FinishReason | None
    ) -> None:
        """Show the new tokens of a branch.

        Args:
            branch: index of the branch in the call.
            pieces: (text, logprob) of each token; the logprob is None if it is not reported.
            ended: the finish reason; None until the branch ends.
        """
        ...

    def close(self) -> None:
        """Show the final state. Branches that never ended were stopped."""
        ...
