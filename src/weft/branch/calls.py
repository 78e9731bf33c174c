"""Commits and prefills of many branches: checked, run as one atomic call, then put in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import ConfigError
from ..kv.cursor import Place
from ..sched.work import Extend, Logits, Scores, Want
from .metrics import Accepted
from .tenancy import Tenancy
from .turns import aturn, turn

if TYPE_CHECKING:
    from ..lm import LM
    from ..sampling.chain import Sampler
    from .branch import Branch

Pairs = Sequence[tuple["Branch", Any]]


class Call(Protocol):
    """What runs the model for branches; nothing of theirs is changed before `finish`."""

    items: list[Extend]

    def finish(self, answers: list[list[Any]]) -> None:
        """Put the new state in place."""


class Commit:
    """A token accepted and run on each of some branches. Everything advances on copies."""

    def __init__(self, pairs: Pairs) -> None:
        self.parts = [_CommitPart(branch, token) for branch, token in pairs]
        self.items = [part.item for part in self.parts]

    def finish(self, answers: list[list[Any]]) -> None:
        for part, answer in zip(self.parts, answers, strict=True):
            part.finish(answer)


class _CommitPart:
    """One branch's share of a commit."""

    def __init__(self, branch: Branch, token: int) -> None:
        self.branch = branch
        self.token = branch.checked_token(token)
        self.place = branch.lm.place((self.token,), after=branch.place)
        self.sampler: Sampler | None = None
        wants: list[Want] = [Logits(self.place.depth)]
        self.accepted_before = branch.accepted_ahead(self.token)
        self.surprisals: tuple[float | None, float | None] = (None, None)
        if not self.accepted_before:
            self.sampler = branch.sampler.clone() if branch.sampler.needs_host else branch.sampler
            self.sampler.accept(self.token)
            known = branch.surprisals(self.token)
            if known is not None:
                self.surprisals = known
            elif branch.position:
                wants.append(Scores(branch.position, self.place.depth))
        self.item = Extend(self.place, (), tuple(wants))

    def finish(self, answer: list[Any]) -> None:
        branch = self.branch
        if self.accepted_before:
            branch.take_accepted(1)
        else:
            assert self.sampler is not None
            raw, kept = self.surprisals
            if len(answer) > 1:
                raw = -float(answer[1].logprobs[0])
            last = Accepted(branch.last, branch.position, self.token, raw, kept)
            branch.sampler, branch.last = self.sampler, last
        branch.moved(self.place, answer[0])
        branch.stream.push(self.token)


class Prefill:
    """Tokens run on each of some branches, not accepted: penalties, grammar, metrics stay."""

    def __init__(self, pairs: Pairs) -> None:
        self.parts: list[tuple[Branch, list[int], Place]] = []
        for branch, tokens in pairs:
            ids = [branch.checked_token(token) for token in tokens]
            if ids:
                place = branch.lm.place(ids, after=branch.place)
                branch.check_ahead(ids)
                self.parts.append((branch, ids, place))
        self.items = [Extend(place, (), (Logits(place.depth),)) for _, _, place in self.parts]

    def finish(self, answers: list[list[Any]]) -> None:
        for (branch, ids, place), answer in zip(self.parts, answers, strict=True):
            branch.take_accepted(len(ids))
            branch.moved(place, answer[0])
            branch.stream.flush()


class Read:
    """Rows of logits that were forgotten, read again: one token a branch is run, no KV written."""

    def __init__(self, branches: Sequence[Branch]) -> None:
        self.branches = branches
        self.items = [Extend(branch.place, (), (Logits(branch.position),)) for branch in branches]

    def finish(self, answers: list[list[Any]]) -> None:
        for branch, answer in zip(self.branches, answers, strict=True):
            branch.tenancy.keep(branch.needed_row(), answer[0])


def run(lm: LM, branches: Sequence[Branch], make: Any, of: Any) -> None:
    """Check, run and finish a call; the branches' other calls wait meanwhile."""
    with turn(Tenancy.of(lm), branches):
        call: Call = make(of)
        if call.items:
            tickets = lm.submit(call.items, atomic=True)
            lm.drive(tickets)
            call.finish([ticket.result() for ticket in tickets])


async def arun(lm: LM, branches: Sequence[Branch], make: Any, of: Any) -> None:
    """The awaitable form of `run`; cancelled, it leaves the branches as they were."""
    async with aturn(Tenancy.of(lm), branches):
        call: Call = make(of)
        if call.items:
            tickets = await lm.asubmit(call.items, atomic=True)
            await lm.adrive(tickets)
            call.finish([ticket.result() for ticket in tickets])


def checked_pairs(lm: LM, pairs: Pairs, call: str) -> list[Branch]:
    """Return the branches of a call. Raises before anything ran: StaleHandle, ConfigError."""
    branches: dict[Branch, None] = {}
    for branch, _ in pairs:
        branch.alive()
        if branch.lm is not lm:
            raise ConfigError(f"{branch!r} belongs to another LM; {call} takes branches of one")
        if branch in branches:
            raise ConfigError(f"{branch!r} is twice in one {call}; give each branch once")
        branches[branch] = None
    return list(branches)
