"""What of a tree is shown, and in which order: the same for all pictures made of boxes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..loom import Heddle

# Browsers flatten what is nested deeper than 512 elements; a fork takes three.
MAX_FORKS = 150


class Item(NamedTuple):
    """A node and those that follow it one by one, down to the next fork or leaf.

    forks: how many forks stand before it. n_branches: what the last one forks into, as shown.
    n_below, n_hidden: nodes below the last one, and how many of them are not shown.
    """

    nodes: list[Heddle]
    forks: int
    n_branches: int
    n_below: int
    n_hidden: int


class End(NamedTuple):
    """All below an item was told. has_branches: as the item said. is_root: the first item's."""

    has_branches: bool
    is_root: bool


def nearest(root: Heddle, limit: int | None) -> list[Heddle]:
    """Return the first `limit` nodes, level by level: parents before children."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(f"limit is {limit!r}; allowed is a whole number from 1, or None for all")
    found: list[Heddle] = []
    waiting = deque([root])
    while waiting and (limit is None or len(found) < limit):
        node = waiting.popleft()
        found.append(node)
        waiting.extend(node.children)
    return found


def sizes(root: Heddle) -> dict[int, int]:
    """Return how many nodes there are from each node down, by `id()`. Cost: O(nodes)."""
    counts: dict[int, int] = {}
    for node in reversed(nearest(root, None)):
        counts[id(node)] = 1 + sum(counts[id(child)] for child in node.children)
    return counts


def outline(root: Heddle, limit: int | None = None) -> Iterator[Item | End]:
    """Yield the tree as items, each followed by those below it and an End. Cost: O(nodes)."""
    shown = {id(node) for node in nearest(root, limit)}
    counts = sizes(root)
    stack: list[tuple[Heddle, int] | End] = [(root, 0)]
    while stack:
        top = stack.pop()
        if isinstance(top, End):
            yield top
            continue
        node, forks = top
        run = [node]
        while len(run[-1].children) == 1 and id(run[-1].children[0]) in shown:
            run.append(run[-1].children[0])
        last = run[-1]
        below = [child for child in last.children if id(child) in shown and forks < MAX_FORKS]
        n_below = counts[id(last)] - 1
        yield Item(run, forks, len(below), n_below, n_below - sum(counts[id(c)] for c in below))
        stack.append(End(bool(below), node is root))
        stack.extend((child, forks + 1) for child in reversed(below))
