"""Jobs: units of work that are admitted, preempted and failed as one.

A job claims paths and starts once they are pinned. It continues when a claim is complete. An extend
then resolves its ticket, and a run draws tokens. Commits (`commits.py`) run a token per sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ...engines.base import FutureTokens, RetainedRow, Row, ScoreSpan
from ...errors import Cancelled, ConstraintError, DeadEnd, WeftError
from ..kv.place import Place
from ..sampling.metrics import broken_logits, join_scores
from ..sampling.sampler import BROKEN, DrawnToken
from .batch import DecodePart, VerifyRow
from .logits_cache import PinnedLogits
from .prefill import LogitsRequest, PathClaim
from .sequences import TokenSequence
from .speculation import Draft, advanced_samplers
from .work import Extend, FinishReason, Run, RunResult, RunState, Scores, Ticket

if TYPE_CHECKING:
    from ...engines.base import Draws
    from ..kv.tree import TokenTree
    from .draft_model import ModelDrafts
    from .ngrams import RunLookup
    from .queues import JobQueues

# An overlapping run skips a step to run this many forced tokens in one row.
_MIN_FORCED_RUN = 3
MergeKey = tuple[object, ...] | None  # equal for runs that can be merged; None: never


class Job(ABC):
    """Base class of the units of work that the scheduler admits, preempts and fails as one.

    The scheduler calls the methods under its lock.
    """

    needs_closed_tails = True  # its path may be cached in the tails of idle sequences
    can_preempt = True  # it can continue from known tokens, see `preempt`

    def __init__(self, age: int, tickets: Sequence[Ticket]) -> None:
        self.age = age  # orders jobs
        self.claims: list[PathClaim] = []  # the paths to pin; set by `prepare`
        self.admitted = False  # its paths are pinned
        self.done = False  # its tickets are resolved
        self.outstanding = 0  # launched parts of its sequences that have not finished
        self.error: WeftError | None = None  # fails the job once these have finished
        for ticket in tickets:
            ticket.job = self

    @abstractmethod
    def tickets(self) -> Sequence[Ticket]:
        """Return the tickets that are not resolved yet."""

    @abstractmethod
    def namespaces(self) -> set[str | None]:
        """Return the namespaces (LoRA adapters) of the token trees that it uses."""

    def longest_path(self) -> int:
        """Return how many slots the job's longest path needs at the moment."""
        return max((claim.depth for claim in self.claims), default=0)

    def n_paths(self) -> int:
        """Return how many paths it needs at once."""
        return len(self.claims)

    def sequences(self) -> Sequence[TokenSequence]:
        """Return the sequences that the job extends."""
        return ()

    def prepare(self, tree: TokenTree) -> None:
        """Set `claims` to the paths to pin. Called before each admission."""

    def note_reused(self, claim: PathClaim, reused: int) -> None:
        """Store in the tickets how many tokens of the claim's path had KV at its first admission.

        reused: that number.
        """

    def start(self, queues: JobQueues) -> None:
        """Start or continue after an admission; by default check whether claims are complete."""
        for claim in self.claims:
            queues.recheck(claim)

    @abstractmethod
    def ready(self, claim: PathClaim, queues: JobQueues) -> None:
        """Continue the job, now that one of its claims has its KV, logits and scores."""

    def has_drafts(self) -> bool:
        """Return True if slots have KV of draft tokens, which `preempt` frees."""
        return False

    def preempt(self, queues: JobQueues) -> None:
        """Release all KV of the job; it continues after its next admission.

        Nothing of the job may be in flight.
        """

    def stop(self, queues: JobQueues) -> None:
        """Release all KV of the job when it fails. The caller resolves its tickets."""

    def finish_failed_step(self, queues: JobQueues) -> None:
        """End the job if it had to end, but waited for a part of the step that has now failed."""
        if self.error is not None:
            queues.fail(self, self.error)

    def cancel(self, ticket: Ticket, queues: JobQueues) -> None:
        """End the work for one ticket now. By default, the complete job fails with `Cancelled`."""
        queues.fail(self, Cancelled("the work was cancelled before it was done"))


class ExtendJob(Job):
    """One extend, or all extends of an atomic call, whose tickets are resolved together."""

    def __init__(self, age: int, tickets: Sequence[Ticket]) -> None:
        super().__init__(age, tickets)
        self._tickets = tickets
        self._answers: dict[int, list[Any]] = {}  # by index of the ticket

    def tickets(self) -> Sequence[Ticket]:
        return self._tickets

    def namespaces(self) -> set[str | None]:
        return {ticket.item.place.namespace for ticket in self._tickets}

    def prepare(self, tree: TokenTree) -> None:
        """Create one PathClaim per item, with its logits requests; pins nothing.

        Later calls change nothing, so results read before a preemption are kept.
        """
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
        answers = [_request_result(want, request, queues) for want, request in pairs]
        if len(self._tickets) == 1:  # the usual case
            ticket.resolve(answers)
            queues.end(self)
            return
        self._answers[claim.index] = answers
        if len(self._answers) == len(self._tickets):
            for number, ticket in enumerate(self._tickets):
                ticket.resolve(self._answers[number])
            queues.end(self)


def _logits_request(claim: PathClaim, want: Any) -> LogitsRequest:
    """Return the request for one entry of an extend's `wants`."""
    if isinstance(want, Scores):
        return LogitsRequest(claim, want.first - 1, want.last - 1, want.top, want.final)
    return LogitsRequest(claim, want.depth - 1, want.depth, None)


def _request_result(want: Any, request: LogitsRequest, queues: JobQueues) -> Any:
    """Return the result for one entry of an extend's `wants`, from its finished request."""
    if isinstance(want, Scores):
        return join_scores(request.answers())
    pinned: PinnedLogits = request.results[0][1]
    if want.pinned:
        return pinned.at
    return pinned.row if want.cached else queues.logits_cache.read_pinned(pinned)


# Runs -----------------------------------------------------------------------------------------


class RunMember:
    """One ticket of a run, with its tokens so far.

    Equal greedy runs from one place are merged into one run with several members.
    """

    __slots__ = ("item", "state", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.item: Run = ticket.item
        self.state = RunState()

    def result(self, end: Place) -> RunResult:
        """Return the result of the member's ticket.

        end: the place after its last token.
        """
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
            kept=state.kept,
        )


class RunJob(Job):
    """A run: it computes its prompt, draws the first token, then decodes one row per step.

    The last token of `sequence` was drawn, but the model has not run it yet. The next row runs it,
    together with tokens that the constraint forces after it.
    """

    def __init__(self, age: int, tickets: Sequence[Ticket]) -> None:
        super().__init__(age, tickets)
        item: Run = tickets[0].item
        self.members = [RunMember(ticket) for ticket in tickets]
        self.sampler = item.sampler
        self.sequence = TokenSequence(item.place)
        self.stops = item.stop_ids
        self.n_drawn = 0  # new tokens so far
        self.forced: list[int] = []  # tokens that the constraint forces, for the next row
        self.deferred: list[int] = []  # more of them for later rows; the sampler has accepted them
        self.future: FutureTokens | None = None  # the draw in flight
        self.n_forced = 0  # forced tokens in flight
        self.is_ending = False  # ends once its part in flight has finished
        self.waits_for_draw = False  # skips steps until the draw in flight has finished
        self.is_primed = False  # penalties have counted the prompt
        self.first_drawn: DrawnToken | None = None  # the first token, if a step has drawn it
        self.draws_alone = False  # no step may draw its first token
        self.drafts: RunLookup | ModelDrafts | None = None  # proposes draft tokens

    def tickets(self) -> list[Ticket]:
        return [member.ticket for member in self.members]

    def namespaces(self) -> set[str | None]:
        return {self.sequence.base.namespace}

    @property
    def limit(self) -> int:
        """The largest `max_tokens` of its members."""
        return max(member.item.max_tokens for member in self.members)

    def longest_path(self) -> int:
        return self.sequence.depth

    def sequences(self) -> Sequence[TokenSequence]:
        return (self.sequence,)

    def prepare(self, tree: TokenTree) -> None:
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

    def open_sequence(self, queues: JobQueues) -> None:
        """Open the sequence, which then pins the prompt instead of the claim.

        The claim may pin more: its node has grown if another job continued the prompt.
        """
        self.sequence.open(queues.tree)
        self.claims[0].unpin_path(queues.tree)

    def first_row(self) -> RetainedRow:
        """Return the row of logits that the first token is drawn from."""
        pinned: PinnedLogits = self.claims[0].requests[0].answers()[0]
        return pinned.at

    def prime(self, queues: JobQueues) -> None:
        """Add the prompt's tokens to the sampler's penalty history. Later calls do nothing."""
        claim = self.claims[0]
        if self.sampler.needs_host and not self.is_primed:
            assert claim.cursor is not None
            self.is_primed = True
            self.sampler.add_prompt(queues.tree.ids(claim.cursor))

    def start_decoding(self, drawn: DrawnToken, queues: JobQueues) -> None:
        """Accept the first token `drawn`, and decode as soon as the prompt's KV is complete."""
        claim, self.first_drawn = self.claims[0], None
        claim.requests, claim.needs_kv = [], True
        if queues.speculation is not None and claim.cursor is not None:
            self.drafts = queues.speculation.new_drafts(claim.cursor)
        self.accept(drawn, queues)
        if not self.done:
            queues.recheck(claim)

    # One step

    def can_step(self, n_ctx: int) -> bool:
        """Return True if the next row of the run can be in the step that is planned now.

        n_ctx: maximum tokens of a path.
        """
        if self.is_ending or self.error is not None:
            return False
        if self.future is None:
            return not self.outstanding
        n_new = self.n_forced + 1
        ends = self.n_drawn + n_new >= self.limit or self.sequence.depth + n_new >= n_ctx
        return not (ends or self.waits_for_draw)

    def room(self, n_ctx: int) -> int:
        """Return how many more tokens the run can get."""
        return min(self.limit - self.n_drawn, n_ctx - self.sequence.depth)

    @property
    def can_verify(self) -> bool:
        """True if draft tokens may follow its last token in the next row."""
        is_free = self.future is None and not (self.forced or self.deferred)
        return is_free and self.sequence.tail is not None

    @property
    def is_wanted(self) -> bool:
        """True if a token will be drawn from the run's row in flight."""
        return not (self.done or self.is_ending or self.error is not None)

    def look_ahead(self, draws: Draws, entry: int, queues: JobQueues) -> None:
        """Let the next row run a token that is being drawn, before its id is known.

        The run skips steps until the draw has finished in three cases. Draft tokens are likely
        to follow, or many tokens are forced, which one row computes faster; or a bias could forbid
        a forced token.

        Args:
            draws: the draws of the step in flight.
            entry: the index of this run's token in them.
            queues: the scheduler's jobs.
        """
        self.future = FutureTokens(draws, entry)
        sampler, speculation = self.sampler, queues.speculation
        self.waits_for_draw = speculation is not None and speculation.is_worth_waiting(self)
        if sampler.matcher is not None and not self.waits_for_draw:
            room = self.room(queues.n_ctx) - 1
            is_long = min(len(sampler.forced()), room) >= _MIN_FORCED_RUN
            self.waits_for_draw = is_long or bool(sampler.params.logit_bias)

    def force(self, budget: int, queues: JobQueues) -> None:
        """Add tokens that the constraint forces to the next row; they need no draw.

        The sampler accepts them now; the run accepts them after the row has run. Nothing is added
        while a draw is in flight.

        budget: maximum number of tokens to add.
        """
        if self.future is not None:  # what is forced depends on the draw in flight
            return
        if self.forced or self.deferred:
            known = [*self.forced, *self.deferred]
            self.forced, self.deferred = known[: max(budget, 0)], known[max(budget, 0) :]
            return
        room = min(budget, self.room(queues.n_ctx) - 1)
        for token in self.sampler.forced()[: max(room, 0)]:
            if token in self.stops:
                break
            try:
                self.sampler.accept(token)
            except ConstraintError:  # the next draw fails with the reason
                break
            self.forced.append(token)

    def row(self, queues: JobQueues) -> Row:
        """Return the row for the next step: the last drawn token and the forced ones after it."""
        sequence = self.sequence
        tokens = sequence.tokens
        if self.future is not None:
            return sequence.row(queues.tree, self.future, len(tokens))
        if not (self.forced or self.deferred):
            return sequence.row(queues.tree, tokens[-1:], len(tokens) - 1)
        if sequence.tail is not None and self.forced:  # a lone run may have a single slot
            n = sequence.tail.reserved - sequence.tail.fragment.length - 1
            self.forced, self.deferred = self.forced[:n], [*self.forced[n:], *self.deferred]
        scored = (ScoreSpan(0, (*self.forced, *self.deferred[:1])),)
        return sequence.row(queues.tree, (tokens[-1], *self.forced), len(tokens) - 1, scored)

    def verify_row(self, draft: Draft, queues: JobQueues) -> VerifyRow | None:
        """Return a row that runs the last drawn token and draft tokens after it.

        None if no draft token can run now.
        """
        sequence = self.sequence
        assert self.can_verify and sequence.tail is not None
        n = sequence.tail.reserved - sequence.tail.fragment.length - 1  # memory may be short
        tokens, samplers = advanced_samplers(self.sampler, draft.tokens[: max(n, 0)], self.stops)
        if not tokens:
            return None
        n_before = len(sequence.tokens) - 1
        ids = (sequence.tokens[-1], *tokens)
        row = sequence.row(queues.tree, ids, n_before, all_logits=True)
        return VerifyRow(self, Draft(tokens, draft.forced), samplers, row)

    def accept_verified(self, draft: Draft, drawn: Sequence[DrawnToken], queues: JobQueues) -> None:
        """Accept the tokens drawn after the last token and after each draft token.

        They are valid up to the first one that is not the draft's. The KV of the other draft
        tokens is freed first. An engine that cannot free it makes the run start over from the tree.

        draft: the draft tokens of the row.

        drawn: one more token than the draft has.
        """
        sequence = self.sequence
        pairs = zip(draft.tokens, drawn, strict=False)
        n_valid = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token, pairs))
        queues.counters.draft_accepted += n_valid
        sequence.trim(queues.tree, len(sequence.tokens) + n_valid)
        forced = [*draft.forced[:n_valid], False]
        for one, is_forced in zip(drawn[: n_valid + 1], forced, strict=True):
            if not self.is_wanted:
                break
            self.accept(one, queues, is_forced=is_forced)
        if not self.done and not sequence.is_open:
            sequence.advance_base(queues.tree, len(sequence.tokens) - 1)
            queues.preempt(self)

    def accept_forced(
        self, part: DecodePart, number: int, forced: Sequence[int], queues: JobQueues
    ) -> None:
        """Accept forced tokens after their row has run, until one of them ends the run.

        Args:
            part: the part with the row; its output has the logprobs of the tokens.
            number: the index of the row in the part.
            forced: the tokens.
            queues: the scheduler's jobs.
        """
        assert part.output is not None
        score = part.output.scores()[part.first_row + number][0]
        assert score.entropies is not None  # left out only by engines without steps
        values = zip(forced, score.logprobs.tolist(), score.entropies.tolist(), strict=True)
        for token, logprob, entropy in values:
            if not self.is_wanted:
                return
            # It was the only legal token.
            one = DrawnToken(token, logprob, entropy, logprob, 0.0)
            self._append_token(one, queues, is_forced=True)

    def accept(self, drawn: DrawnToken, queues: JobQueues, *, is_forced: bool = False) -> None:
        """Accept a drawn token, and end the members that it finishes.

        The run fails if no token could be drawn, unless the constraint requires an end token.

        is_forced: the constraint allowed only this token.
        """
        token, sampler = drawn.token, self.sampler
        matcher = sampler.matcher
        if token >= 0:
            if sampler.needs_host and token not in self.stops:
                sampler.accept(token)
            if drawn.legal_logmass is not None and (
                matcher is None or (token in self.stops and matcher.must_end)
            ):
                drawn = drawn._replace(legal_logmass=None)
            self._append_token(drawn, queues, is_forced=is_forced)
        elif matcher is None or token == BROKEN or not matcher.must_end:
            queues.fail(self, self._draw_error(token))
            return
        if matcher is not None:
            self._end_if_must(queues)

    def _end_if_must(self, queues: JobQueues) -> None:
        """End the run without a draw if the constraint allows only an end token."""
        if (matcher := self.sampler.matcher) is not None and not self.done and matcher.must_end:
            own = self.stops - self.sampler.params.constraint.stop_ids
            for member in self.members:
                member.state.ended_by = min(own, default=None)
            self.end_all("stop", queues)

    def _append_token(
        self, drawn: DrawnToken, queues: JobQueues, *, is_forced: bool = False
    ) -> None:
        """Append a drawn token to all members, and end those that it finishes.

        is_forced: the constraint allowed only this token.
        """
        token, logprob, entropy, legal, kept = drawn
        queues.counters.decoded += 1
        if legal is not None:
            for member in self.members:
                member.state.legal_logmass.append(legal)
        if token in self.stops:  # members have equal stop ids
            for member in self.members:
                member.state.ended_by = token
            self.end_all("stop", queues)
            return
        self.n_drawn += 1
        sequence = self.sequence
        sequence.tokens.append(token)
        if self.drafts is not None:
            self.drafts.push(token, is_forced=is_forced)
        is_last = False
        for member in self.members:
            item, state = member.item, member.state
            tokens = state.tokens
            tokens.append(token)
            if logprob is not None:
                state.logprobs.append(logprob)
            if entropy is not None:
                state.entropies.append(entropy)
            if kept is not None and item.sampler.reports_kept:
                state.kept.append(kept)
            if len(tokens) >= item.max_tokens:
                state.finish_reason = "length"
            if item.sink is not None:
                try:
                    state.finish_reason = item.sink(state) or state.finish_reason
                except Exception as error:
                    member.ticket.resolve(error=error)
                    state.finish_reason = "error"
            if state.finish_reason is not None:
                is_last = True
        if sequence.base.depth + len(sequence.tokens) >= queues.n_ctx:
            self.end_all("context", queues)
        elif is_last:
            self.resolve_finished(queues)

    def _draw_error(self, token: int) -> WeftError:
        """Return the error for a draw that gave no token.

        token: the error code of the draw.
        """
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

    # End of a run

    def end_all(self, reason: FinishReason, queues: JobQueues) -> None:
        """End all members with their tokens so far. Members that have a reason keep it."""
        for member in self.members:
            member.state.finish_reason = member.state.finish_reason or reason
        self.resolve_finished(queues)

    def resolve_finished(self, queues: JobQueues) -> None:
        """Resolve the tickets of finished members; end the run if no other members are left.

        If a part is in flight, the run ends after that.
        """
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
            self.is_ending = True  # the part in flight writes KV; its draw is ignored
        else:
            self.finish(queues)

    def finish(self, queues: JobQueues) -> None:
        """Move the sequence into the tree, resolve the tickets of all members, and end the job."""
        self.sequence.close(queues.tree)
        end = self.sequence.end()
        queues.insert(end)
        queues.to_join.append(self.sequence.base)
        queues.running.pop(self, None)
        for member in self.members:
            place = end.at(member.item.place.depth + len(member.state.tokens))
            member.ticket.resolve(member.result(place))
        queues.end(self)

    def cancel(self, ticket: Ticket, queues: JobQueues) -> None:
        for member in self.members:
            if member.ticket is ticket:
                member.state.finish_reason = ticket.cancel_reason
        self.resolve_finished(queues)

    def preempt(self, queues: JobQueues) -> None:
        """Move the KV of the sequence into the tree, except that of the last token.

        The last token is run again later: a step that failed may have written its KV.
        """
        queues.running.pop(self, None)
        self.sequence.trim(queues.tree, max(len(self.sequence.tokens) - 1, 0))
        self.sequence.close(queues.tree)

    def stop(self, queues: JobQueues) -> None:
        queues.running.pop(self, None)
        self.sequence.drop(queues.tree)

    def finish_failed_step(self, queues: JobQueues) -> None:
        super().finish_failed_step(queues)
        if self.is_ending and not self.done:  # the failed step may have written anything
            self.sequence.trim(queues.tree, max(len(self.sequence.tokens) - 1, 0))
            self.finish(queues)

    def absorb(self, other: RunJob, queues: JobQueues) -> None:
        """Take over the members of an equal run, and end that run without resolving them."""
        self.members += other.members
        for member in other.members:
            member.ticket.job = self
        other.members = []
        queues.end(other)

    def merge_key(self) -> MergeKey:
        """Return a key that is equal for runs that draw the same tokens, so they can be merged.

        None if the run is not greedy, has a constraint, or is not admitted.
        """
        cursor = self.claims[0].cursor
        if not self.sampler.greedy or self.sampler.matcher is not None or cursor is None:
            return None
        neutral = replace(self.sampler.params, n=1, seed=None, stop=(), max_tokens=1)
        return (cursor, neutral, self.stops)
