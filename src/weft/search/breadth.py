"""Breadth first: all of a level at once, the best few go on."""

from __future__ import annotations

from collections.abc import Sequence

from ..loom import Heddle
from .driver import Search, Want
from .judge import Judge
from .ranking import ranked, worth_following


class BreadthFirst:
    """All of a level at once; `state["kept"]` has the ids of each round's kept nodes."""

    def __init__(self, judge: Judge, breadth: int, depth: int) -> None:
        self.judge = judge
        self.breadth = breadth
        self.depth = depth

    def ask(self, search: Search) -> Sequence[Want]:
        """Ask for lines below all that was kept last."""
        if search.round >= self.depth:
            return []
        return [Want(node) for node in self._kept(search, search.round) if not node.terminal]

    def tell(self, search: Search, told: Sequence[Heddle]) -> Sequence[Heddle]:
        """Keep the best of the round."""
        kept = worth_following(search, self.judge, told)[: self.breadth]
        search.state.setdefault("kept", {})[str(search.round + 1)] = [node.id for node in kept]
        return kept

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the paths that ended and those of the last level, best first."""
        rounds = range(1, search.round + 1)
        ended = [n for r in rounds[:-1] for n in self._kept(search, r) if n.terminal]
        return ranked([*ended, *self._kept(search, search.round)]) if search.round else []

    def _kept(self, search: Search, number: int) -> list[Heddle]:
        return search.found(search.state["kept"][str(number)]) if number else [search.start]
