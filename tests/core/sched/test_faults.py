"""Every engine call may fail at any time: its work fails, all other work continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fakes import (
    PROTOCOL,
    Boom,
    BrokenEngine,
    BrokenFragments,
    FlakyEngine,
    HiddenFake,
    LateFake,
    Odds,
    SequenceFake,
    Wrapped,
)
from random_work import Work
from rig import (
    MakeRig,
    MemoryEngine,
    Rig,
    assert_result,
    logits_after,
    run,
    sampler,
    text_after,
    verify_always,
)
from weft._core.sampling.sampler import Sampler
from weft._core.sched.jobs import RunJob
from weft._core.sched.work import Commit, Extend, Logits, Run, Ticket
from weft.constraints.base import Matcher
from weft.engines.base import Engine, Fragments, Row
from weft.errors import Cancelled, ConstraintError, ForwardError, KVFull

KINDS: dict[str, Callable[[Odds], Engine]] = {
    "plain": lambda odds: FlakyEngine(MemoryEngine(), odds),
    "sequence": lambda odds: FlakyEngine(SequenceFake(MemoryEngine(), 4), odds),
    "hidden": lambda odds: FlakyEngine(HiddenFake(MemoryEngine()), odds),
    "late": lambda odds: FlakyEngine(LateFake(MemoryEngine()), odds),
}
ANSWERS = {"forward", "wait", "logits", "scores", "draw", "result"}
# Random work does not call these, or hardly ever; they have tests of their own below.
SELDOM = {"join", "trim"}
CALLS = [call for call in PROTOCOL if call not in SELDOM]
CHANCES = {"any": 0.02, "load": 0.7}


def check_work(
    kind: str, call: str, chance: float, n_turns: int, seed: int, n_later: int = 60
) -> None:
    """Random work in little room, the call failing now and then; then as much without failures."""
    odds = Odds(PROTOCOL if call == "any" else [call], chance, seed)
    capacity = None if kind == "hidden" else 40
    rig = Rig(KINDS[kind](odds), capacity=capacity, host_capacity=10, n_ctx=50, n_batch=8)
    work = Work(rig, seed, flaky=True)
    for turn in range(5 * n_turns):
        if turn >= n_turns and odds.n_failed:
            break
        work.turn()
    odds.chance = 0
    rig.driver.drive([ticket for ticket, _, _ in work.open])
    work.look()
    assert not work.open
    assert odds.n_failed
    rig.step()  # what could not be freed is freed now
    rig.tree.check()
    assert not rig.tree.unfreed
    assert not rig.tree.untrimmed
    later = Work(rig, seed + 1)
    for _ in range(n_later):
        later.turn()
    rig.driver.drive([ticket for ticket, _, _ in later.open])
    later.look()
    assert not later.open
    rig.finish()


# Each call on one engine; on the others the calls that they treat in their own way. The test
# below has all pairs.
PAIRS = [
    *(("plain", call) for call in CALLS),
    *(("late", call) for call in CALLS if call in ANSWERS),
    *((kind, "any") for kind in KINDS),
]


@pytest.mark.parametrize(("kind", "call"), PAIRS)
def test_failing_call_fails_its_own_work_only(kind: str, call: str) -> None:
    # In less work, fragments that could not be freed are never checked.
    n_turns = 60 if call in ("free", "any") else 40
    check_work(kind, call, CHANCES.get(call, 0.1), n_turns, 3, n_later=15)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [*CALLS, "any"])
@pytest.mark.parametrize("seed", range(10, 15))
def test_failing_call_fails_its_own_work_only_over_600_turns(
    kind: str, call: str, seed: int
) -> None:
    if kind == "hidden" and call not in {*ANSWERS, "any"}:
        pytest.skip("a hidden engine has no fragments")
    check_work(kind, call, 2 * CHANCES.get(call, 0.1), 600, seed)


class Once(Odds):
    """One call fails, by its number from 0; `n_calls` counts them."""

    def __init__(self, call: str, number: int) -> None:
        super().__init__([call], 0)
        self.number = number
        self.n_calls = 0

    def maybe_fail(self, call: str) -> None:
        if call in self.calls:
            self.n_calls += 1
            if self.n_calls == self.number + 1:
                self.n_failed[call] += 1
                raise MemoryError(f"no room for {call}")


def do_work(odds: Odds, n_turns: int, seed: int) -> None:
    """Random work in little room, to its end; then nothing is left behind."""
    rig = Rig(KINDS["plain"](odds), capacity=14, host_capacity=20, n_ctx=50, n_batch=8)
    work = Work(rig, seed, flaky=True)
    for _ in range(n_turns):
        work.turn()
    rig.driver.drive([ticket for ticket, _, _ in work.open])
    work.look()
    rig.step()  # what could not be freed is freed now
    assert not rig.tree.unfreed
    assert not rig.tree.untrimmed
    work.places.clear()
    rig.finish()


def check_each_call(call: str, n_turns: int, seed: int) -> None:
    """The same work as often as it makes a call, another one failing each time."""
    counted = Once(call, -1)
    do_work(counted, n_turns, seed)
    assert counted.n_calls > 5
    for number in range(counted.n_calls):
        odds = Once(call, number)
        do_work(odds, n_turns, seed)
        assert odds.n_failed[call] == 1


@pytest.mark.parametrize(("call", "n_turns"), [("attach", 15), ("split", 25), ("load", 40)])
def test_failure_of_any_single_call_is_survived(call: str, n_turns: int) -> None:
    check_each_call(call, n_turns, 0)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["new", "settle", "attach", "split", "load"])
@pytest.mark.parametrize("seed", range(1, 4))
def test_failure_of_any_single_call_in_more_work_is_survived(call: str, seed: int) -> None:
    check_each_call(call, 60, seed)


class Owner:
    """Owner of a sequence."""


def broken(*failures: tuple[str, int], late: bool = False) -> Wrapped:
    """An engine with fragment methods that raise MemoryError at a call by number."""
    engine = MemoryEngine()
    fragments: Fragments = engine.kv
    for method, number in failures:
        fragments = BrokenFragments(fragments, method, number)
    wrapped = Wrapped(engine)
    wrapped.fragments = fragments
    return LateFake(wrapped) if late else wrapped


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("number", range(5))
def test_tail_that_cannot_be_created_fails_its_run_alone(
    make: MakeRig, number: int, late: bool
) -> None:
    rig = make(broken(("new", number), late=late), n_batch=4)
    rig.drive_quietly(Extend(rig.place([1, 2, 3, 4])))
    items = [run(rig.place([1, 2, 3]), i) for i in range(4)]
    tickets = rig.drive_quietly(*items)
    assert sum(ticket.error is not None for ticket in tickets) <= 1
    for item, ticket in zip(items, tickets, strict=True):
        if ticket.error is None:
            assert_result(rig, item, ticket.result())
        else:
            with pytest.raises(ForwardError, match="MemoryError: no room for new"):
                ticket.result()
    assert rig.ask([1, 2, 9], Logits(3))[0].tolist() == logits_after([1, 2, 9]).tolist()


def test_tail_that_cannot_be_created_fails_its_commit_alone(make: MakeRig) -> None:
    rig = make(broken(("new", 1)))
    rig.drive(Extend(rig.place([1, 2, 3])))
    owners = [Owner() for _ in range(2)]
    sequences = [rig.scheduler.sequences.create(owner, rig.place([1, 2, 3])) for owner in owners]
    failed, other = rig.drive_quietly(*(Commit([sequence], [4], [None]) for sequence in sequences))
    with pytest.raises(ForwardError, match="no room for new"):
        failed.result()
    logits = rig.scheduler.logits_cache.read(other.result()[0].row)
    assert logits.tolist() == logits_after([1, 2, 3, 4]).tolist()


def test_fragment_that_cannot_be_created_fails_all_extends_of_an_atomic_call(
    make: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    engine = BrokenEngine(broken(("new", 0)), set())
    engine.fragments = engine.inner.fragments
    rig = make(engine)
    tickets = rig.submit(Extend(rig.place([1, 2])), Extend(rig.place([3, 4])), atomic=True)
    (other,) = rig.submit(Extend(rig.place([5, 6])))
    rig.driver.drive([*tickets, other])
    for ticket in tickets:
        with pytest.raises(ForwardError, match="no room for new"):
            ticket.result()
    assert other.result() == []
    assert [row.tokens for rows in engine.calls for row in rows] == [[5, 6]]
    assert len(caplog.records) == 1  # nothing is planned for the second one


@pytest.mark.parametrize("method", ["settle", "attach", "split", "trim"])
@pytest.mark.parametrize("number", range(4))
def test_run_whose_kv_the_engine_cannot_keep_returns_its_result(
    make: MakeRig, method: str, number: int
) -> None:
    """Its tokens are known; a continuation recomputes their KV."""
    rig = make(broken((method, number + (method in ("settle", "attach")))), n_ctx=40)
    rig.drive(Extend(rig.place([1, 2, 3])))
    items = [run(rig.place([1, 2, 3]), i) for i in range(4)]
    results = [ticket.result() for ticket in rig.drive_quietly(*items)]
    for item, result in zip(items, results, strict=True):
        assert_result(rig, item, result)
    continuations = [run(result.end, 7) for result in results]
    for item, ticket in zip(continuations, rig.drive_quietly(*continuations), strict=True):
        if ticket.error is None:
            assert_result(rig, item, ticket.result())


def test_run_whose_end_has_no_node_yet_returns_and_can_continue(make: MakeRig) -> None:
    """Others went on where it parts from them, and the engine can't split their node for it."""
    odds = Odds(["split"], 0)
    rig = make(FlakyEngine(MemoryEngine(), odds), n_ctx=40)
    item = run(rig.place([1, 2, 3]))
    rig.drive(Extend(rig.place([1, 2, 3])), Extend(rig.place([1, 2, 3, 15])))
    (first, second, third, *_), _ = text_after([1, 2, 3], item, rig.n_ctx)
    rig.drive(Extend(rig.place([1, 2, 3, first, second, third ^ 1])))
    odds.chance = 1
    (result,) = rig.drive(item)
    assert_result(rig, item, result)
    assert odds.n_failed["split"] == 2  # for its slots, then for its end
    odds.chance = 0
    continuation = run(result.end, 7)
    assert_result(rig, continuation, *rig.drive(continuation))


def test_nodes_that_the_engine_cannot_join_stay_as_they_are(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(broken(("join", 3)))
    monkeypatch.setattr(
        rig.tree, "growable_leaf", lambda node: None
    )  # as if siblings had been there
    path = list(range(1, 11))
    places = [rig.place(path[:n]) for n in range(1, 11)]
    for place in places:
        rig.drive(Extend(place))
        rig.tree.check()
    assert rig.tree.n_nodes < 10
    assert [place.ids() for place in places] == [path[:n] for n in range(1, 11)]
    assert rig.ask(path, Logits(10))[0].tolist() == logits_after(path).tolist()


@pytest.mark.parametrize("number", range(3))
def test_commit_that_cannot_be_undone_is_recomputed(make: MakeRig, number: int) -> None:
    """Its second pass fails, and what the first has written cannot be trimmed."""
    wrapped = broken(("trim", number))
    engine = BrokenEngine(wrapped, {5})
    engine.fragments = wrapped.fragments
    rig = make(engine, n_batch=2)
    owners = [Owner() for _ in range(4)]
    sequences = [rig.scheduler.sequences.create(owner, rig.place([1, 2, 3])) for owner in owners]
    (first,) = rig.submit(Commit(sequences, [4, 5, 6, 7], [None] * 4))
    rig.driver.drive([first])
    first.result()
    (failed,) = rig.submit(Commit(sequences, [8] * 4, [None] * 4))
    rig.driver.drive([failed])
    with pytest.raises(ForwardError, match="forward 5"):
        failed.result()
    (repeated,) = rig.submit(Commit(sequences, [9] * 4, [None] * 4))
    rig.driver.drive([repeated])
    for token, result in zip([4, 5, 6, 7], repeated.result(), strict=True):
        logits = rig.scheduler.logits_cache.read(result.row)
        assert logits.tolist() == logits_after([1, 2, 3, token, 9]).tolist()


def test_slots_that_cannot_be_freed_count_as_used_until_freed(make: MakeRig) -> None:
    rig = make(broken(("free", 0)), capacity=6)
    rig.drive(Extend(rig.place([1, 2, 3, 4])))
    (ticket,) = rig.submit(Extend(rig.place([5, 6, 7, 8])))
    rig.step()
    assert rig.tree.budget.used <= 6
    rig.driver.drive([ticket])
    assert ticket.result() == []
    assert not rig.tree.unfreed


def test_job_rejected_in_a_failing_step_has_its_error(make: MakeRig) -> None:
    """The engine fails while the job after it is admitted."""
    rig = make(broken(("split", 0)), capacity=4)
    rig.drive(Extend(rig.place([1, 2, 3, 4])))
    tickets = rig.submit(Extend(rig.place([5] * 5)), Extend(rig.place([1, 2, 6])))
    rig.step(3)
    assert all(ticket.done for ticket in tickets)
    with pytest.raises(KVFull):
        tickets[0].result()
    with pytest.raises(ForwardError, match="MemoryError"):
        tickets[1].result()


def test_commit_cancelled_in_a_step_that_fails_is_cancelled(make: MakeRig) -> None:
    rig, owner = make(LateFake(MemoryEngine(), {1})), Owner()
    place = rig.place([1, 2, 3])
    rig.drive(Extend(place))
    sequence = rig.scheduler.sequences.create(owner, place)
    cancelled, failed = rig.submit(Commit([sequence], [4], [None]), Extend(rig.place([9])))
    rig.step()
    assert rig.scheduler.in_flight is not None
    cancelled.cancel()
    rig.driver.drive([cancelled, failed])
    with pytest.raises(Cancelled):
        cancelled.result()
    with pytest.raises(ForwardError, match="step 1"):
        failed.result()


def test_host_copy_that_cannot_be_loaded_fails_its_own_work_only(make: MakeRig) -> None:
    engine = MemoryEngine(idle_slots=4)
    rig = make(engine, capacity=20)
    paths = [rig.place([1, 2, 3, 4, 5]), rig.place([6, 7, 8, 9, 10])]
    for path in paths:
        rig.drive(Extend(path))
    assert rig.tree.host.slots == 5

    def fail(*_: object) -> None:
        raise Boom("load")

    engine.kv.load = fail  # type: ignore[assignment]
    tickets = rig.drive_quietly(*(Extend(path) for path in paths))
    with pytest.raises(ForwardError, match="Boom: load"):
        tickets[0].result()
    assert tickets[1].result() == []
    del engine.kv.load
    (ticket,) = rig.drive_quietly(Extend(paths[0]))
    assert (ticket.result(), ticket.reused) == ([], 5)


def test_job_that_fails_with_a_step_in_flight_does_not_change_that_step(make: MakeRig) -> None:
    rig = make(broken(("split", 0), late=True))
    rig.drive(Extend(rig.place([1, 2, 3, 4])))
    (flying,) = rig.submit(Extend(rig.place([7, 8]), (), (Logits(2),)))
    rig.step()
    assert rig.scheduler.in_flight is not None
    (cutting,) = rig.submit(run(rig.place([1, 2, 3])))
    rig.driver.drive([flying, cutting])
    assert flying.result()[0].tolist() == logits_after([7, 8]).tolist()
    with pytest.raises(ForwardError, match="MemoryError"):
        cutting.result()
    item = run(rig.place([1, 2, 3]))
    (result,) = rig.drive(item)
    assert_result(rig, item, result)


@pytest.mark.parametrize("late", [False, True])
def test_unexpected_error_fails_all_open_tickets(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Of Weft's own code."""
    rig = make(LateFake(MemoryEngine()) if late else None)
    read = Extend(rig.place(range(60)), (), (Logits(60),))
    tickets = rig.submit(run(rig.place([1, 2, 3]), max_tokens=50), read)
    rig.step(3)
    with monkeypatch.context() as patch:
        patch.setattr(rig.scheduler.queues, "advance", lambda: 1 / 0)
        rig.step()
    for ticket in tickets:
        assert isinstance(ticket.error, ForwardError)
    rig.tree.check()
    item = run(rig.place([1, 2, 3]))
    assert_result(rig, item, *rig.drive(item))


def test_error_while_failing_tickets_fails_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    queues = rig.scheduler.queues
    tickets = rig.submit(*(run(rig.place([1, 2, i]), max_tokens=50) for i in range(3)))
    rig.step(3)
    with monkeypatch.context() as patch:
        patch.setattr(queues, "advance", lambda: 1 / 0)
        patch.setattr(queues, "fail", lambda *_: 1 / 0)
        rig.step()
    assert all(isinstance(ticket.error, ForwardError) for ticket in tickets)
    assert not queues.jobs()
    rig.driver.close()


class Blind(Sampler):
    """Cannot see a prompt."""

    def add_prompt(self, tokens: Sequence[int]) -> None:
        raise Boom("add_prompt")


def test_sampler_that_fails_before_its_first_draw_fails_alone(make: MakeRig) -> None:
    rig = make()
    items = [run(rig.place([1, 2, 3]), i, repetition_penalty=1.2) for i in range(2)]
    first = items[0].sampler
    blind = replace(items[0], sampler=Blind(first.params, first.stream))
    (alone,) = rig.drive_quietly(blind)
    second, other = rig.drive_quietly(replace(blind), items[1])
    assert isinstance(alone.error, ForwardError)
    assert isinstance(second.error, ForwardError)
    assert_result(rig, items[1], other.result())


class Odd(Matcher):
    """Allows all but 15 and forces `forces`; its mask raises if `is_broken`."""

    def __init__(self, forces: Sequence[int] = (), *, is_broken: bool = False) -> None:
        self.forces = forces
        self.is_broken = is_broken

    def fill(self, bits: Any, *sets: Set[int]) -> None:
        if self.is_broken:
            raise Boom("mask")
        bits[:] = (1 << 15) - 1

    def accept(self, token: int) -> None:
        if token == 15:
            raise ConstraintError("15 is not allowed")

    def is_allowed(self, token: int) -> bool:
        return token != 15

    def forced(self, *sets: Set[int]) -> list[int]:
        return list(self.forces)

    may_end = must_end = False

    def clone(self) -> Odd:
        return Odd(self.forces, is_broken=self.is_broken)


def with_matcher(item: Run, matcher: Matcher) -> Run:
    return replace(item, sampler=Sampler(item.sampler.params, item.sampler.stream, matcher))


def test_mask_that_cannot_be_computed_fails_its_run_alone(make: MakeRig) -> None:
    rig = make()
    items = [run(rig.place([1, 2, 3]), i) for i in range(3)]
    (alone,) = rig.drive_quietly(with_matcher(items[0], Odd(is_broken=True)))
    assert isinstance(alone.error, ForwardError)
    bad, *others = rig.drive_quietly(with_matcher(items[0], Odd(is_broken=True)), *items[1:])
    assert isinstance(bad.error, ForwardError)
    for item, ticket in zip(items[1:], others, strict=True):
        assert_result(rig, item, ticket.result())


class Failing(Odd):
    """Raises when the scheduler reads its forced tokens."""

    def forced(self, *sets: Set[int]) -> list[int]:
        raise Boom("forced")

    def clone(self) -> Failing:
        return Failing()


def test_constraint_whose_forced_tokens_raise_fails_its_run_alone(make: MakeRig) -> None:
    """The run fails before its row is created: no forward runs for it."""
    engine = Wrapped(MemoryEngine())
    rig = make(engine)
    item = run(rig.place([1, 2, 3]), 1)
    rig.drive(Extend(rig.place([1, 2, 3])))
    engine.calls.clear()
    bad, good = rig.drive_quietly(with_matcher(run(rig.place([1, 2, 3]), 0), Failing()), item)
    with pytest.raises(ForwardError, match="forced"):
        bad.result()
    assert_result(rig, item, good.result())
    assert [len(rows) for rows in engine.calls] == [1] * len(engine.calls)


def test_constraint_whose_forced_tokens_raise_gets_no_drafts_for_its_commit(make: MakeRig) -> None:
    rig = make()
    verify_always(rig.scheduler)
    matchers = [Failing(), Odd()]
    samplers = [Sampler(sampler().params, n, matcher) for n, matcher in enumerate(matchers)]
    place = rig.place([1, 2, 3])
    sequences = [rig.scheduler.sequences.create(matcher, place) for matcher in matchers]
    for token in [5, 7, 9] * 3:
        rig.drive(*[Commit([sequences[n]], [token], [samplers[n]]) for n in range(2)])
    assert not sequences[0].kept
    assert sequences[1].kept


def test_constraint_that_raises_for_drafts_of_a_run_fails_no_other_run(make: MakeRig) -> None:
    class Fork(Odd):
        """Cannot be cloned, which only draft tokens need."""

        def clone(self) -> Fork:
            raise Boom("clone")

    rig = make()
    verify_always(rig.scheduler)
    items = [run(rig.place([1, 2, 3]), n, max_tokens=20) for n in range(2)]
    first, _ = rig.drive(with_matcher(items[0], Odd()), items[1])
    repeated, good = rig.drive(with_matcher(items[0], Fork()), items[1])
    assert repeated.tokens == first.tokens
    assert_result(rig, items[1], good)


@pytest.mark.parametrize("is_end", [True, False])
def test_forced_tokens_that_cannot_run_are_drawn_instead(make: MakeRig, is_end: bool) -> None:
    """An end token is not run, nor what the constraint then does not allow."""
    rig = make()
    free = run(rig.place([1, 2, 3]))
    tokens, _ = text_after([1, 2, 3], free, rig.n_ctx)
    assert 15 not in tokens
    end = next(token for token in range(15) if token not in tokens)
    item = replace(free, stop_ids=frozenset({end}))
    (result,) = rig.drive(with_matcher(item, Odd([end if is_end else 15])))
    assert (result.tokens, result.finish_reason) == (tokens, "length")


def test_tail_that_cannot_be_trimmed_is_trimmed_later(make: MakeRig) -> None:
    rig = make(broken(("trim", 0)))
    rig.drive(Extend(rig.place([1, 2, 3, 4])))
    tree = rig.tree
    assert tree.fragments is not None
    tail = tree.fragments.new(None)
    rig.engine.forward([Row((), [5, 6, 7], 0, tail)])
    tree.trim(tail, 1)
    assert tree.untrimmed == {tail: 1}
    assert tail.length == 3
    tree.drain_released()
    assert not tree.untrimmed
    assert tail.length == 1
    tree.free(tail)


def test_row_that_cannot_be_created_fails_its_run_alone(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    items = [run(rig.place([1, 2, 3]), i) for i in range(3)]
    tickets = rig.submit(*items)
    row = RunJob.row

    def failing(job: RunJob, queues: Any) -> Row:
        if job.members[0].item is items[1]:
            raise MemoryError("no room for a row")
        return row(job, queues)

    monkeypatch.setattr(RunJob, "row", failing)
    rig.driver.drive(tickets)
    assert isinstance(tickets[1].error, ForwardError)
    for n in (0, 2):
        assert_result(rig, items[n], tickets[n].result())


def test_failing_callback_of_a_ticket_fails_no_other_ticket(make: MakeRig) -> None:
    rig = make()
    tickets = rig.submit(*(Extend(rig.place([1, 2, n]), (), (Logits(3),)) for n in range(3)))

    def failing(ticket: Ticket) -> None:
        raise Boom("the callback failed")

    tickets[1].on_done(failing)
    rig.driver.drive(tickets)
    for n, ticket in enumerate(tickets):
        assert ticket.result()[0].tolist() == logits_after([1, 2, n]).tolist()


def test_failing_callback_of_a_commit_fails_no_other_work(make: MakeRig) -> None:
    rig, owner = make(), Owner()
    sequence = rig.scheduler.sequences.create(owner, rig.place([1, 2, 3]))
    (ticket,) = rig.submit(Commit([sequence], [4], [None]))

    def failing(ticket: Ticket) -> None:
        raise Boom("the callback failed")

    ticket.on_done(failing)
    other = run(rig.place([1, 2]))
    (result,) = rig.drive(other)
    assert_result(rig, other, result)
    assert rig.scheduler.logits_cache.read(ticket.result()[0].row) is not None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_fail_their_run(make: MakeRig, bad: float) -> None:
    engine = MemoryEngine()
    rig = make(engine)
    fine = run(rig.place([1, 2]), max_tokens=3)
    broken_ = run(rig.place([7, 7]), max_tokens=3)
    forward = engine.forward

    def spoilt(rows: Sequence[Row]) -> Any:
        spoil = [engine._path(row)[0] == 7 for row in rows]
        output = forward(rows)
        for index in np.flatnonzero(spoil):
            output._logits[index] = bad
        return output

    engine.forward = spoilt  # type: ignore[method-assign]
    tickets = rig.drive_quietly(fine, broken_)
    assert_result(rig, fine, tickets[0].result())
    with pytest.raises(ForwardError, match="NaN or"):
        tickets[1].result()


def test_changed_weights_are_noticed_before_the_next_work(make: MakeRig) -> None:
    class Changing(MemoryEngine):
        mark = 1

        def weights_version(self) -> object:
            return self.mark

    engine = Changing()
    rig = make(engine)
    rig.ask([1, 2, 3], Logits(3))
    rig.ask([1, 2, 3], Logits(3))
    assert len(engine.sizes) == 1
    engine.mark = 2
    assert rig.ask([1, 2, 3], Logits(3))[0].tolist() == logits_after([1, 2, 3]).tolist()
    assert engine.sizes == [3, 3]


def test_work_after_a_weight_change_waits_for_runs_with_the_old_weights(
    make: MakeRig,
) -> None:
    """Otherwise it would use KV of the old weights as long as some run is live."""

    class Changing(MemoryEngine):
        mark = 1

        def weights_version(self) -> object:
            return self.mark

    engine = Changing()
    rig = make(engine)
    rig.ask([1, 2, 3, 4], Logits(4))
    (running,) = rig.submit(run(rig.place([5, 6]), max_tokens=6))
    rig.step()
    engine.mark = 2
    (later,) = rig.submit(Extend(rig.place([1, 2, 3, 4]), (), (Logits(4),)))
    for _ in range(3):
        rig.step()
    assert not later.done
    assert not running.done
    while not running.done:
        rig.step()
    before = len(engine.sizes)
    rig.driver.drive([later])
    assert later.result()[0].tolist() == logits_after([1, 2, 3, 4]).tolist()
    assert engine.sizes[before:] == [4]  # everything is recomputed


def test_forced_tokens_of_a_postponed_step_run_in_the_next(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make()
    item = with_matcher(run(rig.place([1, 2, 3]), max_tokens=9), Odd([4, 5]))
    (want,) = rig.drive(item)
    rig.driver.exclusive(rig.scheduler.clear)
    fit, calls = rig.scheduler.admission.reserve_slots, list[bool]()

    def put_off(*given: Any, **more: Any) -> bool:
        calls.append(True)
        return len(calls) % 2 == 0 and fit(*given, **more)

    monkeypatch.setattr(rig.scheduler.admission, "reserve_slots", put_off)
    (ticket,) = rig.submit(with_matcher(run(rig.place([1, 2, 3]), max_tokens=9), Odd([4, 5])))
    while not ticket.done:
        rig.step()
    assert len(calls) > 3
    assert ticket.result().tokens == want.tokens
