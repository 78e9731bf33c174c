"""An engine out of memory: no work is lost, and interrupted work is repeated in smaller steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from fakes import HiddenFake, LateFake, SequenceFake, Tight, TightOutput
from random_work import Work
from rig import (
    MakeRig,
    MemoryEngine,
    Parity,
    Rig,
    assert_result,
    constrained,
    draw_after,
    logits_after,
    mixed,
    run,
    sampler,
    text_after,
)
from weft._core.kv.budget import SlotBudget
from weft._core.sched import admission
from weft._core.sched.admission import RELAX_S, MemoryPressure
from weft._core.sched.work import Commit, Extend, Logits, RunResult, Scores, Sink
from weft.engines.base import Engine, Output, Row
from weft.errors import ForwardError, KVFull

KINDS: dict[str, Callable[..., Engine]] = {
    "plain": lambda **pressure: Tight(MemoryEngine(), **pressure),
    "sequence": lambda **pressure: Tight(SequenceFake(MemoryEngine(), 6), **pressure),
    "hidden": lambda **pressure: Tight(HiddenFake(MemoryEngine()), **pressure),
    "late": lambda **pressure: Tight(LateFake(MemoryEngine()), **pressure),
    "late below": lambda **pressure: LateFake(Tight(MemoryEngine(), **pressure)),
}


class Clock:
    """A clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(admission.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def tight_of(engine: Engine) -> Tight:
    tight: Any = engine if isinstance(engine, Tight) else engine.inner
    assert isinstance(tight, Tight)
    return tight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["forward", "wait", "draw", "keep"])
def test_random_work_loses_nothing(kind: str, where: str) -> None:
    engine = KINDS[kind](where=where, chance=0.3, seed=1)
    rig = Rig(engine, capacity=None if kind == "hidden" else 60, n_ctx=50, n_batch=8)
    work = Work(rig, 1)
    for turn in range(60):
        work.turn()
        if turn % 20 == 0:
            rig.scheduler.admission.pressure.reset()  # so that steps are large again
    rig.driver.drive([ticket for ticket, _, _ in work.open])
    work.look()
    assert not work.open
    assert tight_of(engine).n_refused > 2
    rig.finish()


@cache
def results_in_large_steps(forces: int) -> list[RunResult]:
    rig = Rig(MemoryEngine())
    return rig.drive(*mixed(rig, forces=forces))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["forward", "wait", "draw"])
@pytest.mark.parametrize("forces", [0, 2, 6])
def test_runs_in_smaller_steps_give_the_same_results(
    make: MakeRig, clock: Clock, kind: str, where: str, forces: int
) -> None:
    """Penalised ones have counted each token once, constrained ones stand where they stood."""
    engine = KINDS[kind](max_tokens=3, where=where)
    rig = make(engine)
    results = rig.drive(*mixed(rig, forces=forces))
    for result, wanted in zip(results, results_in_large_steps(forces), strict=True):
        assert (result.tokens, result.finish_reason) == (wanted.tokens, wanted.finish_reason)
        np.testing.assert_allclose(result.logprobs, wanted.logprobs)
        np.testing.assert_allclose(result.entropies, wanted.entropies)
        assert result.end.ids() == wanted.end.ids()
    assert tight_of(engine).n_refused


@pytest.mark.parametrize("kind", KINDS)
def test_first_tokens_from_kept_rows_are_drawn_on_the_host(make: MakeRig, kind: str) -> None:
    path = [5, 6, 7]
    texts = []
    for where in ("forward", "rows"):
        engine = KINDS[kind](where=where)
        rig = make(engine)
        rig.drive(Extend(rig.place([]), path, (Logits(3),)))
        results = rig.drive(*(run(rig.place(path), index, max_tokens=4) for index in range(3)))
        texts.append([(each.tokens, each.logprobs) for each in results])
        assert (tight_of(engine).n_refused > 0) == (where == "rows")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_wants_are_answered_in_smaller_steps(make: MakeRig, clock: Clock, kind: str) -> None:
    engine = KINDS[kind](max_tokens=4)
    rig = make(engine)
    path = list(range(1, 15))
    first, second = rig.drive(
        Extend(rig.place([]), path, (Logits(3), Scores(1, 14, 2), Logits(14))),
        Extend(rig.place(path[:6]), [9, 9, 9], (Logits(9),)),
    )
    for answer, depth in ((first[0], 3), (first[2], 14)):
        np.testing.assert_array_equal(answer, logits_after(path[:depth]))
    assert len(first[1].logprobs) == 13
    np.testing.assert_array_equal(second[0], logits_after([*path[:6], 9, 9, 9]))
    atomic = rig.submit(*(Extend(rig.place([7, n]), [n, 3]) for n in range(5)), atomic=True)
    rig.driver.drive(atomic)
    assert all(ticket.error is None for ticket in atomic)
    assert tight_of(engine).n_refused


@pytest.mark.parametrize("where", ["forward", "wait", "draw", "keep"])
@pytest.mark.parametrize("kind", ["plain", "late", "sequence"])
def test_commit_in_smaller_steps_restarts_from_its_first_sequence(
    make: MakeRig, clock: Clock, kind: str, where: str
) -> None:
    engine = KINDS[kind](where=where)
    rig = make(engine, n_batch=4)
    owners = [Owner() for _ in range(6)]
    sequences = [rig.scheduler.sequences.create(owner, rig.place([1, 2, 3])) for owner in owners]
    paths = [[1, 2, 3] for _ in owners]
    for turn in range(4):
        tight_of(engine).max_tokens = 2 if turn == 2 else None
        tokens = [(turn + n) % 5 for n in range(6)]
        (ticket,) = rig.submit(Commit(sequences, tokens, [sampler(n) for n in range(6)]))
        rig.driver.drive([ticket])
        for n, result in enumerate(ticket.result()):
            paths[n].append(tokens[n])
            logits = rig.scheduler.logits_cache.read(result.row)
            np.testing.assert_array_equal(logits, logits_after(paths[n]))
            assert result.drawn[0] == int(draw_after(paths[n], sampler(n)).ids[0])
    assert tight_of(engine).n_refused


@pytest.mark.parametrize("kind", ["plain", "sequence", "late", "late below"])
def test_capacity_shrinks_to_the_slots_that_fit_into_memory(
    make: MakeRig, clock: Clock, kind: str
) -> None:
    """Six runs want 60 slots, and 40 of the 100 of its capacity fit into memory."""
    engine = KINDS[kind](max_slots=40)
    rig = make(engine, capacity=100)
    items = [run(rig.place([1, 2, 3]), i, max_tokens=10) for i in range(6)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    assert tight_of(engine).n_refused
    assert rig.tree.budget.capacity == 40
    assert rig.scheduler.counters.preempted
    # No path of another caller can have more, and the error states the limit.
    (ticket,) = rig.drive_quietly(Extend(rig.place([]), [4] * 50))
    with pytest.raises(KVFull, match=r"50 tokens cannot fit in the 40 slots that fit into memory"):
        ticket.result()
    tight_of(engine).max_slots = None
    clock.now += RELAX_S + 1
    (answer,) = rig.drive(Extend(rig.place([]), [4] * 50, (Logits(50),)))
    np.testing.assert_array_equal(answer[0], logits_after([4] * 50))
    assert rig.tree.budget.capacity == 100


@pytest.mark.parametrize("capacity", [100, None])
@pytest.mark.parametrize("kind", ["plain", "sequence", "late", "late below"])
def test_idle_kv_is_evicted_when_smaller_steps_are_not_enough(
    make: MakeRig, clock: Clock, kind: str, capacity: int | None
) -> None:
    """The number of slots is unknown: runs may need more than half of the used slots,
    and get them as long as they fit.
    """
    engine = KINDS[kind](max_units=40)
    rig = make(engine, capacity=capacity)
    items = [run(rig.place([1, 2, 3]), i, max_tokens=30) for i in range(6)]
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)
    assert tight_of(engine).n_refused
    (ticket,) = rig.drive_quietly(run(rig.place([4]), max_tokens=50))
    with pytest.raises(ForwardError, match="no memory for a step"):
        ticket.result()
    rig.drive(Extend(rig.place([5, 6])))
    rig.scheduler.clear()
    assert rig.tree.budget.capacity == capacity


@pytest.mark.parametrize("error", [MemoryError("no"), KVFull("no", needed=1, capacity=4)])
def test_kv_that_cannot_be_loaded_from_the_host_is_recomputed(
    make: MakeRig, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(*given: object) -> None:
        raise error

    engine = MemoryEngine()
    rig = make(engine, capacity=8, host_capacity=20)
    rig.drive(Extend(rig.place([1, 2, 3, 4, 5])))
    rig.drive(Extend(rig.place([6, 7, 8, 9, 10])))
    assert rig.tree.host.slots == 5
    monkeypatch.setattr(engine.kv, "load", load)
    (answer,) = rig.ask([1, 2, 3, 4, 5, 6], Logits(6))
    np.testing.assert_array_equal(answer, logits_after([1, 2, 3, 4, 5, 6]))
    assert rig.tree.host.slots == 5  # those that went for it


def test_slots_that_the_budget_does_not_count_are_freed_by_eviction(
    make: MakeRig, clock: Clock
) -> None:
    """Rows that keep nothing take slots, too: idle KV is evicted for them."""
    engine = Tight(MemoryEngine(), max_slots=32)
    rig = make(engine, capacity=32, n_batch=32, row_cache_bytes=0)
    for first in range(4):
        rig.drive(Extend(rig.place([first] * 8)))
    assert rig.tree.budget.resident == 32
    (score,) = rig.ask([3] * 8, Scores(1, 8, 0))  # read again
    assert len(score.logprobs) == 7
    assert rig.tree.budget.capacity == 25
    assert engine.n_refused == 1
    rig.scheduler.clear()
    assert rig.tree.budget.capacity == 32


@pytest.mark.parametrize("kind", KINDS)
def test_row_that_cannot_be_smaller_fails_and_others_continue(
    make: MakeRig, clock: Clock, kind: str
) -> None:
    engine = KINDS[kind]()
    rig = make(engine)
    tight, usual = tight_of(engine), Tight.forward

    def forward(rows: Any) -> Any:
        if any(13 in list(row.tokens) for row in rows):
            tight.fail()
        return usual(tight, rows)

    tight.forward = forward  # type: ignore[method-assign]
    items = [Extend(rig.place([1, 2, n]), (), (Logits(3),)) for n in (5, 13, 6, 7)]
    tickets = rig.drive_quietly(*items)
    with pytest.raises(ForwardError, match="no memory for a step"):
        tickets[1].result()
    for n, ticket in zip((5, 6, 7), [tickets[0], *tickets[2:]], strict=True):
        np.testing.assert_array_equal(ticket.result()[0], logits_after([1, 2, n]))


@pytest.mark.parametrize("kind", ["plain", "late", "late below"])
def test_ended_and_cancelled_runs_are_not_repeated_in_smaller_steps(
    make: MakeRig, clock: Clock, kind: str
) -> None:
    """Undone work may have ended: a stop token, a limit, a cancelled ticket."""
    for n_steps in range(1, 9):
        engine = KINDS[kind]()
        rig = make(engine)
        items = [run(rig.place([1, 2, 3]), i, max_tokens=2 + i) for i in range(6)]
        tickets = rig.submit(*items)
        rig.step(n_steps)
        tickets[5].cancel()
        tight_of(engine).max_tokens = 1
        rig.driver.drive(tickets)
        for item, ticket in zip(items[:5], tickets[:5], strict=True):
            assert_result(rig, item, ticket.result())
        assert tickets[5].result().finish_reason in ("cancelled", "length")
        rig.tree.check()


def test_forced_row_without_memory_is_run_one_token_at_a_time(make: MakeRig, clock: Clock) -> None:
    """Its sampler is past the forced tokens, which are neither lost nor counted twice."""
    usual = make(MemoryEngine())
    expected = usual.drive(
        *(constrained(usual.place([1, 2]), i, Parity(6), max_tokens=20) for i in range(3))
    )
    for number in range(12):
        engine = Tight(MemoryEngine())
        rig, n_calls, forward = make(engine), 0, engine.inner.forward

        def failing(rows: Any, number: int = number, forward: Any = forward) -> Any:
            nonlocal n_calls
            n_calls += 1
            if n_calls == number + 2:
                raise MemoryError("no memory for a step")
            return forward(rows)

        engine.inner.forward = failing  # type: ignore[method-assign]
        items = [constrained(rig.place([1, 2]), i, Parity(6), max_tokens=20) for i in range(3)]
        for result, wanted in zip(rig.drive(*items), expected, strict=True):
            assert result.tokens == wanted.tokens
            assert len(result.logprobs) == 20


class Owner:
    """Owner of a pin."""


def test_kv_pinned_by_hand_is_not_requested_repeatedly(make: MakeRig) -> None:
    engine, owner = Tight(MemoryEngine()), Owner()
    rig = make(engine, capacity=100)
    pinned = rig.place([7] * 20)
    rig.drive(Extend(pinned))
    assert rig.tree.pin_for(pinned, owner)
    engine.max_units = 30
    (ticket,) = rig.drive_quietly(run(rig.place([1, 2, 3]), max_tokens=20))
    with pytest.raises(ForwardError, match="no memory for a step"):
        ticket.result()
    assert engine.n_refused < 10


def test_paths_requested_together_count_a_shared_prefix_once(make: MakeRig) -> None:
    engine = Tight(MemoryEngine())
    rig = make(engine, capacity=500)
    for first in range(6):
        rig.drive(Extend(rig.place([first + 8] * 15)))
    engine.max_units = 60
    above = rig.place(list(range(1, 8)) * 3)
    tickets = rig.submit(*(Extend(above, [n], (Logits(22),)) for n in range(8)), atomic=True)
    rig.driver.drive(tickets)
    for n, ticket in enumerate(tickets):
        (answer,) = ticket.result()
        np.testing.assert_array_equal(answer, logits_after([*list(range(1, 8)) * 3, n]))


@pytest.mark.parametrize("capacity", range(8, 24))
def test_row_of_forced_tokens_uses_the_slots_it_already_has(make: MakeRig, capacity: int) -> None:
    rig = make(MemoryEngine(), capacity=capacity)
    expected = make(MemoryEngine())
    wanted = expected.drive(constrained(expected.place([1, 2]), 0, Parity(6), max_tokens=20))
    (ticket,) = rig.submit(constrained(rig.place([1, 2]), 0, Parity(6), max_tokens=20))
    while not ticket.done:
        rig.step()
        rig.tree.check()
    if capacity >= 21:
        assert ticket.result().tokens == wanted[0].tokens
    else:
        with pytest.raises(KVFull):
            ticket.result()


class Spoilt(TightOutput):
    """A step that fails when it lands, and has written what it liked."""

    def __init__(self, inner: Output, engine: Spoiling, rows: Sequence[Row]) -> None:
        super().__init__(inner, engine)
        self.wrote = [(row.kv_out, row.kv_out.length) for row in rows if row.kv_out is not None]

    def synchronize(self) -> None:
        for fragment, n in self.wrote:
            slots = self.engine.inner.kv._use(fragment).slots
            slots[n - 1] = (2, slots[n - 1][1])
        self.engine.fail()


class Spoiling(Tight):
    """Spoils the step whose number (from 0) is `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(MemoryEngine())
        self.at = at

    def forward(self, rows: Sequence[Row]) -> Output:
        output = super().forward(rows)
        return Spoilt(output, self, rows) if len(self.calls) == self.at + 1 else output


@pytest.mark.parametrize("at", range(2, 9))
def test_kv_written_by_an_undone_step_is_not_kept(make: MakeRig, at: int) -> None:
    """Nor where a run has ended in the step before."""
    rig = make(LateFake(Spoiling(at)))

    def stopping(n: int) -> Sink:
        return lambda state: "stop" if len(state.tokens) == n else None

    items = [
        run(rig.place([1, 2, 3]), i, max_tokens=20, sink=stopping(3 + 2 * i)) for i in range(2)
    ]
    for result in rig.drive(*items):
        ids = [*result.end.ids(), 5]
        (answer,) = rig.ask(ids, Logits(len(ids)))
        np.testing.assert_array_equal(answer, logits_after(ids))


def test_empty_pool_does_not_reduce_the_capacity_to_zero(make: MakeRig) -> None:
    """The pool reports its slots; halving the step alone would have been too little."""

    class Pool(Tight):
        def forward(self, rows: Sequence[Row]) -> Output:
            assert self.fragments is not None
            n_used, n = self.fragments.usage().slots, sum(row.n_tokens for row in rows)
            if n_used + n > 40:
                self.n_refused += 1
                raise KVFull("no memory for slots", needed=n, capacity=n_used)
            return super().forward(rows)

    engine = Pool(MemoryEngine())
    rig = make(engine, capacity=1000, n_batch=64)
    items = [Extend(rig.place([n] * 15), (), (Logits(15),)) for n in range(4)]
    for n, (answer,) in enumerate(rig.drive(*items)):
        np.testing.assert_array_equal(answer, logits_after([n] * 15))
    assert engine.n_refused


def test_engine_with_slots_but_no_memory_is_called_few_times(make: MakeRig) -> None:
    class Full(Tight):
        is_full = False

        def forward(self, rows: Sequence[Row]) -> Output:
            if self.is_full:
                self.n_refused += 1
                raise KVFull("no room for 1 token", needed=1, capacity=8000)
            return super().forward(rows)

    engine = Full(MemoryEngine())
    rig = make(engine, capacity=8000)
    (ticket,) = rig.submit(run(rig.place([1, 2, 3]), max_tokens=20))
    rig.step(4)
    engine.is_full = True
    rig.driver.drive([ticket])
    with pytest.raises(KVFull, match="no room for 1 token"):
        ticket.result()
    assert engine.n_refused < 10


@pytest.mark.parametrize("n_steps", range(1, 5))
def test_preempted_run_continues_next_to_a_leaf_that_others_extended(
    make: MakeRig, n_steps: int
) -> None:
    rig = make(LateFake(MemoryEngine()))
    item = run(rig.place([1, 2]), temperature=0, max_tokens=12)
    text, _ = text_after([1, 2], item, rig.n_ctx)
    leaf = rig.place([1, 2, *text[:9]])
    (ticket,) = rig.submit(item)
    rig.step(n_steps)
    rig.drive(Extend(leaf, ()))
    rig.scheduler.finish_in_flight()
    rig.scheduler.queues.preempt_all()
    queue = rig.scheduler.queues.waiting
    kept = list(queue)
    queue.clear()
    (growing,) = rig.submit(Extend(leaf, [5]))
    rig.step()
    queue.extend(kept)
    rig.driver.drive([ticket, growing])
    assert_result(rig, item, ticket.result())


def test_pin_between_steps_after_the_relax_time_restores_the_capacity(
    make: MakeRig, clock: Clock
) -> None:
    engine, owner = Tight(MemoryEngine(), max_slots=40), Owner()
    rig = make(engine, capacity=100)
    rig.drive(*(run(rig.place([1, 2, 3]), i, max_tokens=10) for i in range(6)))
    assert rig.tree.budget.capacity == 40
    clock.now += RELAX_S + 1
    place = rig.place([4] * 50)
    assert rig.driver.exclusive(lambda: rig.tree.pin_for(place, owner))
    assert rig.tree.budget.capacity == 100


def test_limits_shrink_with_every_failure_and_relax_over_time(clock: Clock) -> None:
    room = SlotBudget(100, None)
    pressure = MemoryPressure(room, splits_rows=True)
    assert not pressure.reduce(RuntimeError("broken"), 4, 40, 0)
    assert not pressure.reduce(KVFull("no", needed=101, capacity=100), 1, 1, 0)
    assert pressure.reduce(MemoryError(), 1, 40, 0)
    assert (pressure.max_step_tokens, room.capacity) == (20, 100)
    assert pressure.reduce(KVFull("no", needed=8, capacity=70), 4, 40, 0)
    assert (room.capacity, pressure.limits_slots) == (70, True)
    room.resident = 70
    assert pressure.reduce(KVFull("no", needed=8, capacity=70), 4, 40, 0)
    assert room.capacity == 62
    clock.now += RELAX_S - 1
    pressure.relax()
    assert (pressure.max_step_tokens, room.capacity) == (20, 62)
    clock.now += 2
    pressure.relax()
    assert (pressure.max_step_tokens, room.capacity, pressure.limits_slots) == (None, 100, False)
    for waited in (20, 40, 80, 80):  # who took it has not given it back
        assert pressure.reduce(MemoryError(), 1, 40, 0)
        clock.now += waited - 1
        pressure.relax()
        assert pressure.max_step_tokens == 20
        clock.now += 2
        pressure.relax()
        assert pressure.max_step_tokens is None
    clock.now += 81
    assert pressure.reduce(MemoryError(), 1, 40, 0)
    clock.now += RELAX_S + 1
    pressure.relax()
    assert pressure.max_step_tokens is None
    room.resident, room.tails = 50, 10
    assert pressure.reduce(MemoryError(), 4, 40, 20)
    assert (pressure.max_step_tokens, room.capacity) == (20, 100)
    assert pressure.reduce(MemoryError(), 4, 20, 20)
    assert (pressure.max_step_tokens, room.capacity) == (10, 30)
    assert pressure.grow(35)
    assert room.capacity == 35
    assert not pressure.grow(35)
    assert pressure.grow(200)
    assert room.capacity == 100
    assert pressure.reduce(MemoryError(), 1, 1, 20)  # which cannot be smaller
    assert room.capacity == 30
    assert not pressure.reduce(MemoryError(), 1, 1, 59)
    assert pressure.reduce(KVFull("no", needed=8, capacity=25), 1, 1, 20)
    assert not pressure.grow(35)  # the engine has reported this limit
    unlimited = MemoryPressure(SlotBudget(None, None), splits_rows=False)
    assert unlimited.reduce(KVFull("no", needed=8, capacity=70), 2, 40, 0)
    assert unlimited.max_step_tokens == 20
    assert not unlimited.reduce(MemoryError(), 1, 40, 0)
