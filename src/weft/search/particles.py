"""The particle filter: where the particles are, what they weigh, and what all of them say."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from ..loom import Heddle
from .driver import Search, Want
from .weights import effective_size, log_mean_exp, systematic


class Particles:
    """The filter: `state["at"]` has each round's particles (id, log weight) and log evidence."""

    def __init__(self, n: int, ess: float, depth: int) -> None:
        self.n = n
        self.ess = ess
        self.depth = depth

    def ask(self, search: Search) -> Sequence[Want]:
        """Ask for one line for each particle that goes on and can still count."""
        if search.round >= self.depth:
            return []
        rows = Counter(node for node, weight in self._now(search) if weight > -math.inf)
        return [Want(node, n=times) for node, times in rows.items() if not node.terminal]

    def tell(self, search: Search, told: Sequence[Heddle]) -> Sequence[Heddle]:
        """Move the particles to their new nodes, weigh them, and resample where it is needed."""
        new = defaultdict[str, list[Heddle]](list)
        for node in reversed(search.in_order(told)):
            assert node.parent is not None
            new[node.parent.id].append(node)
        moved: list[tuple[Heddle, float]] = []
        for node, weight in self._now(search):
            child = new[node.id].pop() if new[node.id] else node
            rise = 0.0 if weight == -math.inf or child is node else _rise(node, child, search)
            moved.append((child, weight + rise))
        log_z = self._log_z(search)
        weights = [weight for _, weight in moved]
        if max(weights) > -math.inf and effective_size(weights) < self.ess * self.n:
            log_z += log_mean_exp(weights)
            picked = systematic(weights, search.rng())
            moved = [(moved[index][0], 0.0) for index in picked]
        kept = {"particles": [[node.id, _json(weight)] for node, weight in moved], "log_z": log_z}
        search.state.setdefault("at", {})[str(search.round + 1)] = kept
        return self._by_weight(moved)

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the particles' nodes: right answers first, then ends, the heaviest first."""
        nodes = self._by_weight(self._now(search)) if search.round else []
        return sorted(nodes, key=lambda node: (not search.is_solved(node), not node.terminal))

    def log_evidence(self, search: Search) -> float:
        """Return the log of the estimated mean of exp(potential); nats."""
        return self._log_z(search) + log_mean_exp([weight for _, weight in self._now(search)])

    def _now(self, search: Search) -> list[tuple[Heddle, float]]:
        if not search.round:
            return [(search.start, 0.0)] * self.n
        found = search.state["at"][str(search.round)]["particles"]
        nodes = search.found([node_id for node_id, _ in found])
        return [(node, float(w)) for node, (_, w) in zip(nodes, found, strict=True)]

    def _log_z(self, search: Search) -> float:
        return float(search.state["at"][str(search.round)]["log_z"]) if search.round else 0.0

    def _by_weight(self, particles: Sequence[tuple[Heddle, float]]) -> list[Heddle]:
        mass = defaultdict[Heddle, float](float)
        top = max(weight for _, weight in particles)
        for node, weight in particles:
            mass[node] += math.exp(weight - top) if top > -math.inf else 1.0
        return sorted(mass, key=lambda node: -mass[node])


def _rise(node: Heddle, child: Heddle, search: Search) -> float:
    before = 0.0 if node is search.start else (node.score or 0.0)
    return (child.score or 0.0) - before


def _json(weight: float) -> float | str:
    return weight if math.isfinite(weight) else str(weight)
