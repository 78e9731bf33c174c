"""Checks of the token tree's invariants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .place import resolve

if TYPE_CHECKING:
    from ...engines.base import Fragment
    from .place import Node
    from .tree import TokenTree


def check_tree(tree: TokenTree) -> None:
    """Compare all counters and links of a tree with a recount.

    Raises: AssertionError. Cost: O(tree).
    """
    nodes = list(tree.nodes())
    tails: dict[Node, int] = {}
    for tail in tree.tails:
        cursor = resolve(tail.cursor)
        assert cursor.depth == cursor.node.end, "a tail grows from inside a node"
        assert tail.fragment.length <= tail.reserved, "a tail has slots that it did not reserve"
        tails[cursor.node] = tails.get(cursor.node, 0) + 1
    for node in nodes:
        check_node(node, tails.get(node, 0), tree.untrimmed)
    ends: dict[Node, int] = {}
    for hold in tree.pins:
        node, depth = hold.cursor
        assert depth == node.end, "a pin by hand ends inside a node"
        ends[node] = ends.get(node, 0) + 1
    assert all(node.user_pins == ends.get(node, 0) for node in nodes), "pins by hand"
    for root in tree.roots.values():
        assert root.n_live == sum(c.counted for c in root.children.values()) + tails.get(root, 0), (
            "root live"
        )
    check_budget(tree, nodes)
    assert tree.n_nodes == len(nodes), "node count"
    assert tree.host.slots == sum(len(n.tokens) for n in nodes if n.host is not None), "host slots"


def check_node(node: Node, n_tails: int, untrimmed: Mapping[Fragment, int]) -> None:
    """Compare one node with its parent and children. Raises: AssertionError.

    Args:
        node: the node.
        n_tails: how many tails start at its end.
        untrimmed: lengths of fragments that the engine has failed to trim.
    """
    above = node.parent
    assert above is not None and node.tokens, "an empty node"
    assert node.joined is None, "a joined node is still linked"
    assert node.start == above.end, "a child starts where its parent ends"
    assert above.children.get(node.tokens[0]) is node, "siblings differ in their first token"
    if node.fragment is not None:
        n_slots = untrimmed.get(node.fragment, node.fragment.length)
        assert n_slots == len(node.tokens), "slots == tokens"
        assert above.resident, "a resident node below an absent one"
    pinned_children = sum(child.pins > 0 for child in node.children.values())
    assert node.pins >= pinned_children + node.user_pins, "a pinned child below an unpinned node"
    assert node.n_live == sum(child.counted for child in node.children.values()) + n_tails, "live"
    assert node.holds >= 0, "holds"


def check_budget(tree: TokenTree, nodes: list[Node]) -> None:
    """Compare the counts of slots and paths with a recount, and with those of the engine.

    Their sum must be the capacity. Raises: AssertionError.
    """
    budget = tree.budget
    resident = [node for node in nodes if node.fragment is not None]
    assert budget.resident == sum(len(n.tokens) for n in resident), "resident slots"
    assert budget.pinned == sum(len(n.tokens) for n in resident if n.pins), "pinned slots"
    assert budget.promised == sum(len(n.tokens) for n in nodes if n.fragment is None and n.pins), (
        "promised"
    )
    assert budget.tails == sum(tail.reserved for tail in tree.tails), "tail slots"
    leaves = sum(node.counted and not node.n_live for node in nodes)
    assert budget.paths == leaves + len(tree.tails), "paths"
    tail_slots = sum(tail.fragment.length for tail in tree.tails)
    if tree.fragments is not None:
        lost = sum(fragment.length for fragment in tree.unfreed)
        assert budget.lost == lost, "lost slots"
        assert budget.growing == len(tree.growing), "growing leaves"
        lost += sum(fragment.length - n for fragment, n in tree.untrimmed.items())
        assert tree.fragments.usage().slots == budget.resident + tail_slots + lost, "engine slots"
    if budget.free is not None and budget.capacity is not None:
        evictable = sum(len(n.tokens) for n in resident if not n.pins)
        pinned = budget.pinned + budget.tails
        total = budget.free + budget.promised + evictable + pinned + budget.spare
        assert total == budget.capacity, "slots lost"
