"""Every call of an engine's protocol may fail at any time, under many threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from contract.conftest import Make
from contract.helpers import ask, assert_close, prompt_ids, run_all, run_item
from fakes import PROTOCOL, FlakyEngine, Odds
from weft import Branch, BranchStore
from weft._core.sched.work import Logits
from weft.engines.base import Engine
from weft.errors import ForwardError, KVFull
from weft.lm.lm import LM

SLOTS = 260  # of KV: enough for any one, too few for all
MEMORY = ("settle", "attach", "trim", "free")


def generating(lm: LM, number: int) -> list[int]:
    """A run's tokens."""
    ids = prompt_ids(lm)[: 6 + number % 4]
    return run_all(lm, [run_item(lm, lm.place(ids), number, max_tokens=12)])[0].tokens


def asking(lm: LM, number: int) -> np.ndarray:
    """The logits after a path, which others go through."""
    ids = [*prompt_ids(lm)[: 4 + number % 5], *range(30, 34 + number % 7)]
    answer: np.ndarray = ask(lm, lm.place(ids), Logits(len(ids)))[0]
    return answer


def committing(lm: LM, number: int) -> list[list[int]]:
    """Return the tokens that two branches draw in lockstep."""
    root = Branch.create(lm, seed=number)
    root.prefill(prompt_ids(lm)[:7])
    branches, store = [root, root.fork()], BranchStore(lm)
    for _ in range(5):
        store.commit([(b, p.token) for b, p in zip(branches, store.produce(branches), strict=True)])
    return [branch.tokens for branch in branches]


CALLS: list[Callable[[LM, int], Any]] = [generating, asking, committing]


def same(got: Any, want: Any) -> None:
    if isinstance(want, np.ndarray):
        assert_close(got, want)
    else:
        assert got == want


@pytest.mark.programs
@pytest.mark.parametrize("calls", [MEMORY, PROTOCOL], ids=["memory", "all"])
@pytest.mark.parametrize("n_rounds", [3, pytest.param(40, marks=pytest.mark.slow, id="long")])
def test_eight_threads_over_a_failing_engine_get_their_own_result_or_an_error(
    kind: str, make: Make, calls: tuple[str, ...], n_rounds: int
) -> None:
    if kind == "paged" and n_rounds > 3:
        pytest.skip("Triton's interpreter takes a quarter of an hour for it")
    is_hidden = make(kind).info.kv == "hidden"
    if is_hidden and calls is MEMORY:
        pytest.skip("a hidden engine has no fragments")
    odds = Odds(calls, 0.0, seed=1)

    def flaky(engine: Engine) -> Engine:
        return FlakyEngine(engine, odds)

    budget = {} if is_hidden else {"kv_slots": SLOTS}
    lm = make(kind, flaky, **budget)
    want = [CALLS[n % 3](lm, n) for n in range(8)]
    lm.clear_cache()
    odds.chance = 0.04 if calls is MEMORY else 0.02
    wrong: list[BaseException] = []
    n_failed = 0

    def work(number: int) -> None:
        nonlocal n_failed
        for _ in range(n_rounds):
            try:
                got = CALLS[number % 3](lm, number)
            except (ForwardError, KVFull):
                n_failed += 1
                continue
            except BaseException as error:
                wrong.append(error)
                return
            try:
                same(got, want[number])
            except AssertionError as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        assert not thread.is_alive(), "a caller waits for ever"
    odds.chance = 0.0
    assert not wrong, wrong[0]
    assert odds.n_failed
    assert not lm.closed
    for number in range(8):
        same(CALLS[number % 3](lm, number), want[number])
    lm.clear_cache()
    lm.driver.exclusive(lm.tree.drain_released)
    lm.tree.check()
    assert lm.tree.budget.unevictable == 0
    assert not lm.tree.unfreed
