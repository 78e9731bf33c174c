"""Random work on a scheduler against the rule its engine follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fakes import HiddenFake, LateFake, OwnLoopFake, SequenceFake
from random_work import Work
from rig import MemoryEngine, Rig
from weft.engines.base import Engine

ENGINES: dict[str, Callable[[], Engine]] = {
    "plain": MemoryEngine,
    "sequence": lambda: SequenceFake(MemoryEngine(), 4),
    "hidden": lambda: HiddenFake(MemoryEngine()),
    "ownloop": lambda: OwnLoopFake(MemoryEngine(), max_in_flight=3),
    "idle": lambda: MemoryEngine(idle_slots=5),
    "late": lambda: LateFake(MemoryEngine()),
}


def check_random_work(engine: str, capacity: int | None, n_turns: int, seed: int) -> None:
    """A step runs 8 tokens at most, so that nearly everything is chunked."""
    if engine == "hidden" and capacity is not None:
        pytest.skip("a hidden engine has no room of ours")
    rig = Rig(ENGINES[engine](), capacity=capacity, host_capacity=10, n_ctx=50, n_batch=8)
    work = Work(rig, seed)
    for _ in range(n_turns):
        work.turn()
    rig.driver.drive([ticket for ticket, _, _ in work.open])
    work.look()
    assert not work.open
    assert work.n_answered > n_turns // 3
    rig.finish()


@pytest.mark.parametrize("capacity", [None, 40])
@pytest.mark.parametrize("engine", ENGINES)
def test_random_work_gives_the_results_of_the_rule_and_leaves_nothing(
    engine: str, capacity: int | None
) -> None:
    check_random_work(engine, capacity, 200, 3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", range(30, 60))
def test_random_work_of_400_turns_in_40_slots_gives_the_results_of_the_rule(
    engine: str, seed: int
) -> None:
    check_random_work(engine, 40, 400, seed)
