"""A loom without a model: a tree of texts that is read, scored, saved and added to."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft
from weft import Loom
from weft.errors import ConfigError, ModelMismatch


@pytest.fixture
def loom() -> Loom:
    loom = Loom(None, "Which way?")
    left = loom.add("left")
    left.add(", then up").score = 0.5
    loom.add("right")
    return loom


def test_texts_are_added_and_read(loom: Loom) -> None:
    assert [node.text for node in loom.walk()] == ["Which way?", "left", ", then up", "right"]
    assert loom.leaves[0].get_prefix_text(1) == loom.leaves[0].crown() == "left, then up"
    assert all(node.tokens == [] for node in loom.walk())
    assert loom.lm is None
    assert "left" in repr(loom.children[0])
    loom.children[1].remove()
    assert loom.count_children() == 3


def test_saved_loom_of_texts_opens_equal_and_takes_text(loom: Loom, tmp_path: Path) -> None:
    loom.save(tmp_path / "texts.loom.json")
    second = Loom.open(tmp_path / "texts.loom.json")
    assert [(n.text, n.score) for n in second.walk()] == [(n.text, n.score) for n in loom.walk()]
    second.leaves[0].add("!")
    second.save(tmp_path / "texts.loom.json")
    assert Loom.open(tmp_path / "texts.loom.json").leaves[0].crown() == "left, then up!"
    with weft.load("tiny") as lm, pytest.raises(ModelMismatch, match="texts without tokens"):
        Loom.open(tmp_path / "texts.loom.json", lm)


def test_calls_that_need_a_model_raise_without_one(loom: Loom) -> None:
    node = loom.children[0]
    for ask in (
        node.grow,
        node.next,
        lambda: node.measure("x"),
        lambda: node.add([1]),
        lambda: setattr(node, "text", "x"),
        lambda: node.place,
    ):
        with pytest.raises(ConfigError, match="has no model"):
            ask()
    with pytest.raises(ConfigError, match="takes a text as its prompt, not list"):
        Loom(None, [1, 2])


def test_loom_opened_without_its_model_takes_no_texts(tmp_path: Path) -> None:
    """Its tokens are the truth: text without them would be lost when the model is back."""
    with weft.load("tiny") as lm:
        Loom(lm, "Hello").save(tmp_path / "made.loom.json")
    with pytest.raises(ConfigError, match="opened without a model"):
        Loom.open(tmp_path / "made.loom.json").add("text")
