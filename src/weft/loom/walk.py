"""Walks over reasoning trees; iterative, so that depth costs nothing but time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from .heddle import Heddle
    from .node import Node


def preorder(node: Node) -> Iterator[Heddle]:
    """Yield the node and all below it, parents first; children are read after their parent."""
    stack = [cast("Heddle", node)]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(reversed(top.children))


def leaves(node: Node) -> list[Heddle]:
    """Return the childless nodes from here down, in order; a childless node is its own leaf."""
    return [each for each in preorder(node) if not each.children]


def path(node: Node) -> list[Heddle]:
    """Return the nodes from the root to this one, both included."""
    up = [cast("Heddle", node)]
    while (parent := up[-1].parent) is not None:
        up.append(parent)
    return up[::-1]


def is_below(node: Node, top: Node) -> bool:
    """Whether `node` is `top` or below it."""
    at: Node | None = node
    while at is not None:
        if at is top:
            return True
        at = at.parent
    return False


def numbered(node: Node) -> Iterator[Heddle]:
    """Yield as `preorder`, children `by_call`: the order in which nodes get their numbers."""
    stack = [cast("Heddle", node)]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(reversed(by_call(top.children)))


def by_call(children: Iterable[Heddle]) -> list[Heddle]:
    """Return children as they were asked for, call by call, whichever ended first."""
    kept = list(children)
    first: dict[object, int] = {}
    for place, child in enumerate(kept):
        first.setdefault(_call(child), place)
    return sorted(kept, key=lambda child: (first[_call(child)], child.lineage))


def _call(node: Heddle) -> object:
    """What the children of one call share."""
    return node.id if node.params is None else node.params.seed
