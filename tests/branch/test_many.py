"""Very many live branches: each costs its KV and little more, and all are right."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from shallow import shallow
from weft import LM, Branch, BranchStore
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.numpy import NumpyEngine


@pytest.fixture(params=["numpy", "torch"])
def lm(request, monkeypatch) -> LM:
    """An LM whose engine has a crowd from the first tail on, and steps of eight rows."""
    if request.param == "torch":
        pytest.importorskip("torch")
        from weft.engines import padded_pool
        from weft.engines.torch import TorchEngine

        monkeypatch.setattr(padded_pool, "LARGE_BATCH_BYTES", 0)
        engine = TorchEngine.load(shallow(), dtype="float32")
    else:
        from weft.engines.numpy import kv

        monkeypatch.setattr(kv, "LARGE_BYTES", 0)
        engine = NumpyEngine.load(shallow())
    lm = LM(engine, Tokenizer.from_folder(shallow()), n_batch=8)
    yield lm
    lm.tree.check()
    lm.close()


def forks(lm: LM, n: int) -> list[Branch]:
    root = Branch.create(lm, seed=1, temperature=1.5)
    root.prefill([*range(40, 60)])
    return [root.fork() for _ in range(n)]


def bytes_per_kv_byte(lm: LM) -> float:
    """Bytes that the engine allocates for a byte of KV."""
    usage = lm.engine.fragments.usage()
    return usage.bytes / (usage.slots * lm.info.kv_bytes_per_token)


def right(lm: LM, branches: list[Branch]) -> None:
    lm.clear_cache()
    for branch in branches:
        fresh = Branch.create(lm)
        fresh.prefill(branch.tokens)
        np.testing.assert_allclose(branch.logits, fresh.logits, atol=1e-4)


def test_memory_of_live_branches_is_twice_their_kv_or_less(lm: LM) -> None:
    branches, store = forks(lm, 60), BranchStore(lm)
    for _ in range(9):
        pieces = store.produce(branches)
        store.commit([(b, p.token) for b, p in zip(branches, pieces, strict=True)])
        assert bytes_per_kv_byte(lm) <= 2
    rows = [branch.logits for branch in branches]
    right(lm, branches[::7])
    for row, branch in zip(rows, branches, strict=True):
        np.testing.assert_allclose(row, branch.logits, atol=1e-4)


@pytest.mark.programs
def test_few_longer_branches_do_not_widen_the_others(lm: LM) -> None:
    branches, store = forks(lm, 60), BranchStore(lm)
    store.commit([(b, 70 + n) for n, b in enumerate(branches)])
    for token in range(30):
        store.commit([(branches[n], 50 + token) for n in (1, 30, 31)])
        assert bytes_per_kv_byte(lm) <= 3
    store.commit([(b, 9) for b in branches[20:40]])  # rows apart from each other
    kept = [branches[n] for n in (0, 1, 20, 30, 31, 39, 59)]
    rows = [branch.logits for branch in kept]
    right(lm, kept)
    for row, branch in zip(rows, kept, strict=True):
        np.testing.assert_allclose(row, branch.logits, atol=1e-4)


def test_memory_of_ended_branches_is_freed(lm: LM) -> None:
    branches, store = forks(lm, 60), BranchStore(lm)
    for token in range(3):
        store.commit([(b, 70 + n + token) for n, b in enumerate(branches)])
    best = branches[33]
    store.retain_only(best)
    del branches
    gc.collect()
    best.commit(5)
    best.commit(6)
    usage = lm.engine.fragments.usage()
    assert usage.bytes <= 2 * (len(best.tokens) + 60 * 3) * lm.info.kv_bytes_per_token
    lm.clear_cache()
    assert lm.engine.fragments.usage().slots == 0
    right(lm, [best])
