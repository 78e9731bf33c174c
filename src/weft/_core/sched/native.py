"""Runs that the engine generates by itself: handed over, heard of, and ended early."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...engines.base import Engine
from ...engines.generation import EngineGenerator, GenerationEvent, GenerationRequest
from ...errors import ForwardError, Unsupported
from ..sampling.sampler import DrawnToken
from .jobs import MergeKey, RunJob
from .reads import Claim
from .step import as_forward_error
from .work import Extend, Item, Run, Scores, Ticket

if TYPE_CHECKING:
    from ..sampling.params import SamplingParams
    from ..sampling.sampler import Sampler
    from .desk import Desk

_log = logging.getLogger(__name__)


class NativeJob(RunJob):
    """A run that the engine generates: waiting to be handed over, then heard of until it ends.

    family: what it has in common with its siblings, while it waits. flight: what it is on its way
    as; None while it waits.
    """

    can_park = False

    def __init__(self, age: int, tickets: Sequence[Ticket], abroad: Abroad) -> None:
        super().__init__(age, tickets)
        self.abroad = abroad
        self.family: MergeKey = None
        self.flight: Flight | None = None
        self._figures: tuple[bool, bool] | None = None  # whether logprobs, entropies are told

    def prepare(self) -> None:
        """Claim the path, of which nothing has to be known here."""
        claim = Claim(self, self.line.base)
        claim.wants_kv = False
        self.claims = [claim]

    def start(self, desk: Desk) -> None:
        if self.line.depth >= desk.n_ctx:
            self.end_all("context", desk)
        else:
            self.abroad.add(self)

    def ask(self, desk: Desk) -> GenerationRequest:
        """Return what the engine is asked for, with this run as its only sibling."""
        sampler, line = self.sampler, self.line
        params = replace(sampler.params, n=1, seed=None, max_tokens=1)
        n_left = min(self.limit, desk.n_ctx - line.depth)
        ids = tuple(line.end().ids())
        name = line.base.namespace
        return GenerationRequest(ids, params, (sampler.stream,), n_left, self.stops, name)

    def hear(self, event: GenerationEvent, desk: Desk) -> None:
        """Go on by what the engine tells; after its end nothing more is heard."""
        known = (event.logprobs is not None, event.entropies is not None)
        n = len(event.tokens)
        logprobs = [None] * n if event.logprobs is None else event.logprobs
        entropies = [None] * n if event.entropies is None else event.entropies
        if n and known != self._figures:
            self._figures = known if self._figures is None else self._fewer(known)
        for token, logprob, entropy in zip(event.tokens, logprobs, entropies, strict=True):
            if self.done:
                return
            if self.sampler.needs_host and token not in self.stops:
                self.sampler.accept(token)
            of_all = self._figures or known
            drawn = DrawnToken(
                token, logprob if of_all[0] else None, entropy if of_all[1] else None
            )
            self._take(drawn, desk)
            self._end_if_must(desk)
        if self.done or not event.is_last:
            return
        if event.error is not None:
            desk.fail(self, as_forward_error(event.error))
            return
        if event.ended_by is not None:
            for member in self.members:
                member.state.ended_by = event.ended_by
        matcher = self.sampler.matcher
        if event.end == "stop" and matcher is not None and not matcher.may_end:
            why = "the engine ended a text that its constraint does not let end"
            desk.fail(self, ForwardError(f"{why}, after {self.n_drawn} tokens"))
            return
        self.end_all(event.end or "error", desk)

    def _fewer(self, known: tuple[bool, bool]) -> tuple[bool, bool]:
        """Figures that are not told of every token are those of none."""
        assert self._figures is not None
        both = (known[0] and self._figures[0], known[1] and self._figures[1])
        for member in self.members:
            if not both[0]:
                member.state.logprobs.clear()
            if not both[1]:
                member.state.entropies.clear()
        return both

    def finish(self, desk: Desk) -> None:
        self.abroad.leave(self)
        super().finish(desk)

    def stop(self, desk: Desk) -> None:
        self.abroad.leave(self)
        super().stop(desk)

    def merge_key(self) -> MergeKey:
        """Return what runs have in common that are siblings of one prompt."""
        cursor = self.claims[0].cursor
        params = replace(self.sampler.params, n=1, seed=None, max_tokens=1)
        length = None if self.sampler.greedy else self.limit  # of greedy ones the longest goes
        return (cursor, params, self.stops, length)


class Flight:
    """Siblings on their way: which job is which, and which of them are not over yet."""

    def __init__(self, jobs: Sequence[NativeJob]) -> None:
        self.jobs: list[NativeJob | None] = list(jobs)
        self.open = set(range(len(jobs)))
        self.handle: Any = None


class Abroad:
    """The runs that an engine generates by itself, under the scheduler's lock but for `tell`.

    n_away: siblings there that are not over.
    """

    def __init__(self, native: EngineGenerator) -> None:
        self._native = native
        self.n_away = 0
        # Those that wait for room there; families and their members in the order they came, which
        # is that of their age.
        self._waiting: dict[MergeKey, dict[NativeJob, None]] = {}
        self._n_heard_of = 0  # jobs on their way that somebody waits for
        self._heard: deque[tuple[Flight, GenerationEvent]] = deque()
        self._news = threading.Event()

    @property
    def is_idle(self) -> bool:
        """Nobody waits for news."""
        return not self._waiting and not self._n_heard_of

    def add(self, job: NativeJob) -> None:
        """Let a job wait for its turn."""
        job.family = job.merge_key()
        self._waiting.setdefault(job.family, {})[job] = None

    def _take(self, job: NativeJob) -> None:
        """A job waits no longer."""
        family = self._waiting.get(job.family)
        if family is not None:
            family.pop(job, None)
            if not family:
                del self._waiting[job.family]

    def leave(self, job: NativeJob) -> None:
        """A job is over: what of it is on its way is not wanted any more."""
        self._take(job)
        flight, job.flight = job.flight, None
        if flight is None:
            return
        self._n_heard_of -= 1
        number = flight.jobs.index(job)
        flight.jobs[number] = None
        if number in flight.open and flight.handle is not None:
            try:
                self._native.cancel(flight.handle, number)
            except Exception as error:  # it runs to its end there; nobody hears of it
                _log.warning("a run could not be cancelled: %r", error)

    def wake(self) -> None:
        """End a wait; any thread."""
        self._news.set()

    def wait(self, seconds: float) -> None:
        """Wait until there is news, or so long. Without the lock."""
        self._news.wait(seconds)

    # Handing over

    def send(self, desk: Desk) -> int:
        """Hand over what may go, the oldest first; return how often something did, or failed."""
        n_sent = 0
        while self._waiting and self.n_away < self._native.most:
            self._start(self._siblings(desk), desk)
            n_sent += 1
        return n_sent

    def _siblings(self, desk: Desk) -> list[NativeJob]:
        """Take the oldest waiting job, with its siblings as far as there is room."""
        family = next(iter(self._waiting.values()))
        first = next(iter(family))
        if first.sampler.greedy:  # all say the same
            for job in list(family)[1:]:
                self._take(job)
                first.carry(job, desk)
        most = 1 if first.sampler.matcher is not None else self._native.most - self.n_away
        siblings = list(islice(family, most))
        for job in siblings:
            self._take(job)
        return siblings

    def _start(self, jobs: list[NativeJob], desk: Desk) -> None:
        for job in jobs:
            desk.guard(job, _prime, job, desk)
        jobs = [job for job in jobs if not job.done]
        if not jobs:
            return
        flight = Flight(jobs)
        ask = replace(jobs[0].ask(desk), streams=tuple(job.sampler.stream for job in jobs))
        try:
            flight.handle = self._native.start(ask, lambda event: self._tell(flight, event))
        except Exception as error:
            for job in jobs:
                desk.fail(job, as_forward_error(error))
            return
        for job in jobs:
            job.flight = flight
        self.n_away += len(jobs)
        self._n_heard_of += len(jobs)

    # Hearing

    def _tell(self, flight: Flight, event: GenerationEvent) -> None:
        self._heard.append((flight, event))
        self._news.set()

    def hear(self, desk: Desk) -> int:
        """Give what was told to the jobs; return how many events there were."""
        self._news.clear()
        n_heard = 0
        while self._heard:
            flight, event = self._heard.popleft()
            n_heard += 1
            job = flight.jobs[event.sibling]
            if event.is_last and event.sibling in flight.open:
                flight.open.discard(event.sibling)
                self.n_away -= 1
            if job is not None:
                desk.guard(job, job.hear, event, desk)
        return n_heard


def _prime(job: NativeJob, desk: Desk) -> None:
    """Let penalties see the prompt."""
    if job.sampler.needs_host:
        job.sampler.prime(job.line.base.ids())


def refuse(items: Iterable[Item], engine: Engine) -> None:
    """Raise Unsupported for work that an engine without steps cannot do."""
    name, scores = engine.info.name, engine.info.capabilities.scoring
    for item in items:
        if scores and isinstance(item, Extend) and _is_scoring(item):
            continue
        if not isinstance(item, Run):
            raise without_steps(engine)
        why = why_not_native(item.sampler, engine.native)
        if why is not None:
            raise Unsupported(
                f"{engine.info.model} on the {name} engine generates whole runs only, and cannot"
                f" honour {why}"
            )


def without_steps(engine: Engine) -> Unsupported:
    """Return what is raised for work that needs the steps an engine does not have."""
    info = engine.info
    measuring = "" if info.capabilities.scoring else ", no measuring"
    return Unsupported(
        f"{info.model} on the {info.name} engine generates whole runs only: no next-token"
        f" distributions{measuring}, no branches that are committed token by token",
        hint="load the model itself, by another engine, for what needs single steps",
    )


def check_steps(params: SamplingParams, engine: Engine) -> None:
    """Raise Unsupported for an engine without steps, and for what its rows do not carry."""
    if not engine.info.capabilities.steps:
        raise without_steps(engine)
    check_rows_suffice(params, engine)


def refuse_scaled(items: Iterable[Item], engine: Engine) -> None:
    """Raise Unsupported for runs that would need the logits of an engine that has none, raw."""
    for item in items:
        if isinstance(item, Run) and why_not_native(item.sampler, engine.native) is not None:
            check_rows_suffice(item.sampler.params, engine)


def check_rows_suffice(params: SamplingParams, engine: Engine) -> None:
    """Raise Unsupported for parameters that cannot be honoured by the engine's rows."""
    if params.repetition_penalty != 1 and not engine.info.capabilities.raw_logits:
        raise Unsupported(
            f"{engine.info.model} gives log-probabilities and no raw logits, whose signs a"
            " repetition_penalty asks for: it works in whole runs only. Take presence_penalty or"
            " frequency_penalty"
        )


def _is_scoring(item: Extend) -> bool:
    """Whether nothing is wanted but the scores of given tokens."""
    return bool(item.wants) and all(
        isinstance(want, Scores) and not want.top for want in item.wants
    )


def why_not_native(sampler: Sampler, native: EngineGenerator | None) -> str | None:
    """Say why the engine cannot generate a run by itself; None: it can."""
    if native is None:
        return "anything but steps"
    if sampler.resumed:
        return "a constraint that has begun before this node"
    return native.unsupported_params(sampler.params)
