"""Small pure pieces of the token tree: comparing, cutting and joining what nodes hold."""

from __future__ import annotations

from typing import Any

from .node import Node

JOIN_LENGTH = 8  # one-child nodes in a row before they become one (beam search makes thousands)
JOIN_RATIO = 8  # a node this much longer than all below it stays apart, so joining costs O(n log n)


def common_prefix(known: list[int], ids: list[int], offset: int) -> int:
    """Return how many of `known` equal `ids` from `offset` on; compares slices in C."""
    limit = min(len(known), len(ids) - offset)
    if known[:limit] == ids[offset : offset + limit]:
        return limit
    low, high = 0, limit  # known[:low] is equal, known[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if known[low:middle] == ids[offset + low : offset + middle]:
            low = middle
        else:
            high = middle
    return low


def grow_leaf(node: Node, ids: list[int]) -> Node:
    """Put new tokens below `node`, or into it where it is an absent leaf that nothing uses."""
    if not (node.resident or node.children or node.pins or node.launched or node.host is not None):
        node.tokens = node.tokens + ids
        return node
    child = node.children[ids[0]] = Node(ids, node.end, node, node.namespace)
    return child


def join_chain(lower: Node) -> list[Node]:
    """Return the nodes that may become one with `lower`, itself first, then upwards."""
    chain, length = [lower], len(lower.tokens)
    while (upper := chain[-1].parent) is not None and can_join(upper, chain[-1]):
        if len(upper.tokens) > JOIN_RATIO * length:
            break
        chain.append(upper)
        length += len(upper.tokens)
    return chain


def can_join(upper: Node, lower: Node) -> bool:
    """Whether `lower` may take in `upper`: an only child, in the same state, nothing else there."""
    return (
        upper.parent is not None
        and len(upper.children) == 1
        and upper.live == (1 if lower.counted else 0)
        and (upper.pins > 0) == (lower.pins > 0)
        and (upper.fragment is None) == (lower.fragment is None)
        and upper.host is None
        and lower.host is None
        and not upper.launched
        and not lower.launched
    )


def split_exported(host: dict[str, Any], cut: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cut exported KV: k.* and v.* have their slots on axis 1, others describe the whole."""
    upper, lower = dict(host), dict(host)
    for name, array in host.items():
        if name.startswith(("k.", "v.")):
            upper[name], lower[name] = array[:, :cut], array[:, cut:]
    return upper, lower


def move_rows(source: Node, target: Node, last: int) -> None:
    """Give cached logits rows at depths up to `last` from one node to another."""
    if not source.rows:
        return
    for depth in [d for d in source.rows if d <= last]:
        row = source.rows.pop(depth)
        row.node = target
        if target.rows is None:
            target.rows = {}
        target.rows[depth] = row


def is_evictable(node: Node) -> bool:
    """Resident, and nothing uses it or hangs on it."""
    return node.fragment is not None and not node.pins and not node.live


def is_forgettable(node: Node) -> bool:
    """Nothing needs this node's tokens."""
    return not (
        node.fragment is not None
        or node.host is not None
        or node.children
        or node.holds
        or node.pins
        or node.live
        or node.launched
        or node.rows
    )
