"""The model calls behind `Branch` and `BranchStore`: commit, prefill and reading logits.

`run(call)` takes the branches exclusively, submits each stage of the call to the scheduler, waits,
and applies the results. `BranchStore.commit` is `run(CommitCall(lm, pairs))`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .._core.sched import work
from .._core.sched.driver import deferred_interrupt
from .._core.sched.work import Extend, Item, Logits, Scores
from ..constraints.lines import warn_of_end_space
from ..errors import ConfigError
from .state import Accepted, BranchRegistry, State

if TYPE_CHECKING:
    from .._core.sampling.sampler import Sampler
    from .._core.sched.commits import Committed
    from .._core.sched.logits_cache import LogitsRow
    from .._core.sched.sequences import TokenSequence
    from .._core.sched.work import Want
    from ..engines.base import Score
    from ..lm.lm import LM
    from .branch import Branch

Pairs = Sequence[tuple["Branch", Any]]
_PAIR_TYPES = (tuple, list)


@dataclass(frozen=True, slots=True)
class Stage:
    """Work items that the scheduler runs together, and a function that applies their results."""

    items: Sequence[Item]
    apply: Callable[[list[Any]], None]

    @property
    def is_atomic(self) -> bool:
        """True if the scheduler must run all items or none; one commit is atomic by itself."""
        return isinstance(self.items[0], Extend)


class BranchCall(Protocol):
    """A call on branches of one LM, such as a commit.

    The constructor validates its arguments and changes nothing. The functions `run` and `arun` of
    this module execute the call.
    """

    lm: LM
    branches: Sequence[Branch]

    def stages(self) -> Iterator[Stage]:
        """Yield the stages in order. `run` calls this when it holds the branches exclusively.

        Only `apply` of the last stage changes the branches.
        """
        ...


class CommitCall:
    """The call behind `commit`: append a token to each branch and run it.

    State advances on copies until the run has succeeded.

    pairs: (branch, token id).
    """

    def __init__(self, lm: LM, pairs: Pairs) -> None:
        self.lm = lm
        self.branches: Sequence[Branch] = check_pairs(lm, pairs, "commit")
        self._pairs = pairs

    def stages(self) -> Iterator[Stage]:
        """First read evicted logits that surprisals need; then run the tokens."""
        entries = [_BranchCommit(branch, token) for branch, token in self._pairs]
        # A step runs sequences of one adapter, so those of each adapter are adjacent.
        if len({entry.branch.base.namespace for entry in entries}) > 1:
            entries.sort(key=lambda entry: entry.branch.adapter or "")
        unscored = [entry.branch for entry in entries if entry.needs_logits()]
        if unscored:
            yield from ReadCall(self.lm, unscored).stages()
        if not entries:
            return
        sequences = [entry.branch.open_sequence() for entry in entries]
        tokens = [entry.token for entry in entries]
        item = work.Commit(sequences, tokens, [entry.next_sampler() for entry in entries])

        def apply(answers: list[Any]) -> None:
            """Store the new state of all branches."""
            for entry, sequence, answer in zip(entries, sequences, answers[0], strict=True):
                entry.finish(sequence, answer)

        yield Stage([item], apply)


class _BranchCommit:
    """One branch's token in a `CommitCall`, with the sampler's state after it."""

    __slots__ = ("branch", "is_accepted", "is_unscored", "sampler", "steering", "token", "used")

    def __init__(self, branch: Branch, token: int) -> None:
        self.branch = branch
        self.token = branch.validate_token(token)
        if branch.depth >= branch.lm.n_ctx:
            branch.lm.place((self.token,), after=branch.place)  # raises ContextOverflow
        self.is_accepted = bool(branch.ahead) and branch.is_accepted_ahead(self.token)
        self.is_unscored = not self.is_accepted or branch.is_surprisal_unknown()
        self.used = self.sampler = sampler = branch.sampler
        self.steering = branch.steering
        if sampler.needs_host and not self.is_accepted:
            self.sampler = sampler.clone()
            self.sampler.accept(self.token)

    def needs_logits(self) -> bool:
        """Return True if the token's surprisal needs logits that must be computed again."""
        branch = self.branch
        if not self.is_unscored or branch.row is None:
            return False
        drawn = branch.drawn
        is_known = drawn is not None and drawn.token == self.token
        return not is_known and branch.lm.scheduler.logits_cache.read(branch.row) is None

    def next_sampler(self) -> Sampler:
        """Return the sampler for the token after this one, which the same step draws in advance."""
        return self.sampler.with_biases(self.steering) if self.steering else self.sampler

    def finish(self, sequence: TokenSequence, answer: Committed) -> None:
        """Store the branch's new state: the token, the sampler, the logits and the drawn token."""
        branch, token = self.branch, self.token
        raw, kept = branch.surprisals(token) or (None, None) if self.is_unscored else (None, None)
        if self.is_accepted:
            branch.mark_accepted_run([raw])
        else:
            branch.last = Accepted(branch.last, branch.depth, token, raw, kept)
            if branch.sampler is self.used:
                branch.sampler = self.sampler
            else:  # the caller replaced it while the commit ran
                branch.sampler.accept(token)
        branch.advance(sequence, token)
        branch.row, branch.custom_logits = answer.row, None
        branch.stream.push(token)
        is_valid = branch.sampler is self.sampler and branch.steering is self.steering
        drawn = answer.drawn if is_valid else None
        branch.drawn = None if drawn is None else branch.produced(*drawn)


class PrefillCall:
    """The call behind `prefill`: append tokens to each branch and run them.

    Penalties, grammar and metrics ignore the tokens.

    pairs: (branch, token ids).
    """

    def __init__(self, lm: LM, pairs: Pairs) -> None:
        self.lm = lm
        self.branches: Sequence[Branch] = check_pairs(lm, pairs, "prefill")
        self._pairs = pairs

    def stages(self) -> Iterator[Stage]:
        """Yield one stage: the tokens of each branch are one item."""
        entries: list[_BranchPrefill] = []
        for branch, tokens in self._pairs:
            if isinstance(tokens, str) or not _is_iterable(tokens):
                raise ConfigError(
                    f"tokens are {tokens!r:.80}; allowed is a sequence of token ids. Of a text they"
                    " are lm.tokenize(text), of chat messages lm.format_chat(messages).ids"
                )
            ids = [branch.validate_token(token) for token in tokens]
            if ids:
                if not branch.position:
                    branch.lm.text.warn_without_bos(ids)
                warn_before_grammar(branch, ids)
                entries.append(_BranchPrefill(branch, ids))

        def apply(answers: list[Any]) -> None:
            """Store the new state of all branches."""
            for entry, answer in zip(entries, answers, strict=True):
                entry.finish(*answer)

        if entries:
            yield Stage([Extend(entry.place, (), entry.outputs()) for entry in entries], apply)


def warn_before_grammar(branch: State, ids: Sequence[int]) -> None:
    """Log a warning if a prompt ends in a space, and a grammar that no token has used follows.

    ids: the last tokens of the prompt.
    """
    n_accepted = 0 if branch.last is None else branch.last.n
    constraint = branch.params.constraint
    if constraint is not None and branch.grammar_from == n_accepted:
        warn_of_end_space(ids, constraint, branch.lm.constraints)


class _BranchPrefill:
    """One branch's tokens in a `PrefillCall`.

    The first tokens may have been counted by `accept` already; the run adds their surprisals.

    n_ahead: number of these tokens.
    first: index of the first of them whose surprisal is unknown.
    """

    __slots__ = ("branch", "first", "n_ahead", "place")

    def __init__(self, branch: Branch, ids: list[int]) -> None:
        self.branch = branch
        self.place = branch.lm.place(ids, after=branch.place)
        self.n_ahead = branch.check_ahead(ids)
        unscored = (
            n for n in range(self.n_ahead) if branch.position + n and branch.is_surprisal_unknown(n)
        )
        self.first = next(unscored, self.n_ahead)

    def outputs(self) -> tuple[Want, ...]:
        """Return the results to request: the logits after the tokens, and surprisals if needed."""
        start, row = self.branch.position, Logits(self.place.depth, cached=True)
        if self.first == self.n_ahead:
            return (row,)
        return row, Scores(start + self.first, start + self.n_ahead)

    def finish(self, row: LogitsRow, scores: Score | None = None) -> None:
        """Store the branch's new state.

        row: the logits after the tokens. scores: logprobs of the tokens without a surprisal.
        """
        surprisals: list[float | None] = [None] * self.n_ahead
        if scores is not None:
            surprisals[self.first :] = (-scores.logprobs).tolist()
        self.branch.mark_accepted_run(surprisals)
        self.branch.set_tip(self.place, row)
        self.branch.stream.flush()


class ReadCall:
    """The call that computes evicted logits again: it runs the last token of each branch.

    It stores the logits in the cache of logits rows and writes no KV.
    """

    def __init__(self, lm: LM, branches: Sequence[Branch]) -> None:
        self.lm = lm
        self.branches = branches

    def stages(self) -> Iterator[Stage]:
        """Yield one stage: the logits at the tip of each branch."""

        def apply(answers: list[list[Any]]) -> None:
            """Store the logits of all branches in the cache."""
            for branch, answer in zip(self.branches, answers, strict=True):
                branch.lm.scheduler.logits_cache.set(branch.require_row(), answer[0], keep=True)

        yield Stage(
            [Extend(branch.place, (), (Logits(branch.position),)) for branch in self.branches],
            apply,
        )


def run(call: BranchCall) -> None:
    """Execute a call on the scheduler, blocking. Other calls on its branches wait until it ends."""
    lm = call.lm
    with exclusive(BranchRegistry.for_lm(lm), call.branches):
        try:
            lm.see_weights()
            for stage in call.stages():
                tickets = lm.submit(stage.items, atomic=stage.is_atomic)
                lm.drive(tickets)
                with deferred_interrupt():
                    stage.apply([ticket.result() for ticket in tickets])
        except BaseException:
            restore(call.branches)
            raise


async def arun(call: BranchCall) -> None:
    """The async form of `run`. A cancelled call leaves the branches unchanged."""
    lm = call.lm
    async with aexclusive(BranchRegistry.for_lm(lm), call.branches):
        try:
            await lm.asee_weights()
            for stage in call.stages():
                tickets = await lm.asubmit(stage.items, atomic=stage.is_atomic)
                await lm.adrive(tickets)
                stage.apply([ticket.result() for ticket in tickets])
        except BaseException:
            restore(call.branches)
            raise


def restore(branches: Sequence[Branch]) -> None:
    """Leave the branches as they were before a call that has failed.

    Reading `place` moves a branch from its sequence, on which a commit may still run, back to a
    place in the token tree.
    """
    for branch in branches:
        if branch.ended_by is None:
            _ = branch.place


def check_pairs(lm: LM, pairs: Pairs, call: str) -> list[Branch]:
    """Validate the pairs of a call and return their branches.

    Raises: StaleHandle for an ended branch; ConfigError for a branch of another LM, a branch that
    occurs twice, and anything that is no pair.
    """
    branches: dict[Branch, None] = {}
    if not _is_iterable(pairs):
        raise ConfigError(f"{call} has {pairs!r}; allowed are pairs of a branch and its tokens")
    for pair in pairs:
        is_pair = isinstance(pair, _PAIR_TYPES) and len(pair) == 2
        if not is_pair or not hasattr(pair[0], "check_open"):
            raise ConfigError(f"{call} has {pair!r}; allowed are pairs of a branch and its tokens")
        branch = pair[0]
        branch.check_open()
        if branch.lm is not lm:
            raise ConfigError(f"{branch!r} belongs to another LM; {call} takes branches of one")
        if branch in branches:
            raise ConfigError(f"{branch!r} is twice in one {call}; give each branch once")
        branches[branch] = None
    return list(branches)


def _is_iterable(value: object) -> bool:
    try:
        iter(value)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


@contextmanager
def exclusive(registry: BranchRegistry, branches: Sequence[Branch]) -> Iterator[None]:
    """Context manager: lock the branches for this call; block while other calls use them."""
    claim: Future[Any] = Future()
    try:
        while (other := _try_claim(registry, branches, claim)) is not None:
            other.result()
        yield
    finally:
        try:
            _release(registry, branches, claim)
        except BaseException:  # Ctrl-C arrived before `_release` deferred it
            _release(registry, branches, claim)
            raise


@asynccontextmanager
async def aexclusive(registry: BranchRegistry, branches: Sequence[Branch]) -> AsyncIterator[None]:
    """Async context manager: like `exclusive`, without blocking the event loop."""
    claim: Future[Any] = Future()
    try:
        while (other := _try_claim(registry, branches, claim)) is not None:
            await asyncio.shield(asyncio.wrap_future(other))
        yield
    finally:
        _release(registry, branches, claim)


def _try_claim(
    registry: BranchRegistry, branches: Sequence[Branch], claim: Future[Any]
) -> Future[Any] | None:
    """Claim all branches for a call, or none.

    Returns: None on success, else the claim of another call to wait for.
    """
    with deferred_interrupt(), registry.claim_lock:
        for branch in branches:
            if branch.claimed_by is not None:
                return branch.claimed_by
        for branch in branches:
            branch.claimed_by = claim
        return None


def _release(registry: BranchRegistry, branches: Sequence[Branch], claim: Future[Any]) -> None:
    """Remove a call's claim from its branches, and wake the calls that wait for it."""
    with deferred_interrupt(), registry.claim_lock:
        for branch in branches:
            if branch.claimed_by is claim:
                branch.claimed_by = None
    if not claim.done():
        claim.set_result(None)
