"""Choice of chains of one-child nodes that are joined into one node."""

from __future__ import annotations

from .place import Node

JOIN_LENGTH = 8  # chains of one-child nodes are joined at this length (beam search has thousands)
JOIN_RATIO = 8  # a node this many times longer than the chain below it is not joined: O(n log n)


def join_chain(lower: Node) -> list[Node]:
    """Return the chain of one-child nodes that may be joined: `lower` first, then upwards.

    The chain ends below a node that is `JOIN_RATIO` times longer than the chain.
    """
    chain, length = [lower], len(lower.tokens)
    while (upper := chain[-1].parent) is not None and can_join(upper, chain[-1]):
        if len(upper.tokens) > JOIN_RATIO * length:
            break
        chain.append(upper)
        length += len(upper.tokens)
    return chain


def can_join(upper: Node, lower: Node) -> bool:
    """Return True if a parent and its child may become one node.

    `lower` must be the only child. Both must be resident or both absent, and both pinned or both
    unpinned. Neither may have a host copy or be in flight, and no tail or user's pin may end at
    `upper`.
    """
    return (
        upper.parent is not None
        and len(upper.children) == 1
        and upper.n_live == (1 if lower.counted else 0)
        and not upper.user_pins
        and (upper.pins > 0) == (lower.pins > 0)
        and (upper.fragment is None) == (lower.fragment is None)
        and upper.host is None
        and lower.host is None
        and not upper.in_flight
        and not lower.in_flight
    )
