"""The order in which a tree is drawn, and the short texts that describe a node."""

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

    nodes: at least one.
    forks: number of forks above it.
    n_branches: branches shown below its last node.
    n_below: nodes below its last node.
    n_hidden: how many of those are not shown.
    """

    nodes: list[Heddle]
    forks: int
    n_branches: int
    n_below: int
    n_hidden: int


class ChainEnd(NamedTuple):
    """The end of all branches below a chain. is_root: it ends the first chain."""

    has_branches: bool
    is_root: bool


def oldest_first(node: Heddle) -> Sequence[Heddle]:
    """Return a node's children in their own order."""
    return node.children


def by_number(node: Heddle, numbers: Mapping[str, int]) -> list[Heddle]:
    """Return a node's children by number; those without a number come last."""
    last = len(numbers)
    return sorted(node.children, key=lambda child: numbers.get(child.id, last))


def breadth_first(root: Heddle, limit: int | None, below: Below = oldest_first) -> list[Heddle]:
    """Return the first `limit` nodes level by level, so parents come before children."""
    if limit is not None:
        limit = check_int("limit", limit, 1)
    nodes: list[Heddle] = []
    waiting = deque([root])
    while waiting and (limit is None or len(nodes) < limit):
        node = waiting.popleft()
        nodes.append(node)
        waiting.extend(below(node))
    return nodes


def sizes(root: Heddle) -> dict[int, int]:
    """Return the number of nodes from each node down, by `id()`. Cost: O(nodes)."""
    counts: dict[int, int] = {}
    for node in reversed(breadth_first(root, None)):
        counts[id(node)] = 1 + sum(counts[id(child)] for child in node.children)
    return counts


def best_path(root: Heddle) -> list[Heddle]:
    """Return the nodes from `root` to the leaf that ranks first; [] if nothing ranks the leaves.

    Leaves are ranked by score, then by the mean logprob of all sampled tokens of their path.

    Cost: O(nodes).
    """
    nodes = breadth_first(root, None)
    # The sum and the number of sampled logprobs from the root to each node.
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
    """Yield the tree as chains, each followed by those below it and a ChainEnd. Cost: O(nodes).

    below: returns a node's children in drawing order.
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
    """Return the text that represents a node; for a root, the user's prompt."""
    from ..loom import Loom  # imported here, because most users of this module do not need it
    from ..loom.node import imported_display

    # A subclass may define its own display text.
    if isinstance(node, Loom) and type(node).display_text is Loom.display_text:
        shown = imported_display(node)
        return (node.user_prompt or node.text) if shown is None else shown
    return node.display_text()


def facts(node: Heddle) -> list[str]:
    """Return a node's statistics as short texts: tokens, mean p, score, finish reason."""
    parts = [f"{len(node.tokens)} tok"]
    if node.logprobs:
        parts.append(f"p {node.mean_p:.2f}")
    if node.score is not None:
        tiny = 0 < abs(node.score) < 0.001
        parts.append("score 0.000" if tiny else f"score {node.score:.3g}")
    if node.terminal:
        parts.append("end")
    elif node.finish_reason is not None:
        parts.append(node.finish_reason)
    return parts


def counted(n: int, one: str, many: str = "") -> str:
    """Return a count and its noun, such as "2 nodes"."""
    return f"{n:,} {one if n == 1 else many or one + 's'}".replace(",", " ")
