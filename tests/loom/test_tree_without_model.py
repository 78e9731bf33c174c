"""Laws of the tree itself: no model is needed for any of them."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from weft.errors import ConfigError, TreeError
from weft.loom import Heddle, Loom
from written_looms import by_id, open_written, with_stub

#        n0
#      ┌──┼──┐
#     n1  n4  n5
#    ┌─┴─┐     │
#   n2   n3   n6
PARENTS = [None, 0, 1, 1, 0, 0, 5]


@pytest.fixture
def loom(tmp_path: Path) -> Loom:
    return open_written(tmp_path / "x.loom.json", PARENTS)


def ids(nodes: list[Heddle]) -> list[str]:
    return [node.id for node in nodes]


def test_walks_are_preorder(loom: Loom) -> None:
    assert ids(list(loom.walk())) == [f"n{i}" for i in range(7)]
    assert ids(loom.get_all_children()) == [f"n{i}" for i in range(1, 7)]
    assert ids(loom.get_all_children(depth=1)) == [f"n{i}" for i in range(7)]
    assert ids(loom.leaves) == ids(loom.get_all_leaves()) == ["n2", "n3", "n4", "n6"]
    assert loom.count_children() == 7
    assert loom.count_leaves() == 4


def test_childless_node_is_its_own_leaf_everywhere(loom: Loom) -> None:
    leaf = loom.find("n4")
    assert leaf.leaves == [leaf]
    assert leaf.get_all_leaves() == [leaf]
    assert leaf.count_leaves() == 1
    assert leaf.at_all_leaves(lambda node: node.id) == ["n4"]
    assert leaf.apply_at_leaves(lambda node: node.id) == ["n4"]
    assert leaf.apply_all_children(lambda node: node.id, leaves_only=True) == ["n4"]
    assert leaf.get_all_children() == []


def test_apply_all_children_follows_its_flags(loom: Loom) -> None:
    five = loom.find("n5")
    assert five.apply_all_children(lambda n: n.id) == ["n6"]
    assert five.apply_all_children(lambda n: n.id, apply_self=True) == ["n5", "n6"]
    assert loom.apply_all_children(lambda n: n.id, leaves_only=True) == ["n2", "n3", "n4", "n6"]


def test_apply_at_leaves_finds_the_leaves_before_each_function(loom: Loom) -> None:
    results = loom.apply_at_leaves(
        lambda leaf: leaf.parent.to_leaf() if leaf.id == "n6" else None, lambda leaf: leaf.id
    )
    assert results == ["n2", "n3", "n4", "n5"]


def test_prefix_texts_and_tokens_run_from_the_root(loom: Loom) -> None:
    node = loom.find("n6")
    assert ids(node.path) == ["n0", "n5", "n6"]
    assert node.get_prefix_tokens() == [0, 7, 5, 7, 6, 7]
    assert node.get_prefix_tokens(1) == [5, 7, 6, 7]
    assert node.get_prefix_text() == "t0 t5 t6 "
    assert node.crown() == "t5 t6 "
    assert node.get_display_text(1) == "t5 t6 "


def test_clip_and_trim_take_the_same_tokens_as_slices(loom: Loom) -> None:
    with_stub(loom)
    for limit, kept in [(5, 2), (2, 2), (1, 1), (0, 0), (-1, 1), (-2, 0), (-9, 0)]:
        node = loom.find("n2")
        node._tokens = [2, 7]
        assert node.clip(limit) is node
        assert node.tokens == [2, 7][:kept]
    node._tokens = [2, 7]
    assert node.trim(0).tokens == [2, 7]
    assert node.trim(1).tokens == [2]
    assert node.trim(9).tokens == []


def test_clip_that_cuts_drops_children_and_the_end(loom: Loom) -> None:
    with_stub(loom)
    node = loom.find("n5")
    child = node.children[0]
    node.terminal, node.finish_reason, node.score = True, "stop", 1.0
    node.clip(2)
    assert node.terminal
    assert node.children == [child]
    node.clip(1)
    assert not node.terminal
    assert node.finish_reason is None
    assert node.score is None
    assert node.children == []
    assert child.parent is None
    assert child.get_prefix_tokens() == child.tokens


def test_split_keeps_the_path_and_gives_children_and_end_to_the_lower_node(loom: Loom) -> None:
    with_stub(loom)
    node = loom.find("n5")
    node._tokens, node.logprobs, node.entropies = [1, 2, 3], [-1.0, -2.0, -3.0], [0.1, 0.2, 0.3]
    node.terminal, node.finish_reason, node.score = True, "stop", 0.5
    child = node.children[0]
    before = child.get_prefix_tokens()
    lower = node.split(-1)
    assert (node.tokens, lower.tokens) == ([1, 2], [3])
    assert (node.logprobs, lower.logprobs) == ([-1.0, -2.0], [-3.0])
    assert (node.entropies, lower.entropies) == ([0.1, 0.2], [0.3])
    assert node.children == [lower]
    assert lower.children == [child]
    assert child.parent is lower
    assert child.get_prefix_tokens() == before
    assert lower.terminal
    assert not node.terminal
    assert (node.finish_reason, lower.finish_reason) == (None, "stop")
    assert (node.score, lower.score) == (None, 0.5)
    assert node.id == "n5"
    assert lower.id != "n5"


@pytest.mark.parametrize("at", [0, 2, -2, -3, 9])
def test_split_into_an_empty_node_raises(loom: Loom, at: int) -> None:
    with_stub(loom)
    with pytest.raises(ConfigError, match="cannot split"):
        loom.find("n5").split(at)


def test_remove_returns_a_complete_subtree(loom: Loom) -> None:
    node = loom.find("n1")
    assert node.remove() is node
    assert ids(list(loom.walk())) == ["n0", "n4", "n5", "n6"]
    assert ids(list(node.walk())) == ["n1", "n2", "n3"]
    assert node.get_prefix_tokens() == node.tokens
    with pytest.raises(TreeError, match="root"):
        node.remove()
    with pytest.raises(TreeError, match="none of its children"):
        loom.remove_child(node)


def test_add_child_moves_a_subtree_to_its_new_parent(loom: Loom) -> None:
    one, six = loom.find("n1"), loom.find("n6")
    assert six.add_child(one) is one
    assert ids(list(loom.walk())) == ["n0", "n4", "n5", "n6", "n1", "n2", "n3"]
    assert one.parent is six
    assert loom.find("n3").get_prefix_tokens() == [0, 7, 5, 7, 6, 7, 1, 7, 3, 7]


def test_add_child_that_would_break_the_tree_raises(loom: Loom, tmp_path: Path) -> None:
    one, two = loom.find("n1"), loom.find("n2")
    with pytest.raises(TreeError, match="child of itself"):
        two.add_child(one)
    with pytest.raises(TreeError, match="child of itself"):
        two.add_child(two)
    other = open_written(tmp_path / "y.loom.json", [None])
    with pytest.raises(TreeError, match="root"):
        two.add_child(other)


def test_generation_without_a_model_raises_with_the_remedy(loom: Loom) -> None:
    calls = [
        lambda: loom.grow(),
        lambda: loom.stream(),
        lambda: loom.add("x"),
        lambda: loom.next(),
        lambda: loom.measure("x"),
        lambda: loom.ramify(n=2),
        lambda: loom.frag,
        lambda: setattr(loom, "text", "x"),
        lambda: setattr(loom, "tokens", [1]),
        lambda: loom.clip(1),
        lambda: loom.split(1),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"Loom\.open\(path, lm\)"):
            call()


def test_find_of_an_unknown_id_raises_with_the_id(loom: Loom) -> None:
    with pytest.raises(TreeError, match="n99"):
        loom.find("n99")


def test_repr_is_one_line(loom: Loom) -> None:
    node = loom.find("n5")
    node._text = "two\nlines " * 30
    node.score = 0.25
    for one in (node, loom):
        assert "\n" not in repr(one)
        assert len(repr(one)) < 160
    assert "n5" in repr(node)
    assert "1 children" in repr(node)
    assert "score 0.25" in repr(node)


@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copy_of_a_loom_raises_with_the_remedy(
    loom: Loom, attempt: Callable[[Heddle], object]
) -> None:
    for node in (loom, loom.find("n1")):
        with pytest.raises(TypeError, match=r"loom\.save\(path\)"):
            attempt(node)


@pytest.mark.parametrize("good", [None, 1, True, np.float32(0.5), np.array(0.5)])
def test_score_is_a_number_or_none(loom: Loom, good: object) -> None:
    loom.score = good
    assert loom.score == good
    assert type(loom.score) in (float, type(None))
    for bad in ("high", "0.5", [0.5], {}, np.zeros(2)):
        with pytest.raises(ConfigError, match="score is"):
            loom.score = bad
    assert loom.score == good


def test_subclass_creates_children_of_its_own_class(tmp_path: Path) -> None:
    class Loud(Heddle):
        def display_text(self) -> str:
            return self.text.upper()

    open_written(tmp_path / "x.loom.json", PARENTS)
    loom = Loom.open(tmp_path / "x.loom.json", heddle_class=Loud)
    assert all(type(node) is Loud for node in loom.get_all_children())
    assert loom.find("n6").get_display_text(1) == "T5 T6 "
    assert "T6" in str(loom)
    assert type(with_stub(loom).find("n6").split(1)) is Loud


def test_random_edits_agree_with_a_twin_of_plain_lists(tmp_path: Path) -> None:
    """The twin is a dict of (parent id, tokens) in order of insertion, walked naively."""
    rng = random.Random(5)
    loom = with_stub(
        open_written(tmp_path / "x.loom.json", [None, *(rng.randrange(i) for i in range(1, 40))])
    )
    twin = {n.id: ((n.parent.id if n.parent else None), n.tokens) for n in loom.walk()}
    for _ in range(300):
        nodes = by_id(loom)
        node = rng.choice(list(nodes.values()))
        other = rng.choice(list(nodes.values()))
        kind = rng.choice(["move", "split", "clip", "move", "split"])
        if kind == "move" and node is not loom and not _is_below(twin, other.id, node.id):
            other.add_child(node)
            twin[node.id] = (other.id, twin[node.id][1])
        elif kind == "split" and len(node.tokens) > 1:
            lower = node.split(1)
            for key, (parent, tokens) in twin.items():
                if parent == node.id:
                    twin[key] = (lower.id, tokens)
            twin[lower.id] = (node.id, twin[node.id][1][1:])
            twin[node.id] = (twin[node.id][0], twin[node.id][1][:1])
        elif kind == "clip" and not node.children and node is not loom:
            node.clip(1)
            twin[node.id] = (twin[node.id][0], twin[node.id][1][:1])
        assert {n.id: ((n.parent.id if n.parent else None), n.tokens) for n in loom.walk()} == twin
        for descendant in loom.walk():
            assert descendant.get_prefix_tokens() == _prefix(twin, descendant.id)


def _is_below(twin: dict, key: str | None, top: str) -> bool:
    while key is not None:
        if key == top:
            return True
        key = twin[key][0]
    return False


def _prefix(twin: dict, key: str | None) -> list[int]:
    parts: list[list[int]] = []
    while key is not None:
        key, tokens = twin[key]
        parts.append(tokens)
    return [token for part in reversed(parts) for token in part]


@pytest.mark.parametrize("depth", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_deep_chain_is_walked_printed_saved_and_freed(tmp_path: Path, depth: int) -> None:
    loom = open_written(tmp_path / "deep.loom.json", [None, *range(depth - 1)])
    assert loom.count_children() == depth
    assert loom.count_leaves() == 1
    leaf = loom.leaves[0]
    assert len(leaf.path) == depth
    assert len(leaf.get_prefix_tokens()) == 2 * depth
    assert len(leaf.get_prefix_text()) > depth
    drawing = str(loom)
    assert drawing.count("\n") == depth - 1
    assert len(drawing) < 200 * depth
    assert "more nodes" in loom._repr_html_()
    assert len(repr(loom)) < 160
    loom.save(tmp_path / "again.loom.json")
    assert Loom.open(tmp_path / "again.loom.json").count_children() == depth
    upper = loom.find("n100")
    loom.find("n1").add_child(upper)
    assert loom.count_children() == depth
    assert loom.count_leaves() == 2
    upper.remove()
    gone = weakref.ref(leaf)
    del leaf, upper, loom
    gc.collect()
    assert gone() is None


def test_merge_with_two_children_raises_tree_error() -> None:
    loom = Loom(None, "Once")
    node = loom.add("a")
    node.add("b")
    node.add("c")
    with pytest.raises(TreeError, match="has 2 children; a node is merged with its only child"):
        node.merge()
