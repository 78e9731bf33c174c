"""A scheduler with its driver and nothing above: no text, no model.

MemoryEngine: reads the path of every row back from its KV, and its logits are a rule of that path.
A slot in a wrong place changes a text or fails at once.
Rig: the assembled parts, and the results that the rule gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from functools import lru_cache
from typing import Any

import numpy as np

from core.kv.listkv import ListFragments
from fakes import Boom
from weft._core.kv.place import Place
from weft._core.kv.tree import TokenTree
from weft._core.sampling import metrics
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.rng import stream_of
from weft._core.sampling.sampler import BatchSampler, DrawResult, Sampler
from weft._core.sched.driver import Driver
from weft._core.sched.scheduler import Scheduler
from weft._core.sched.speculation import StepCosts
from weft._core.sched.work import Extend, Run, RunResult, Ticket, Want
from weft.constraints.base import Matcher
from weft.engines.base import (
    Engine,
    EngineInfo,
    Fragment,
    Fragments,
    FutureTokens,
    HostOutput,
    Output,
    Row,
    Score,
    ScoreSpan,
)

N_VOCAB = 16


def logits_after(ids: Sequence[int]) -> np.ndarray:
    """Return the raw logits of the rule after a path, float32 [V], read-only."""
    return _logits_after(tuple(ids))


@lru_cache(maxsize=1 << 14)
def _logits_after(ids: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng([token + 1 for token in ids])
    logits = (rng.standard_normal(N_VOCAB) * 2).astype(np.float32)
    logits.flags.writeable = False
    return logits


def score_of(ids: Sequence[int], first: int, last: int, top: int) -> Score:
    """Return the expected result of `Scores(first, last, top)` of a path."""
    rows = np.stack([logits_after(ids[:depth]) for depth in range(first, last)])
    return metrics.score(rows, np.array(ids[first:last]), top)


def draw_after(ids: Sequence[int], sampler: Sampler | BatchSampler) -> DrawResult:
    """Draw one token after a path, by a sampler or by the batch of one that has it."""
    batch = BatchSampler([sampler]) if isinstance(sampler, Sampler) else sampler
    at = np.array([len(ids)], dtype=np.uint64)
    return batch.draw(logits_after(ids)[None], np.zeros(1, dtype=np.int64), at, kept=True)


def text_after(ids: Sequence[int], run: Run, n_ctx: int) -> tuple[list[int], str]:
    """Return tokens and finish reason of a run after `ids`, computed one path at a time."""
    path, generated = list(ids), list[int]()
    sampler = Sampler(run.sampler.params, run.sampler.stream)  # the run's own has counted
    sampler.add_prompt(path)
    batch = BatchSampler([sampler])
    while len(path) < n_ctx:
        token = int(draw_after(path, batch).ids[0])
        if token in run.stop_ids:
            return generated, "stop"
        sampler.accept(token)
        path.append(token)
        generated.append(token)
        if len(generated) == run.max_tokens:
            return generated, "length"
    return generated, "context"


class MemoryEngine(Engine):
    """See the module. `sizes` and `adapters`: the tokens of every forward, and whose they are."""

    def __init__(
        self, *, hidden: bool = False, same_thread_only: bool = False, idle_slots: int | None = None
    ) -> None:
        self.info = EngineInfo(
            name="memory",
            model="memory",
            n_layers=1,
            n_vocab=N_VOCAB,
            context_length=1 << 20,
            kv_bytes_per_token=0 if hidden else 1,
            dtype="float32",
            fingerprint="memory",
            kv="hidden" if hidden else "addressable",
            same_thread_only=same_thread_only,
            idle_slots=idle_slots,
        )
        self.kv = ListFragments()
        self.fragments = None if hidden else self.kv
        self.sizes: list[int] = []
        self.adapters: list[set[str | None]] = []

    def forward(self, rows: Sequence[Row]) -> Output:
        self.sizes.append(sum(row.n_tokens for row in rows))
        self.adapters.append({row.adapter for row in rows})
        dests = [row.kv_out for row in rows if row.kv_out is not None]
        assert len(set(dests)) == len(dests), "two rows write one fragment"
        logits, scores = [], []
        for row in rows:
            path = self._path(row)
            logits += [logits_after(path[: row.position + at + 1]) for at in row.logits_at]
            scores.append(
                [self._score(path[: row.position + span.start + 1], span) for span in row.scores]
            )
        for row in rows:
            if row.kv_out is not None:
                self.kv.write(row.kv_out, list(self._tokens(row)), row.position)
        return HostOutput(np.array(logits, np.float32).reshape(-1, N_VOCAB), scores)

    def _score(self, before: list[int], span: ScoreSpan) -> Score:
        path = [*before, *span.targets]
        return score_of(path, len(before), len(path), span.top)

    def _path(self, row: Row) -> list[int]:
        fragments = [(span.fragment, span.length) for span in row.prefix]
        if row.kv_out is not None:
            fragments.append((row.kv_out, row.kv_out.length))
        slots = [slot for part, length in fragments for slot in self.kv._use(part).slots[:length]]
        assert [at for _, at in slots] == list(range(row.position)), "slots out of place"
        return [token for token, _ in slots] + list(self._tokens(row))

    def _tokens(self, row: Row) -> Sequence[int]:
        assert not isinstance(row.tokens, FutureTokens)
        return row.tokens

    def close(self) -> None:
        """It holds nothing of its own."""


class Untrimmable(MemoryEngine):
    """An engine whose fragments cannot be shortened."""

    def __init__(self) -> None:
        super().__init__()
        fragments = self.kv

        class Fixed(type(fragments)):  # type: ignore[misc]
            def trim(self, fragment: Fragment, length: int) -> None:
                raise Boom("trim")

        fragments.__class__ = Fixed
        self.fragments: Fragments | None = fragments


class Rig:
    """A tree, a scheduler and a driver over an engine."""

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        capacity: int | None = None,
        host_capacity: int = 0,
        n_ctx: int = 64,
        n_batch: int = 16,
        row_cache_bytes: int = 1 << 20,
    ) -> None:
        self.engine = MemoryEngine() if engine is None else engine
        self.tree = TokenTree(
            self.engine.fragments,
            capacity=capacity,
            max_paths=self.engine.info.max_paths,
            host_capacity=host_capacity,
            host_uses_free_slots=self.engine.info.idle_slots is not None,
        )
        self.scheduler = Scheduler(
            self.engine, self.tree, n_ctx=n_ctx, n_batch=n_batch, row_cache_bytes=row_cache_bytes
        )
        self.driver = Driver(self.scheduler)
        self.n_ctx = n_ctx

    def place(
        self, ids: Sequence[int], after: Place | None = None, namespace: str | None = None
    ) -> Place:
        name = after.namespace if after is not None else namespace
        return Place(self.tree.holds, name, after, list(ids))

    def submit(self, *items: Extend | Run, atomic: bool = False) -> list[Ticket]:
        return self.driver.submit(items, atomic=atomic)

    def drive(self, *items: Extend | Run) -> list[Any]:
        """The answers of items, submitted together."""
        tickets = self.submit(*items)
        self.driver.drive(tickets)
        return [ticket.result() for ticket in tickets]

    def drive_quietly(self, *items: Extend | Run) -> list[Ticket]:
        """The tickets of items, done; they may have failed."""
        tickets = self.submit(*items)
        self.driver.drive(tickets)
        return tickets

    def ask(self, ids: Sequence[int], *wants: Want) -> list[Any]:
        (answers,) = self.drive(Extend(self.place(ids), (), wants))
        return list(answers)

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.scheduler.step()

    def finish(self) -> None:
        """Close, and see that nothing is left."""
        if self.scheduler.in_flight is None:
            self.tree.check()
        self.driver.close()
        self.tree.check()
        assert self.tree.budget.unevictable == 0
        if self.tree.fragments is not None:
            assert self.tree.fragments.usage().slots == 0


MakeRig = Callable[..., Rig]


class FreeSteps(StepCosts):
    """Every step takes equally long, so that each draft token pays."""

    def is_known(self, n_tokens: int) -> bool:
        return True

    def estimate(self, n_tokens: int) -> float:
        return 1.0


def verify_always(scheduler: Scheduler) -> None:
    """Let a scheduler verify every draft token that it finds in its tree."""
    scheduler.speculate(lookup=True)
    assert scheduler.queues.speculation is not None
    scheduler.queues.speculation.costs = FreeSteps()
    scheduler.queues.speculation.min_gain = 1.0


def sampler(index: int = 0, **options: Any) -> Sampler:
    return Sampler(SamplingParams(**options), stream_of(5, (index,)))


def run(place: Place, index: int = 0, **options: Any) -> Run:
    """A run; what is not its own option says how to draw."""
    own = {name: options.pop(name) for name in ("stop_ids", "sink") if name in options}
    return Run(place, sampler(index, **options), max_tokens=options.get("max_tokens", 6), **own)


class Parity(Matcher):
    """Even and odd tokens in turn; of every 8 the first `forces` are forced. None after `end`."""

    def __init__(self, forces: int = 0, end: int = 1 << 30, n_accepted: int = 0) -> None:
        self.forces = forces
        self.end = end
        self.n_accepted = n_accepted

    def allowed(self) -> list[int]:
        if self.n_accepted >= self.end:
            return []
        if self.n_accepted % 8 < self.forces:
            return [self.n_accepted % 8]
        return [token for token in range(N_VOCAB) if token % 2 == self.n_accepted % 2]

    def fill(
        self,
        bits: np.ndarray,
        banned: Set[int] = frozenset(),
        biased: Set[int] = frozenset(),
    ) -> None:
        bits[:] = 0
        for token in self.allowed():
            bits[token // 32] |= 1 << token % 32

    def accept(self, token: int) -> None:
        assert self.is_allowed(token)
        self.n_accepted += 1

    def is_allowed(self, token: int) -> bool:
        return token in self.allowed()

    def forced(self, banned: Set[int] = frozenset(), biased: Set[int] = frozenset()) -> list[int]:
        return list(range(self.n_accepted % 8, self.forces))

    may_end = must_end = False

    def clone(self) -> Parity:
        return Parity(self.forces, self.end, self.n_accepted)


def constrained(place: Place, index: int, matcher: Matcher, **options: Any) -> Run:
    item = run(place, index, **options)
    item.sampler = Sampler(item.sampler.params, item.sampler.stream, matcher)
    return item


def mixed(rig: Rig, n_tokens: int = 20, forces: int = 0) -> list[Run]:
    """Runs of all kinds from one place: plain, penalised, constrained."""
    place = rig.place([1, 2, 3])
    plain = [run(place, i, max_tokens=n_tokens) for i in range(4)]
    penalised = [
        run(place, 10 + i, max_tokens=n_tokens, repetition_penalty=1.3, frequency_penalty=0.4)
        for i in range(2)
    ]
    matched = [constrained(place, 20 + i, Parity(forces), max_tokens=n_tokens) for i in range(2)]
    return [*plain, *penalised, *matched]


def assert_result(rig: Rig, item: Run, result: RunResult) -> None:
    """A run's result is what the rule says."""
    ids = item.place.ids()
    tokens, reason = text_after(ids, item, rig.n_ctx)
    assert (result.tokens, result.finish_reason) == (tokens, reason)
    assert result.end.ids() == [*ids, *tokens]
    assert len(result.logprobs) == len(result.entropies) == len(tokens)
