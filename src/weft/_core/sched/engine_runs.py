"""Runs that the engine generates with its own loop: submitting, events and cancellation."""

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
from .batch import as_forward_error
from .jobs import MergeKey, RunJob
from .prefill import PathClaim
from .work import Extend, Item, Run, Scores, Ticket

if TYPE_CHECKING:
    from ..kv.tree import TokenTree
    from ..sampling.params import SamplingParams
    from ..sampling.sampler import Sampler
    from .queues import JobQueues

_log = logging.getLogger(__name__)


class EngineRunJob(RunJob):
    """A run that the engine generates with its own loop, such as a remote server's.

    The scheduler runs no steps for it.

    sibling_key: equal for waiting runs that can be submitted to the engine as one request.

    in_flight: the submitted request that it is part of; None while it waits.
    """

    can_preempt = False

    def __init__(self, age: int, tickets: Sequence[Ticket], engine_runs: EngineRunQueue) -> None:
        super().__init__(age, tickets)
        self.engine_runs = engine_runs
        self.sibling_key: MergeKey = None
        self.in_flight: InFlightRun | None = None
        self._reported: tuple[bool, bool] | None = None  # whether it has logprobs, and entropies

    def prepare(self, tree: TokenTree) -> None:
        """Create the claim of the prompt's path; it needs no KV, which the engine computes."""
        claim = PathClaim(self, self.sequence.base)
        claim.needs_kv = False
        self.claims = [claim]

    def start(self, queues: JobQueues) -> None:
        if self.sequence.depth >= queues.n_ctx:
            self.end_all("context", queues)
        else:
            self.engine_runs.add(self)

    def to_request(self, queues: JobQueues) -> GenerationRequest:
        """Return the request for the engine, with this run as its only sibling."""
        sampler, sequence = self.sampler, self.sequence
        params = replace(sampler.params, n=1, seed=None, max_tokens=1)
        n_left = min(self.limit, queues.n_ctx - sequence.depth)
        ids = tuple(sequence.end().ids())
        name = sequence.base.namespace
        return GenerationRequest(ids, params, (sampler.stream,), n_left, self.stops, name)

    def process_event(self, event: GenerationEvent, queues: JobQueues) -> None:
        """Accept the new tokens that the engine reports; end the run with the last event.

        Does nothing after the run has ended.
        """
        has = (event.logprobs is not None, event.entropies is not None)
        n = len(event.tokens)
        logprobs = [None] * n if event.logprobs is None else event.logprobs
        entropies = [None] * n if event.entropies is None else event.entropies
        if n and has != self._reported:
            self._reported = has if self._reported is None else self._clear_unreported(has)
        for token, logprob, entropy in zip(event.tokens, logprobs, entropies, strict=True):
            if self.done:
                return
            # The engine applies the penalties, so their history stays empty.
            if self.sampler.matcher is not None and token not in self.stops:
                self.sampler.matcher.accept(token)
            of_all = self._reported or has
            drawn = DrawnToken(
                token, logprob if of_all[0] else None, entropy if of_all[1] else None
            )
            self._append_token(drawn, queues)
            self._end_if_must(queues)
        if self.done or not event.is_last:
            return
        if event.error is not None:
            queues.fail(self, as_forward_error(event.error))
            return
        if event.ended_by is not None:
            for member in self.members:
                member.state.ended_by = event.ended_by
        matcher = self.sampler.matcher
        if event.end == "stop" and matcher is not None and not matcher.may_end:
            why = "the engine ended a text that its constraint does not let end"
            queues.fail(self, ForwardError(f"{why}, after {self.n_drawn} tokens"))
            return
        self.end_all(event.end or "error", queues)

    def _clear_unreported(self, has: tuple[bool, bool]) -> tuple[bool, bool]:
        """Clear logprobs or entropies of the run if the engine does not report them for each token.

        has: whether the current event has logprobs, and whether it has entropies.

        Returns: whether the run still has logprobs, and whether it still has entropies.
        """
        assert self._reported is not None
        both = (has[0] and self._reported[0], has[1] and self._reported[1])
        for member in self.members:
            if not both[0]:
                member.state.logprobs.clear()
            if not both[1]:
                member.state.entropies.clear()
        return both

    def finish(self, queues: JobQueues) -> None:
        self.engine_runs.cancel(self)
        super().finish(queues)

    def stop(self, queues: JobQueues) -> None:
        self.engine_runs.cancel(self)
        super().stop(queues)

    def merge_key(self) -> MergeKey:
        """Return a key that is equal for runs that one request can generate as siblings.

        These have the same prompt, sampling parameters and stop ids; sampled ones also the same
        limit.
        """
        cursor = self.claims[0].cursor
        params = replace(self.sampler.params, n=1, seed=None, max_tokens=1)
        length = None if self.sampler.greedy else self.limit  # of greedy ones the longest goes
        return (cursor, params, self.stops, length)


class InFlightRun:
    """A request that the engine is generating, with its jobs; None for cancelled ones.

    `open` has the indices of the jobs whose last event has not arrived.
    """

    def __init__(self, jobs: Sequence[EngineRunJob]) -> None:
        self.jobs: list[EngineRunJob | None] = list(jobs)
        self.open = set(range(len(jobs)))
        self.handle: Any = None


class EngineRunQueue:
    """Waiting and submitted runs of an engine that generates with its own loop.

    Callers hold the scheduler's lock, except for `wake`, `wait` and the engine's events.

    n_in_flight: runs that the engine has not ended, cancelled ones included.
    """

    def __init__(self, generator: EngineGenerator) -> None:
        self._generator = generator
        self.n_in_flight = 0
        # Jobs that wait for a free place in the engine; groups of siblings, oldest first.
        self._waiting: dict[MergeKey, dict[EngineRunJob, None]] = {}
        self._n_awaited = 0  # jobs in flight whose results are wanted
        self._events: deque[tuple[InFlightRun, GenerationEvent]] = deque()
        self._changed = threading.Event()

    @property
    def is_idle(self) -> bool:
        """True if no run waits for submission or for events."""
        return not self._waiting and not self._n_awaited

    def add(self, job: EngineRunJob) -> None:
        """Queue a job for submission."""
        job.sibling_key = job.merge_key()
        self._waiting.setdefault(job.sibling_key, {})[job] = None

    def _remove_waiting(self, job: EngineRunJob) -> None:
        """Remove a job from the queue."""
        sibling_key = self._waiting.get(job.sibling_key)
        if sibling_key is not None:
            sibling_key.pop(job, None)
            if not sibling_key:
                del self._waiting[job.sibling_key]

    def cancel(self, job: EngineRunJob) -> None:
        """Remove a job that has ended, and cancel its run in the engine if it was submitted.

        An error of the engine is only logged.
        """
        self._remove_waiting(job)
        in_flight, job.in_flight = job.in_flight, None
        if in_flight is None:
            return
        self._n_awaited -= 1
        number = in_flight.jobs.index(job)
        in_flight.jobs[number] = None
        if number in in_flight.open and in_flight.handle is not None:
            try:
                self._generator.cancel(in_flight.handle, number)
            except Exception as error:  # the run goes on in the engine; its events are ignored
                _log.warning("a run could not be cancelled: %r", error)

    def wake(self) -> None:
        """End a `wait` of the scheduler. Any thread may call it."""
        self._changed.set()

    def wait(self, seconds: float) -> None:
        """Block until an event or `wake`, at most `seconds`. Do not hold the lock."""
        self._changed.wait(seconds)

    # Submitting

    def submit_waiting(self, queues: JobQueues) -> int:
        """Submit waiting runs, oldest first, while the engine has free places.

        Returns: the number of requests.
        """
        n_sent = 0
        while self._waiting and self.n_in_flight < self._generator.max_in_flight:
            self._submit(self._pop_siblings(queues), queues)
            n_sent += 1
        return n_sent

    def _pop_siblings(self, queues: JobQueues) -> list[EngineRunJob]:
        """Remove and return the oldest waiting job, with jobs that can share its request.

        Greedy siblings give the same tokens, so the oldest absorbs them. A job with a constraint is
        returned alone.
        """
        sibling_key = next(iter(self._waiting.values()))
        first = next(iter(sibling_key))
        if first.sampler.greedy:  # all siblings give the same tokens
            for job in list(sibling_key)[1:]:
                self._remove_waiting(job)
                first.absorb(job, queues)
        n_free = self._generator.max_in_flight - self.n_in_flight
        n_siblings = 1 if first.sampler.matcher is not None else n_free
        siblings = list(islice(sibling_key, n_siblings))
        for job in siblings:
            self._remove_waiting(job)
        return siblings

    def _submit(self, jobs: list[EngineRunJob], queues: JobQueues) -> None:
        """Submit jobs to the engine as one request."""
        in_flight = InFlightRun(jobs)
        to_request = replace(
            jobs[0].to_request(queues), streams=tuple(job.sampler.stream for job in jobs)
        )
        try:
            in_flight.handle = self._generator.start(
                to_request, lambda event: self._on_event(in_flight, event)
            )
        except Exception as error:
            for job in jobs:
                queues.fail(job, as_forward_error(error))
            return
        for job in jobs:
            job.in_flight = in_flight
        self.n_in_flight += len(jobs)
        self._n_awaited += len(jobs)

    # Events

    def _on_event(self, in_flight: InFlightRun, event: GenerationEvent) -> None:
        """Queue an event of the engine, and wake the scheduler. Any thread."""
        self._events.append((in_flight, event))
        self._changed.set()

    def process_events(self, queues: JobQueues) -> int:
        """Give the queued events to their jobs; return the number of events."""
        self._changed.clear()
        n_heard = 0
        while self._events:
            in_flight, event = self._events.popleft()
            n_heard += 1
            job = in_flight.jobs[event.sibling]
            if event.is_last and event.sibling in in_flight.open:
                in_flight.open.discard(event.sibling)
                self.n_in_flight -= 1
            if job is not None:
                queues.guard(job, job.process_event, event, queues)
        return n_heard


def check_steps_needed(items: Iterable[Item], engine: Engine) -> None:
    """Raise Unsupported for items that an engine without steps cannot run.

    It can generate runs by itself, and some engines can also score given tokens.
    """
    name, scores = engine.info.name, engine.info.capabilities.scoring
    for item in items:
        if scores and isinstance(item, Extend) and _is_scoring(item):
            continue
        if not isinstance(item, Run):
            raise no_steps_error(engine)
        why = why_not_generated(item.sampler, engine.native)
        if why is not None:
            raise Unsupported(
                f"{engine.info.model} on the {name} engine generates complete runs only, and cannot"
                f" honour {why}"
            )


def no_steps_error(engine: Engine) -> Unsupported:
    """Return the error for work that needs steps, for an engine that generates full runs only."""
    info = engine.info
    measuring = "" if info.capabilities.scoring else ", no measuring"
    return Unsupported(
        f"{info.model} on the {info.name} engine generates complete runs only: no next-token"
        f" distributions{measuring}, no branches that are committed token by token",
        hint="load the model itself, by another engine, for what needs single steps",
    )


def check_steps(params: SamplingParams, engine: Engine) -> None:
    """Raise Unsupported if the engine has no steps, or if `check_params` does."""
    if not engine.info.capabilities.steps:
        raise no_steps_error(engine)
    check_params(params, engine)


def check_raw_logits(items: Iterable[Item], engine: Engine) -> None:
    """Raise Unsupported for runs that need raw logits, if the engine returns none.

    Runs that the engine can generate by itself are accepted.
    """
    for item in items:
        if isinstance(item, Run) and why_not_generated(item.sampler, engine.native) is not None:
            check_params(item.sampler.params, engine)


def check_params(params: SamplingParams, engine: Engine) -> None:
    """Raise Unsupported for parameters that need raw logits, if the engine has none."""
    if params.repetition_penalty != 1 and not engine.info.capabilities.raw_logits:
        raise Unsupported(
            f"{engine.info.model} gives log-probabilities and no raw logits, whose signs a"
            " repetition_penalty asks for: it works in complete runs only. Take presence_penalty or"
            " frequency_penalty"
        )


def _is_scoring(item: Extend) -> bool:
    """Return True if the item requests nothing but scores without `top` ids."""
    return bool(item.wants) and all(
        isinstance(want, Scores) and not want.top for want in item.wants
    )


def why_not_generated(sampler: Sampler, generator: EngineGenerator | None) -> str | None:
    """Return the reason why an engine cannot generate a run by itself; None if it can.

    Args:
        sampler: the sampler of the run.
        generator: the engine's own loop; None if the engine has none.
    """
    if generator is None:
        return "anything but steps"
    if sampler.resumed:
        return "a constraint that has begun before this node"
    return generator.unsupported_params(sampler.params)
