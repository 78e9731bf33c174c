"""First tokens of runs: drawn where their logits are, by the step that brings them if it can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fakes import Boom, HiddenFake, LateFake, LateOutput, SequenceFake
from rig import MakeRig, MemoryEngine, Rig, assert_result, logits_after, run
from weft._core.kv.place import Place
from weft._core.sched.work import Logits, Run
from weft.engines.base import Engine, HostOutput

KINDS: dict[str, Callable[[], Engine]] = {
    "plain": MemoryEngine,
    "owner": lambda: MemoryEngine(same_thread_only=True),
    "sequence": lambda: SequenceFake(MemoryEngine(), 40),
    "hidden": lambda: HiddenFake(MemoryEngine()),
    "late": lambda: LateFake(MemoryEngine()),
}


def runs_at(place: Place, first: int = 0) -> list[Run]:
    """Runs of several rules, some of which count the prompt."""
    plain = [run(place, first + i) for i in range(4)]
    counting = [
        run(place, first + 10 + i, repetition_penalty=1.6, frequency_penalty=0.3, penalty_last_n=4)
        for i in range(2)
    ]
    greedy = [run(place, first + 20, temperature=0), run(place, first + 21, temperature=0)]
    return [*plain, *counting, *greedy]


def drive_and_check(rig: Rig, *items: Run) -> None:
    for item, result in zip(items, rig.drive(*items), strict=True):
        assert_result(rig, item, result)


@pytest.mark.parametrize("kind", KINDS)
def test_first_draws_from_new_and_cached_rows_follow_the_rule(make: MakeRig, kind: str) -> None:
    rig = make(KINDS[kind]())
    one, other = rig.place([1, 2, 1, 3]), rig.place([4, 4])
    drive_and_check(rig, *runs_at(one), *runs_at(other))
    drive_and_check(rig, *runs_at(one, 50), *runs_at(other, 50))
    rig.ask([1, 2, 1, 3], Logits(4))  # now the host has that row
    new = rig.place([5], after=one)
    drive_and_check(rig, *runs_at(one, 90), *runs_at(other, 90), *runs_at(new, 90))


def test_overlapping_runs_fetch_no_logits_to_the_host(make: MakeRig) -> None:
    engine = LateFake(MemoryEngine())
    rig = make(engine)
    place = rig.place([1, 2, 3])
    drive_and_check(rig, *runs_at(place))
    assert (engine.n_fetched, engine.n_drawn_kept) == (0, 0)
    drive_and_check(rig, *runs_at(place, 50))
    assert (engine.n_fetched, engine.n_drawn_kept) == (0, 7)  # equal greedy runs are one
    (row,) = rig.ask([1, 2, 3], Logits(3))
    assert engine.n_fetched == 1
    assert np.array_equal(row, logits_after([1, 2, 3]))
    assert rig.ask([1, 2, 3], Logits(3))[0] is row
    assert engine.n_fetched == 1


def test_run_that_starts_at_a_cached_row_does_not_delay_live_runs(make: MakeRig) -> None:
    """Its first token is drawn by a step that the live run rides, too, and is not waited for."""
    engine = LateFake(MemoryEngine())
    rig = make(engine)
    place = rig.place([1, 2])
    drive_and_check(rig, run(place, 5))
    n_before, n_overlapped = len(engine.calls), engine.n_overlapped
    live = run(place, 0, max_tokens=14)
    tickets = rig.submit(live)
    rig.step(6)
    late = run(place, 1, max_tokens=5)
    tickets += rig.submit(late)
    rig.driver.drive(tickets)
    assert_result(rig, live, tickets[0].result())
    assert_result(rig, late, tickets[1].result())
    assert len(engine.calls) - n_before == 13
    assert engine.n_overlapped - n_overlapped == 12


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_first_draws_that_fail_together_are_repeated_one_by_one(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch, late: bool, kept: bool
) -> None:
    """The prompt is counted once, and no run fails."""
    engine = LateFake(MemoryEngine()) if late else MemoryEngine()
    rig = make(engine)
    place = rig.place([1, 2, 1, 3])
    if kept:
        drive_and_check(rig, run(place, 70))
    n_failed = 0

    def fails_once(real: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*given: Any) -> Any:
            nonlocal n_failed
            if not n_failed:
                n_failed = 1
                raise Boom("no draw")
            return real(*given)

        return draw

    if kept:
        monkeypatch.setattr(engine, "draw", fails_once(engine.draw))
    else:
        output = LateOutput if late else HostOutput
        monkeypatch.setattr(output, "draw", fails_once(output.draw))
    drive_and_check(rig, *runs_at(place))
    assert n_failed == 1


def test_runs_cancelled_or_failed_before_their_first_draw_leave_nothing(
    make: MakeRig,
) -> None:
    for n_steps in range(4):
        rig = make(LateFake(MemoryEngine()))
        place = rig.place([1, 2, 3])
        if n_steps % 2:
            drive_and_check(rig, run(place, 9, max_tokens=2))
        items = runs_at(place)
        tickets = rig.submit(*items)
        rig.step(n_steps)
        for ticket in tickets[::2]:
            ticket.cancel()
        rig.driver.drive(tickets)
        for item, ticket in list(zip(items, tickets, strict=True))[1::2]:
            assert_result(rig, item, ticket.result())
        assert all(t.result().finish_reason == "cancelled" for t in tickets[:6:2])
