"""The live runs: their rows every step, what each drawn token does, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..engines.base import LateTokens, Row, ScoreSpan
from ..errors import ConstraintError, DeadEnd
from ..kv.cursor import Place
from ..kv.tree import TokenTree
from ..sampling.bridge import draw_batch
from ..sampling.chain import NOTHING, Chain, DrawBatch
from .step import Group
from .task import Job, Member, RunTask
from .work import Counters, FinishReason, RunResult

if TYPE_CHECKING:
    from collections.abc import Sequence


class Runs:
    """Runs that have drawn their first token. One row a step each, formed without asking anybody.

    A run writes into a private tail of the tree; `end` and `suspend` put the tail into it.
    """

    def __init__(
        self,
        tree: TokenTree,
        n_ctx: int,
        n_vocab: int,
        counters: Counters,
        ended: Callable[[Job], None],
    ) -> None:
        """ended: told of every job whose last member has its answer."""
        self.n_vocab = n_vocab
        self.tree = tree
        self.n_ctx = n_ctx
        self.counters = counters
        self.ended = ended
        self.live: list[RunTask] = []
        self.to_join: list[Place] = []
        self._chain: Chain | None = None
        self._chain_of: list[RunTask] = []
        self._turn = 0

    # Planning ---------------------------------------------------------------------------------

    def ready(self, most: int) -> list[RunTask]:
        """Return the runs whose next token can be run now, `most` tokens at most, then in turn."""
        ready = [run for run in self.live if self._can_step(run)]
        if len(ready) > most:
            start = self._turn % len(ready)
            self._turn += most
            ready = (ready + ready)[start : start + most]
        spare = most - len(ready)
        for run in ready:
            if run.sampler.matcher is not None:
                self._force(run, spare)
                spare -= len(run.forced)
        return ready

    def _force(self, run: RunTask, most: int) -> None:
        """Let the next row run what the constraint forces, too: it need not be drawn.

        Its sampler goes on already; its tokens are accepted when the row has run.
        """
        matcher = run.sampler.matcher
        if run.forced or matcher is None:
            return
        room = min(most, run.limit - len(run.tokens) - 1, self.n_ctx - run.depth - 1)
        stops = run.members[0].item.stop_ids
        for token in matcher.forced()[: max(room, 0)]:
            if token in stops:
                break
            try:
                run.sampler.accept(token)
            except ConstraintError:  # the draw that follows finds nothing to draw, and says why
                break
            run.forced.append(token)

    def _can_step(self, run: RunTask) -> bool:
        if run.ending:
            return False
        if run.late is None:
            return True
        return (
            not run.sampler.needs_host
            and len(run.tokens) + 1 < run.limit
            and run.depth + 1 < self.n_ctx
        )

    def reserve(self, runs: Sequence[RunTask]) -> None:
        """Give every run a tail with room for one slot more."""
        for run in runs:
            tail = run.tail
            if tail is None:
                assert run.cursor is not None
                # A join may have put the place into a node since the run was admitted.
                tail = run.tail = self.tree.new_tail(self.tree.cut(run.cursor))
                run.row = None
            length = tail.fragment.length + 1 + len(run.forced)
            if length > tail.reserved:
                self.tree.room.reserve(tail, length)

    def group(self, runs: list[RunTask]) -> Group:
        """Return the runs' rows and draws as one group of a step."""
        rows = [self._row(run) for run in runs]
        positions = [row.position + row.n_tokens for row in rows]
        return Group(runs, rows, self._batch(runs, positions) if runs else None)

    def _batch(self, runs: list[RunTask], positions: list[int]) -> DrawBatch:
        if self._chain is None or self._chain_of != runs:
            self._chain = Chain([run.sampler for run in runs])
            self._chain_of = list(runs)
        self._chain.prepare(self.n_vocab)
        return draw_batch(self._chain, 0, positions)

    def _row(self, run: RunTask) -> Row:
        tail = run.tail
        if tail is None:
            return self._whole_row(run)
        row = run.row
        if row is None or run.epoch != self.tree.epoch:
            assert run.cursor is not None
            path = self.tree.path(run.cursor)
            row = run.row = Row(path, (), 0, tail.fragment, (0,), (), run.namespace)
            run.epoch = self.tree.epoch
        row.tokens = run.late if run.late is not None else (run.tokens[-1], *run.forced)
        row.position = tail.cursor.depth + tail.fragment.length
        row.logits_at = (len(run.forced),)
        row.scores = scored(run, 0)
        return row

    def _whole_row(self, run: RunTask) -> Row:
        """Hidden engines: the whole path every step."""
        assert run.cursor is not None
        if run.path_ids is None:
            run.path_ids = self.tree.ids(run.cursor) + run.tokens[run.settled :]
        ids, first = run.path_ids, len(run.path_ids) - 1
        whole = [*ids, *run.forced] if run.forced else ids
        return Row((), whole, 0, None, (len(whole) - 1,), scored(run, first), run.namespace)

    def note_late(self, group: Group) -> None:
        """Remember which draw of a launched step is each run's next token."""
        assert group.draws is not None
        for index, run in enumerate(group.runs):
            run.late = LateTokens(group.draws, index)

    # Delivering -------------------------------------------------------------------------------

    def deliver(self, group: Group) -> None:
        """Give a finished step's draws to its runs."""
        if group.draws is None:
            return
        result = group.draws.result()
        drawn = zip(
            group.runs,
            result.ids.tolist(),
            result.logprobs.tolist(),
            result.entropies.tolist(),
            strict=True,
        )
        for number, (run, token, logprob, entropy) in enumerate(drawn):
            run.outstanding -= 1
            if run.late is not None and run.late.draws is group.draws:
                run.late = None
            if run.forced:
                self._accept_forced(run, group, number)
            if run.ending:
                self.end(run)
            elif not run.job.done:
                self.accept(run, token, logprob, entropy)

    def _accept_forced(self, run: RunTask, group: Group, number: int) -> None:
        """Accept what the constraint forced and the row has run, as far as nothing ends the run."""
        assert group.output is not None
        forced, run.forced = run.forced, []
        score = group.output.scores()[number][0]
        figures = zip(forced, score.logprobs.tolist(), score.entropies.tolist(), strict=True)
        for token, logprob, entropy in figures:
            if run.job.done:
                return
            self._accept(run, token, logprob, entropy, counted=True)

    def accept(self, run: RunTask, token: int, logprob: float, entropy: float) -> None:
        """Note a drawn token and end the run's members that are done with it."""
        matcher = run.sampler.matcher
        if token != NOTHING:
            self._accept(run, token, logprob, entropy, counted=False)
        elif matcher is None or not matcher.must_end:  # else what was forced has finished the text
            self.fail(run, dead_end(run))
            return
        if matcher is not None and not run.job.done and matcher.must_end:
            # Only an end token may follow: it need not be drawn.
            stops = run.members[0].item.stop_ids
            for member in run.members:
                member.state.ended_by = min(stops, default=None)
                member.state.finish_reason = "stop"
            self.settle_members(run)

    def _accept(
        self, run: RunTask, token: int, logprob: float, entropy: float, *, counted: bool
    ) -> None:
        self.counters.decoded += 1
        members = run.members
        if token in members[0].item.stop_ids:  # the same for all members
            for member in members:
                member.state.ended_by, member.state.finish_reason = token, "stop"
            self.settle_members(run)
            return
        if not counted:
            try:
                run.sampler.accept(token)
            except ConstraintError as error:
                self.fail(run, error)
                return
        run.tokens.append(token)
        if run.path_ids is not None:
            run.path_ids.append(token)
        last = False
        for member in members:
            item, state = member.item, member.state
            state.tokens.append(token)
            state.logprobs.append(logprob)
            state.entropies.append(entropy)
            if len(state.tokens) >= item.max_tokens:
                state.finish_reason = "length"
            if item.sink is not None:
                self._tell(member)
            last = last or state.finish_reason is not None
        if run.depth >= self.n_ctx:
            for member in members:
                member.state.finish_reason = member.state.finish_reason or "context"
            last = True
        if last:
            self.settle_members(run)

    def _tell(self, member: Member) -> None:
        assert member.item.sink is not None
        try:
            reason = member.item.sink(member.state)
        except Exception as error:
            member.ticket.resolve(error=error)
            member.state.finish_reason = "error"
            return
        if reason is not None:
            member.state.finish_reason = reason

    # Ending -----------------------------------------------------------------------------------

    def settle_members(self, run: RunTask) -> None:
        """Answer the members that are done; end the run when none is left."""
        going = [member for member in run.members if member.state.finish_reason is None]
        if going:
            for member in run.members:
                if member.state.finish_reason is not None:
                    item = member.item
                    ids = [*item.tokens, *member.state.tokens]
                    place = Place(self.tree.holds, run.namespace, item.place, ids)
                    member.ticket.resolve(result_of(member, place))
            run.members = going
        elif run.late is not None:
            run.ending = (
                True  # one more draw is in flight: its slot is there, its token is not wanted
            )
        else:
            self.end(run)

    def stop(self, run: RunTask, reason: FinishReason) -> None:
        """End all members of a run now, with what they have."""
        for member in run.members:
            member.state.finish_reason = member.state.finish_reason or reason
        self.settle_members(run)

    def end(self, run: RunTask) -> None:
        """Put a run's tokens into the tree and answer its members."""
        if run.cursor is None:  # not admitted now
            ids = [*run.anchor_ids, *run.tokens[run.settled :]]
            end = Place(self.tree.holds, run.namespace, run.anchor, ids)
        else:
            self.suspend(run)
            left = run.tokens[run.settled :]
            end = self.tree.held(self.tree.extend(self.tree.place(run.anchor), left))
            self.to_join.append(run.anchor)
        for member in run.members:
            base = member.item.place.depth + len(member.item.tokens)
            place = end.at(base + len(member.state.tokens))  # each its own hold
            member.ticket.resolve(result_of(member, place))
        self.ended(run.job)

    def fail(self, run: RunTask, error: BaseException) -> None:
        """Drop a run's tail and give its members the error."""
        self._remove(run)
        if run.tail is not None:
            self.tree.drop_tail(run.tail)
            run.tail = None
        for member in run.members:
            member.ticket.resolve(error=error)
        self.ended(run.job)

    def suspend(self, run: RunTask) -> None:
        """Move what a run's tail holds into the tree; the run may go on from there later."""
        self._remove(run)
        tail, run.row = run.tail, None
        cursor = run.cursor
        assert cursor is not None
        if tail is not None:
            assert self.tree.fragments is not None
            wanted = min(tail.fragment.length, len(run.tokens) - run.settled)
            if tail.fragment.length > wanted:
                self.tree.fragments.trim(tail.fragment, wanted)
            run.tail = None  # `end_tail` uses it up, also when it fails
            cursor = self.tree.end_tail(tail, run.tokens[run.settled : run.settled + wanted])
            run.settled += wanted
        run.anchor, run.anchor_ids = self.tree.held(cursor), ()

    def _remove(self, run: RunTask) -> None:
        if run in self.live:
            self.live.remove(run)
            if not self.live:
                self._chain, self._chain_of = None, []  # hold nothing of runs that are gone


def scored(run: RunTask, first: int) -> tuple[ScoreSpan, ...]:
    """Ask for the figures of what is forced; `first`: the row's index of the token before it."""
    return (ScoreSpan(first, tuple(run.forced)),) if run.forced else ()


def dead_end(run: RunTask) -> ConstraintError:
    """Return the error of a run that nothing is left to."""
    matcher = run.sampler.matcher
    if matcher is not None and matcher.failure is not None:
        return ConstraintError(f"after {len(run.tokens)} new tokens, {matcher.failure}")
    return DeadEnd(
        f"the constraint and the logit bias leave no token after {len(run.tokens)} new ones:"
        f" the last token ids are {run.tokens[-8:]}"
    )


def result_of(member: Member, end: Place) -> RunResult:
    """Return a member's answer."""
    state = member.state
    assert state.finish_reason is not None
    return RunResult(
        state.tokens, state.logprobs, state.entropies, state.finish_reason, state.ended_by, end
    )
