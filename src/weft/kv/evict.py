"""Which leaf loses its KV first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from .node import Node

# Lower goes first; any comparable. A caller may weigh in what a node is worth to it.
Order = Callable[[Node], Any]


def by_use_and_cost(node: Node) -> tuple[bool, int, int]:
    """Nodes that no handle holds, then the least recently used, then the cheapest to recompute."""
    return (node.holds > 0, node.used, len(node.tokens))


class EvictionQueue:
    """Evictable leaves, worst first.

    Entries are not updated in place: `offer` again when a node's key changed; stale entries are
    skipped.
    """

    def __init__(self, order: Order = by_use_and_cost) -> None:
        self.order = order
        self._heap: list[tuple[Any, int, Node]] = []
        self._tick = count()

    def offer(self, node: Node) -> None:
        """Say that a node may be evicted now. Cost: O(log entries)."""
        heapq.heappush(self._heap, (self.order(node), next(self._tick), node))

    def pop(self, evictable: Callable[[Node], bool]) -> Node | None:
        """Return the first node that still is evictable under its present key, or None."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            if evictable(node):
                if key == self.order(node):
                    return node
                self.offer(node)
        return None

    def __len__(self) -> int:
        return len(self._heap)

    def rebuild(self, nodes: list[Node]) -> None:
        """Forget stale entries: only these nodes are evictable."""
        self._heap = [(self.order(node), next(self._tick), node) for node in nodes]
        heapq.heapify(self._heap)
