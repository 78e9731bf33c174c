"""How many slots and paths there are, who has them, and who loses them first."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

from ...engines.base import Fragments
from .place import Node, Tail


class SlotBudget:
    """Counts over one token tree; the tree tells it of every change.

    Slots: every slot of the capacity is in exactly one of these::

        free │ promised to pinned absent nodes │ reserved by tails │ evictable │ pinned │ spare

    Spare is what leaves keep to grow in, and what the engine could not give back.

    Paths: leaves of what is resident or promised, tails included; sequence engines can tag
    `max_paths`. A node is counted when it is resident or pinned; its `live` is the number of
    counted children and tails.
    """

    __slots__ = (
        "capacity",
        "growing",
        "growth",
        "lost",
        "max_paths",
        "paths",
        "pinned",
        "promised",
        "resident",
        "tails",
    )

    def __init__(self, capacity: int | None, max_paths: int | None, growth: int = 1) -> None:
        """growth: slots that a tail reserves at a time."""
        self.capacity = capacity
        self.growth = growth
        self.max_paths = max_paths
        self.resident = 0
        self.pinned = 0
        self.promised = 0
        self.tails = 0
        self.paths = 0
        self.growing = 0  # leaves that keep room to grow in
        self.lost = 0  # slots that the engine could not free

    @property
    def spare(self) -> int:
        """Slots that hold nothing: each growing leaf may have nearly a `growth` of them."""
        return self.growing * (self.growth - 1) + self.lost

    @property
    def used(self) -> int:
        """Slots that are held or promised."""
        return self.resident + self.promised + self.tails + self.spare

    @property
    def free(self) -> int | None:
        """Slots nobody has; negative while too much is promised; None without a limit."""
        return None if self.capacity is None else self.capacity - self.used

    @property
    def unevictable(self) -> int:
        """Slots that no eviction can free: pinned, promised, and what tails reserved."""
        return self.pinned + self.promised + self.tails

    @property
    def is_exceeded(self) -> bool:
        """More is held and promised than there is."""
        if self.capacity is not None and self.used > self.capacity:
            return True
        return self.max_paths is not None and self.paths > self.max_paths

    def count_node(self, node: Node) -> None:
        """A node became counted: one path more, unless it lengthens its parent's."""
        above = node.parent
        assert above is not None
        if node.n_live == 0:
            self.paths += 1
        above.n_live += 1
        if above.counted and above.n_live == 1:
            self.paths -= 1

    def uncount_node(self, node: Node) -> None:
        """A node is no longer counted; nothing that is hangs on it."""
        above = node.parent
        assert above is not None and node.n_live == 0
        self.paths -= 1
        above.n_live -= 1
        if above.counted and above.n_live == 0:
            self.paths += 1

    def add_tail(self, node: Node) -> None:
        """A tail grows from the end of `node`."""
        node.n_live += 1
        if not (node.counted and node.n_live == 1):
            self.paths += 1

    def remove_tail(self, node: Node) -> None:
        """A tail of `node` is gone."""
        node.n_live -= 1
        if not (node.counted and node.n_live == 0):
            self.paths -= 1

    def reserve(self, tail: Tail, length: int) -> None:
        """Let a tail grow to `length` slots, in the engine's measure; may leave the room over."""
        if length > tail.reserved:
            self.set_reserved(tail, -(-length // self.growth) * self.growth)

    def shrink_reservation(self, tail: Tail, length: int) -> None:
        """Give back what a tail reserved beyond `length`: the last resort when it is alone."""
        self.set_reserved(tail, min(tail.reserved, max(length, tail.fragment.length)))

    def set_reserved(self, tail: Tail, reserved: int) -> None:
        """Say how many slots a tail may write."""
        self.tails += reserved - tail.reserved
        tail.reserved = reserved

    def pin(self, node: Node) -> bool:
        """Add a pin; return whether it was the first, so that the parent gets one too."""
        node.pins += 1
        if node.pins > 1:
            return False
        if node.fragment is not None:
            self.pinned += len(node.tokens)
        else:
            self.promised += len(node.tokens)
            self.count_node(node)
        return True

    def unpin(self, node: Node) -> bool:
        """Take a pin back; return whether it was the last."""
        node.pins -= 1
        if node.pins:
            return False
        if node.fragment is not None:
            self.pinned -= len(node.tokens)
        else:
            self.promised -= len(node.tokens)
            self.uncount_node(node)
        return True

    def absorb(self, leaf: Node, node: Node) -> None:
        """A resident leaf takes in its only child, absent and counted, with its tokens."""
        n = len(node.tokens)
        assert node.pins and leaf.pins
        self.promised -= n
        self.resident += n
        self.pinned += n
        leaf.pins += node.pins - 1
        leaf.n_live = node.n_live

    def attach(self, node: Node) -> None:
        """A node just got its fragment."""
        self.resident += len(node.tokens)
        if node.pins:
            self.pinned += len(node.tokens)
            self.promised -= len(node.tokens)
        else:
            self.count_node(node)

    def detach(self, node: Node) -> None:
        """An unpinned node just lost its fragment."""
        self.resident -= len(node.tokens)
        self.uncount_node(node)


Key = tuple[bool, int, int]


def eviction_key(node: Node) -> Key:
    """First nodes that no handle holds, then the least recently used, then the cheapest to redo."""
    return (node.holds > 0, node.last_used, len(node.tokens))


class EvictionQueue:
    """Evictable leaves, worst first.

    Entries are not updated in place: `offer` again when a node's key changed; stale entries are
    skipped. One that stands before where a node belongs will do for it, and is put right when it
    comes to the front: a path that is used again and again is not put in each time.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Node]] = []
        self._tick = count()

    def offer(self, node: Node) -> None:
        """Say that a node may be evicted now. Cost: O(log entries)."""
        key = eviction_key(node)
        if node.queued_key is None or key < node.queued_key:
            node.queued_key = key
            heapq.heappush(self._heap, (key, next(self._tick), node))

    def pop(self, evictable: Callable[[Node], bool]) -> Node | None:
        """Return the first node that still is evictable under its present key, or None."""
        while self._heap:
            key, _, node = heapq.heappop(self._heap)
            node.queued_key = None
            if evictable(node):
                if key == eviction_key(node):
                    return node
                self.offer(node)
        return None

    def __len__(self) -> int:
        return len(self._heap)

    def rebuild(self, nodes: list[Node]) -> None:
        """Forget stale entries: only these nodes are evictable."""
        for _, _, node in self._heap:
            node.queued_key = None
        self._heap = []
        for node in nodes:
            self.offer(node)


_log = logging.getLogger(__name__)


class HostTier:
    """Exported KV of at most `capacity` slots, oldest out first; `slots` of them are in use."""

    def __init__(self, capacity: int, device: SlotBudget | None = None) -> None:
        """shared: a room whose free slots may hold KV on the host, too."""
        self.capacity = capacity
        self.slots = 0
        self._device = device
        self._nodes: dict[Node, None] = {}

    @property
    def limit(self) -> int:
        """Slots that may be in use now."""
        free = 0 if self._device is None else self._device.free or 0
        return self.capacity + max(free, 0)

    def evict_excess(self) -> list[Node]:
        """Free the oldest copies beyond the limit; return their nodes."""
        return self._free_beyond(self.limit)

    def offload(self, node: Node, fragments: Fragments) -> list[Node]:
        """Copy a node's KV to the host if it can fit; return the nodes that had to go for it."""
        size = len(node.tokens)
        limit = self.limit + (0 if self._device is None else size)  # its own slots become free
        if node.fragment is None or size > limit:
            return []
        evicted = self._free_beyond(limit - size)
        try:
            node.host = fragments.export(node.fragment)
        except Exception as error:  # no room for a copy, say: the tokens are known all the same
            _log.warning("the engine could not copy KV to the host; it is dropped: %r", error)
            return evicted
        self._nodes[node] = None
        self.slots += size
        return evicted

    def _free_beyond(self, limit: int) -> list[Node]:
        evicted = []
        while self.slots > limit:
            oldest = next(iter(self._nodes))
            self.free(oldest)
            evicted.append(oldest)
        return evicted

    def free(self, node: Node) -> None:
        """Forget a node's host copy, if there is one."""
        if node.host is not None:
            self.slots -= len(node.tokens)
            node.host = None
            del self._nodes[node]

    def split(self, upper: Node, lower: Node, cut: int) -> None:
        """A node was cut before its slot `cut`: each half has its part of the host copy."""
        assert lower.host is not None
        upper.host, lower.host = split_exported(lower.host, cut)
        self._nodes[upper] = None


def split_exported(host: dict[str, Any], cut: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Cut exported KV: k.* and v.* have their slots on axis 1, others describe the whole.

    Both are copies: a view would keep the memory of the whole, whatever becomes of the other half.
    """
    upper, lower = dict(host), dict(host)
    for name, array in host.items():
        if name.startswith(("k.", "v.")):
            upper[name], lower[name] = array[:, :cut].copy(), array[:, cut:].copy()
    return upper, lower
