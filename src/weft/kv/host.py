"""The second tier: KV of evicted nodes in host memory."""

from __future__ import annotations

import logging

from ..engines.base import Fragments
from .node import Node

_log = logging.getLogger(__name__)


class HostTier:
    """Exported KV of at most `capacity` slots, oldest out first; `slots` of them are in use."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots = 0
        self._nodes: dict[Node, None] = {}

    def take(self, node: Node, fragments: Fragments) -> list[Node]:
        """Copy a node's KV to the host if it can fit; return the nodes that had to go for it."""
        size, gone = len(node.tokens), []
        if node.fragment is None or size > self.capacity:
            return []
        while self.slots + size > self.capacity:
            oldest = next(iter(self._nodes))
            self.free(oldest)
            gone.append(oldest)
        try:
            node.host = fragments.export(node.fragment)
        except Exception as error:  # no room for a copy, say: the tokens are known all the same
            _log.warning("the engine could not copy KV to the host; it is dropped: %r", error)
            return gone
        self._nodes[node] = None
        self.slots += size
        return gone

    def free(self, node: Node) -> None:
        """Forget a node's host copy, if there is one."""
        if node.host is not None:
            self.slots -= len(node.tokens)
            node.host = None
            del self._nodes[node]

    def split(self, upper: Node) -> None:
        """A node was cut: its new upper half has a part of the host copy of its own."""
        self._nodes[upper] = None
