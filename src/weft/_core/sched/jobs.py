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
from ..sampling.sampler import BROKEN, BatchSampler, DrawnToken, draw_at
from .batch import DecodePart, SequencePart
from .logits_cache import LogitsRow, PinnedLogits
from .prefill import LogitsRequest, PathClaim
from .sequences import TokenSequence
from .work import Commit, Extend, FinishReason, Run, RunResult, RunState, Scores, Ticket

if TYPE_CHECKING:
    from ...engines.base import Draws
    from ..sampling.sampler import DrawBatch, DrawResult
    from .queues import JobQueues

# So many forced tokens are worth a step in which a run that overlaps has no row.
_WORTH_WAITING = 3
MergeKey = tuple[object, ...] | None  # what greedy runs that are one run have in common


class Job(ABC):
    """Base of all jobs. `age` orders them.

    claims: the paths it wants pinned; made by `prepare`. outstanding: launched parts of its lines.
    error: what it ends with once those have landed. by_content: it may find what lines have in
    their tails, once these are closed. can_park: it can go on from what is known, see `park`.
    """

    needs_closed_tails = True
    can_preempt = True

    def __init__(self, age: int, tickets: Sequence[Ticket]) -> None:
        self.age = age
        self.claims: list[PathClaim] = []
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

    def sequences(self) -> Sequence[TokenSequence]:
        """Return the lines that it goes on with."""
        return ()

    def prepare(self) -> None:
        """Say which paths must be pinned first."""

    def note_reused(self, claim: PathClaim, reused: int) -> None:
        """Note how many of a path's tokens were there at its first admission."""

    def start(self, queues: JobQueues) -> None:
        """Go on after admission: claims are looked at, others wait for them."""
        for claim in self.claims:
            queues.recheck(claim)

    @abstractmethod
    def ready(self, claim: PathClaim, queues: JobQueues) -> None:
        """A claim has all it wants."""

    def preempt(self, queues: JobQueues) -> None:
        """Stop, and let everything go that can be computed again; nothing of it is in flight."""

    def stop(self, queues: JobQueues) -> None:
        """Let go of everything: the job ends."""

    def finish_failed_step(self, queues: JobQueues) -> None:
        """End, if what it had in flight, which was undone, is all that kept it from that."""
        if self.error is not None:
            queues.fail(self, self.error)

    def cancel(self, ticket: Ticket, queues: JobQueues) -> None:
        """End for one ticket, early."""
        queues.fail(self, Cancelled("the work was cancelled before it was done"))


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
        at_node_end = len(self._tickets) > 1  # paths that must fit together are counted exactly
        for number, ticket in enumerate(self._tickets):
            item: Extend = ticket.item
            claim = PathClaim(self, item.place, item.tokens, at_node_end=at_node_end)
            claim.requests = [_logits_request(claim, want) for want in item.wants]
            claim.index = number
            self.claims.append(claim)

    def note_reused(self, claim: PathClaim, reused: int) -> None:
        self._tickets[claim.index].reused = reused

    def ready(self, claim: PathClaim, queues: JobQueues) -> None:
        ticket = self._tickets[claim.index]
        pairs = zip(ticket.item.wants, claim.requests, strict=True)
        answers = [_answer(want, request, queues) for want, request in pairs]
        if len(self._tickets) == 1:  # mostly
            ticket.resolve(answers)
            queues.end(self)
            return
        self._answers[claim.index] = answers
        if len(self._answers) == len(self._tickets):
            for number, ticket in enumerate(self._tickets):
                ticket.resolve(self._answers[number])
            queues.end(self)


def _logits_request(claim: PathClaim, want: Any) -> LogitsRequest:
    if isinstance(want, Scores):
        return LogitsRequest(claim, want.first - 1, want.last - 1, want.top)
    return LogitsRequest(claim, want.depth - 1, want.depth, None)


def _answer(want: Any, request: LogitsRequest, queues: JobQueues) -> Any:
    if isinstance(want, Scores):
        return join_scores(request.answers())
    pinned: PinnedLogits = request.results[0][1]
    if want.pinned:
        return pinned.at
    return pinned.row if want.cached else queues.logits_cache.read_pinned(pinned)


# Runs -----------------------------------------------------------------------------------------


class RunMember:
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
        self.members = [RunMember(ticket) for ticket in tickets]
        self.sampler = item.sampler
        self.sequence = TokenSequence(item.place)
        self.stops = item.stop_ids
        self.n_drawn = 0
        self.forced: list[int] = []
        self.deferred: list[int] = []
        self.future: FutureTokens | None = None
        self.n_forced = 0
        self.is_ending = False
        self.waits_for_draw = False
        self.is_primed = False
        self.first_drawn: DrawnToken | None = None
        self.draws_alone = False

    def tickets(self) -> list[Ticket]:
        return [member.ticket for member in self.members]

    def namespaces(self) -> set[str | None]:
        return {self.sequence.base.namespace}

    @property
    def limit(self) -> int:
        """The most tokens that any of its members wants."""
        return max(member.item.max_tokens for member in self.members)

    def longest_path(self) -> int:
        return self.sequence.depth

    def sequences(self) -> Sequence[TokenSequence]:
        return (self.sequence,)

    def prepare(self) -> None:
        if not self.claims:
            claim = PathClaim(self, self.sequence.base)
            claim.needs_kv = False
            claim.requests = [LogitsRequest(claim, claim.depth - 1, claim.depth, None)]
            self.claims = [claim]
        self.claims[0].place = self.sequence.base

    def note_reused(self, claim: PathClaim, reused: int) -> None:
        for member in self.members:
            member.ticket.reused = reused

    def start(self, queues: JobQueues) -> None:
        if self.sequence.depth >= queues.n_ctx:
            self.end_all("context", queues)
        elif self.n_drawn or not queues.merge_greedy(self):
            super().start(queues)

    def ready(self, claim: PathClaim, queues: JobQueues) -> None:
        if self.n_drawn:
            queues.running[self] = None
        else:
            queues.first_draws.append(self)

    def first_row(self) -> RetainedRow:
        """Return the logits that the first token is drawn from."""
        pinned: PinnedLogits = self.claims[0].requests[0].answers()[0]
        return pinned.at

    def prime(self, queues: JobQueues) -> None:
        """Let penalties see the prompt, once."""
        claim = self.claims[0]
        if self.sampler.needs_host and not self.is_primed:
            assert claim.cursor is not None
            self.is_primed = True
            self.sampler.add_prompt(queues.tree.ids(claim.cursor))

    def start_decoding(self, drawn: DrawnToken, queues: JobQueues) -> None:
        """Go on from the first draw."""
        claim, self.first_drawn = self.claims[0], None
        claim.requests, claim.needs_kv = [], True
        self.accept(drawn, queues)
        if not self.done:
            queues.recheck(claim)

    # A step of it

    def can_step(self, n_ctx: int) -> bool:
        """Whether its next token can be run now."""
        if self.is_ending or self.error is not None:
            return False
        if self.future is None:
            return not self.outstanding
        n_new = self.n_forced + 1
        ends = self.n_drawn + n_new >= self.limit or self.sequence.depth + n_new >= n_ctx
        return not (ends or self.waits_for_draw)

    @property
    def is_wanted(self) -> bool:
        """Whether what its row in flight gives is to be drawn from."""
        return not (self.done or self.is_ending or self.error is not None)

    def look_ahead(self, draws: Draws, entry: int, queues: JobQueues) -> None:
        """Go on from an entry of draws that have begun; or stand aside until they have landed.

        What is forced is drawn token by token, unless there is enough of it; or a bias might forbid
        what is taken unseen when it is forced.
        """
        self.future = FutureTokens(draws, entry)
        sampler = self.sampler
        if sampler.matcher is not None:
            room = min(self.limit - self.n_drawn, queues.n_ctx - self.sequence.depth) - 1
            is_long = min(len(sampler.matcher.forced(sampler.banned)), room) >= _WORTH_WAITING
            self.waits_for_draw = is_long or bool(sampler.params.logit_bias)

    def force(self, budget: int, queues: JobQueues) -> None:
        """Let the next row run what the constraint forces, too: it need not be drawn.

        The sampler goes on already; the tokens are accepted when the row has run.
        """
        matcher = self.sampler.matcher
        if self.future is not None:  # the draw tells first
            return
        if self.forced or self.deferred:
            known = [*self.forced, *self.deferred]
            self.forced, self.deferred = known[: max(budget, 0)], known[max(budget, 0) :]
            return
        assert matcher is not None
        room = min(budget, self.limit - self.n_drawn - 1, queues.n_ctx - self.sequence.depth - 1)
        for token in matcher.forced(self.sampler.banned)[: max(room, 0)]:
            if token in self.stops:
                break
            try:
                self.sampler.accept(token)
            except ConstraintError:  # the draw that follows finds nothing to draw, and says why
                break
            self.forced.append(token)

    def row(self, queues: JobQueues) -> Row:
        """Return the row of its next token."""
        sequence, tokens = self.sequence, self.sequence.tokens
        if self.future is not None:
            return sequence.row(queues.tree, self.future, len(tokens))
        if sequence.tail is not None and self.forced:  # alone it may have got a slot only
            n = sequence.tail.reserved - sequence.tail.fragment.length - 1
            self.forced, self.deferred = self.forced[:n], [*self.forced[n:], *self.deferred]
        if not (self.forced or self.deferred):
            return sequence.row(queues.tree, tokens[-1:], len(tokens) - 1)
        scored = (ScoreSpan(0, (*self.forced, *self.deferred[:1])),)
        return sequence.row(queues.tree, (tokens[-1], *self.forced), len(tokens) - 1, scored)

    def accept_forced(
        self, part: DecodePart, number: int, forced: Sequence[int], queues: JobQueues
    ) -> None:
        """Accept what the constraint forced and the row has run, as far as nothing ends the run."""
        assert part.output is not None
        score = part.output.scores()[part.first_row + number][0]
        assert score.entropies is not None  # left out only by engines without steps
        figures = zip(forced, score.logprobs.tolist(), score.entropies.tolist(), strict=True)
        for token, logprob, entropy in figures:
            if not self.is_wanted:
                return
            # The only token that was legal.
            self._take(DrawnToken(token, logprob, entropy, legal_logmass=logprob), queues)

    def accept(self, drawn: DrawnToken, queues: JobQueues) -> None:
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
            self._take(drawn, queues)
            if matcher is None:
                return
        elif matcher is None or token == BROKEN or not matcher.must_end:
            queues.fail(self, self._cannot_go_on(token))
            return
        self._end_if_must(queues)

    def _end_if_must(self, queues: JobQueues) -> None:
        """End where only an end token may follow: it need not be drawn."""
        if (matcher := self.sampler.matcher) is not None and not self.done and matcher.must_end:
            own = self.stops - self.sampler.params.constraint.stop_ids
            for member in self.members:
                member.state.ended_by = min(own, default=None)
            self.end_all("stop", queues)

    def _take(self, drawn: DrawnToken, queues: JobQueues) -> None:
        token, logprob, entropy, legal = drawn
        queues.counters.decoded += 1
        if legal is not None:
            for member in self.members:
                member.state.legal_logmass.append(legal)
        if token in self.stops:  # the same for all members
            for member in self.members:
                member.state.ended_by = token
            self.end_all("stop", queues)
            return
        self.n_drawn += 1
        sequence = self.sequence
        sequence.tokens.append(token)
        is_full = sequence.depth >= queues.n_ctx
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
                self._call_sink(member)
            is_last = is_last or state.finish_reason is not None
        if is_full:
            self.end_all("context", queues)
        elif is_last:
            self.resolve_finished(queues)

    def _call_sink(self, member: RunMember) -> None:
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
            f" the last token ids are {self.sequence.tokens[-8:]}",
            token_ids=self.sequence.end().ids(),
        )

    # Its end

    def end_all(self, reason: FinishReason, queues: JobQueues) -> None:
        """End all members now, with what they have."""
        for member in self.members:
            member.state.finish_reason = member.state.finish_reason or reason
        self.resolve_finished(queues)

    def resolve_finished(self, queues: JobQueues) -> None:
        """Answer the members that are done; end the run when none is left."""
        going = [member for member in self.members if member.state.finish_reason is None]
        if going:
            for member in self.members:
                if member.state.finish_reason is not None:
                    ids = tuple(member.state.tokens)
                    name = self.sequence.base.namespace
                    place = Place(queues.tree.holds, name, member.item.place, ids)
                    member.ticket.resolve(member.result(place))
            self.members = going
        elif self.outstanding:
            self.is_ending = True  # its slots are there, what is drawn after them is not wanted
        else:
            self.finish(queues)

    def finish(self, queues: JobQueues) -> None:
        """Put the tokens into the tree and answer the members."""
        self.sequence.close(queues.tree)
        end = self.sequence.end()
        queues.insert(end)
        queues.to_join.append(self.sequence.base)
        queues.running.pop(self, None)
        for member in self.members:
            place = end.at(member.item.place.depth + len(member.state.tokens))  # each its own hold
            member.ticket.resolve(member.result(place))
        queues.end(self)

    def cancel(self, ticket: Ticket, queues: JobQueues) -> None:
        for member in self.members:
            if member.ticket is ticket:
                member.state.finish_reason = ticket.cancel_reason
        self.resolve_finished(queues)

    def preempt(self, queues: JobQueues) -> None:
        """Its last token is to be run, also where a step that was undone has run it already."""
        queues.running.pop(self, None)
        self.sequence.trim(queues.tree, max(len(self.sequence.tokens) - 1, 0))
        self.sequence.close(queues.tree)

    def stop(self, queues: JobQueues) -> None:
        queues.running.pop(self, None)
        self.sequence.drop(queues.tree)

    def finish_failed_step(self, queues: JobQueues) -> None:
        super().finish_failed_step(queues)
        if self.is_ending and not self.done:  # what the step has written may be anything
            self.sequence.trim(queues.tree, max(len(self.sequence.tokens) - 1, 0))
            self.finish(queues)

    def absorb(self, other: RunJob, queues: JobQueues) -> None:
        """Let the tickets of an equal run be this one's, too; that run is over."""
        self.members += other.members
        for member in other.members:
            member.ticket.job = self
        other.members = []
        queues.end(other)

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

    needs_closed_tails = False

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
        return {sequence.base.namespace for sequence in self.item.sequences}

    def longest_path(self) -> int:
        return max((sequence.depth + 1 for sequence in self.item.sequences), default=0)

    def n_paths(self) -> int:
        return len(self.item.sequences)

    def sequences(self) -> Sequence[TokenSequence]:
        return self.item.sequences

    def prepare(self) -> None:
        """Claim the paths of lines that are not open; the others have theirs pinned."""
        closed = [sequence for sequence in self.item.sequences if not sequence.is_open]
        self.claims = [PathClaim(self, sequence.base) for sequence in closed]
        for claim, sequence in zip(self.claims, closed, strict=True):
            claim.was_admitted = sequence.was_admitted
        self.n_waiting = len(self.claims)

    def start(self, queues: JobQueues) -> None:
        queues.commits[self] = None
        for sequence in self.item.sequences:
            sequence.job, sequence.was_admitted = self, True
        super().start(queues)

    def ready(self, claim: PathClaim, queues: JobQueues) -> None:
        self.n_waiting -= 1

    def share(self, budget: int, queues: JobQueues) -> int:
        """Return the line before which a step stops: `budget` tokens on, all of one adapter."""
        if queues.runs_full_paths:
            costs = accumulate(sequence.depth + 1 for sequence in self.item.sequences[self.next :])
            budget = max(sum(1 for _ in takewhile(lambda cost: cost <= budget, costs)), 1)
        if not self._is_mixed:
            return min(self.next + budget, len(self.item.sequences))
        sequences = self.item.sequences[self.next : self.next + budget]
        name = sequences[0].base.namespace
        same = takewhile(lambda sequence: sequence.base.namespace == name, sequences)
        return self.next + sum(1 for _ in same)

    def finish(self, queues: JobQueues) -> None:
        """All has run: the lines go on by their tokens."""
        for sequence, token in zip(self.item.sequences, self.item.tokens, strict=True):
            sequence.tokens.append(token)
            sequence.job = None
            if not queues.sequences.is_leased(sequence):  # released while this was on its way
                queues.sequences.close(sequence)
        queues.commits.pop(self, None)
        self.ticket.resolve(self.committed)
        queues.end(self)

    def preempt(self, queues: JobQueues) -> None:
        """Undo what has run, and begin anew when there is room."""
        self.stop(queues)
        for sequence in self.item.sequences:
            queues.sequences.close(sequence)

    def stop(self, queues: JobQueues) -> None:
        queues.commits.pop(self, None)
        self.next, self.committed = 0, []
        for sequence in self.item.sequences:
            sequence.trim(queues.tree, len(sequence.tokens))
            sequence.job = None


class CommitPart(SequencePart):
    """What one step runs of a commit: its lines first, first + 1, … last - 1."""

    def __init__(self, job: CommitJob, first: int, last: int, queues: JobQueues) -> None:
        item = job.item
        super().__init__(item.sequences[first].base.namespace)
        self.job = job
        self.last = last
        pairs = zip(item.sequences[first:last], item.tokens[first:last], strict=True)
        self._rows = [
            sequence.row(queues.tree, (token,), len(sequence.tokens)) for sequence, token in pairs
        ]
        self._n_tokens = len(self._rows)
        if queues.runs_full_paths:
            self._n_tokens = sum([row.n_tokens for row in self._rows])
        self._samplers = item.samplers[first:last]
        drawing = [sampler for sampler in self._samplers if sampler is not None]
        self._sampler: BatchSampler | None = None
        if drawing:
            self._sampler = queues.commit_samplers.get(drawing)
            self._sampler.prepare(queues.info.n_vocab)
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

    def n_stored(self) -> int:
        return len(self._rows)

    def draw(self) -> None:
        if self._sampler is not None:
            assert self.output is not None
            self._draws = self.output.draw(self._batch(self._sampler))

    def _batch(self, sampler: BatchSampler) -> DrawBatch:
        drawn = [i for i, sampler in enumerate(self._samplers) if sampler is not None]
        positions = [self._rows[i].position + self._rows[i].n_tokens for i in drawn]
        return draw_at(sampler, [self.first_logit + i for i in drawn], positions)

    def wait(self) -> None:
        if self._draws is not None:
            self._result = self._draws.result()

    def process_outputs(self, queues: JobQueues) -> None:
        job = self.job
        job.outstanding -= 1
        queues.counters.decoded += len(self._rows)
        drawn = self._drawn()
        for row, sampler in zip(self.stored, self._samplers, strict=True):
            job.committed.append(Committed(row, next(drawn) if sampler is not None else None))
        job.next = self.last
        if job.error is not None:
            queues.fail(job, job.error)
        elif job.next == len(job.item.sequences):
            job.finish(queues)

    def _drawn(self) -> Any:
        result = self._result
        if result is None or result.kept is None:
            return iter([None] * len(self._rows))
        each = zip(result.ids.tolist(), result.logprobs.tolist(), result.kept.tolist(), strict=True)
        return (drawn if drawn[0] >= 0 else None for drawn in each)

    def discard(self, queues: JobQueues) -> None:
        self.job.outstanding -= 1


def new_job(age: int, tickets: Sequence[Ticket]) -> Job:
    """Return the job of tickets that are answered together."""
    return _KINDS[type(tickets[0].item)](age, tickets)


_KINDS: dict[type[Any], type[Job]] = {Extend: ExtendJob, Run: RunJob, Commit: CommitJob}
