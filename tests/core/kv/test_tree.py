from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from core.kv.listkv import ListFragments
from fakes import BrokenFragments
from weft._core.kv.budget import EvictionQueue, HostTier, split_exported
from weft._core.kv.place import Cursor, Node, Place, common_prefix, resolve
from weft._core.kv.tree import TokenTree
from weft._core.sched.logits_cache import LogitsRow


def compute(tree: TokenTree, kv: ListFragments, ids: list[int]) -> Cursor:
    """A pinned, resident path."""
    end = tree.pin(tree.cut(tree.extend(tree.root(), ids)))
    for node in reversed(list(tree.up(end))):
        if not node.resident:
            assert node.parent is not None
            assert tree.fragments is not None
            fragment = tree.fragments.new(node.parent.fragment)
            kv.write(fragment, node.tokens, node.start)
            tree.fill(Cursor(node, node.end), node.start, fragment)
    return end


def slots(tree: TokenTree, cursor: Cursor) -> list[tuple[int, int]]:
    parts: list[Any] = [(span.fragment, span.length) for span in tree.path(cursor)]
    return [slot for fragment, length in parts for slot in fragment.slots[:length]]


@pytest.mark.parametrize(
    ("known", "ids", "offset", "same"),
    [
        ([1, 2, 3], [1, 2, 3], 0, 3),
        ([1, 2, 3], [0, 1, 2], 1, 2),
        ([1, 2, 3], [1, 9, 3], 0, 1),
        ([1, 2, 3], [9], 0, 0),
        ([1, 2, 3], [], 0, 0),
        (list(range(1000)), [*range(700), 0, *range(701, 1000)], 0, 700),
    ],
)
def test_common_prefix_equals_comparison_token_by_token(
    known: list[int], ids: list[int], offset: int, same: int
) -> None:
    assert common_prefix(known, ids, offset) == same


def test_match_returns_longest_known_prefix_and_changes_nothing() -> None:
    tree = TokenTree(ListFragments())
    tree.pin(tree.extend(tree.root(), [1, 2, 3]))
    tree.pin(tree.extend(tree.root(), [1, 2, 5]))
    before = tree.n_nodes
    depths = {tuple(ids): tree.match(ids).depth for ids in ([1, 2, 5, 6], [1, 9], [7], [1, 2])}
    assert depths == {(1, 2, 5, 6): 3, (1, 9): 1, (7,): 0, (1, 2): 2}
    assert tree.match((1, 2, 3)).depth == 3
    assert tree.n_nodes == before


def test_find_of_place_returns_its_known_part_and_changes_nothing() -> None:
    tree = TokenTree(ListFragments())
    tree.pin(tree.extend(tree.root(), [1, 2, 3, 4]))
    tree.pin(tree.extend(tree.root(), [1, 2, 5]))
    before = tree.n_nodes
    start = Place(tree.holds, None, None, [1])
    chains = {(2, 3): 3, (2, 3, 4): 4, (2, 3, 4, 9): 4, (2, 9, 3): 2, (2, 5, 4): 3, (): 1}
    for rest, depth in chains.items():
        for cut in range(len(rest) + 1):
            place = Place(tree.holds, None, Place(tree.holds, None, start, rest[:cut]), rest[cut:])
            assert tree.find(place).depth == depth
            assert tree.ids(tree.find(place)) == [1, *rest][:depth]
    hold = tree.hold(tree.match([1, 2, 3]))
    assert tree.find(hold).depth == 3
    assert tree.find(Place(tree.holds, None, hold, [4, 4])).depth == 4
    assert tree.find(Place(tree.holds, "law", None, [1, 2])).depth == 0
    assert (tree.n_nodes, start.cursor) == (before, None)


def test_equal_paths_in_two_namespaces_share_nothing() -> None:
    tree = TokenTree(ListFragments())
    plain = tree.pin(tree.extend(tree.root(), [1, 2]))
    other = tree.pin(tree.extend(tree.root("law"), [1, 2]))
    assert plain.node is not other.node
    assert other.node.namespace == "law"
    tree.check()


def test_kv_that_became_resident_meanwhile_replaces_a_later_copy() -> None:
    """Two computed the same six tokens; the second one's first four slots are duplicates."""
    kv = ListFragments()
    tree = TokenTree(kv)
    compute(tree, kv, [1, 2, 3, 4])
    end = tree.pin(tree.extend(tree.root(), [1, 2, 3, 4, 5, 6]))
    assert tree.fragments is not None
    late = tree.fragments.new(None)
    kv.write(late, [1, 2, 3, 4, 5, 6], 0)
    tree.fill(end, 0, late)
    assert kv.usage().slots == 6
    assert slots(tree, end) == [(token, token - 1) for token in range(1, 7)]
    tree.check()


def failing_tail(tree: TokenTree, kv: ListFragments) -> None:
    end = compute(tree, kv, [1, 2])
    tree.extend(end, [3])
    tree.pin(tree.extend(end, [3, 4]))
    tail = tree.new_tail(end)
    tree.budget.reserve(tail, 3)
    kv.write(tail.fragment, [3, 4, 5], 2)
    tree.end_tail(tail, [3, 4, 5])


def failing_fill(tree: TokenTree, kv: ListFragments) -> None:
    compute(tree, kv, [1, 2])
    tree.pin(tree.extend(tree.root(), [1, 2, 3]))
    end = tree.pin(tree.extend(tree.root(), [1, 2, 3, 4]))
    assert tree.fragments is not None
    late = tree.fragments.new(None)
    kv.write(late, [1, 2, 3, 4], 0)
    tree.fill(end, 0, late)


@pytest.mark.parametrize(
    ("method", "number", "use"),
    [
        ("settle", 0, failing_tail),
        ("attach", 1, failing_tail),
        ("split", 0, failing_tail),
        ("split", 0, failing_fill),
        ("split", 1, failing_fill),
        ("attach", 1, failing_fill),
        ("attach", 2, failing_fill),
    ],
)
def test_engine_failure_half_way_loses_no_slot(
    method: str, number: int, use: Callable[[TokenTree, ListFragments], None]
) -> None:
    kv = ListFragments()
    broken = BrokenFragments(kv, method, number)
    tree = TokenTree(broken)
    with pytest.raises(MemoryError):
        use(tree, kv)
    assert kv.usage().slots == sum(len(n.tokens) for n in tree.nodes() if n.fragment is not None)
    assert not tree.tails
    tree.check()


def test_tail_reserves_in_the_engines_unit_and_returns_unused_slots() -> None:
    kv = ListFragments()
    kv.growth = 4
    tree = TokenTree(kv, capacity=20)
    tail = tree.new_tail(compute(tree, kv, [1, 2]))
    for wanted, reserved in ((1, 4), (3, 4), (4, 4), (5, 8)):
        tree.budget.reserve(tail, wanted)
        assert (tail.reserved, tree.budget.tails) == (reserved, reserved)
    kv.write(tail.fragment, [7, 8, 9], 2)
    for length, reserved in ((5, 5), (6, 5), (1, 3)):
        tree.budget.shrink_reservation(tail, length)
        assert (tail.reserved, tree.budget.tails) == (reserved, reserved)
    tree.check()
    tree.drop_tail(tail)
    assert (tree.budget.tails, kv.usage().slots) == (0, 2)


class Owner:
    """The owner of a pin."""


def test_pin_by_hand_keeps_the_slots_that_a_tail_reserves_next() -> None:
    kv = ListFragments()
    kv.growth = 4
    tree = TokenTree(kv, capacity=16)
    tail, owner = tree.new_tail(compute(tree, kv, [1, 2])), Owner()
    tree.budget.reserve(tail, 1)
    assert tree.budget.unevictable == 6
    longest = 16 - 6 - 4
    for n, fits in ((longest + 1, False), (longest, True)):
        place = Place.from_cursor(tree.holds, tree.extend(tree.root(), list(range(20, 20 + n))))
        hold = tree.pin_for(place, owner)
        assert (hold is not None) is fits
        tree.check()
    tree.budget.reserve(tail, 5)
    assert tree.budget.unevictable == 16
    assert not tree.budget.is_exceeded
    tree.drop_tail(tail)


def test_empty_tail_ends_where_it_started() -> None:
    kv = ListFragments()
    tree = TokenTree(kv)
    end = compute(tree, kv, [1, 2])
    tail = tree.new_tail(end)
    assert tree.end_tail(tail, []) == end
    assert not tree.tails
    tree.check()


def test_tree_without_fragments_extends_by_single_tokens() -> None:
    assert TokenTree(None).budget.growth == 1


def test_chain_of_eight_short_nodes_is_joined_and_long_nodes_are_not() -> None:
    kv = ListFragments()
    tree = TokenTree(kv)
    ends = [compute(tree, kv, list(range(1, n + 1))) for n in range(1, 9)]
    for end in ends[:-1]:
        tree.unpin(end)
    assert tree.join(ends[6]) == 0
    assert tree.join(ends[7]) == 7
    assert tree.n_nodes == 1
    assert slots(tree, ends[7]) == [(token, token - 1) for token in range(1, 9)]
    long = compute(tree, kv, [*range(100, 200)])
    assert tree.join(compute(tree, kv, [*range(100, 201)]), minimum=2) == 0
    assert resolve(long).node.end == 100
    tree.check()


def test_lru_leaf_is_evicted_first_and_its_parent_next() -> None:
    kv = ListFragments()
    tree = TokenTree(kv, capacity=8)
    for ids in ([1, 2, 3], [1, 2, 3, 4], [5, 6]):
        tree.unpin(compute(tree, kv, ids))
    tree.unpin(compute(tree, kv, [1, 2, 3]))
    end = tree.pin(tree.extend(tree.root(), [7, 8, 9]))
    assert tree.make_room()
    assert tree.n_evicted == 1
    assert tree.match([1, 2, 3, 4]).depth == 3
    tree.unpin(end)
    end = tree.pin(tree.extend(tree.root(), [*range(10, 18)]))
    assert tree.make_room()
    assert kv.usage().slots == 0
    tree.pin(tree.extend(end, [1]))
    assert not tree.make_room()


def test_tokens_of_a_place_are_known_after_their_kv_is_evicted() -> None:
    kv = ListFragments()
    tree = TokenTree(kv)
    hold = tree.hold(compute(tree, kv, [1, 2]))
    cursor = hold.cursor
    assert cursor is not None
    tree.unpin(cursor)
    tree.clear()
    assert kv.usage().slots == 0
    assert hold.ids() == [1, 2]
    assert not cursor.node.resident


def test_stale_entries_of_the_eviction_queue_do_not_accumulate() -> None:
    kv = ListFragments()
    tree = TokenTree(kv)
    end = compute(tree, kv, [1, 2])
    for _ in range(500):
        tree.unpin(end)
        end = tree.pin(end)
    assert len(tree.queue) <= 4 * tree.n_nodes + 65


def test_path_used_50_times_is_queued_once_and_evicted_in_order() -> None:
    kv = ListFragments()
    tree = TokenTree(kv, capacity=6)
    first, other = compute(tree, kv, [1, 2]), compute(tree, kv, [3, 4])
    hold = tree.hold(other)
    tree.unpin(other)
    tree.unpin(first)
    n_queued = len(tree.queue)
    for _ in range(50):
        tree.unpin(tree.pin(first))
    assert len(tree.queue) == n_queued
    del hold
    tree.drain_released()  # without a hold, it is evicted before paths that were used later
    tree.pin(tree.extend(tree.root(), [5, 6, 7]))
    assert tree.make_room()
    assert (first.node.resident, other.node.resident) == (True, False)
    tree.pin(tree.extend(tree.root(), [6, 7, 8]))
    assert tree.make_room()
    assert not first.node.resident
    tree.check()


def test_rebuilt_queue_accepts_a_node_it_has_dropped() -> None:
    queue = EvictionQueue()
    one, two = (Node([i], 0, None, None) for i in range(2))
    one.last_used, two.last_used = 1, 2
    for node in (one, two):
        queue.offer(node)
    queue.rebuild([two])
    assert len(queue) == 1
    queue.offer(one)
    assert [queue.pop(lambda node: True) for _ in range(3)] == [one, two, None]


def test_leaf_whose_key_changed_is_queued_under_the_new_key() -> None:
    queue = EvictionQueue()
    one, two = (Node([i], 0, None, None) for i in range(2))
    one.last_used, two.last_used = 1, 2
    queue.offer(one)
    queue.offer(two)
    one.last_used = 3
    assert queue.pop(lambda node: True) is two
    assert queue.pop(lambda node: node is not one) is None
    assert len(queue) == 0


def test_repr_of_node_names_where_its_kv_is() -> None:
    kv = ListFragments()
    tree = TokenTree(kv, capacity=3, host_capacity=9)
    end = compute(tree, kv, [1, 2, 3])
    assert repr(end.node) == "<Node 0..3 device pins=1 holds=0>"
    hold = tree.hold(end)
    tree.unpin(end)
    other = tree.pin(tree.extend(tree.root(), [4]))
    assert tree.make_room()
    assert repr(end.node) == "<Node 0..3 host pins=0 holds=1>"
    assert repr(other.node) == "<Node 0..1 absent pins=1 holds=0>"
    assert hold.depth == 3


# The host tier --------------------------------------------------------------------------------


def test_oldest_host_copy_is_evicted_first_and_oversized_nodes_are_not_copied() -> None:
    kv = ListFragments()
    tree = TokenTree(kv, host_capacity=5)
    ends = [compute(tree, kv, ids) for ids in ([1, 2], [3, 4], [5, 6], [*range(10, 16)])]
    holds = [tree.hold(end) for end in ends]
    for end in ends:
        tree.unpin(end)
    for end in ends:
        tree.drop(end.node, offload=True)
    assert [end.node.host is not None for end in ends] == [False, True, True, False]
    assert tree.host.slots == 4
    assert len(holds) == 4
    tree.check()


def test_split_of_a_node_splits_its_host_copy() -> None:
    kv = ListFragments()
    tree = TokenTree(kv, host_capacity=9)
    end = compute(tree, kv, [1, 2, 3, 4])
    hold = tree.hold(end)
    tree.unpin(end)
    tree.drop(end.node, offload=True)
    upper = tree.split(end.node, 3)
    assert upper.host is not None
    assert end.node.host is not None
    tree.check()
    tree.pin(end)
    tree.load_host(upper)
    tree.load_host(end.node)
    assert tree.host.slots == 0
    assert slots(tree, end) == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert hold.depth == 4
    tree.check()


def test_half_of_a_host_copy_does_not_keep_the_memory_of_the_full_copy() -> None:
    export = {"k.0": np.zeros((2, 100, 4)), "v.0": np.zeros((2, 100, 4))}
    for half, n in zip(split_exported(export, 97), (97, 3), strict=True):
        assert all(array.base is None and array.shape == (2, n, 4) for array in half.values())


def test_node_without_kv_has_nothing_to_copy() -> None:
    tier = HostTier(5)
    node = Node([1], 0, None, None)
    assert tier.offload(node, ListFragments()) == []
    tier.free(node)
    assert (tier.slots, node.host) == (0, None)


def test_values_that_are_no_slots_are_in_both_halves_of_an_export() -> None:
    class Slots(list[int]):
        def __getitem__(self, key: Any) -> Any:
            _, part = key
            return list(self)[part]

    upper, lower = split_exported({"k.0": Slots([1, 2, 3]), "dtype": "bfloat16"}, 1)
    assert (upper, lower) == (
        {"k.0": [1], "dtype": "bfloat16"},
        {"k.0": [2, 3], "dtype": "bfloat16"},
    )


def test_leaf_whose_copy_to_the_host_fails_is_dropped() -> None:
    kv = ListFragments()
    tree = TokenTree(BrokenFragments(kv, "export", 0), capacity=4, host_capacity=9)
    tree.unpin(compute(tree, kv, [1, 2, 3]))
    wanted = tree.pin(tree.extend(tree.root(), [7, 8]))
    assert tree.make_room()
    assert (tree.budget.resident, tree.host.slots, tree.n_evicted) == (0, 0, 3)
    tree.check()
    tree.unpin(wanted)
    tree.check()


# A leaf that takes in what comes after it -------------------------------------------------------


def grown(kv: ListFragments, tree: TokenTree) -> tuple[Cursor, Cursor]:
    """A leaf [1, 2, 3] whose fragment has the slots of an absent child [4, 5] too; both pinned."""
    leaf = compute(tree, kv, [1, 2, 3])
    end = tree.pin(tree.extend(leaf, [4, 5]))
    assert tree.growable_leaf(end.node) is leaf.node
    kv.write(leaf.node.fragment, [4, 5], 3)
    return leaf, end


def test_leaf_absorbs_its_child_with_its_rows() -> None:
    kv = ListFragments()
    tree = TokenTree(kv)
    leaf, end = grown(kv, tree)
    row = LogitsRow()
    row.node, row.depth = end.node, 5
    end.node.logits_rows = {5: row}
    tree.absorb_chunk(leaf.node, end)
    assert resolve(end) == Cursor(leaf.node, 5)
    assert leaf.node.tokens == [1, 2, 3, 4, 5]
    assert leaf.node.logits_rows == {5: row}
    assert row.node is leaf.node
    assert slots(tree, end) == [(token, token - 1) for token in (1, 2, 3, 4, 5)]
    tree.check()


def test_absorb_of_a_path_filled_meanwhile_frees_the_extra_slots() -> None:
    kv = ListFragments()
    tree = TokenTree(kv)
    leaf, end = grown(kv, tree)
    other = kv.new(None)
    kv.write(other, [4, 5], 3)
    tree.fill(end, 3, other)
    tree.absorb_chunk(leaf.node, end)
    assert leaf.node.fragment is not None
    assert leaf.node.fragment.length == 3
    assert slots(tree, end) == [(token, token - 1) for token in (1, 2, 3, 4, 5)]
    tree.check()


def test_leaf_with_a_new_child_meanwhile_frees_the_new_slots() -> None:
    kv = ListFragments()
    tree = TokenTree(kv)
    leaf, end = grown(kv, tree)
    known, epoch = tree.path(leaf), tree.epoch
    other = tree.pin(tree.extend(leaf, [9]))
    tree.absorb_chunk(leaf.node, end)
    assert tree.epoch > epoch
    assert tree.path(leaf) != known
    assert slots(tree, leaf) == [(token, token - 1) for token in (1, 2, 3)]
    assert slots(tree, end) == [(token, token - 1) for token in (1, 2, 3, 4, 5)]
    assert not other.node.resident
    tree.check()


def test_nodes_that_cannot_be_joined_stay_as_they_are() -> None:
    kv = ListFragments()
    tree = TokenTree(BrokenFragments(kv, "join", 0))
    ends = [compute(tree, kv, list(range(1, n + 1))) for n in range(1, 9)]
    for end in ends[:-1]:
        tree.unpin(end)
    assert tree.join(ends[-1]) == 0
    assert tree.n_nodes == 8
    tree.check()
    assert tree.join(ends[-1]) == 7


def test_fragment_that_cannot_be_split_keeps_its_own_slots() -> None:
    """A leaf grew by what it computed for its child, and meanwhile another child came."""
    kv = ListFragments()
    tree = TokenTree(BrokenFragments(kv, "split", 0))
    end = compute(tree, kv, [1, 2, 3, 4])
    leaf = end.node
    children = [tree.pin(tree.cut(tree.extend(end, more))) for more in ([5, 6], [7])]
    assert leaf.fragment is not None
    kv.write(leaf.fragment, [5, 6], 4)
    with pytest.raises(MemoryError):
        tree.absorb_chunk(leaf, children[0])
    assert slots(tree, end) == [(token, token - 1) for token in range(1, 5)]
    assert not children[0].node.resident
    tree.check()


def test_slots_that_cannot_be_attached_to_a_child_are_freed() -> None:
    """A leaf grew by what it computed for its child, and meanwhile another child came."""
    kv = ListFragments()
    broken = BrokenFragments(kv, "attach", 1)
    tree = TokenTree(broken)
    end = compute(tree, kv, [1, 2, 3, 4])
    leaf = end.node
    children = [tree.pin(tree.cut(tree.extend(end, more))) for more in ([5, 6], [7])]
    assert leaf.fragment is not None
    kv.write(leaf.fragment, [5, 6], 4)
    with pytest.raises(MemoryError):
        tree.absorb_chunk(leaf, children[0])
    assert slots(tree, end) == [(token, token - 1) for token in range(1, 5)]
    assert kv.usage().slots == 4
    assert not children[0].node.resident
    tree.check()


def test_leaf_whose_spare_slots_cannot_be_released_keeps_its_kv() -> None:
    kv = ListFragments()
    tree = TokenTree(BrokenFragments(kv, "settle", 0))
    leaf, end = grown(kv, tree)
    tree.absorb_chunk(leaf.node, end)
    assert tree.budget.growing == 1
    tree.finalize_leaves()
    assert tree.budget.growing == 0
    assert slots(tree, end) == [(token, token - 1) for token in (1, 2, 3, 4, 5)]
    tree.check()
