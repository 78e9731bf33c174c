"""Depth first: one path at a time, and back up from a node without hope."""

from __future__ import annotations

from collections.abc import Sequence

from ..loom import Heddle
from .driver import Search, Want
from .frontier import paths
from .judge import Judge
from .ranking import ranked, worth_following


class DepthFirst:
    """One node at a time: the deepest that is open, best first."""

    def __init__(self, judge: Judge, breadth: int, depth: int) -> None:
        self.judge = judge
        self.breadth = breadth
        self.depth = depth

    def ask(self, search: Search) -> Sequence[Want]:
        """Ask for lines below the next node, or for the answer of a path that is full."""
        if self._ended(search):
            return []
        for node in self._descent(search):
            if node.terminal or node.meta.get("opened"):
                continue
            if self._is_full(search, node):
                return [Want(node, "answers", 1, 0.0)]
            return [Want(node)]
        return []

    def tell(self, search: Search, told: Sequence[Heddle]) -> Sequence[Heddle]:
        """Mark the node as opened, so that the next round goes on elsewhere."""
        for node in told:
            if node.parent is not None:
                node.parent.meta["opened"] = True
        return ranked(search.in_order(told))

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return a right answer if there is one, then full paths, ends, and the deepest."""
        return paths(search)

    def _ended(self, search: Search) -> bool:
        ends = [node for node in search.start.walk() if node.terminal]
        return any(map(search.is_solved, ends)) if search.task is not None else bool(ends)

    def _is_full(self, search: Search, node: Heddle) -> bool:
        return search.level(node) - search.level(search.start) >= self.depth

    def _descent(self, search: Search) -> list[Heddle]:
        """Return the nodes in the order of a depth-first search, each state once."""
        order, stack = list[Heddle](), [search.start]
        seen: set[object] = set()
        while stack:
            node = stack.pop()
            if (place := search.place_of(node)) in seen and node is not search.start:
                continue
            seen.add(place)
            order.append(node)
            steps = [child for child in node.children if child.score is not None]
            kept = worth_following(search, self.judge, steps)[: self.breadth]
            stack += reversed(kept)
        return order
