"""Nodes that were grown with a constraint: where it began, and what their text stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from .heddle import Heddle
    from .node import Node


def constrained(node: Heddle | None, constraint: Any) -> list[Heddle]:
    """Return the nodes from where a constraint began down to `node`, all grown with an equal one.

    A node that a call cut short is gone on with by an equal constraint: it does not begin anew.
    """
    found: list[Heddle] = []
    while node is not None and node.params is not None and node.params.constraint == constraint:
        found.append(node)
        node = node.parent
    return found[::-1]


def constrained_so_far(node: Heddle, constraint: Any) -> list[int]:
    """Return the tokens that a constraint has seen before a branch of `node`."""
    return [token for each in constrained(node, constraint) for token in each.tokens]


def parsed(node: Node) -> Any:
    """Return the object that a constrained text stands for; see `Heddle.parsed`."""
    constraint = node.params.constraint if node.params is not None else None
    if constraint is None:
        raise ConfigError("this node was grown without a constraint; its text is all there is")
    nodes = constrained(node, constraint)  # type: ignore[arg-type]
    return constraint.parse("".join(each.text for each in nodes))
