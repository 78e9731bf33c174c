"""Counts of KV slots and paths, the eviction queue, and KV copies on the host."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from itertools import count
from typing import Any

from ...engines.base import Fragments
from .place import Node, Tail


class SlotBudget:
    """Counts of slots and paths of one token tree, which reports every change.

    Each slot of the capacity is in exactly one of these::

        free │ promised to pinned absent nodes │ reserved by tails │ evictable │ pinned │ spare

    Spare slots are those that leaves keep for growth, and those that the engine failed to free.

    Paths are leaves of resident and promised nodes, tails included. Engines with sequence ids
    support `max_paths` of them. A node is counted if it is resident or pinned; its `n_live` is the
    number of counted children and tails.
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
        self.resident = 0  # slots of resident nodes
        self.pinned = 0  # of these, slots of pinned nodes
        self.promised = 0  # slots of pinned absent nodes
        self.tails = 0  # slots reserved by tails
        self.paths = 0  # leaves of resident and promised nodes, and tails
        self.growing = 0  # leaves with spare slots for growth
        self.lost = 0  # slots that the engine failed to free

    @property
    def spare(self) -> int:
        """Slots without KV: each growing leaf may have nearly `growth` of them."""
        return self.growing * (self.growth - 1) + self.lost

    @property
    def used(self) -> int:
        """Slots that are occupied or promised."""
        return self.resident + self.promised + self.tails + self.spare

    @property
    def free(self) -> int | None:
        """Slots that are unused; negative while too many are promised; None without a limit."""
        return None if self.capacity is None else self.capacity - self.used

    @property
    def unevictable(self) -> int:
        """Slots that no eviction can free: pinned, promised, and reserved by tails."""
        return self.pinned + self.promised + self.tails

    @property
    def is_exceeded(self) -> bool:
        """True if more slots or paths are used and promised than exist."""
        if self.capacity is not None and self.used > self.capacity:
            return True
        return self.max_paths is not None and self.paths > self.max_paths

    def count_node(self, node: Node) -> None:
        """Count a node: one path more, unless it extends its parent's path."""
        above = node.parent
        assert above is not None
        if node.n_live == 0:
            self.paths += 1
        above.n_live += 1
        if above.counted and above.n_live == 1:
            self.paths -= 1

    def uncount_node(self, node: Node) -> None:
        """Stop counting a node that has no counted children."""
        above = node.parent
        assert above is not None and node.n_live == 0
        self.paths -= 1
        above.n_live -= 1
        if above.counted and above.n_live == 0:
            self.paths += 1

    def add_tail(self, node: Node) -> None:
        """Count a tail at the end of `node`."""
        node.n_live += 1
        if not (node.counted and node.n_live == 1):
            self.paths += 1

    def remove_tail(self, node: Node) -> None:
        """Stop counting a tail of `node`."""
        node.n_live -= 1
        if not (node.counted and node.n_live == 0):
            self.paths -= 1

    def reserve(self, tail: Tail, length: int) -> None:
        """Reserve `length` slots for a tail, rounded up to `growth`; the budget may be exceeded
        then.
        """
        if length > tail.reserved:
            self.set_reserved(tail, -(-length // self.growth) * self.growth)

    def shrink_reservation(self, tail: Tail, length: int) -> None:
        """Release what a tail reserved beyond `length`: the last resort for a lone job."""
        self.set_reserved(tail, min(tail.reserved, max(length, tail.fragment.length)))

    def set_reserved(self, tail: Tail, reserved: int) -> None:
        """Set how many slots a tail may write."""
        self.tails += reserved - tail.reserved
        tail.reserved = reserved

    def pin(self, node: Node) -> bool:
        """Add a pin; return True if it is the first, so that the parent needs one too."""
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
        """Remove a pin; return True if it was the last."""
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
        """Update counts after a resident leaf has absorbed its only child, which was absent and
        counted.
        """
        n = len(node.tokens)
        assert node.pins and leaf.pins
        self.promised -= n
        self.resident += n
        self.pinned += n
        leaf.pins += node.pins - 1
        leaf.n_live = node.n_live

    def attach(self, node: Node) -> None:
        """Update counts after a node got its fragment."""
        self.resident += len(node.tokens)
        if node.pins:
            self.pinned += len(node.tokens)
            self.promised -= len(node.tokens)
        else:
            self.count_node(node)

    def detach(self, node: Node) -> None:
        """Update counts after an unpinned node lost its fragment."""
        self.resident -= len(node.tokens)
        self.uncount_node(node)


Key = tuple[bool, int, int]


def eviction_key(node: Node) -> Key:
    """Order of eviction: nodes without holds first, then least recently used, then shortest."""
    return (node.holds > 0, node.last_used, len(node.tokens))


class EvictionQueue:
    """Priority queue of evictable leaves.

    Entries are not updated in place: call `offer` again when a node's key changes, and stale
    entries are skipped. An entry with an earlier key is enough: `pop` corrects it. So a node that
    is used often is not pushed each time.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Node]] = []
        self._tick = count()

    def offer(self, node: Node) -> None:
        """Add a node that is evictable now. Cost: O(log entries)."""
        key = eviction_key(node)
        if node.queued_key is None or key < node.queued_key:
            node.queued_key = key
            heapq.heappush(self._heap, (key, next(self._tick), node))

    def pop(self, evictable: Callable[[Node], bool]) -> Node | None:
        """Return the first node that is evictable under its current key, or None."""
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
        """Replace all entries by these nodes."""
        for _, _, node in self._heap:
            node.queued_key = None
        self._heap = []
        for node in nodes:
            self.offer(node)


_log = logging.getLogger(__name__)


class HostTier:
    """KV copies on the host of at most `capacity` slots, oldest out first. `slots`: those in
    use.
    """

    def __init__(self, capacity: int, device: SlotBudget | None = None) -> None:
        """device: a budget whose free slots may also be used on the host."""
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
        """Copy a node's KV to the host if it fits; return the nodes whose copies were freed
        for it.
        """
        size = len(node.tokens)
        limit = self.limit + (0 if self._device is None else size)  # frees its own device slots
        if node.fragment is None or size > limit:
            return []
        evicted = self._free_beyond(limit - size)
        try:
            node.host = fragments.export(node.fragment)
        except Exception as error:  # such as no memory for a copy; the tokens stay known
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
        """Free a node's host copy, if there is one."""
        if node.host is not None:
            self.slots -= len(node.tokens)
            node.host = None
            del self._nodes[node]

    def split(self, upper: Node, lower: Node, cut: int) -> None:
        """Split the host copy of a node that was split at its slot `cut`."""
        assert lower.host is not None
        upper.host, lower.host = split_exported(lower.host, cut)
        self._nodes[upper] = None


def split_exported(host: dict[str, Any], cut: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split exported KV: k.* and v.* have their slots on axis 1, other entries describe all of it.

    Both parts are copies, as a view would keep the memory of the full array.
    """
    upper, lower = dict(host), dict(host)
    for name, array in host.items():
        if name.startswith(("k.", "v.")):
            upper[name], lower[name] = array[:, :cut].copy(), array[:, cut:].copy()
    return upper, lower
