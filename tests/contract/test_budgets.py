"""KV budgets from one slot upwards: the same texts, or a clean KVFull; nothing stays pinned."""

from __future__ import annotations

import numpy as np
import pytest

from contract.conftest import WITH_KV, Make
from contract.helpers import assert_close, prompt_ids, run_item
from weft import Branch, BranchStore
from weft.errors import KVFull
from weft.sched.work import Extend, Logits

BUDGETS = [*range(1, 9), 11, 14, 18, 22, 27, 33, 40, 56, 80, 120]


def work(lm) -> list[object]:
    """What each piece of some mixed work gives: tokens, logits, or None for KVFull."""
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
def test_any_budget_gives_the_same_or_says_that_it_is_full(kind: str, make: Make) -> None:
    want = work(make(kind))
    n_full = []
    for slots in BUDGETS:
        lm = make(kind, kv_slots=slots, n_batch=8)
        got = work(lm)
        for mine, theirs in zip(got, want, strict=True):
            if isinstance(theirs, np.ndarray) and mine is not None:
                assert_close(mine, theirs)
            else:
                assert mine is None or mine == theirs, slots
        lm.driver.exclusive(lm.scheduler.settle)
        assert lm.tree.room.must == 0
        lm.tree.check()
        n_full.append(sum(each is None for each in got))
    assert n_full[0] == len(want)
    assert n_full[-1] == 0
    assert sorted(n_full, reverse=True) == n_full, "more room, and less fits"
