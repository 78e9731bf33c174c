from __future__ import annotations

import numpy as np

from kv.listkv import ListFragments
from weft.kv.cursor import Cursor
from weft.kv.tree import TokenTree
from weft.sched.rows import RowCache

ROW = np.zeros(4, np.float32).nbytes


def row(value: float) -> np.ndarray:
    return np.full(4, value, np.float32)


def path(n: int = 6) -> tuple[TokenTree, Cursor]:
    tree = TokenTree(ListFragments())
    return tree, tree.pin(tree.extend(tree.root(), list(range(n))))


def test_a_row_is_found_where_it_was_put_and_nowhere_else() -> None:
    tree, end = path()
    cache = RowCache(10 * ROW, tree.forget)
    assert cache.get(end) is None
    cache.put(end, row(1))
    assert cache.get(end).tolist() == [1] * 4
    assert cache.get(Cursor(end.node, 5)) is None


def test_the_least_recently_used_row_goes_first() -> None:
    tree, end = path()
    cache = RowCache(2 * ROW, tree.forget)
    places = [Cursor(end.node, depth) for depth in (1, 2, 3)]
    cache.put(places[0], row(1))
    cache.put(places[1], row(2))
    cache.get(places[0])
    cache.put(places[2], row(3))
    assert [cache.get(place) is not None for place in places] == [True, False, True]
    assert cache.used_bytes == 2 * ROW
    assert set(end.node.rows) == {1, 3}


def test_a_row_put_again_replaces_the_old_one() -> None:
    tree, end = path()
    cache = RowCache(2 * ROW, tree.forget)
    cache.put(end, row(1))
    cache.put(end, row(2))
    assert cache.get(end).tolist() == [2] * 4
    assert cache.used_bytes == ROW


def test_rows_that_are_too_large_or_at_the_root_are_not_kept() -> None:
    tree, end = path()
    cache = RowCache(2 * ROW, tree.forget)
    cache.put(end, np.zeros(9, np.float32))
    cache.put(tree.root(), row(1))
    assert cache.get(end) is None
    assert cache.get(tree.root()) is None
    assert cache.used_bytes == 0


def test_rows_stay_at_their_places_when_a_node_is_split_and_joined() -> None:
    tree, end = path()
    cache = RowCache(10 * ROW, tree.forget)
    for depth in (2, 4, 6):
        cache.put(Cursor(end.node, depth), row(depth))
    tree.split(end.node, 3)
    found = {depth: cache.get(Cursor(end.node, depth)) for depth in range(1, 7)}
    assert {d: r[0] for d, r in found.items() if r is not None} == {2: 2, 4: 4, 6: 6}
    assert set(end.node.rows) == {4, 6}
    assert tree.join(end, minimum=2) == 1
    found = {depth: cache.get(Cursor(end.node, depth)) for depth in range(1, 7)}
    assert {d: r[0] for d, r in found.items() if r is not None} == {2: 2, 4: 4, 6: 6}


def test_a_row_keeps_its_tokens_known_until_it_has_to_go() -> None:
    tree, end = path()
    cache = RowCache(2 * ROW, tree.forget)
    cache.put(Cursor(end.node, 4), row(1))
    cache.put(end, row(2))
    tree.unpin(end)
    assert tree.match(list(range(6))).depth == 6
    others = [tree.pin(tree.extend(tree.root(), [token])) for token in (8, 9)]
    cache.put(others[0], row(3))
    assert cache.get(end).tolist() == [2] * 4
    cache.put(others[1], row(4))
    cache.put(others[0], row(5))
    assert tree.match(list(range(6))).depth == 0
    assert cache.used_bytes == 2 * ROW


def test_clear_forgets_every_row() -> None:
    tree, end = path()
    cache = RowCache(10 * ROW, tree.forget)
    cache.put(end, row(1))
    cache.put(Cursor(end.node, 2), row(2))
    cache.clear()
    assert cache.get(end) is None
    assert cache.used_bytes == 0
    cache.put(end, row(3))
    assert cache.get(end).tolist() == [3] * 4


def test_rows_that_the_tree_cleared_make_room_like_any_other() -> None:
    tree, end = path()
    cache = RowCache(2 * ROW, tree.forget)
    cache.put(end, row(1))
    cache.put(Cursor(end.node, 2), row(2))
    tree.clear()
    assert cache.get(end) is None
    for depth in (1, 3):
        cache.put(Cursor(end.node, depth), row(depth))
    assert cache.used_bytes == 2 * ROW
    assert [cache.get(Cursor(end.node, depth))[0] for depth in (1, 3)] == [1, 3]
