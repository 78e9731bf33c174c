"""Fakes of engines that are not installed; a real engine computes their results.

SequenceFake: like llama.cpp, paths are tagged and there are only a few tags.
HiddenFake: like vLLM, it manages its KV and every row is a complete path.
OwnLoopFake: like a server, it also runs generations itself and reports them in any order.
LateFake: like a device, results arrive one step late and errors with them.
BrokenEngine: any engine, failing on demand. FlakyEngine: any engine, failing at random. Tight: any
engine, short of memory.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weft._core.sampling.params import SamplingParams
from weft._core.sampling.sampler import BatchSampler, DrawBatch, DrawResult, Sampler
from weft.engines.base import (
    Draws,
    Engine,
    Fragment,
    Fragments,
    FutureTokens,
    Output,
    RetainedLogits,
    RetainedRow,
    Row,
    Score,
    Usage,
)
from weft.engines.generation import (
    EngineGenerator,
    EventCallback,
    GenerationEvent,
    GenerationRequest,
)
from weft.errors import KVFull


class Boom(RuntimeError):
    """The error that fakes raise."""


class Wrapped(Engine):
    """An engine around another one."""

    def __init__(self, inner: Engine, **info: Any) -> None:
        self.inner = inner
        self.info = replace(inner.info, **info)
        self.fragments = inner.fragments
        self.calls: list[list[Row]] = []

    def forward(self, rows: Sequence[Row]) -> Output:
        self.calls.append(list(rows))
        return self.inner.forward(rows)

    def n_tokens_to_run(self, tokens: Sequence[int], first: int, adapter: str | None) -> int:
        return self.inner.n_tokens_to_run(tokens, first, adapter)

    def clear_caches(self) -> None:
        self.inner.clear_caches()

    def close(self) -> None:
        """The inner engine is the test's."""


class BrokenEngine(Wrapped):
    """Fails the forwards whose number (from 0) is in `fail_on`, before or after they wrote."""

    def __init__(self, inner: Engine, fail_on: set[int]) -> None:
        super().__init__(inner)
        self.fail_on = fail_on

    def forward(self, rows: Sequence[Row]) -> Output:
        number = len(self.calls)
        self.calls.append(list(rows))
        if number in self.fail_on:
            raise Boom(f"forward {number}")
        return self.inner.forward(rows)


# Sequences ------------------------------------------------------------------------------------


class TaggedFragments(Fragments):
    """Knows which fragment continues which, and so how many paths need a tag."""

    def __init__(self, inner: Fragments, max_paths: int) -> None:
        self.inner = inner
        self.growth = inner.growth
        self.max_paths = max_paths
        self.parents: dict[Fragment, Fragment | None] = {}

    def n_tags(self) -> int:
        return len(set(self.parents) - set(self.parents.values()))

    def check(self) -> None:
        assert self.n_tags() <= self.max_paths, f"{self.n_tags()} paths, {self.max_paths} tags"

    def new(self, parent: Fragment | None) -> Fragment:
        fragment = self.inner.new(parent)
        self.parents[fragment] = parent
        return fragment

    def attach(self, fragment: Fragment, parent: Fragment | None) -> None:
        self.parents[fragment] = parent

    def split(self, fragment: Fragment, at: int) -> Fragment:
        upper = self.inner.split(fragment, at)
        self.parents[upper] = self.parents[fragment]
        self.parents[fragment] = upper
        return upper

    def join(self, upper: Fragment, lower: Fragment) -> None:
        self.inner.join(upper, lower)
        self.parents[lower] = self.parents.pop(upper)

    def trim(self, fragment: Fragment, length: int) -> None:
        self.inner.trim(fragment, length)

    def settle(self, fragment: Fragment) -> None:
        self.inner.settle(fragment)

    def free(self, fragment: Fragment) -> None:
        self.inner.free(fragment)
        del self.parents[fragment]

    def export(self, fragment: Fragment) -> dict[str, Any]:
        return self.inner.export(fragment)

    def load(self, data: dict[str, Any], parent: Fragment | None) -> Fragment:
        fragment = self.inner.load(data, parent)
        self.parents[fragment] = parent
        return fragment

    def usage(self) -> Usage:
        return self.inner.usage()


class SequenceFake(Wrapped):
    """At most `max_paths` resident paths, a tag each."""

    def __init__(self, inner: Engine, max_paths: int = 8) -> None:
        super().__init__(inner, name="sequence", kv="sequence", max_paths=max_paths)
        assert inner.fragments is not None
        self.tags = TaggedFragments(inner.fragments, max_paths)
        self.fragments = self.tags

    def forward(self, rows: Sequence[Row]) -> Output:
        self.tags.check()
        for row in rows:
            above = None
            for span in row.prefix:
                assert self.tags.parents[span.fragment] is above, "a row's path jumps"
                above = span.fragment
            assert row.kv_out is None or self.tags.parents[row.kv_out] is above
        return super().forward(rows)


# Hidden KV ------------------------------------------------------------------------------------


class HiddenFake(Wrapped):
    """An engine without fragments: each row is a complete path."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(
            inner, name="hidden", kv="hidden", kv_bytes_per_token=0, no_prefix_cache=True
        )
        self.fragments = None

    def forward(self, rows: Sequence[Row]) -> Output:
        for row in rows:
            assert row.prefix == ()
            assert row.kv_out is None
            assert row.position == 0
        return super().forward(rows)


# A loop of its own ------------------------------------------------------------------------------


@dataclass(eq=False)
class Sibling:
    """One sibling that a BackgroundLoop generates."""

    run: GenerationRequest
    number: int
    on_event: EventCallback
    sampler: Sampler
    tokens: list[int] = field(default_factory=list)
    cancelled: bool = False


class BackgroundLoop(EngineGenerator):
    """Generates on a thread of its own, a few tokens of some sibling at a time, in random order.

    has_logprobs: True if events have logprobs and entropies. fail_on: the events (from 0) that are
    errors. started: the requests so far. max_siblings: the largest number at a time.
    """

    def __init__(
        self,
        engine: HiddenFake,
        *,
        max_in_flight: int = 6,
        has_logprobs: bool = True,
        fail_on: set[int] | None,
    ) -> None:
        self.max_in_flight = max_in_flight
        self.has_logprobs = has_logprobs
        self.fail_on = fail_on or set()
        self.started: list[GenerationRequest] = []
        self.max_siblings = 0
        self.n_events = 0
        self.engine = engine
        self.random = random.Random(7)
        self.going: list[Sibling] = []
        self.news = threading.Condition()
        self.thread: threading.Thread | None = None

    def unsupported_params(self, params: SamplingParams) -> str | None:
        return None if params.constraint is None else "a constraint"

    def start(self, request: GenerationRequest, on_event: EventCallback) -> list[Sibling]:
        self.started.append(request)
        siblings = [
            Sibling(request, number, on_event, Sampler(request.params, stream))
            for number, stream in enumerate(request.streams)
        ]
        for sibling in siblings:
            sibling.sampler.add_prompt(request.tokens)
        with self.news:
            self.going += siblings
            self.max_siblings = max(self.max_siblings, len(self.going))
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, daemon=True)
                self.thread.start()
            self.news.notify()
        return siblings

    def cancel(self, handle: list[Sibling], sibling: int) -> None:
        handle[sibling].cancelled = True

    def _work(self) -> None:
        while True:
            with self.news:
                if not self.going and not self.news.wait_for(lambda: self.going, 0.2):
                    self.thread = None
                    return
                sibling = self.random.choice(self.going)
            event = self._next_event(sibling)
            if event.is_last:
                with self.news:
                    self.going.remove(sibling)
                    self.news.notify_all()
            sibling.on_event(event)

    def _next_event(self, sibling: Sibling) -> GenerationEvent:
        number, self.n_events = self.n_events, self.n_events + 1
        if number in self.fail_on:
            return GenerationEvent(sibling.number, error=Boom(f"event {number}"))
        drawn: list[tuple[int, float, float]] = []
        end, ended_by = None, None
        for _ in range(self.random.randint(1, 3)):
            if sibling.cancelled:
                end = "cancelled"
                break
            token, logprob, entropy = self._draw(sibling)
            if token in sibling.run.stop_ids:
                end, ended_by = "stop", token
                break
            sibling.sampler.accept(token)
            sibling.tokens.append(token)
            drawn.append((token, logprob, entropy))
            if len(sibling.tokens) == sibling.run.max_tokens:
                end = "length"
                break
        tokens, *values = zip(*drawn, strict=True) if drawn else ((), (), ())
        logprobs, entropies = values if self.has_logprobs else (None, None)
        return GenerationEvent(sibling.number, tokens, logprobs, entropies, end, ended_by)

    def _draw(self, sibling: Sibling) -> tuple[int, float, float]:
        ids = [*sibling.run.tokens, *sibling.tokens]
        row = Row((), ids, 0, None, (len(ids) - 1,), (), sibling.run.adapter)
        logits = self.engine.forward([row]).logits(0)[None]
        at = np.array([len(ids)], dtype=np.uint64)
        drawn = BatchSampler([sibling.sampler]).draw(logits, np.zeros(1, dtype=np.int64), at)
        return int(drawn.ids[0]), float(drawn.logprobs[0]), float(drawn.entropies[0])


class OwnLoopFake(HiddenFake):
    """Hidden KV and a BackgroundLoop for generations. steps: it also runs rows."""

    def __init__(
        self,
        inner: Engine,
        *,
        max_in_flight: int = 6,
        has_logprobs: bool = True,
        steps: bool = True,
        fail_on: set[int] | None = None,
    ) -> None:
        super().__init__(inner)
        capabilities = replace(self.info.capabilities, steps=steps, native_runs=True)
        self.info = replace(self.info, name="ownloop", capabilities=capabilities)
        self.running = threading.Lock()
        self.native: BackgroundLoop = BackgroundLoop(
            self, max_in_flight=max_in_flight, has_logprobs=has_logprobs, fail_on=fail_on
        )

    def forward(self, rows: Sequence[Row]) -> Output:
        with self.running:
            return super().forward(rows)


# Late results ---------------------------------------------------------------------------------


class LateDraws:
    """Draws that the device has and the host may not see before it waits."""

    def __init__(self, output: LateOutput, secret: Draws) -> None:
        self.output = output
        self.secret = secret

    def result(self) -> DrawResult:
        self.output.synchronize()
        return self.secret.result()


class LateLogits(RetainedLogits):
    """Rows on the device. The engine counts those that come to the host."""

    def __init__(self, engine: LateFake, inner: RetainedLogits) -> None:
        self.engine = engine
        self.inner = inner
        self.n_bytes = inner.n_bytes

    def logits(self, number: int) -> np.ndarray:
        self.engine.n_fetched += 1
        return self.inner.logits(number)


class LateOutput(Output):
    """A launched step: `wait` lands it, and says then whether it failed."""

    def __init__(self, engine: LateFake, inner: Output, uses: set[Fragment]) -> None:
        self.engine = engine
        self.inner = inner
        self.uses = uses
        self.error: Exception | None = None
        self.landed = False

    def synchronize(self) -> None:
        if not self.landed:
            self.landed = True
            self.engine.outstanding.remove(self)
        if self.error is not None:
            raise self.error
        self.inner.synchronize()

    def logits(self, index: int) -> np.ndarray:
        self.synchronize()
        self.engine.n_fetched += 1
        return self.inner.logits(index)

    def retain(self, indices: Sequence[int]) -> LateLogits:
        assert self.landed
        return LateLogits(self.engine, self.inner.retain(indices))

    def scores(self) -> list[list[Score]]:
        self.synchronize()
        return self.inner.scores()

    def draw(self, batch: DrawBatch) -> Draws:
        n_out = len(self.engine.outstanding)
        assert n_out <= self.engine.per_step, "the step before has landed when this one draws"
        return LateDraws(self, self.inner.draw(batch))


class GuardedFragments(Fragments):
    """Fails if fragments that a launched step still uses are freed, joined, trimmed or exported."""

    def __init__(self, inner: Fragments, engine: LateFake) -> None:
        self.inner = inner
        self.growth = inner.growth
        self.engine = engine

    def _idle(self, fragment: Fragment) -> None:
        for output in self.engine.outstanding:
            assert fragment not in output.uses, "a launched step still uses this fragment"

    def new(self, parent: Fragment | None) -> Fragment:
        return self.inner.new(parent)

    def attach(self, fragment: Fragment, parent: Fragment | None) -> None:
        self.inner.attach(fragment, parent)

    def split(self, fragment: Fragment, at: int) -> Fragment:
        upper = self.inner.split(fragment, at)
        for output in self.engine.outstanding:
            if fragment in output.uses:
                output.uses.add(upper)
        return upper

    def join(self, upper: Fragment, lower: Fragment) -> None:
        self._idle(upper)
        self._idle(lower)
        self.inner.join(upper, lower)

    def trim(self, fragment: Fragment, length: int) -> None:
        self._idle(fragment)
        self.inner.trim(fragment, length)

    def settle(self, fragment: Fragment) -> None:
        self._idle(fragment)
        self.inner.settle(fragment)

    def free(self, fragment: Fragment) -> None:
        self._idle(fragment)
        self.inner.free(fragment)

    def export(self, fragment: Fragment) -> dict[str, Any]:
        self._idle(fragment)
        return self.inner.export(fragment)

    def load(self, data: dict[str, Any], parent: Fragment | None) -> Fragment:
        return self.inner.load(data, parent)

    def usage(self) -> Usage:
        return self.inner.usage()


class LateFake(Wrapped):
    """Launches a step before the one before it has landed; failures show when a step lands.

    per_step: the most forwards that a step has, one an adapter. n_fetched: logits rows that came to
    the host. n_drawn_kept: samplers that drew from rows that were kept.
    """

    def __init__(
        self, inner: Engine, fail_on: set[int] | None = None, *, per_step: int = 1
    ) -> None:
        super().__init__(inner, name="late", async_scheduling=True)
        assert inner.fragments is not None
        self.fragments = GuardedFragments(inner.fragments, self)
        self.fail_on = fail_on or set()
        self.per_step = per_step
        self.outstanding: list[LateOutput] = []
        self.n_overlapped = 0
        self.n_fetched = 0
        self.n_drawn_kept = 0

    def draw(self, rows: Sequence[RetainedRow], batch: DrawBatch) -> Draws:
        assert len(set(rows)) == len(rows)
        self.n_drawn_kept += len(batch.rows)
        here = [
            RetainedRow(row.rows.inner, row.number) if isinstance(row.rows, LateLogits) else row
            for row in rows
        ]
        return self.inner.draw(here, batch)

    def forward(self, rows: Sequence[Row]) -> Output:
        number = len(self.calls)
        self.calls.append(list(rows))
        self.n_overlapped += bool(self.outstanding)
        limit = 2 * self.per_step - 1
        assert len(self.outstanding) <= limit, (
            "at most one step in flight when the next is launched"
        )
        real = [self._on_device(row) for row in rows]
        uses = {span.fragment for row in rows for span in row.prefix}
        uses |= {row.kv_out for row in rows if row.kv_out is not None}
        output = LateOutput(self, self.inner.forward(real), uses)
        if number in self.fail_on:
            output.error = Boom(f"step {number}")
        self.outstanding.append(output)
        return output

    def _on_device(self, row: Row) -> Row:
        """Return the row with the ids of its future tokens, which the device has already."""
        tokens = row.tokens
        if isinstance(tokens, FutureTokens):
            assert isinstance(tokens.draws, LateDraws)
            tokens = (max(int(tokens.draws.secret.result().ids[tokens.number]), 0),)
        return Row(
            row.prefix, tokens, row.position, row.kv_out, row.logits_at, row.scores, row.adapter
        )


# Memory that is short -------------------------------------------------------------------------


class Tight(Wrapped):
    """Any engine on a shared device, which has less memory than the engine's budget.

    max_tokens: limit of a step. max_slots: limit of slots with KV. max_units: limit of units; a
    slot takes one, a token of a step four. chance: of MemoryError for a step that could have been
    smaller, at `where`: its "forward", its "draw", its "wait", or its retained rows ("keep"); or
    for any draw from retained rows ("rows").
    """

    def __init__(
        self,
        inner: Engine,
        *,
        max_tokens: int | None = None,
        max_slots: int | None = None,
        max_units: int | None = None,
        where: str = "forward",
        chance: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(inner)
        self.max_tokens = max_tokens
        self.max_slots = max_slots
        self.max_units = max_units
        self.where = where
        self.chance = chance
        self.random = random.Random(seed)
        self.n_refused = 0

    def forward(self, rows: Sequence[Row]) -> Output:
        n_tokens = sum(row.n_tokens for row in rows)
        may_be_less = len(rows) > 1 or (n_tokens > 1 and self.fragments is not None)
        is_lucky = not may_be_less or self.random.random() >= self.chance
        if self.max_tokens is not None and n_tokens > self.max_tokens and may_be_less:
            is_lucky = False
        if self.max_units is not None and self.fragments is not None:
            is_lucky = self.fragments.usage().slots + 4 * n_tokens <= self.max_units
        if not is_lucky and self.where == "forward":
            self.fail()
        if self.max_slots is not None and self.fragments is not None:
            wanted = self.fragments.usage().slots + n_tokens
            if wanted > self.max_slots:
                self.n_refused += 1
                needed = wanted - self.max_slots
                raise KVFull("no memory for slots", needed=needed, capacity=self.max_slots)
        output = super().forward(rows)
        return output if is_lucky else TightOutput(output, self)

    def draw(self, rows: Sequence[RetainedRow], batch: DrawBatch) -> Draws:
        if self.where == "rows":
            self.fail()
        return self.inner.draw(rows, batch)

    def fail(self) -> None:
        """Raise MemoryError."""
        self.n_refused += 1
        raise MemoryError("no memory for a step")


class TightOutput(Output):
    """A step that finds no memory later on."""

    def __init__(self, inner: Output, engine: Tight) -> None:
        self.inner = inner
        self.engine = engine

    def synchronize(self) -> None:
        self.inner.synchronize()
        if self.engine.where == "wait":
            self.engine.fail()

    def logits(self, index: int) -> np.ndarray:
        return self.inner.logits(index)

    def retain(self, indices: Sequence[int]) -> RetainedLogits:
        if self.engine.where == "keep":
            self.engine.fail()
        return self.inner.retain(indices)

    def scores(self) -> list[list[Score]]:
        return self.inner.scores()

    def draw(self, batch: DrawBatch) -> Draws:
        if self.engine.where == "draw":
            self.engine.fail()
        return self.inner.draw(batch)


# Fragments that fail --------------------------------------------------------------------------


class BrokenFragments(TaggedFragments):
    """Raises MemoryError at call `number` (from 0) of one method."""

    def __init__(self, inner: Fragments, method: str, number: int) -> None:
        super().__init__(inner, 1 << 30)
        self.n_calls = 0
        real = getattr(self, method)

        def failing(*given: Any) -> Any:
            self.n_calls += 1
            if self.n_calls == number + 1:
                raise MemoryError(f"no room for {method}")
            return real(*given)

        setattr(self, method, failing)


class Odds:
    """Lets calls named in `calls` fail with `chance`; `n_failed` counts failures by name.

    Every other failure is a MemoryError, after which a smaller call is tried if possible.
    """

    def __init__(self, calls: Sequence[str], chance: float, seed: int = 0) -> None:
        self.calls = frozenset(calls)
        self.chance = chance
        self.random = random.Random(seed)
        self.n_failed: Counter[str] = Counter()

    def maybe_fail(self, call: str) -> None:
        """Raise an error with probability `chance`."""
        if call in self.calls and self.random.random() < self.chance:
            self.n_failed[call] += 1
            kind = MemoryError if self.n_failed.total() % 2 else Boom
            raise kind(f"no room for {call}")


class FlakyFragments(Fragments):
    """Any fragments, whose calls may fail at any time; one that fails has changed nothing."""

    def __init__(self, inner: Fragments, odds: Odds) -> None:
        self.inner = inner
        self.growth = inner.growth
        self.odds = odds

    def _call(self, name: str, *given: Any) -> Any:
        self.odds.maybe_fail(name)
        return getattr(self.inner, name)(*given)

    def new(self, parent: Fragment | None) -> Fragment:
        return self._call("new", parent)

    def attach(self, fragment: Fragment, parent: Fragment | None) -> None:
        self._call("attach", fragment, parent)

    def split(self, fragment: Fragment, at: int) -> Fragment:
        return self._call("split", fragment, at)

    def join(self, upper: Fragment, lower: Fragment) -> None:
        self._call("join", upper, lower)

    def trim(self, fragment: Fragment, length: int) -> None:
        self._call("trim", fragment, length)

    def settle(self, fragment: Fragment) -> None:
        self._call("settle", fragment)

    def free(self, fragment: Fragment) -> None:
        self._call("free", fragment)

    def export(self, fragment: Fragment) -> dict[str, Any]:
        return self._call("export", fragment)

    def load(self, data: dict[str, Any], parent: Fragment | None) -> Fragment:
        return self._call("load", data, parent)

    def usage(self) -> Usage:
        return self.inner.usage()


class FlakyDraws:
    """Draws that may be lost."""

    def __init__(self, inner: Draws, odds: Odds) -> None:
        self.inner = inner
        self.odds = odds

    def result(self) -> DrawResult:
        self.odds.maybe_fail("result")
        return self.inner.result()


class FlakyLogits(RetainedLogits):
    """Kept rows that may be lost on their way to the host."""

    def __init__(self, inner: RetainedLogits, odds: Odds) -> None:
        self.inner = inner
        self.odds = odds
        self.n_bytes = inner.n_bytes

    def logits(self, number: int) -> np.ndarray:
        self.odds.maybe_fail("logits")
        return self.inner.logits(number)


class FlakyOutput(Output):
    """A step whose answers may be lost."""

    def __init__(self, inner: Output, odds: Odds) -> None:
        self.inner = inner
        self.odds = odds

    def synchronize(self) -> None:
        self.inner.synchronize()  # what fails has landed all the same
        self.odds.maybe_fail("wait")

    def logits(self, index: int) -> np.ndarray:
        self.odds.maybe_fail("logits")
        return self.inner.logits(index)

    def retain(self, indices: Sequence[int]) -> RetainedLogits:
        self.odds.maybe_fail("keep")
        return FlakyLogits(self.inner.retain(indices), self.odds)

    def scores(self) -> list[list[Score]]:
        self.odds.maybe_fail("scores")
        return self.inner.scores()

    def draw(self, batch: DrawBatch) -> Draws:
        self.odds.maybe_fail("draw")
        return FlakyDraws(self.inner.draw(batch), self.odds)


PROTOCOL = (
    *("new", "attach", "split", "join", "trim", "settle", "free", "export", "load"),
    *("forward", "wait", "logits", "keep", "scores", "draw", "result"),
)


class FlakyEngine(Wrapped):
    """Any engine, every call of which may fail at any time."""

    def __init__(self, inner: Engine, odds: Odds) -> None:
        super().__init__(inner)
        self.odds = odds
        if inner.fragments is not None:
            self.fragments = FlakyFragments(inner.fragments, odds)

    def draw(self, rows: Sequence[RetainedRow], batch: DrawBatch) -> Draws:
        self.odds.maybe_fail("draw")
        here = [
            RetainedRow(row.rows.inner, row.number) if isinstance(row.rows, FlakyLogits) else row
            for row in rows
        ]
        return FlakyDraws(self.inner.draw(here, batch), self.odds)

    def forward(self, rows: Sequence[Row]) -> Output:
        self.odds.maybe_fail("forward")
        return FlakyOutput(self.inner.forward([_unwrapped(row) for row in rows]), self.odds)


def _unwrapped(row: Row) -> Row:
    """Return the row with the draws of the inner engine."""
    tokens = row.tokens
    if not (isinstance(tokens, FutureTokens) and isinstance(tokens.draws, FlakyDraws)):
        return row
    tokens = FutureTokens(tokens.draws.inner, tokens.number)
    return Row(row.prefix, tokens, row.position, row.kv_out, row.logits_at, row.scores, row.adapter)
