"""KV budgets from one slot upwards: the same texts, or a clean KVFull; nothing stays pinned."""

from __future__ import annotations

import numpy as np
import pytest

from contract.conftest import WITH_KV, Make, Oracle
from contract.helpers import assert_close, prompt_ids, run_item
from fakes import Tight
from weft import Branch, BranchStore
from weft._core.sched import admission
from weft._core.sched.admission import MemoryPressure
from weft._core.sched.work import Extend, Logits
from weft.engines.base import Engine
from weft.errors import KVFull

BUDGETS = [*range(1, 9), 11, 14, 18, 22, 27, 33, 40, 56, 80, 120]
FEW_BUDGETS = [1, 6, 18, 40, 120]  # Triton's interpreter takes seconds a step


def work(lm) -> list[object]:
    """Return the result of each piece of mixed work: tokens, logits, or None for KVFull."""
    ids = prompt_ids(lm)[:8]
    items = [
        run_item(lm, lm.place(ids), 3, 0, max_tokens=10, stop_ids=frozenset()),
        run_item(lm, lm.place([*ids, 40]), 3, 1, max_tokens=6, stop_ids=frozenset()),
        Extend(lm.place([*ids[:5], *range(50, 60)]), (), (Logits(15),)),
        run_item(lm, lm.place(ids[:3]), 3, 2, max_tokens=14, stop_ids=frozenset()),
    ]
    tickets = lm.submit(items)
    lm.drive(tickets)
    out: list[object] = []
    for ticket in tickets:
        try:
            result = ticket.result()
        except KVFull:
            out.append(None)
        else:
            out.append(result[0] if isinstance(result, list) else result.tokens)
    root = Branch.create(lm, seed=4)
    try:
        root.prefill(ids)
        branches, store = [root, root.fork(), root.fork()], BranchStore(lm)
        for _ in range(4):
            pieces = store.produce(branches)
            store.commit([(b, p.token) for b, p in zip(branches, pieces, strict=True)])
        out.append([branch.tokens for branch in branches])
    except KVFull:
        out.append(None)
    return out


@pytest.mark.programs
@pytest.mark.parametrize("kind", WITH_KV)
def test_any_budget_gives_equal_results_or_kvfull(kind: str, make: Make) -> None:
    want = work(make(kind))
    n_full = []
    for slots in FEW_BUDGETS if kind == "paged" else BUDGETS:
        lm = make(kind, kv_slots=slots, n_batch=8)
        got = work(lm)
        for mine, theirs in zip(got, want, strict=True):
            if isinstance(theirs, np.ndarray) and mine is not None:
                assert_close(mine, theirs)
            else:
                assert mine is None or mine == theirs, slots
        lm.driver.exclusive(lm.scheduler.close_idle_sequences)
        assert lm.tree.budget.unevictable == 0
        lm.tree.check()
        n_full.append(sum(each is None for each in got))
    assert n_full[0] == len(want)
    assert n_full[-1] == 0
    assert sorted(n_full, reverse=True) == n_full, "more room, and less fits"


@pytest.mark.parametrize("kind", WITH_KV)
@pytest.mark.parametrize("short", [{"max_tokens": 2}, {"max_slots": 34}], ids=["step", "kv"])
def test_less_memory_than_configured_gives_the_same(
    kind: str, short: dict[str, int], make: Make
) -> None:
    """Others take it on the same device: steps that find none are done again with less."""
    want = work(make(kind))
    engines: list[Tight] = []

    def tight(engine: Engine) -> Engine:
        engines.append(Tight(engine, **short))
        return engines[-1]

    lm = make(kind, tight, kv_slots=200)
    for mine, theirs in zip(work(lm), want, strict=True):
        if isinstance(theirs, np.ndarray):
            assert_close(mine, theirs)
        else:
            assert mine == theirs
    assert engines[0].n_refused
    lm.driver.exclusive(lm.scheduler.close_idle_sequences)
    assert lm.tree.budget.unevictable == 0
    lm.tree.check()


@pytest.mark.parametrize("kind", ["paged"])
def test_pool_that_cannot_grow_gives_the_same(
    kind: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch itself says that there is no memory, in the midst of a step."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from weft.engines.torch.paged import pool
    from weft.engines.torch.paged.step import PagedBackend

    monkeypatch.setattr(pool, "SMALLEST_POOL", 8)
    monkeypatch.setattr(admission, "RELAX_S", 1e9)  # the limit stays, however slow the machine is
    lm, limit, empty, refused = make(kind, kv_slots=1000), 4 * pool.GROW_BY, PagedBackend._empty, []

    def within(memory: PagedBackend, shape: object, n: int) -> object:
        if n > limit + 1:
            refused.append(n)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(memory, shape, n)

    def grown() -> list[list[int]]:
        place = lm.place(prompt_ids(lm)[:8])
        items = [run_item(lm, place, 3, i, max_tokens=3, stop_ids=frozenset()) for i in range(6)]
        tickets = lm.submit(items)
        lm.drive(tickets)
        return [ticket.result().tokens for ticket in tickets]

    want = grown()
    lm.clear_cache()
    monkeypatch.setattr(PagedBackend, "_empty", within)
    assert grown() == want
    assert refused
    assert lm.tree.budget.capacity <= limit
    assert lm.stats().parked


@pytest.mark.parametrize("kind", WITH_KV)
@pytest.mark.parametrize("where", ["forward", "draw", "wait", "keep"])
def test_kv_of_repeated_work_equals_a_plain_forward(
    kind: str, where: str, make: Make, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of each path is there, and what comes after it is as if it had been read at once."""
    monkeypatch.setattr(
        MemoryPressure, "relax", MemoryPressure.reset
    )  # so that steps are large each time
    engines: list[Tight] = []

    def tight(engine: Engine) -> Engine:
        engines.append(Tight(engine, where=where, chance=0.4, seed=3))
        return engines[-1]

    lm = make(kind, tight, kv_slots=200, n_batch=8)
    ids = prompt_ids(lm)[:8]
    items = [
        run_item(lm, lm.place(ids), 3, i, max_tokens=5 + i, stop_ids=frozenset()) for i in range(4)
    ]
    other = [*ids[:5], *range(50, 60)]
    tickets = lm.submit([*items, Extend(lm.place(other), (), (Logits(15),))])
    lm.drive(tickets)
    assert engines[0].n_refused
    engines[0].chance = 0.0
    assert_close(tickets[4].result()[0], oracle(other)[-1])
    for ticket in tickets[:4]:
        path = ticket.result().end.ids()
        ends = len(path), len(path) + 2
        (read,) = lm.submit([Extend(lm.place([*path, 40, 41]), (), tuple(map(Logits, ends)))])
        lm.drive([read])
        want = oracle([*path, 40, 41])
        for depth, logits in zip(ends, read.result(), strict=True):
            assert_close(logits, want[depth - 1])
