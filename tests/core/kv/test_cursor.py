from __future__ import annotations

import gc

import pytest

from core.kv.listkv import ListFragments
from weft._core.kv.place import Cursor, Place, climb, path_ids, resolve, resolve_joined
from weft._core.kv.tree import TokenTree


@pytest.fixture
def tree() -> TokenTree:
    return TokenTree(ListFragments())


def place(tree: TokenTree, ids: list[int], after: Place | None = None) -> Place:
    return Place(tree.holds, None, after, ids)


def test_cursor_after_splits_and_joins_names_the_same_place(tree: TokenTree) -> None:
    end = tree.pin(tree.extend(tree.root(), [1, 2, 3, 4, 5, 6]))
    inside = Cursor(end.node, 2)
    for depth in (4, 2, 1):
        tree.split(resolve(Cursor(end.node, depth)).node, depth)
    assert [len(node.tokens) for node in climb(end)] == [2, 2, 1, 1]
    assert (resolve(inside).node.start, resolve(inside).node.end) == (1, 2)
    assert path_ids(inside) == [1, 2]
    upper = resolve(inside).node
    assert tree.join(end, minimum=2) == 3
    assert resolve(inside) == (end.node, 2)
    assert resolve_joined(upper) is end.node
    assert path_ids(Cursor(upper, 2)) == [1, 2]


def test_reading_forward_links_shortens_them(tree: TokenTree) -> None:
    """Three joins in a row, each into the next node."""
    ends = [tree.pin(tree.extend(tree.root(), [1, 2, 3, 4][: n + 1])) for n in range(4)]
    for end in ends[1:]:
        tree.join(end, minimum=2)
    first = ends[0].node
    assert first.joined is ends[1].node
    assert resolve_joined(first) is ends[3].node
    assert first.joined is not ends[1].node


def test_path_read_from_any_depth_gives_its_tokens(tree: TokenTree) -> None:
    end = tree.pin(tree.extend(tree.root(), [1, 2, 3, 4, 5]))
    tree.split(end.node, 3)
    assert [path_ids(end, first) for first in (0, 2, 3, 4, 5)] == [
        [1, 2, 3, 4, 5],
        [3, 4, 5],
        [4, 5],
        [5],
        [],
    ]


@pytest.mark.parametrize("settled", [0, 1, 2, 3])
def test_place_in_or_outside_the_tree_has_the_same_tokens(tree: TokenTree, settled: int) -> None:
    """Three places in a row; the first `settled` of them are in the tree."""
    one = place(tree, [1, 2])
    two = place(tree, [3], one)
    three = place(tree, [4, 5], two)
    for point in (one, two, three)[:settled]:
        tree.place(point)
    assert [each.depth for each in (one, two, three)] == [2, 3, 5]
    assert three.ids() == [1, 2, 3, 4, 5]
    assert [three.at(depth).ids() for depth in range(6)] == [[1, 2, 3, 4, 5][:n] for n in range(6)]
    assert (three.cursor is None) == (settled < 3)
    assert [each.depth for each in three.pending()] == [2, 3, 5][settled:]
    copy = three.fork()
    assert (copy.ids(), copy.depth) == ([1, 2, 3, 4, 5], 5)
    assert tree.ids(tree.place(copy)) == [1, 2, 3, 4, 5]


def test_depth_beyond_the_path_raises(tree: TokenTree) -> None:
    one = place(tree, [1, 2])
    for depth in (-1, 3):
        with pytest.raises(ValueError, match=f"depth {depth} is not on this path of 2 tokens"):
            one.at(depth)


def test_place_that_enters_the_tree_drops_its_predecessor(tree: TokenTree) -> None:
    one = place(tree, [1, 2])
    two = place(tree, [3], one)
    assert (two.after, two.own_ids) == (one, [3])
    tree.place(two)
    assert (two.after, list(two.own_ids)) == (None, [])
    del one
    tree.drain_released()
    assert tree.ids(tree.place(two)) == [1, 2, 3]


def test_tokens_of_a_place_are_matched_until_the_place_is_dropped(tree: TokenTree) -> None:
    one = place(tree, [1, 2])
    tree.place(one)
    two = one.at(1)
    del one
    gc.collect()
    tree.drain_released()
    assert tree.ids(tree.match([1, 2])) == [1, 2]  # a node with a hold is not split
    del two
    tree.drain_released()
    tree.drain_released()
    assert tree.n_nodes == 0
    assert not tree.holds.alive
    tree.check()


def test_place_before_all_tokens_has_no_node(tree: TokenTree) -> None:
    start = place(tree, [])
    assert (start.ids(), start.depth) == ([], 0)
    assert tree.place(start) == tree.root()
    assert start.fork().ids() == start.at(0).ids() == []
    assert tree.n_nodes == 0
