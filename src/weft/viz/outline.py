"""What of a tree is shown, in which order, and what is said of a node besides its text."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .._core.validation import check_int

if TYPE_CHECKING:
    from ..loom import Heddle

Below = Callable[["Heddle"], Sequence["Heddle"]]

# Browsers flatten what is nested deeper than 512 elements; a fork takes three.
MAX_FORKS = 150


class Chain(NamedTuple):
    """A node and those that follow it one by one, down to the next fork or leaf.

    forks: how many forks stand before it. n_branches: what the last one forks into, as shown.
    n_below, n_hidden: nodes below the last one, and how many of them are not shown.
    """

    nodes: list[Heddle]
    forks: int
    n_branches: int
    n_below: int
    n_hidden: int


class ChainEnd(NamedTuple):
    """All below an item was told. has_branches: as the item said. is_root: the first item's."""

    has_branches: bool
    is_root: bool


def oldest_first(node: Heddle) -> Sequence[Heddle]:
    """Return a node's children as it keeps them."""
    return node.children


def by_number(node: Heddle, numbers: Mapping[str, int]) -> list[Heddle]:
    """Return a node's children in the order of their numbers; those without one are the last."""
    last = len(numbers)
    return sorted(node.children, key=lambda child: numbers.get(child.id, last))


def breadth_first(root: Heddle, limit: int | None, below: Below = oldest_first) -> list[Heddle]:
    """Return the first `limit` nodes, level by level: parents before children."""
    if limit is not None:
        limit = check_int("limit", limit, 1)
    found: list[Heddle] = []
    waiting = deque([root])
    while waiting and (limit is None or len(found) < limit):
        node = waiting.popleft()
        found.append(node)
        waiting.extend(below(node))
    return found


def sizes(root: Heddle) -> dict[int, int]:
    """Return how many nodes there are from each node down, by `id()`. Cost: O(nodes)."""
    counts: dict[int, int] = {}
    for node in reversed(breadth_first(root, None)):
        counts[id(node)] = 1 + sum(counts[id(child)] for child in node.children)
    return counts


def best_path(root: Heddle) -> list[Heddle]:
    """Return the nodes from `root` to the leaf that ranks first; none where nothing ranks them.

    By score where a leaf has one, else by the mean logprob of all that was sampled on the way.
    Cost: O(nodes).
    """
    nodes = breadth_first(root, None)
    # What was sampled from the root to each node: the sum of its logprobs, and how many.
    sampled = {id(root): (math.fsum(root.logprobs), len(root.logprobs))}
    for node in nodes:
        total, n = sampled[id(node)]
        for child in node.children:
            more = child.logprobs
            sampled[id(child)] = (total + math.fsum(more), n + len(more))
    leaves = [node for node in nodes if not node.children]
    if not any(leaf.score is not None or sampled[id(leaf)][1] for leaf in leaves):
        return []

    def rank(leaf: Heddle) -> tuple[float, bool, float]:
        total, n = sampled[id(leaf)]
        score = -math.inf if leaf.score is None else leaf.score
        return (score, leaf.terminal, total / n if n else -math.inf)

    path = max(leaves, key=rank).path
    return path[path.index(root) :]


def outline(
    root: Heddle, limit: int | None = None, below: Below = oldest_first
) -> Iterator[Chain | ChainEnd]:
    """Yield the tree as items, each followed by those below it and a ChainEnd. Cost: O(nodes).

    below: a node's children, in the order in which they are told.
    """
    shown = {id(node) for node in breadth_first(root, limit, below)}
    counts = sizes(root)
    stack: list[tuple[Heddle, int] | ChainEnd] = [(root, 0)]
    while stack:
        top = stack.pop()
        if isinstance(top, ChainEnd):
            yield top
            continue
        node, forks = top
        run = [node]
        while len(run[-1].children) == 1 and id(run[-1].children[0]) in shown:
            run.append(run[-1].children[0])
        last = run[-1]
        children = [child for child in below(last) if id(child) in shown and forks < MAX_FORKS]
        n_below = counts[id(last)] - 1
        yield Chain(
            run, forks, len(children), n_below, n_below - sum(counts[id(c)] for c in children)
        )
        stack.append(ChainEnd(bool(children), node is root))
        stack.extend((child, forks + 1) for child in reversed(children))


NOTHING = "(ended at once)"


def headline(node: Heddle) -> str:
    """Return the text that stands for a node: of a root, what was asked."""
    from ..loom import Loom  # here, or who counts and draws nothing would load it
    from ..loom.node import imported_display

    # A class of one's own says itself what it shows.
    if isinstance(node, Loom) and type(node).display_text is Loom.display_text:
        shown = imported_display(node)
        return (node.user_prompt or node.text) if shown is None else shown
    return node.display_text()


def facts(node: Heddle) -> list[str]:
    """Return a node's figures, shortest first to read: tokens, mean p, score, how it ended."""
    found = [f"{len(node.tokens)} tok"]
    if node.logprobs:
        found.append(f"p {node.mean_p:.2f}")
    if node.score is not None:
        tiny = 0 < abs(node.score) < 0.001
        found.append("score 0.000" if tiny else f"score {node.score:.3g}")
    if node.terminal:
        found.append("end")
    elif node.finish_reason is not None:
        found.append(node.finish_reason)
    return found


def counted(n: int, one: str, many: str = "") -> str:
    """Return a count and its noun."""
    return f"{n:,} {one if n == 1 else many or one + 's'}".replace(",", " ")
