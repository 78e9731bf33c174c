"""What a tree of scored nodes says: visits, totals, and where it is worth going on."""

from __future__ import annotations

from collections.abc import Iterable

from ..loom import Heddle
from .driver import Search
from .judge import Judge

# A full path is completed when the model gives it at least this.
LIKELY = 0.5


class Frontier:
    """One reading of the tree: each scored node counts once for itself and all above it.

    visits, total: by node id; how many scored nodes there are at or below, and their scores' sum.
    steps: a node's children to go on from, in their order.
    """

    def __init__(self, search: Search, judge: Judge, depth: int) -> None:
        """Cost: O(nodes), and the text of each path is read once."""
        self.search = search
        self.depth = depth
        self.nodes = list(search.start.walk())
        self.visits: dict[str, int] = {}
        self.total: dict[str, float] = {}
        self.steps = {node.id: list(filter(is_step, node.children)) for node in self.nodes}
        self._count()
        self.closed = self._without_hope(judge)

    def full(self) -> list[Heddle]:
        """Return the full paths that the model finds likely and that have no answer yet."""
        return [
            node
            for node in self.nodes
            if node.id not in self.closed and self.is_full(node) and (node.score or 0) >= LIKELY
        ]

    def is_full(self, node: Heddle) -> bool:
        """Say whether no step may follow the node."""
        return self.search.level(node) - self.search.level(self.search.start) >= self.depth

    def open(self, taken: Iterable[str] = (), *, widens: bool = False) -> set[str]:
        """Return the ids of nodes at or below which there is something to do.

        taken: ids of nodes with work on its way. widens: nodes that have steps may get more.
        """
        busy, found = set(taken), set[str]()
        for node in reversed(self.nodes):
            if node.id in self.closed or self.is_full(node):
                continue
            steps = self.steps[node.id]
            below = any(child.id in found for child in steps)
            if below or ((widens or not steps) and node.id not in busy):
                found.add(node.id)
        return found

    def _count(self) -> None:
        for node in reversed(self.nodes):
            below = node.children
            self.visits[node.id] = (node.score is not None) + sum(
                self.visits[child.id] for child in below
            )
            self.total[node.id] = (node.score or 0.0) + sum(self.total[child.id] for child in below)

    def _without_hope(self, judge: Judge) -> set[str]:
        """Return what need not be followed: ends, the hopeless, and all but one of each state."""
        closed, seen = set[str](), set[object]()
        for node in self.nodes:
            if node is self.search.start:
                continue
            place = self.search.place_of(node)
            answered = any(child.meta.get("answer") for child in node.children)
            ended = node.terminal or (answered and self.is_full(node))
            if not is_step(node) or ended or place is None or place in seen:
                closed.add(node.id)
            elif judge.is_hopeless(node):
                closed.add(node.id)
            seen.add(place)
        return closed


def is_step(node: Heddle) -> bool:
    """Say whether a node is a scored step, not a whole answer or a part of a line."""
    return node.score is not None and not node.meta.get("answer")


def is_answered(search: Search) -> bool:
    """Say whether the search is over early: there is a checker, and a right answer."""
    return search.task is not None and any(map(search.is_solved, search.start.walk()))


def paths(search: Search) -> list[Heddle]:
    """Return what to answer with, best first.

    Right answers; likely full paths of a task that have no answer; ends; then the deepest.
    """
    nodes = [n for n in search.start.walk() if n is not search.start and n.score is not None]
    steps = 0 if search.task is None else search.task.steps

    def rank(node: Heddle) -> tuple[int, int, float]:
        level = search.level(node)
        kind = 1 if node.terminal else 0
        if search.is_solved(node):
            kind = 3
        elif steps and level >= steps and not node.children and not node.terminal:
            kind = 2
        return (-kind, 0 if node.terminal else -level, -(node.score or 0.0))

    return sorted(nodes, key=rank)
