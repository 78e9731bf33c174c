"""Which candidates are worth following, and how deep a search goes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..loom import Heddle
from .core import lines_of, whole
from .driver import Search
from .judge import Judge

# Levels of a search that knows neither a task nor a depth.
DEEPEST = 16
CHECKED_ROUNDS, BLIND_ROUNDS = 32, 8


def worth_following(search: Search, judge: Judge, told: Sequence[Heddle]) -> list[Heddle]:
    """Return the candidates worth following, best first, the first of each state."""
    best = ranked(search.in_order(told))
    if search.task is None:
        return best
    kept: dict[object, Heddle] = {}
    for node in best:
        place = search.place_of(node)
        if place is not None and not judge.is_hopeless(node):
            kept.setdefault(place, node)
    return list(kept.values())


def ranked(nodes: Sequence[Heddle]) -> list[Heddle]:
    """Best first; equal scores in the order given."""
    return sorted(nodes, key=lambda node: math.inf if node.score is None else -node.score)


def deepest(depth: int | None, search: Search) -> int:
    """Return how many levels there are to search below the start."""
    given = DEEPEST if depth is None else whole("depth", depth)
    if search.task is None:
        return given
    missing = max(search.task.steps - len(lines_of(search.start)), 0)
    return missing if depth is None else min(given, missing)


def most_rounds(rounds: int | None, search: Search) -> int:
    """Return how many rounds a search has: many only where a checker can end it."""
    if rounds is not None:
        return whole("rounds", rounds)
    return CHECKED_ROUNDS if search.task is not None else BLIND_ROUNDS
