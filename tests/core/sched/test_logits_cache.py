from __future__ import annotations

import threading

import numpy as np
import pytest

from core.kv.listkv import ListFragments
from weft._core.kv.place import Cursor
from weft._core.kv.tree import TokenTree
from weft._core.sched.logits_cache import LogitsCache, LogitsRow
from weft.engines.base import HostOutput
from weft.errors import ForwardError

ROW = np.zeros(4, np.float32).nbytes


def path(n: int = 6) -> tuple[TokenTree, Cursor]:
    tree = TokenTree(ListFragments())
    return tree, tree.pin(tree.extend(tree.root(), list(range(n))))


def store_of(tree: TokenTree, n_rows: int) -> LogitsCache:
    return LogitsCache(n_rows * ROW, 4, tree.forget, threading.RLock())


def put(cache: LogitsCache, at: Cursor, value: float) -> LogitsRow:
    """Keep a row of its own, hung on the tree."""
    row = LogitsRow()
    cache.set(row, np.full(4, value, np.float32))
    cache.attach(at, row)
    return row


def keep(
    cache: LogitsCache, output: HostOutput, indices: list[int], *, in_tree: bool = False
) -> list[LogitsRow]:
    """Keep these rows of an output, and no others."""
    rows = cache.add(output.retain(indices), range(len(indices)), len(indices), in_tree=in_tree)
    cache.evict_excess()
    return rows


def first_logit(cache: LogitsCache, at: Cursor) -> float | None:
    logits = cache.get(at)
    return None if logits is None else float(logits[0])


class Output(HostOutput):
    """Rows that say which they are, and count how often they were fetched."""

    def __init__(self, n_rows: int) -> None:
        super().__init__(np.repeat(np.arange(n_rows, dtype=np.float32)[:, None], 4, 1), [])
        self.n_fetched = 0

    def logits(self, index: int) -> np.ndarray:
        self.n_fetched += 1
        return super().logits(index)


def test_row_is_read_at_the_place_where_it_was_put_only() -> None:
    tree, end = path()
    cache = store_of(tree, 10)
    assert cache.get(end) is None
    put(cache, end, 1)
    assert first_logit(cache, end) == 1
    assert cache.get(Cursor(end.node, 5)) is None
    with pytest.raises(ValueError, match="read-only"):
        cache.get(end)[0] = 3


@pytest.mark.parametrize("in_tree", [False, True])
def test_row_is_fetched_once_at_its_first_read(in_tree: bool) -> None:
    tree, _ = path()
    output, cache = Output(6), store_of(tree, 10)
    rows = keep(cache, output, [1, 2, 3, 4, 5], in_tree=in_tree)
    assert output.n_fetched == 0
    assert cache.used_bytes <= 6 * ROW
    for _ in range(2):
        assert [float(cache.read(row)[0]) for row in rows] == [1, 2, 3, 4, 5]
    assert output.n_fetched == 5


@pytest.mark.parametrize("error", [RuntimeError, ForwardError])
@pytest.mark.parametrize("in_tree", [False, True])
def test_row_that_the_engine_fails_to_give_is_dropped(
    in_tree: bool, error: type[Exception]
) -> None:
    """The error is raised for that row; rows next to it stay and it costs no bytes."""

    class Failing(Output):
        def logits(self, index: int) -> np.ndarray:
            if index == 1:
                raise error("the card fell off")
            return super().logits(index)

    tree, _ = path()
    cache = store_of(tree, 10)
    first, second = keep(cache, Failing(2), [1, 0], in_tree=in_tree)
    with pytest.raises(ForwardError, match="the card fell off"):
        cache.read(first)
    assert cache.read(first) is None
    assert cache.pin(first) is None
    assert float(cache.read(second)[0]) == 0
    del first
    cache.evict_excess()
    assert cache.used_bytes == ROW


def test_rows_are_copied_at_once_from_an_output_kept_for_few_rows() -> None:
    tree, _ = path()
    output, cache = Output(64), store_of(tree, 10)
    rows = keep(cache, output, [2, 4])
    assert output.n_fetched == 2
    assert [float(cache.read(row)[0]) for row in rows] == [2, 4]
    assert cache.used_bytes == 2 * ROW


@pytest.mark.parametrize("in_tree", [False, True])
def test_rows_without_readers_are_evicted(in_tree: bool) -> None:
    tree, _ = path()
    cache = store_of(tree, 4)
    kept = keep(cache, Output(2), [0, 1], in_tree=in_tree)
    for _ in range(50):
        keep(cache, Output(2), [0, 1], in_tree=in_tree)
        assert cache.used_bytes <= 4 * ROW
    assert [cache.read(row) is not None for row in kept] == [True, True]


def test_unread_output_is_evicted_at_once_and_read_rows_stay() -> None:
    tree, _ = path()
    cache = store_of(tree, 4)
    rows = keep(cache, Output(3), [0, 1, 2])
    assert cache.used_bytes == 3 * ROW
    assert float(cache.read(rows[1])[0]) == 1
    others = keep(cache, Output(3), [0, 1, 2])
    assert [cache.read(row) is not None for row in rows] == [False, True, False]
    assert [cache.read(row) is not None for row in others] == [True, True, True]
    assert cache.used_bytes <= 4 * ROW
    cache.clear()
    assert cache.used_bytes == 0
    assert not any(cache.read(row) is not None for row in [*rows, *others])


def test_lru_row_is_evicted_first() -> None:
    tree, end = path()
    cache = store_of(tree, 2)
    places = [Cursor(end.node, depth) for depth in (1, 2, 3)]
    put(cache, places[0], 1)
    put(cache, places[1], 2)
    cache.get(places[0])
    put(cache, places[2], 3)
    assert [first_logit(cache, place) for place in places] == [1, None, 3]
    assert cache.used_bytes == 2 * ROW
    assert set(end.node.logits_rows) == {1, 3}


def test_row_put_twice_replaces_the_first() -> None:
    tree, end = path()
    cache = store_of(tree, 2)
    old = put(cache, end, 1)
    put(cache, end, 2)
    assert first_logit(cache, end) == 2
    assert old.node is None
    del old
    put(cache, Cursor(end.node, 2), 3)
    assert first_logit(cache, end) == 2
    assert cache.used_bytes == 2 * ROW


def test_rows_that_are_too_large_or_at_the_root_are_not_kept() -> None:
    tree, end = path()
    cache = store_of(tree, 2)
    cache.budget_bytes = ROW - 1
    row = put(cache, end, 1)
    assert cache.read(row) is None
    cache.budget_bytes = 2 * ROW
    put(cache, tree.root(), 1)
    assert cache.get(end) is None
    assert cache.get(tree.root()) is None


def test_row_kept_without_capacity_is_readable_until_the_next_row() -> None:
    tree, _ = path()
    cache, row, other = store_of(tree, 0), LogitsRow(), LogitsRow()
    cache.set(row, np.full(4, 7, np.float32), keep=True)
    assert cache.read(row)[0] == 7
    cache.set(other, np.full(4, 8, np.float32))
    assert cache.read(row) is cache.read(other) is None
    assert cache.used_bytes == 0


def test_rows_stay_at_their_places_when_a_node_is_split_and_joined() -> None:
    tree, end = path()
    cache = store_of(tree, 10)
    for depth in (2, 4, 6):
        put(cache, Cursor(end.node, depth), depth)
    tree.split(end.node, 3)
    want = {1: None, 2: 2, 3: None, 4: 4, 5: None, 6: 6}
    assert {depth: first_logit(cache, Cursor(end.node, depth)) for depth in want} == want
    assert set(end.node.logits_rows) == {4, 6}
    assert tree.join(end, minimum=2) == 1
    assert {depth: first_logit(cache, Cursor(end.node, depth)) for depth in want} == want


def test_row_keeps_its_tokens_known_until_it_is_evicted() -> None:
    tree, end = path()
    cache = store_of(tree, 2)
    put(cache, Cursor(end.node, 4), 1)
    put(cache, end, 2)
    tree.unpin(end)
    assert tree.match(list(range(6))).depth == 6
    others = [tree.pin(tree.extend(tree.root(), [token])) for token in (8, 9)]
    put(cache, others[0], 3)
    assert first_logit(cache, end) == 2
    put(cache, others[1], 4)
    put(cache, others[0], 5)
    assert tree.match(list(range(6))).depth == 0
    assert cache.used_bytes == 2 * ROW


def test_clear_drops_all_rows() -> None:
    tree, end = path()
    cache = store_of(tree, 10)
    put(cache, end, 1)
    put(cache, Cursor(end.node, 2), 2)
    filled = LogitsRow()
    cache.set(filled, np.full(4, 7, np.float32))
    cache.clear()
    assert cache.get(end) is None
    assert cache.read(filled) is None
    assert cache.used_bytes == 0
    put(cache, end, 3)
    assert first_logit(cache, end) == 3


def test_rows_of_a_cleared_tree_are_evicted_like_others() -> None:
    tree, end = path()
    cache = store_of(tree, 2)
    put(cache, end, 1)
    put(cache, Cursor(end.node, 2), 2)
    tree.clear()
    assert cache.get(end) is None
    for depth in (1, 3):
        put(cache, Cursor(end.node, depth), depth)
    assert cache.used_bytes == 2 * ROW
    assert [first_logit(cache, Cursor(end.node, depth)) for depth in (1, 3)] == [1, 3]
