"""An engine that fails outside the model call: what is open fails, and the LM goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from contract.conftest import Make
from contract.helpers import ask, prompt_ids, run_all, run_item
from fakes import BrokenFragments, Wrapped
from shallow import SLOT
from weft._core.sched.work import Extend, Logits
from weft.engines.base import Engine
from weft.errors import ForwardError
from weft.lm.lm import LM


def failing(method: str, number: int) -> Callable[[Engine], Engine]:
    """Wrap an engine so that call `number` of a fragment method raises MemoryError."""

    def wrap(engine: Engine) -> Engine:
        wrapped = Wrapped(engine)
        assert engine.fragments is not None
        wrapped.fragments = BrokenFragments(engine.fragments, method, number)
        return wrapped

    return wrap


@pytest.mark.parametrize("on_a_thread", [False, True], ids=["inline", "thread"])
@pytest.mark.parametrize(
    ("method", "number"),
    [("new", 0), ("new", 1), ("new", 2), ("settle", 0), ("attach", 1), ("trim", 0), ("split", 0)],
)
def test_failing_fragments_fail_open_work_and_later_calls_work(
    make: Make, method: str, number: int, on_a_thread: bool
) -> None:
    lm = make("numpy", failing(method, number))
    if on_a_thread:
        lm.driver.start()
    ids = prompt_ids(lm)
    place = lm.place(ids)
    items = [run_item(lm, place, 1, i, max_tokens=6) for i in range(3)]
    tickets = lm.submit([*items, Extend(lm.place([*ids[:4], 9]), (), (Logits(5),))])
    lm.drive(tickets)
    failed = [ticket for ticket in tickets if ticket.error is not None]
    for ticket in failed:
        with pytest.raises(ForwardError, match="MemoryError"):
            ticket.result()
    assert failed or method in ("trim", "split")
    want = run_all(lm, [run_item(lm, place, 1, i, max_tokens=6) for i in range(3)])
    lm.clear_cache()
    repeated = run_all(lm, [run_item(lm, place, 1, i, max_tokens=6) for i in range(3)])
    assert [r.tokens for r in repeated] == [r.tokens for r in want]
    assert lm.tree.budget.unevictable == 0


def allocated(lm: LM) -> float:
    stats = lm.stats()
    return stats.kv_bytes_allocated / stats.kv_bytes


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_allocated_kv_exceeds_used_kv_by_a_tenth_or_less(make: Make, engine: str) -> None:
    lm = make(engine)
    ids = prompt_ids(lm)
    paths = [[*ids, 40 + i] for i in range(16)]
    for path in paths:
        ask(lm, lm.place(path), Logits(len(path)))
    assert allocated(lm) <= 1.10
    run_all(lm, [run_item(lm, lm.place(paths[0]), 1, i, max_tokens=9) for i in range(8)])
    assert allocated(lm) <= 1.10


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_live_runs_do_not_exceed_the_budget_by_much(make: Make, engine: str) -> None:
    """Growing leaves take 32 slots at a time and count so; a bank's unused rows come on top."""
    budget = 400 * SLOT
    lm = make(engine, kv_bytes=budget)
    place = lm.place(prompt_ids(lm))
    tickets = lm.submit([run_item(lm, place, 1, i, max_tokens=40) for i in range(24)])
    peak = 0
    while not all(ticket.done for ticket in tickets):
        lm.scheduler.step()
        peak = max(peak, lm.stats().kv_bytes_allocated)
    assert lm.stats().parked > 0
    assert peak <= 2.2 * budget
