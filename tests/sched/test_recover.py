"""Engines that fail outside the model call."""

from __future__ import annotations

import logging

import pytest

from fakes import BrokenFragments, LateFake, Wrapped
from rig import MakeRig, MemoryEngine, Rig, assert_result, logits_after, run
from weft.engines.base import Fragments
from weft.errors import ForwardError, KVFull
from weft.sched.work import Extend, Logits


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
@pytest.mark.parametrize(
    "failure", [("new", 0), ("new", 1), ("new", 3), ("settle", 0), ("attach", 2), ("split", 0)]
)
def test_what_is_open_fails_and_what_comes_later_works(
    make: MakeRig, failure: tuple[str, int], late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(broken(failure, late=late), n_batch=4)
    rig.drive_quietly(Extend(rig.place([1, 2, 3, 4, 5, 6])))
    items = [run(rig.place([1, 2, 3]), i) for i in range(3)]
    extend = Extend(rig.place([1, 2, 9]), (), (Logits(3),))
    rig.drive_quietly(*items, extend, Extend(rig.place([1, 2, 3, 4, 5, 7, 8])))
    assert "failed outside the model call" in caplog.text
    if rig.scheduler.flight is None:
        rig.tree.check()
    assert rig.tree.room.must == 0
    for i in range(3):
        item = run(rig.place([1, 2, 3]), i)
        (result,) = rig.drive(item)
        assert_result(rig, item, result)
    assert rig.ask([1, 2, 9], Logits(3))[0].tolist() == logits_after([1, 2, 9]).tolist()


def test_tickets_fail_even_where_their_work_cannot_be_undone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The second failure comes while the first is cleared up; its slots are the engine's loss."""
    rig = Rig(broken(("new", 3), ("free", 0)))
    with caplog.at_level(logging.ERROR, "weft"):
        tickets = rig.drive_quietly(
            run(rig.place([1, 2]), 0), run(rig.place([1, 2]), 1), run(rig.place([1, 2]), 2)
        )
    assert "could not be undone" in caplog.text
    for ticket in tickets:
        with pytest.raises(ForwardError, match="MemoryError"):
            ticket.result()
    assert rig.scheduler.is_idle
    item = run(rig.place([1, 2]))
    (result,) = rig.drive(item)
    assert_result(rig, item, result)


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


def test_a_step_that_fails_while_another_is_in_flight_waits_for_it(make: MakeRig) -> None:
    rig = make(broken(("split", 0), late=True))
    rig.drive(Extend(rig.place([1, 2, 3, 4])))
    flying = rig.submit(Extend(rig.place([7, 8])))
    rig.step()
    assert rig.scheduler.flight is not None
    cutting = rig.submit(run(rig.place([1, 2, 3])))
    rig.step()
    assert rig.scheduler.flight is None
    for ticket in (*flying, *cutting):
        with pytest.raises(ForwardError, match="MemoryError"):
            ticket.result()
    item = run(rig.place([1, 2, 3]))
    (result,) = rig.drive(item)
    assert_result(rig, item, result)
