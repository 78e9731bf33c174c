"""Saved looms that are opened with a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft
from shallow import shallow
from weft import Loom, samples
from weft.errors import ConfigError, ModelMismatch


@pytest.fixture(scope="module")
def lm() -> Iterator[weft.LM]:
    with weft.load(shallow(), engine="numpy") as lm:
        yield lm


@pytest.fixture
def saved(lm: weft.LM, tmp_path: Path) -> tuple[Loom, Path]:
    loom = Loom(lm, samples.game24)
    first = loom.grow(2, max_tokens=12, temperature=0.6, stop="\n", seed=11)
    first[0].score = 0.1 + 0.2
    first[0].meta = {"why": "é漢"}
    first[1].add("Wait.").grow(max_tokens=3, logit_bias={7: 1.5}, seed=2)
    list(loom.stream(max_tokens=2, seed=1))
    path = tmp_path / "24.loom.json"
    loom.save(path)
    return loom, path


def everything(loom: Loom) -> list[tuple[object, ...]]:
    return [
        (
            node.id,
            node.parent.id if node.parent else None,
            node.tokens,
            node.text,
            node.logprobs,
            node.entropies,
            node.params,
            node.lineage,
            node.finish_reason,
            node.stop_string,
            node.terminal,
            node.score,
            node.meta,
        )
        for node in loom.walk()
    ]


def test_open_with_and_without_model_restores_the_loom(
    lm: weft.LM, saved: tuple[Loom, Path]
) -> None:
    loom, path = saved
    for opened in (Loom.open(path, lm), Loom.open(path)):
        assert everything(opened) == everything(loom)
        assert opened.user_prompt == samples.game24
        assert opened.chat_template_used
        assert opened.created == loom.created
        assert str(opened) == str(loom)


def test_opened_loom_grows_without_a_second_template(lm: weft.LM, saved: tuple[Loom, Path]) -> None:
    loom, path = saved
    opened = Loom.open(path, lm)
    assert opened.tokens == loom.tokens
    nodes = opened.grow(2, max_tokens=12, temperature=0.6, stop="\n", seed=11)
    assert [c.tokens for c in nodes] == [c.tokens for c in loom.children[:2]]
    assert opened.children[0].next(3) == loom.children[0].next(3)


def test_save_twice_gives_identical_bytes(lm: weft.LM, saved: tuple[Loom, Path]) -> None:
    loom, path = saved
    loom.save(path.with_name("again"))
    Loom.open(path, lm).save(path.with_name("opened"))
    assert path.read_bytes() == path.with_name("again").read_bytes()
    assert path.read_bytes() == path.with_name("opened").read_bytes()


def test_open_with_another_model_raises_unless_forced(
    lm: weft.LM, saved: tuple[Loom, Path]
) -> None:
    loom, path = saved
    data = json.loads(path.read_text(encoding="utf-8"))
    data["model"]["fingerprint"] = "another"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ModelMismatch, match="force=True"):
        Loom.open(path, lm)
    assert Loom.open(path, lm, force=True).grow(max_tokens=1, seed=1)
    data["model"]["n_vocab"] += 1
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ModelMismatch, match="token ids"):
        Loom.open(path, lm, force=True)


def test_loom_without_model_saves_but_cannot_grow(saved: tuple[Loom, Path]) -> None:
    _, path = saved
    opened = Loom.open(path)
    with pytest.raises(ConfigError, match="without a model"):
        opened.grow()
    opened.save(path.with_name("copy"))
    assert path.read_bytes() == path.with_name("copy").read_bytes()
