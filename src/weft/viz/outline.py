"""The drawing order of a tree, and short texts that describe a node."""

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
    """Nodes without a fork between them: each is the only child of the one before.

    A chain ends at a node with several children, or at a leaf.

    nodes: the nodes, at least one.
    forks: number of forks above the chain.
    n_branches: number of children of the last node that are shown.
    n_below: number of all nodes below the last node.
    n_hidden: number of nodes in branches of the last node that are left out.
    """

    nodes: list[Heddle]
    forks: int
    n_branches: int
    n_below: int
    n_hidden: int


class ChainEnd(NamedTuple):
    """A marker that `outline` yields after a chain and everything below it.

    has_branches: `outline` yielded branches of the chain.
    is_root: the chain is the first one, so this is the end of the tree.
    """

    has_branches: bool
    is_root: bool


def oldest_first(node: Heddle) -> Sequence[Heddle]:
    """Return a node's children in order of creation; the default order of drawings."""
    return node.children


def children_by_number(node: Heddle, numbers: Mapping[str, int]) -> list[Heddle]:
    """Return a node's children sorted by node number; children without a number are last.

    numbers: node id → number, as `weft tree` shows it.
    """
    last = len(numbers)
    return sorted(node.children, key=lambda child: numbers.get(child.id, last))


def breadth_first(
    root: Heddle, limit: int | None, children_of: Below = oldest_first
) -> list[Heddle]:
    """Return nodes level by level from `root` down, so that parents precede their children.

    Args:
        root: the first node.
        limit: maximum number of nodes; None: no limit.
        children_of: returns a node's children in drawing order.
    """
    if limit is not None:
        limit = check_int("limit", limit, 1)
    nodes: list[Heddle] = []
    waiting = deque([root])
    while waiting and (limit is None or len(nodes) < limit):
        node = waiting.popleft()
        nodes.append(node)
        waiting.extend(children_of(node))
    return nodes


def sizes(root: Heddle) -> dict[int, int]:
    """Return the number of nodes of each subtree, including its root: `id(node)` → size.

    Cost: O(nodes).
    """
    counts: dict[int, int] = {}
    for node in reversed(breadth_first(root, None)):
        counts[id(node)] = 1 + sum(counts[id(child)] for child in node.children)
    return counts


def best_path(root: Heddle) -> list[Heddle]:
    """Return the nodes from `root` to its best leaf; [] if leaves have neither scores nor logprobs.

    The best leaf has the highest score. Without scores, it has the highest mean logprob of the
    sampled tokens on its path.

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
        """Sort key of a leaf; the best leaf has the largest key."""
        total, n = sampled[id(leaf)]
        score = -math.inf if leaf.score is None else leaf.score
        return (score, leaf.terminal, total / n if n else -math.inf)

    path = max(leaves, key=rank).path
    return path[path.index(root) :]


def outline(
    root: Heddle, limit: int | None = None, children_of: Below = oldest_first
) -> Iterator[Chain | ChainEnd]:
    """Yield the tree in drawing order: each chain, then all chains below it, then its ChainEnd.

    Args:
        root: the first node.
        limit: maximum number of nodes, nearest to the root first; None: no limit.
        children_of: returns a node's children in drawing order.

    Cost: O(nodes).
    """
    shown = {id(node) for node in breadth_first(root, limit, children_of)}
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
        children = [
            child for child in children_of(last) if id(child) in shown and forks < MAX_FORKS
        ]
        n_below = counts[id(last)] - 1
        yield Chain(
            run, forks, len(children), n_below, n_below - sum(counts[id(c)] for c in children)
        )
        stack.append(ChainEnd(bool(children), node is root))
        stack.extend((child, forks + 1) for child in reversed(children))


NOTHING = "(ended at once)"


def headline(node: Heddle) -> str:
    """Return the text to draw for a node: its own text; for a root, the user's prompt."""
    from ..loom import Loom  # imported here, because most users of this module do not need it
    from ..loom.node import imported_display

    # A subclass may define its own display text.
    if isinstance(node, Loom) and type(node).display_text is Loom.display_text:
        shown = imported_display(node)
        return (node.user_prompt or node.text) if shown is None else shown
    return node.display_text()


def geometric_mean_p(node: Heddle) -> float:
    """Return the geometric mean of the probabilities of a node's sampled tokens; 0 without any."""
    return math.exp(node.mean_logprob)


def facts(node: Heddle) -> list[str]:
    """Return a node's statistics as short texts, such as ["12 tok", "p 0.81", "stop"]."""
    parts = [f"{len(node.tokens)} tok"]
    if node.logprobs:
        parts.append(f"p {geometric_mean_p(node):.2f}")
    if node.score is not None:
        tiny = 0 < abs(node.score) < 0.001
        parts.append("score 0.000" if tiny else f"score {node.score:.3g}")
    if node.terminal:
        parts.append("end")
    elif node.finish_reason is not None:
        parts.append(node.finish_reason)
    return parts


def counted(n: int, singular: str, plural: str = "") -> str:
    """Return a count with its noun, such as "1 node" or "2 nodes".

    plural: "" means `singular` with an s.
    """
    return f"{n:,} {singular if n == 1 else plural or singular + 's'}"
