"""Choice of chains of one-child nodes that are joined into one node."""

from __future__ import annotations

from .place import Node

JOIN_LENGTH = 8  # chains of one-child nodes are joined at this length (beam search has thousands)
JOIN_RATIO = 8  # a node this many times longer than the chain below it is not joined: O(n log n)


def join_chain(lower: Node) -> list[Node]:
    """Return the nodes that may be joined with `lower`, itself first, then upwards."""
    chain, length = [lower], len(lower.tokens)
    while (upper := chain[-1].parent) is not None and can_join(upper, chain[-1]):
        if len(upper.tokens) > JOIN_RATIO * length:
            break
        chain.append(upper)
        length += len(upper.tokens)
    return chain


def can_join(upper: Node, lower: Node) -> bool:
    """Return True if `lower` is the only child of `upper`, in the same state, and nothing else uses
    it.
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
