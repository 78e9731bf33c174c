"""Every call of the engine may fail at any time: what met it fails, everything else goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fakes import (
    PROTOCOL,
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
from rig import MakeRig, MemoryEngine, Rig, assert_result, logits_after, run
from weft.engines.base import Engine, Fragments
from weft.errors import ForwardError, KVFull
from weft.sched.work import Commit, Extend, Logits

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [*CALLS, "any"])
def test_a_call_that_fails_fails_what_met_it_and_nothing_else(kind: str, call: str) -> None:
    if kind == "hidden" and call not in {*ANSWERS, "any"}:
        pytest.skip("a hidden engine has no fragments")
    check_work(kind, call, CHANCES.get(call, 0.1), 60, 3, n_later=30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", [*CALLS, "any"])
@pytest.mark.parametrize("seed", range(10, 22))
def test_a_call_that_fails_fails_what_met_it_and_nothing_else_for_long(
    kind: str, call: str, seed: int
) -> None:
    if kind == "hidden" and call not in {*ANSWERS, "any"}:
        pytest.skip("a hidden engine has no fragments")
    check_work(kind, call, 2 * CHANCES.get(call, 0.1), 600, seed)


class Owner:
    """Who has a line."""


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
def test_a_tail_that_cannot_be_made_fails_its_run_alone(
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


@pytest.mark.parametrize("method", ["settle", "attach", "split", "trim"])
@pytest.mark.parametrize("number", range(4))
def test_a_run_whose_kv_the_engine_cannot_keep_is_answered_all_the_same(
    make: MakeRig, method: str, number: int
) -> None:
    """Its tokens are known; who goes on from there has them computed again."""
    rig = make(broken((method, number + (method in ("settle", "attach")))), n_ctx=40)
    rig.drive(Extend(rig.place([1, 2, 3])))
    items = [run(rig.place([1, 2, 3]), i) for i in range(4)]
    results = [ticket.result() for ticket in rig.drive_quietly(*items)]
    for item, result in zip(items, results, strict=True):
        assert_result(rig, item, result)
    again = [run(result.end, 7) for result in results]
    for item, ticket in zip(again, rig.drive_quietly(*again), strict=True):
        if ticket.error is None:
            assert_result(rig, item, ticket.result())


def test_nodes_that_the_engine_cannot_join_stay_as_they_are(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make(broken(("join", 3)))
    monkeypatch.setattr(rig.tree, "may_grow", lambda node: None)  # as if siblings had been there
    path = list(range(1, 11))
    held = [rig.place(path[:n]) for n in range(1, 11)]
    for place in held:
        rig.drive(Extend(place))
        rig.tree.check()
    assert rig.tree.n_nodes < 10
    assert [place.ids() for place in held] == [path[:n] for n in range(1, 11)]
    assert rig.ask(path, Logits(10))[0].tolist() == logits_after(path).tolist()


@pytest.mark.parametrize("number", range(3))
def test_a_commit_that_cannot_be_undone_is_computed_again(make: MakeRig, number: int) -> None:
    """Its second pass fails, and what the first has written cannot be trimmed."""
    wrapped = broken(("trim", number))
    engine = BrokenEngine(wrapped, {5})
    engine.fragments = wrapped.fragments
    rig = make(engine, n_batch=2)
    owners = [Owner() for _ in range(4)]
    lines = [rig.scheduler.lines.begin(owner, rig.place([1, 2, 3])) for owner in owners]
    (first,) = rig.submit(Commit(lines, [4, 5, 6, 7], [None] * 4))
    rig.driver.drive([first])
    first.result()
    (failed,) = rig.submit(Commit(lines, [8] * 4, [None] * 4))
    rig.driver.drive([failed])
    with pytest.raises(ForwardError, match="forward 5"):
        failed.result()
    (again,) = rig.submit(Commit(lines, [9] * 4, [None] * 4))
    rig.driver.drive([again])
    for token, found in zip([4, 5, 6, 7], again.result(), strict=True):
        logits = rig.scheduler.rows.read(found.row)
        assert logits.tolist() == logits_after([1, 2, 3, token, 9]).tolist()


def test_what_cannot_be_freed_counts_as_taken_until_it_is(make: MakeRig) -> None:
    rig = make(broken(("free", 0)), capacity=6)
    rig.drive(Extend(rig.place([1, 2, 3, 4])))
    (ticket,) = rig.submit(Extend(rig.place([5, 6, 7, 8])))
    rig.step()
    assert rig.tree.room.used <= 6
    rig.driver.drive([ticket])
    assert ticket.result() == []
    assert not rig.tree.unfreed


def test_a_job_refused_in_a_step_that_fails_has_its_answer(make: MakeRig) -> None:
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


def test_a_job_that_fails_beside_a_step_in_flight_does_not_touch_it(make: MakeRig) -> None:
    rig = make(broken(("split", 0), late=True))
    rig.drive(Extend(rig.place([1, 2, 3, 4])))
    (flying,) = rig.submit(Extend(rig.place([7, 8]), (), (Logits(2),)))
    rig.step()
    assert rig.scheduler.flight is not None
    (cutting,) = rig.submit(run(rig.place([1, 2, 3])))
    rig.driver.drive([flying, cutting])
    assert flying.result()[0].tolist() == logits_after([7, 8]).tolist()
    with pytest.raises(ForwardError, match="MemoryError"):
        cutting.result()
    item = run(rig.place([1, 2, 3]))
    (result,) = rig.drive(item)
    assert_result(rig, item, result)
