"""Jobs: what is admitted, parked and failed together, and knows how each of that is done.

A job asks for paths (claims). Once they are pinned it starts; when a claim has all it wants the job
goes on: an extend answers, a run draws its first token and then a token a step, a commit runs a
token on each of its lines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engines.base import FutureTokens, RetainedRow, Row, ScoreSpan
from ...errors import Cancelled, ConstraintError, DeadEnd, WeftError
from ..kv.place import Place
from ..sampling.metrics import broken_logits, join_scores
from ..sampling.sampler import BROKEN, Chain, DrawnToken, draw_at
from .lines import Line
from .reads import Claim, Need
from .rows import LentRow, LogitsRow
from .step import LinesPart, RunsPart
from .work import Commit, Extend, FinishReason, Run, RunResult, RunState, Scores, Ticket

if TYPE_CHECKING:
    from ...engines.base import Draws
    from ..sampling.sampler import DrawBatch, DrawResult
    from .desk import Desk

# So many forced tokens are worth a step in which a run that overlaps has no row.
_WORTH_WAITING = 3
MergeKey = tuple[object, ...] | None  # what greedy runs that are one run have in common


class Job(ABC):
    """Base of all jobs. `age` orders them.

    claims: the paths it wants pinned; made by `prepare`. outstanding: launched parts of its lines.
    error: what it ends with once those have landed. by_content: it may find what lines have in
    their tails, once these are closed. can_park: it can go on from what is known, see `park`.
    """

    by_content = True
    can_park = True

    def __init__(self, age: int, tickets: Sequence[Ticket]) -> None:
        self.age = age
        self.claims: list[Claim] = []
        self.admitted = False
        self.done = False
        self.outstanding = 0
        self.error: WeftError | None = None
        for ticket in tickets:
            ticket.job = self

    @abstractmethod
    def tickets(self) -> Sequence[Ticket]:
        """Return the tickets that it still has to answer."""

    @abstractmethod
    def namespaces(self) -> set[str | None]:
        """Return whose trees it works in."""

    def longest_path(self) -> int:
        """Return how many slots its longest path needs now."""
        return max((claim.depth for claim in self.claims), default=0)

    def n_paths(self) -> int:
        """Return how many paths it needs at once."""
        return len(self.claims)

    def lines(self) -> Sequence[Line]:
        """Return the lines that it goes on with."""
        return ()

    def prepare(self) -> None:
        """Say which paths must be pinned first."""

    def note_reused(self, claim: Claim, reused: int) -> None:
        """Note how many of a path's tokens were there at its first admission."""

    def start(self, desk: Desk) -> None:
        """Go on after admission: claims are looked at, others wait for them."""
        for claim in self.claims:
            desk.look_at(claim)

    @abstractmethod
    def ready(self, claim: Claim, desk: Desk) -> None:
        """A claim has all it wants."""

    def park(self, desk: Desk) -> None:
        """Stop, and let everything go that can be computed again; nothing of it is in flight."""

    def stop(self, desk: Desk) -> None:
        """Let go of everything: the job ends."""

    def conclude(self, desk: Desk) -> None:
        """End, if what it had in flight, which was undone, is all that kept it from that."""
        if self.error is not None:
            desk.fail(self, self.error)

    def cancel(self, ticket: Ticket, desk: Desk) -> None:
        """End for one ticket, early."""
        desk.fail(self, Cancelled("the work was cancelled before it was done"))


class ExtendJob(Job):
    """One extend, or all of an atomic call, whose tickets are answered together."""

    def __init__(self, age: int, tickets: Sequence[Ticket]) -> None:
        super().__init__(age, tickets)
        self._tickets = tickets
        self._answers: dict[int, list[Any]] = {}  # by number of the ticket

    def tickets(self) -> Sequence[Ticket]:
        return self._tickets

    def namespaces(self) -> set[str | None]:
        return {ticket.item.place.namespace for ticket in self._tickets}

    def prepare(self) -> None:
        """Claim each item's path, once: what was answered stays answered when it is parked."""
        if self.claims:
            return
        exact = len(self._tickets) > 1  # paths that must fit together are counted exactly
        for number, ticket in enumerate(self._tickets):
            item: Extend = ticket.item
            claim = Claim(self, item.place, item.tokens, exact=exact)
            claim.needs = [_need(claim, want) for want in item.wants]
            claim.number = number
            self.claims.append(claim)

    def note_reused(self, claim: Claim, reused: int) -> None:
        self._tickets[claim.number].reused = reused

    def ready(self, claim: Claim, desk: Desk) -> None:
        ticket = self._tickets[claim.number]
        pairs = zip(ticket.item.wants, claim.needs, strict=True)
        answers = [_answer(want, need, desk) for want, need in pairs]
        if len(self._tickets) == 1:  # mostly
            ticket.resolve(answers)
            desk.end(self)
            return
        self._answers[claim.number] = answers
        if len(self._answers) == len(self._tickets):
            for number, ticket in enumerate(self._tickets):
                ticket.resolve(self._answers[number])
            desk.end(self)


def _need(claim: Claim, want: Any) -> Need:
    if isinstance(want, Scores):
        return Need(claim, want.first - 1, want.last - 1, want.top)
    return Need(claim, want.depth - 1, want.depth, None)


def _answer(want: Any, need: Need, desk: Desk) -> Any:
    if isinstance(want, Scores):
        return join_scores(need.answers())
    lent: LentRow = need.parts[0][1]
    if want.lent:
        return lent.at
    return lent.row if want.kept else desk.rows.read_lent(lent)


# Runs -----------------------------------------------------------------------------------------


class Member:
    """One ticket of a run; equal greedy runs from one place are one run with several members."""

    __slots__ = ("item", "state", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.item: Run = ticket.item
        self.state = RunState()

    def result(self, end: Place) -> RunResult:
        """Return the answer; `end`: the place after the last token."""
        state = self.state
        assert state.finish_reason is not None
        return RunResult(
            tokens=state.tokens,
            logprobs=state.logprobs,
            entropies=state.entropies,
            finish_reason=state.finish_reason,
            ended_by=state.ended_by,
            end=end,
            legal_logmass=state.legal_logmass,
        )


class RunJob(Job):
    """A run on its way: waiting for its first draw, then live on its line, now and then parked.

    The line's last token was drawn and is to be run, with those that the constraint forces after
    it. put_off: more of these, for later rows; its sampler is past them, too. late: the draw that
    is in flight. n_forced: forced tokens that are. ending: ends once that has landed. stands_aside:
    it waits for that draw, to run what is forced after it at once. first_drawn: its first token and
    the figures of it, where a step has drawn it. draws_alone: no step is to.
    """

    def __init__(self, age: int, tickets: Sequence[Ticket]) -> None:
        super().__init__(age, tickets)
        item: Run = tickets[0].item
        self.members = [Member(ticket) for ticket in tickets]
        self.sampler = item.sampler
        self.line = Line(item.place)
        self.stops = item.stop_ids
        self.n_drawn = 0
        self.forced: list[int] = []
        self.put_off: list[int] = []
        self.late: FutureTokens | None = None
        self.n_forced = 0
        self.ending = False
        self.stands_aside = False
        self.is_primed = False
        self.first_drawn: DrawnToken | None = None
        self.draws_alone = False

    def tickets(self) -> list[Ticket]:
        return [member.ticket for member in self.members]

    def namespaces(self) -> set[str | None]:
        return {self.line.base.namespace}

    @property
    def limit(self) -> int:
        """The most tokens that any of its members wants."""
        return max(member.item.max_tokens for member in self.members)

    def longest_path(self) -> int:
        return self.line.depth

    def lines(self) -> Sequence[Line]:
        return (self.line,)

    def prepare(self) -> None:
        if not self.claims:
            claim = Claim(self, self.line.base)
            claim.wants_kv = False
            claim.needs = [Need(claim, claim.depth - 1, claim.depth, None)]
            self.claims = [claim]
        self.claims[0].place = self.line.base

    def note_reused(self, claim: Claim, reused: int) -> None:
        for member in self.members:
            member.ticket.reused = reused

    def start(self, desk: Desk) -> None:
        if self.line.depth >= desk.n_ctx:
            self.end_all("context", desk)
        elif self.n_drawn or not desk.merge(self):
            super().start(desk)

    def ready(self, claim: Claim, desk: Desk) -> None:
        if self.n_drawn:
            desk.live[self] = None
        else:
            desk.first.append(self)

    def first_row(self) -> RetainedRow:
        """Return the logits that the first token is drawn from."""
        lent: LentRow = self.claims[0].needs[0].answers()[0]
        return lent.at

    def prime(self, desk: Desk) -> None:
        """Let penalties see the prompt, once."""
        claim = self.claims[0]
        if self.sampler.needs_host and not self.is_primed:
            assert claim.cursor is not None
            self.is_primed = True
            self.sampler.prime(desk.tree.ids(claim.cursor))

    def begin(self, drawn: DrawnToken, desk: Desk) -> None:
        """Go on from the first draw."""
        claim, self.first_drawn = self.claims[0], None
        claim.needs, claim.wants_kv = [], True
        self.accept(drawn, desk)
        if not self.done:
            desk.look_at(claim)

    # A step of it

    def can_step(self, n_ctx: int) -> bool:
        """Whether its next token can be run now."""
        if self.ending or self.error is not None:
            return False
        if self.late is None:
            return not self.outstanding
        n_new = self.n_forced + 1
        ends = self.n_drawn + n_new >= self.limit or self.line.depth + n_new >= n_ctx
        return not (ends or self.stands_aside)

    @property
    def is_wanted(self) -> bool:
        """Whether what its row in flight gives is to be drawn from."""
        return not (self.done or self.ending or self.error is not None)

    def look_ahead(self, draws: Draws, entry: int, desk: Desk) -> None:
        """Go on from an entry of draws that have begun; or stand aside until they have landed.

        What is forced is drawn token by token, unless there is enough of it; or a bias might forbid
        what is taken unseen when it is forced.
        """
        self.late = FutureTokens(draws, entry)
        sampler = self.sampler
        if sampler.matcher is not None:
            room = min(self.limit - self.n_drawn, desk.n_ctx - self.line.depth) - 1
            is_long = min(len(sampler.matcher.forced(sampler.banned)), room) >= _WORTH_WAITING
            self.stands_aside = is_long or bool(sampler.params.logit_bias)

    def force(self, most: int, desk: Desk) -> None:
        """Let the next row run what the constraint forces, too: it need not be drawn.

        The sampler goes on already; the tokens are accepted when the row has run.
        """
        matcher = self.sampler.matcher
        if self.late is not None:  # the draw tells first
            return
        if self.forced or self.put_off:
            known = [*self.forced, *self.put_off]
            self.forced, self.put_off = known[: max(most, 0)], known[max(most, 0) :]
            return
        assert matcher is not None
        room = min(most, self.limit - self.n_drawn - 1, desk.n_ctx - self.line.depth - 1)
        for token in matcher.forced(self.sampler.banned)[: max(room, 0)]:
            if token in self.stops:
                break
            try:
                self.sampler.accept(token)
            except ConstraintError:  # the draw that follows finds nothing to draw, and says why
                break
            self.forced.append(token)

    def row(self, desk: Desk) -> Row:
        """Return the row of its next token."""
        line, tokens = self.line, self.line.tokens
        if self.late is not None:
            return line.row(desk.tree, self.late, len(tokens))
        if line.tail is not None and self.forced:  # alone it may have got a slot only
            n = line.tail.reserved - line.tail.fragment.length - 1
            self.forced, self.put_off = self.forced[:n], [*self.forced[n:], *self.put_off]
        if not (self.forced or self.put_off):
            return line.row(desk.tree, tokens[-1:], len(tokens) - 1)
        scored = (ScoreSpan(0, (*self.forced, *self.put_off[:1])),)
        return line.row(desk.tree, (tokens[-1], *self.forced), len(tokens) - 1, scored)

    def accept_forced(self, part: RunsPart, number: int, forced: Sequence[int], desk: Desk) -> None:
        """Accept what the constraint forced and the row has run, as far as nothing ends the run."""
        assert part.output is not None
        score = part.output.scores()[part.first_row + number][0]
        assert score.entropies is not None  # left out only by engines without steps
        figures = zip(forced, score.logprobs.tolist(), score.entropies.tolist(), strict=True)
        for token, logprob, entropy in figures:
            if not self.is_wanted:
                return
            # The only token that was legal.
            self._take(DrawnToken(token, logprob, entropy, legal_logmass=logprob), desk)

    def accept(self, drawn: DrawnToken, desk: Desk) -> None:
        """Note a drawn token and end the members that are done with it."""
        token, _, _, legal = drawn
        sampler, matcher = self.sampler, self.sampler.matcher
        if token >= 0:
            if sampler.needs_host and token not in self.stops:
                sampler.accept(token)
            if legal is not None and (
                matcher is None or (token in self.stops and matcher.must_end)
            ):
                drawn = drawn._replace(legal_logmass=None)
            self._take(drawn, desk)
            if matcher is None:
                return
        elif matcher is None or token == BROKEN or not matcher.must_end:
            desk.fail(self, self._cannot_go_on(token))
            return
        self._end_if_must(desk)

    def _end_if_must(self, desk: Desk) -> None:
        """End where only an end token may follow: it need not be drawn."""
        if (matcher := self.sampler.matcher) is not None and not self.done and matcher.must_end:
            own = self.stops - self.sampler.params.constraint.stop_ids
            for member in self.members:
                member.state.ended_by = min(own, default=None)
            self.end_all("stop", desk)

    def _take(self, drawn: DrawnToken, desk: Desk) -> None:
        token, logprob, entropy, legal = drawn
        desk.counters.decoded += 1
        if legal is not None:
            for member in self.members:
                member.state.legal_logmass.append(legal)
        if token in self.stops:  # the same for all members
            for member in self.members:
                member.state.ended_by = token
            self.end_all("stop", desk)
            return
        self.n_drawn += 1
        line = self.line
        line.tokens.append(token)
        is_full = line.depth >= desk.n_ctx
        is_last = is_full
        for member in self.members:
            item, state = member.item, member.state
            state.tokens.append(token)
            if logprob is not None:
                state.logprobs.append(logprob)
            if entropy is not None:
                state.entropies.append(entropy)
            if len(state.tokens) >= item.max_tokens:
                state.finish_reason = "length"
            if item.sink is not None:
                self._tell(member)
            is_last = is_last or state.finish_reason is not None
        if is_full:
            self.end_all("context", desk)
        elif is_last:
            self.settle(desk)

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

    def _cannot_go_on(self, token: int) -> WeftError:
        if token == BROKEN:
            return broken_logits()
        matcher = self.sampler.matcher
        if matcher is not None and matcher.failure is not None:
            return ConstraintError(f"after {self.n_drawn} new tokens, {matcher.failure}")
        return DeadEnd(
            f"the constraint and the logit bias leave no token after {self.n_drawn} new ones:"
            f" the last token ids are {self.line.tokens[-8:]}",
            token_ids=self.line.end().ids(),
        )

    # Its end

    def end_all(self, reason: FinishReason, desk: Desk) -> None:
        """End all members now, with what they have."""
        for member in self.members:
            member.state.finish_reason = member.state.finish_reason or reason
        self.settle(desk)

    def settle(self, desk: Desk) -> None:
        """Answer the members that are done; end the run when none is left."""
        going = [member for member in self.members if member.state.finish_reason is None]
        if going:
            for member in self.members:
                if member.state.finish_reason is not None:
                    ids = tuple(member.state.tokens)
                    name = self.line.base.namespace
                    place = Place(desk.tree.holds, name, member.item.place, ids)
                    member.ticket.resolve(member.result(place))
            self.members = going
        elif self.outstanding:
            self.ending = True  # its slots are there, what is drawn after them is not wanted
        else:
            self.finish(desk)

    def finish(self, desk: Desk) -> None:
        """Put the tokens into the tree and answer the members."""
        self.line.close(desk.tree)
        end = self.line.end()
        desk.place(end)
        desk.to_join.append(self.line.base)
        desk.live.pop(self, None)
        for member in self.members:
            place = end.at(member.item.place.depth + len(member.state.tokens))  # each its own hold
            member.ticket.resolve(member.result(place))
        desk.end(self)

    def cancel(self, ticket: Ticket, desk: Desk) -> None:
        for member in self.members:
            if member.ticket is ticket:
                member.state.finish_reason = ticket.cancel_reason
        self.settle(desk)

    def park(self, desk: Desk) -> None:
        """Its last token is to be run, also where a step that was undone has run it already."""
        desk.live.pop(self, None)
        self.line.trim(desk.tree, max(len(self.line.tokens) - 1, 0))
        self.line.close(desk.tree)

    def stop(self, desk: Desk) -> None:
        desk.live.pop(self, None)
        self.line.drop(desk.tree)

    def conclude(self, desk: Desk) -> None:
        super().conclude(desk)
        if self.ending and not self.done:  # what the step has written may be anything
            self.line.trim(desk.tree, max(len(self.line.tokens) - 1, 0))
            self.finish(desk)

    def carry(self, other: RunJob, desk: Desk) -> None:
        """Let the tickets of an equal run be this one's, too; that run is over."""
        self.members += other.members
        for member in other.members:
            member.ticket.job = self
        other.members = []
        desk.end(other)

    def merge_key(self) -> MergeKey:
        """Return what greedy runs that are one run have in common; None for other runs."""
        cursor = self.claims[0].cursor
        if not self.sampler.greedy or self.sampler.matcher is not None or cursor is None:
            return None
        neutral = replace(self.sampler.params, n=1, seed=None, stop=(), max_tokens=1)
        return (cursor, neutral, self.stops)


# Commits --------------------------------------------------------------------------------------


class Committed(NamedTuple):
    """What a commit gives one line: its logits row, and what was drawn from it.

    drawn: token, raw log-probability, and log-probability among what the filters left; None where
    nothing was to be drawn, or nothing could.
    """

    row: LogitsRow
    drawn: tuple[int, float, float] | None


class CommitJob(Job):
    """A commit on its way: the tokens from `next` on are still to be run."""

    by_content = False

    def __init__(self, age: int, tickets: Sequence[Ticket]) -> None:
        super().__init__(age, tickets)
        (self.ticket,) = tickets
        self.item: Commit = self.ticket.item
        self._is_mixed = len(self.namespaces()) > 1
        self.committed: list[Committed] = []
        self.n_waiting = 0
        self.next = 0

    def tickets(self) -> list[Ticket]:
        return [self.ticket]

    def namespaces(self) -> set[str | None]:
        return {line.base.namespace for line in self.item.lines}

    def longest_path(self) -> int:
        return max((line.depth + 1 for line in self.item.lines), default=0)

    def n_paths(self) -> int:
        return len(self.item.lines)

    def lines(self) -> Sequence[Line]:
        return self.item.lines

    def prepare(self) -> None:
        """Claim the paths of lines that are not open; the others have theirs pinned."""
        closed = [line for line in self.item.lines if not line.is_open]
        self.claims = [Claim(self, line.base) for line in closed]
        for claim, line in zip(self.claims, closed, strict=True):
            claim.seen = line.seen
        self.n_waiting = len(self.claims)

    def start(self, desk: Desk) -> None:
        desk.commits[self] = None
        for line in self.item.lines:
            line.job, line.seen = self, True
        super().start(desk)

    def ready(self, claim: Claim, desk: Desk) -> None:
        self.n_waiting -= 1

    def share(self, most: int, desk: Desk) -> int:
        """Return the line before which a step stops: `most` tokens on, all of one adapter."""
        if desk.runs_whole_paths:
            costs = accumulate(line.depth + 1 for line in self.item.lines[self.next :])
            most = max(sum(1 for _ in takewhile(lambda cost: cost <= most, costs)), 1)
        if not self._is_mixed:
            return min(self.next + most, len(self.item.lines))
        lines = self.item.lines[self.next : self.next + most]
        name = lines[0].base.namespace
        same = takewhile(lambda line: line.base.namespace == name, lines)
        return self.next + sum(1 for _ in same)

    def finish(self, desk: Desk) -> None:
        """All has run: the lines go on by their tokens."""
        for line, token in zip(self.item.lines, self.item.tokens, strict=True):
            line.tokens.append(token)
            line.job = None
            if not desk.lines.is_leased(line):  # released while this was on its way
                desk.lines.close(line)
        desk.commits.pop(self, None)
        self.ticket.resolve(self.committed)
        desk.end(self)

    def park(self, desk: Desk) -> None:
        """Undo what has run, and begin anew when there is room."""
        self.stop(desk)
        for line in self.item.lines:
            desk.lines.close(line)

    def stop(self, desk: Desk) -> None:
        desk.commits.pop(self, None)
        self.next, self.committed = 0, []
        for line in self.item.lines:
            line.trim(desk.tree, len(line.tokens))
            line.job = None


class CommitPart(LinesPart):
    """What one step runs of a commit: its lines first, first + 1, … last - 1."""

    def __init__(self, job: CommitJob, first: int, last: int, desk: Desk) -> None:
        item = job.item
        super().__init__(item.lines[first].base.namespace)
        self.job = job
        self.last = last
        pairs = zip(item.lines[first:last], item.tokens[first:last], strict=True)
        self._rows = [line.row(desk.tree, (token,), len(line.tokens)) for line, token in pairs]
        self._n_tokens = len(self._rows)
        if desk.runs_whole_paths:
            self._n_tokens = sum([row.n_tokens for row in self._rows])
        self._samplers = item.samplers[first:last]
        drawing = [sampler for sampler in self._samplers if sampler is not None]
        self._chain: Chain | None = None
        if drawing:
            self._chain = desk.commit_chains.of(drawing)
            self._chain.prepare(desk.info.n_vocab)
        self._draws: Draws | None = None
        self._result: DrawResult | None = None
        job.outstanding += 1

    def rows(self) -> list[Row]:
        return self._rows

    def n_tokens(self) -> int:
        return self._n_tokens

    def n_logits(self) -> int:
        return len(self._rows)

    def jobs(self) -> Iterable[Job]:
        return [self.job]

    def n_kept(self) -> int:
        return len(self._rows)

    def draw(self) -> None:
        if self._chain is not None:
            assert self.output is not None
            self._draws = self.output.draw(self._batch(self._chain))

    def _batch(self, chain: Chain) -> DrawBatch:
        drawn = [i for i, sampler in enumerate(self._samplers) if sampler is not None]
        positions = [self._rows[i].position + self._rows[i].n_tokens for i in drawn]
        return draw_at(chain, [self.first_logit + i for i in drawn], positions)

    def land(self) -> None:
        if self._draws is not None:
            self._result = self._draws.result()

    def deliver(self, desk: Desk) -> None:
        job = self.job
        job.outstanding -= 1
        desk.counters.decoded += len(self._rows)
        drawn = self._drawn()
        for row, sampler in zip(self.kept, self._samplers, strict=True):
            job.committed.append(Committed(row, next(drawn) if sampler is not None else None))
        job.next = self.last
        if job.error is not None:
            desk.fail(job, job.error)
        elif job.next == len(job.item.lines):
            job.finish(desk)

    def _drawn(self) -> Any:
        result = self._result
        if result is None or result.kept is None:
            return iter([None] * len(self._rows))
        each = zip(result.ids.tolist(), result.logprobs.tolist(), result.kept.tolist(), strict=True)
        return (drawn if drawn[0] >= 0 else None for drawn in each)

    def discard(self, desk: Desk) -> None:
        self.job.outstanding -= 1


def new_job(age: int, tickets: Sequence[Ticket]) -> Job:
    """Return the job of tickets that are answered together."""
    return _KINDS[type(tickets[0].item)](age, tickets)


_KINDS: dict[type[Any], type[Job]] = {Extend: ExtendJob, Run: RunJob, Commit: CommitJob}
