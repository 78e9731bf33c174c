"""Nodes of an engine that reports no log-probabilities or entropies: absent, never invented."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import OwnLoopFake
from shallow import shallow
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.numpy import NumpyEngine
from weft.lm.lm import LM
from weft.loom import Loom
from weft.viz.outline import facts


@pytest.fixture
def lm() -> Iterator[LM]:
    engine = NumpyEngine.load(shallow())
    new = LM(OwnLoopFake(engine, has_logprobs=False), Tokenizer.from_folder(shallow()))
    yield new
    new.close()
    engine.close()


def test_grown_node_has_tokens_and_no_scores(lm: LM) -> None:
    loom = Loom(lm, "Once", template=False)
    children = loom.grow(n=3, max_tokens=5, seed=1)
    for child in children:
        assert len(child.tokens) == 5
        assert (child.logprobs, child.entropies) == ([], [])
        assert not any(fact.startswith("p ") for fact in facts(child))
    assert "[0]    -  <Heddle" in repr(children)


def test_streams_without_scores_yield_texts(lm: LM) -> None:
    loom = Loom(lm, "Once", template=False)
    deltas = list(loom.stream(n=2, max_tokens=4, seed=1))
    assert all(delta.logprobs == () for delta in deltas)
    texts = ["".join(d.text for d in deltas if d.branch == branch) for branch in range(2)]
    assert texts == [child.text for child in loom.children]

    async def other() -> list[str]:
        second = Loom(lm, "Once", template=False)
        async for _ in second.astream(n=2, max_tokens=4, seed=1):
            pass
        return [child.text for child in second.children]

    assert asyncio.run(other()) == texts


def test_pictures_and_files_leave_absent_scores_out(lm: LM, tmp_path: Path) -> None:
    loom = Loom(lm, "Once", template=False)
    loom.grow(n=2, max_tokens=4, seed=1)
    assert "Once" in loom.to_html(tint="entropy")
    assert loom.children[0]._repr_html_()
    loom.show()
    loom.save(tmp_path / "a.loom.json")
    second = Loom.open(tmp_path / "a.loom.json", lm)
    assert [child.tokens for child in second.children] == [c.tokens for c in loom.children]
    assert second.children[0].logprobs == []
    clipped = second.children[0].clip(2)
    assert (len(clipped.tokens), clipped.logprobs) == (2, [])
