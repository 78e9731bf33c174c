"""Loom, Branch and AsyncLM on one model at the same time: each gets what it would get alone."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from contract.helpers import STORY, TOLERANCE
from weft import AsyncLM, Branch, BranchStore, Loom
from weft.constraints import Regex


def loom_job(lm) -> list[str]:
    loom, texts = Loom(lm, STORY), []
    for seed in range(2):
        for node in loom.grow(n=4, max_tokens=8, seed=seed, temperature=1.2, show=False):
            texts.append(node.text)
        constraint = Regex("[0-9]{2,5}")
        created = loom.grow(n=2, max_tokens=12, seed=seed, constraint=constraint, show=False)
        texts += [node.text for node in created]
    return texts


def branch_job(lm) -> list[list[int]]:
    store = BranchStore(lm)
    root = Branch.create(lm, seed=5, temperature=1.2)
    root.prefill(Loom(lm, STORY).tokens)
    branches = [root.fork() for _ in range(4)]
    for step in range(8):
        pieces = store.produce(branches)
        store.commit([(b, p.token) for b, p in zip(branches, pieces, strict=True)])
        if step % 4 == 3:
            branches[0] = branches[1].fork()
    return [branch.tokens for branch in branches]


def async_job(lm) -> np.ndarray:
    model, ids = AsyncLM(lm, as_torch=False), Loom(lm, STORY).tokens

    async def main():
        rows = []
        for step in range(3):
            contexts = [[*ids, *range(30, 30 + step), 40 + n] for n in range(6)]
            rows.append(await model.batch_next_token_logprobs(contexts))
        return np.concatenate(rows)

    return asyncio.run(main())


@pytest.mark.parametrize("slots", [None, 150])
def test_each_face_gets_what_it_gets_alone(make, kind: str, slots: int | None) -> None:
    if make(kind).info.kv == "hidden" and slots is not None:
        pytest.skip("a hidden engine keeps its KV to itself: there is no budget")
    jobs = [loom_job, branch_job, async_job]
    alone = [job(make(kind)) for job in jobs]
    lm = make(kind, kv_slots=slots)
    result: list = [None] * len(jobs)
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            result[number] = jobs[number](lm)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert result[0] == alone[0]
    assert result[1] == alone[1]
    np.testing.assert_allclose(result[2], alone[2], atol=TOLERANCE["float32"])
