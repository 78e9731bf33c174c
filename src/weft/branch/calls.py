"""Commits and prefills of many branches: in turn, checked, run as one atomic call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from .._core.sched import work
from .._core.sched.driver import deferred_interrupt
from .._core.sched.work import Extend, Item, Logits, Scores
from ..constraints.lines import can_begin_after
from ..errors import ConfigError
from .state import Accepted, LiveBranches

if TYPE_CHECKING:
    from .._core.sampling.sampler import Sampler
    from .._core.sched.jobs import Committed
    from .._core.sched.lines import Line
    from .._core.sched.rows import LogitsRow
    from .._core.sched.work import Want
    from ..engines.base import Score
    from ..lm.lm import LM
    from .branch import Branch

Pairs = Sequence[tuple["Branch", Any]]


class BranchCall(Protocol):
    """What runs the model for branches; nothing of theirs is changed before all has run.

    Each stage: items to run together, and what to do with their answers.
    """

    def stages(self) -> Iterator[tuple[list[Item], Callable[[list[Any]], None]]]: ...


class CommitCall:
    """A token accepted and run on each of some branches. Everything advances on copies."""

    def __init__(self, pairs: Pairs) -> None:
        self.parts = [_CommitPart(branch, token) for branch, token in pairs]
        # A step runs lines of one adapter: those of each come together.
        if len({part.branch.base.namespace for part in self.parts}) > 1:
            self.parts.sort(key=lambda part: part.branch.adapter or "")

    def stages(self) -> Iterator[tuple[list[Item], Callable[[list[Any]], None]]]:
        """Read the rows that figures need and nobody kept, then run the tokens."""
        unknown = [part.branch for part in self.parts if part.is_unknown()]
        if unknown:
            yield from ReadCall(unknown).stages()
        parts = self.parts
        if parts:
            lines = [part.branch.going_on() for part in parts]
            tokens = [part.token for part in parts]
            item = work.Commit(lines, tokens, [part.ahead() for part in parts])
            yield [item], lambda answers: self._finish(lines, answers[0])

    def _finish(self, lines: list[Line], answers: list[Committed]) -> None:
        for part, line, answer in zip(self.parts, lines, answers, strict=True):
            part.finish(line, answer)


class _CommitPart:
    """One branch's share of a commit."""

    __slots__ = ("accepted_before", "branch", "sampler", "steering", "token", "unscored", "used")

    def __init__(self, branch: Branch, token: int) -> None:
        self.branch = branch
        self.token = branch.checked_token(token)
        if branch.position >= branch.lm.n_ctx:
            branch.lm.place((self.token,), after=branch.place)  # which says what is wrong
        self.accepted_before = branch.accepted_ahead(self.token)
        self.unscored = not self.accepted_before or branch.is_unscored()
        self.used = self.sampler = branch.sampler
        self.steering = branch.steering
        if not self.accepted_before and self.used.needs_host:
            self.sampler = self.used.clone()
            self.sampler.accept(self.token)

    def is_unknown(self) -> bool:
        """Whether its figures need a row of logits that must be read again."""
        branch = self.branch
        if not self.unscored or branch.row is None:
            return False
        drawn = branch.drawn
        known = drawn is not None and drawn.token == self.token
        return not known and branch.lm.scheduler.rows.read(branch.row) is None

    def ahead(self) -> Sampler:
        """Return what draws the token after in the same step: it has accepted this one already."""
        return self.sampler.steered(self.steering) if self.steering else self.sampler

    def finish(self, line: Line, answer: Committed) -> None:
        branch, token = self.branch, self.token
        raw, kept = branch.surprisals(token) or (None, None) if self.unscored else (None, None)
        if self.accepted_before:
            branch.take_accepted([raw])
        else:
            branch.last = Accepted(branch.last, branch.position, token, raw, kept)
            if branch.sampler is self.used:
                branch.sampler = self.sampler
            else:  # set anew while the commit was on its way
                branch.sampler.accept(token)
        branch.advanced(line, token)
        branch.row, branch.instead = answer.row, None
        branch.stream.push(token)
        as_asked = branch.sampler is self.sampler and branch.steering is self.steering
        drawn = answer.drawn if as_asked else None
        branch.drawn = None if drawn is None else branch.produced(*drawn)


class PrefillCall:
    """Tokens run on each of some branches, not accepted: penalties, grammar, metrics stay."""

    def __init__(self, pairs: Pairs) -> None:
        self.parts: list[_PrefillPart] = []
        for branch, tokens in pairs:
            if isinstance(tokens, str) or not _is_iterable(tokens):
                raise ConfigError(
                    f"tokens are {tokens!r:.80}; allowed is a sequence of token ids. Of a text they"
                    " are lm.tokenize(text), of chat messages lm.format_chat(messages).ids"
                )
            ids = [branch.checked_token(token) for token in tokens]
            if ids:
                _warn_of_prompt(branch, ids)
                self.parts.append(_PrefillPart(branch, ids))

    def stages(self) -> Iterator[tuple[list[Item], Callable[[list[Any]], None]]]:
        """Yield one stage: the tokens of all branches, each its own item."""
        if self.parts:
            yield [Extend(part.place, (), part.wants()) for part in self.parts], self._finish

    def _finish(self, answers: list[list[Any]]) -> None:
        for part, answer in zip(self.parts, answers, strict=True):
            part.finish(*answer)


def _warn_of_prompt(branch: Branch, ids: Sequence[int]) -> None:
    """Warn if a prompt lacks BOS, or if it ends in a space and a grammar follows."""
    text = branch.lm.text
    if not branch.position:
        text.warn_without_bos(ids)
    n_accepted = 0 if branch.last is None else branch.last.n
    constraint, is_fresh = branch.params.constraint, branch.grammar_from == n_accepted
    if constraint is not None and is_fresh and can_begin_after(constraint):
        text.warn_of_end_space(ids)


class _PrefillPart:
    """One branch's share of a prefill; its first `n_ahead` tokens were accepted before.

    first: the first of these whose surprisal the run gives.
    """

    __slots__ = ("branch", "first", "n_ahead", "place")

    def __init__(self, branch: Branch, ids: list[int]) -> None:
        self.branch = branch
        self.place = branch.lm.place(ids, after=branch.place)
        self.n_ahead = branch.check_ahead(ids)
        scored = (n for n in range(self.n_ahead) if branch.position + n and branch.is_unscored(n))
        self.first = next(scored, self.n_ahead)

    def wants(self) -> tuple[Want, ...]:
        start, row = self.branch.position, Logits(self.place.depth, kept=True)
        if self.first == self.n_ahead:
            return (row,)
        return row, Scores(start + self.first, start + self.n_ahead)

    def finish(self, row: LogitsRow, scores: Score | None = None) -> None:
        found: list[float | None] = [None] * self.n_ahead
        if scores is not None:
            found[self.first :] = (-scores.logprobs).tolist()
        self.branch.take_accepted(found)
        self.branch.moved(self.place, row)
        self.branch.stream.flush()


class ReadCall:
    """Rows of logits that were forgotten, read again: one token a branch is run, no KV written."""

    def __init__(self, branches: Sequence[Branch]) -> None:
        self.branches = branches

    def stages(self) -> Iterator[tuple[list[Item], Callable[[list[Any]], None]]]:
        """Yield one stage: the logits where each branch stands."""
        branches = self.branches
        yield [Extend(each.place, (), (Logits(each.position),)) for each in branches], self._finish

    def _finish(self, answers: list[list[Any]]) -> None:
        for branch, answer in zip(self.branches, answers, strict=True):
            branch.lm.scheduler.rows.fill(branch.needed_row(), answer[0], wanted=True)


def run(lm: LM, branches: Sequence[Branch], make: Any, of: Any) -> None:
    """Check, run and finish a call; the branches' other calls wait meanwhile."""
    with turn(LiveBranches.of(lm), branches), placed(branches):
        lm.see_weights()
        call: BranchCall = make(of)
        for items, finish in call.stages():
            tickets = lm.submit(items, atomic=isinstance(items[0], Extend))
            lm.drive(tickets)
            with deferred_interrupt():
                finish([ticket.result() for ticket in tickets])


@contextmanager
def placed(branches: Sequence[Branch]) -> Iterator[None]:
    """After an error, let branches go on from their places: a commit may be on its way still."""
    try:
        yield
    except BaseException:
        for branch in branches:
            if branch.ended_by is None:
                _ = branch.place
        raise


async def arun(lm: LM, branches: Sequence[Branch], make: Any, of: Any) -> None:
    """The awaitable form of `run`; cancelled, it leaves the branches as they were."""
    async with aturn(LiveBranches.of(lm), branches):
        with placed(branches):
            await lm.asee_weights()
            call: BranchCall = make(of)
            for items, finish in call.stages():
                tickets = await lm.asubmit(items, atomic=isinstance(items[0], Extend))
                await lm.adrive(tickets)
                finish([ticket.result() for ticket in tickets])


def checked_pairs(lm: LM, pairs: Pairs, call: str) -> list[Branch]:
    """Return the branches of a call. Raises before anything ran: StaleHandle, ConfigError."""
    branches: dict[Branch, None] = {}
    if not _is_iterable(pairs):
        raise ConfigError(f"{call} has {pairs!r}; allowed are pairs of a branch and its tokens")
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not hasattr(pair[0], "alive"):
            raise ConfigError(f"{call} has {pair!r}; allowed are pairs of a branch and its tokens")
        branch = pair[0]
        branch.alive()
        if branch.lm is not lm:
            raise ConfigError(f"{branch!r} belongs to another LM; {call} takes branches of one")
        if branch in branches:
            raise ConfigError(f"{branch!r} is twice in one {call}; give each branch once")
        branches[branch] = None
    return list(branches)


def _is_iterable(given: object) -> bool:
    try:
        iter(given)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


@contextmanager
def turn(peers: LiveBranches, branches: Sequence[Branch]) -> Iterator[None]:
    """Have the branches for oneself; blocks while others have them."""
    mine: Future[Any] = Future()
    try:
        while (other := _claim(peers, branches, mine)) is not None:
            other.result()
        yield
    finally:
        try:
            _release(peers, branches, mine)
        except BaseException:  # Ctrl-C came before it began
            _release(peers, branches, mine)
            raise


@asynccontextmanager
async def aturn(peers: LiveBranches, branches: Sequence[Branch]) -> AsyncIterator[None]:
    """The same for an event loop, which goes on meanwhile."""
    mine: Future[Any] = Future()
    try:
        while (other := _claim(peers, branches, mine)) is not None:
            await asyncio.shield(asyncio.wrap_future(other))
        yield
    finally:
        _release(peers, branches, mine)


def _claim(
    peers: LiveBranches, branches: Sequence[Branch], mine: Future[Any]
) -> Future[Any] | None:
    with deferred_interrupt(), peers.turns:
        for branch in branches:
            if branch.busy is not None:
                return branch.busy
        for branch in branches:
            branch.busy = mine
        return None


def _release(peers: LiveBranches, branches: Sequence[Branch], mine: Future[Any]) -> None:
    with deferred_interrupt(), peers.turns:
        for branch in branches:
            if branch.busy is mine:
                branch.busy = None
    if not mine.done():
        mine.set_result(None)
