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

    Spare slots have no KV in use: growing leaves keep some for their next tokens, and the engine
    failed to free others.

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
        """Count nothing yet.

        Args:
            capacity: slots on the device; None means no limit.
            max_paths: maximum number of paths; None means no limit.
            growth: slots that a tail reserves at a time.
        """
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
        """Slots that are not free: resident, promised, reserved by tails, or spare."""
        return self.resident + self.promised + self.tails + self.spare

    @property
    def free(self) -> int | None:
        """Slots of `capacity` that are not used. Negative while too many are promised.

        None if `capacity` is None: there is no limit.
        """
        return None if self.capacity is None else self.capacity - self.used

    @property
    def unevictable(self) -> int:
        """Slots that no eviction can free: pinned, promised, and reserved by tails."""
        return self.pinned + self.promised + self.tails

    @property
    def is_exceeded(self) -> bool:
        """True if more slots are used than `capacity`, or there are more paths than `max_paths`."""
        if self.capacity is not None and self.used > self.capacity:
            return True
        return self.max_paths is not None and self.paths > self.max_paths

    def count_node(self, node: Node) -> None:
        """Count a node that has become resident or promised.

        The number of paths grows by one, unless the node extends the path of its parent.
        """
        above = node.parent
        assert above is not None
        if node.n_live == 0:
            self.paths += 1
        above.n_live += 1
        if above.counted and above.n_live == 1:
            self.paths -= 1

    def uncount_node(self, node: Node) -> None:
        """Stop counting a node that is neither resident nor promised any more.

        It must have no counted children. The number of paths falls by one, unless its parent
        becomes the end of a path.
        """
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
        """Let a tail have at least `length` slots in total, rounded up to a multiple of `growth`.

        The budget may be exceeded afterwards (`is_exceeded`).
        """
        if length > tail.reserved:
            reserved = -(-length // self.growth) * self.growth
            self.tails += reserved - tail.reserved
            tail.reserved = reserved

    def shrink_reservation(self, tail: Tail, length: int) -> None:
        """Release the slots of a tail beyond `length`, except slots that have KV.

        The scheduler does this if only one job is admitted and its next tokens do not fit.
        """
        self.set_reserved(tail, min(tail.reserved, max(length, tail.fragment.length)))

    def set_reserved(self, tail: Tail, reserved: int) -> None:
        """Set the number of slots that are reserved for a tail to `reserved`.

        That is how many it may write in total, including those that have KV.
        """
        self.tails += reserved - tail.reserved
        tail.reserved = reserved

    def pin(self, node: Node) -> bool:
        """Add a pin to one node; if it is absent and had none, its slots are promised.

        Returns True if this is the node's first pin: the caller then pins the parent too.
        """
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
        """Remove a pin of one node; return True if it was the last.

        The caller then removes a pin of the parent too.
        """
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
        """Count the slots of `node` as resident, and add its pins to `leaf`.

        Call it when the fragment of a resident leaf has grown by the slots of its only child
        `node`. The child is absent; both are pinned.
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
    """Return the sort key of eviction: the node with the smallest key is evicted first.

    Nodes without holds come first, then the least recently used ones. Among these, nodes with the
    fewest tokens of their own come first.
    """
    return (node.holds > 0, node.last_used, len(node.tokens))


class EvictionQueue:
    """Priority queue of evictable leaves.

    Entries are not updated in place. Call `offer` when a node becomes evictable; `pop` skips
    entries of nodes that are not evictable any more. `pop` also corrects an entry whose key is too
    small. So a node that is used often need not be pushed again at each use.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Node]] = []
        self._tick = count()

    def offer(self, node: Node) -> None:
        """Add an entry for a node that is evictable now, unless it has an earlier one.

        Cost: O(log entries).
        """
        key = eviction_key(node)
        if node.queued_key is None or key < node.queued_key:
            node.queued_key = key
            heapq.heappush(self._heap, (key, next(self._tick), node))

    def pop(self, evictable: Callable[[Node], bool]) -> Node | None:
        """Remove and return the evictable node with the smallest current key; None if none is left.

        evictable: returns True if a node can be evicted now.
        """
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
    """KV copies on the host, of at most `limit` slots. The oldest copies are freed first.

    slots: slots that the copies use now.
    """

    def __init__(self, capacity: int, device: SlotBudget | None = None) -> None:
        """Create an empty tier.

        Args:
            capacity: slots on the host.
            device: the device's budget. The host may use as many more slots as it has free. None
                means that `capacity` is the limit.
        """
        self.capacity = capacity
        self.slots = 0
        self._device = device
        self._nodes: dict[Node, None] = {}

    @property
    def limit(self) -> int:
        """Maximum of `slots` now: `capacity` plus the free slots of `device`, if it is given."""
        free = 0 if self._device is None else self._device.free or 0
        return self.capacity + max(free, 0)

    def evict_excess(self) -> list[Node]:
        """Free the oldest copies beyond the limit; return their nodes."""
        return self._free_beyond(self.limit)

    def offload(self, node: Node, fragments: Fragments) -> list[Node]:
        """Copy a node's KV to the host if it fits.

        Older copies are freed to make room; their nodes are returned. If the engine fails, there is
        no copy, and the error is only logged. The node's KV on the device does not change.
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
        """Free the oldest copies until at most `limit` slots are in use; return their nodes."""
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
        """Divide the host copy of a node that was split into `upper` and `lower`.

        The copy is at `lower`; its first `cut` slots move to `upper`.
        """
        assert lower.host is not None
        upper.host, lower.host = split_exported(lower.host, cut)
        self._nodes[upper] = None


def split_exported(host: dict[str, Any], cut: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two copies of exported KV: of the first `cut` slots, and of the others.

    Arrays named k.* and v.* have their slots on axis 1 and are cut. Other entries are in both
    results. The parts are copies, because a view would keep the memory of the full array.
    """
    upper, lower = dict(host), dict(host)
    for name, array in host.items():
        if name.startswith(("k.", "v.")):
            upper[name], lower[name] = array[:, :cut].copy(), array[:, cut:].copy()
    return upper, lower
