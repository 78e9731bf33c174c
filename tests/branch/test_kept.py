"""Saved branches, awaited stores, and the state that a store reports."""

from __future__ import annotations

import asyncio
import json

import pytest

import weft
from weft import Branch, BranchStore, samples
from weft.constraints import Allow
from weft.errors import ConfigError, FormatError, ModelMismatch, StaleHandle, StoreError


@pytest.fixture(scope="module")
def lm():
    return weft.load("tiny", kv_budget="8MiB")


@pytest.fixture
def branch(lm) -> Branch:
    new = Branch.create(lm, seed=2, grammar={"type": "integer"})
    new.prefill(lm.tokenize(samples.opening))
    return new


def test_file_without_a_branch_raises(lm, branch, tmp_path) -> None:
    data = branch.save()
    for wrong, error in (
        ({**data, "version": 99}, FormatError),
        ({**data, "format": "x"}, FormatError),
        ({**data, "fingerprint": "x"}, ModelMismatch),
        ({**data, "accepted": [[1]]}, FormatError),
        ({key: value for key, value in data.items() if key != "tokens"}, FormatError),
    ):
        with pytest.raises(error):
            Branch.load(lm, wrong)
    file = tmp_path / "x.json"
    for text in ("{", "[]"):
        file.write_text(text)
        with pytest.raises(FormatError, match="no saved branch"):
            Branch.load(lm, file)
    with pytest.raises(StoreError, match="cannot read"):
        Branch.load(lm, tmp_path / "nosuch.json")


def test_missing_adapter_raises_and_names_the_file(lm, branch, tmp_path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({**branch.save(), "adapter": "law"}))
    with pytest.raises(ConfigError, match=r"x\.json: unknown LoRA adapter: 'law'"):
        Branch.load(lm, file)


def test_loaded_branch_continues_its_grammar(lm, branch) -> None:
    minus = lm.tokenize("-", add_bos=False)[0]
    branch.commit(minus)
    second = Branch.load(lm, json.loads(json.dumps(branch.save())))
    assert not second.is_legal(minus)
    assert second.legal().tolist() == branch.legal().tolist()


def test_awaited_store_produces_commits_and_reports_pressure(lm, branch) -> None:
    store = BranchStore(lm)
    forks = [branch.fork() for _ in range(3)]

    async def main() -> None:
        pieces = await store.aproduce(forks)
        await store.acommit([(b, p.token) for b, p in zip(forks, pieces, strict=True)])
        await store.aprefill([(forks[0], [5, 6]), (forks[1], [])])
        for fork in forks:
            lm.scheduler.logits_cache.read(fork.require_row())
        second = await store.aproduce(forks[1:])
        assert [piece.token for piece in second] == [b.produce().token for b in forks[1:]]

    asyncio.run(main())
    assert store.branches[-3:] == forks
    pressure = store.pressure()
    assert pressure.remaining is not None
    assert 0 < pressure.remaining <= pressure.capacity
    assert pressure.n_branches == len(store.branches)
    assert store.available == 65_536 - len(store.branches)
    with pytest.raises(ConfigError, match="at is 'x'"):
        branch.fork(at="x")
    with branch as used:
        assert used.children == forks
    assert all(fork.disposed for fork in forks)
    with pytest.raises(StaleHandle):
        store.produce(forks)


def test_grammar_of_a_token_set_limits_a_branch(lm) -> None:
    chars = {lm.tokenize(character, add_bos=False)[0] for character in "abc"}
    new = Branch.create(lm, grammar=Allow(chars), seed=1)
    new.prefill(lm.tokenize(samples.opening))
    assert set(new.legal().nonzero()[0]) == chars | lm.text.stop_ids
    for _ in range(5):
        piece = new.produce()
        if piece.is_stop:
            break
        new.commit(piece.token)
    assert set(new.text) <= set("abc")
    with pytest.raises(weft.WeftError, match="not among the 4 allowed"):
        new.commit(max(chars) + 1)
