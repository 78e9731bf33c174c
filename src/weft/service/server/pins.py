"""Pinned nodes of an open loom; pins follow their nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...errors import ConfigError, WeftError

if TYPE_CHECKING:
    from ..._core.kv.place import Place
    from ...lm.path_kv import Pin
    from ...loom import Heddle
    from ..store.change import Change
    from ..store.stored_loom import StoredLoom


class NodePins:
    """Pinned KV by node id, for the nodes of one open loom.

    When a node's path changes, the pin moves to the new path, and room for its new tokens is
    reserved. Both halves of a split node are pinned, and so is the result of a merge with a pinned
    node. A pin ends when its node is removed, or if there is no room for it. Methods block like
    `Pin`: call them in threads.
    """

    def __init__(self) -> None:
        self._pins: dict[str, tuple[Pin, Place]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter([node_id for node_id in self._pins if node_id in self])

    def __contains__(self, node_id: str) -> bool:
        entry = self._pins.get(node_id)
        return entry is not None and entry[0].is_pinned

    def __bool__(self) -> bool:
        return any(pin.is_pinned for pin, _ in self._pins.values())

    def take(self, node: Heddle, pin: Pin) -> None:
        """Store the pin of a node and release its previous one."""
        previous = self._pins.get(node.id)
        self._pins[node.id] = pin, pin.place
        if previous is not None:
            previous[0].unpin()

    def drop(self, node_id: str) -> None:
        """Unpin a node, if it is pinned."""
        entry = self._pins.pop(node_id, None)
        if entry is not None:
            entry[0].unpin()

    def clear(self) -> None:
        """Drop all pins without waiting for the model, which releases them itself."""
        self._pins.clear()

    def inherit(self, previous: NodePins, stored: StoredLoom) -> None:
        """Take over the pins of a loom that was reopened; its nodes have the same ids as before.

        previous: the pins before. stored: the reopened loom.
        """
        self._pins, previous._pins = previous._pins, {}
        self.follow(stored)

    def follow(self, stored: StoredLoom, change: Change | None = None) -> None:
        """Move pins to the current paths of their nodes. Cost: O(pins) if nothing moved.

        change: the change of the tree, if known.
        """
        released: list[Pin] = []
        for node_id, (pin, place) in list(self._pins.items()):
            node = _find_node(stored, node_id) if pin.is_pinned else None
            end = None if node is None else _place_of(node)
            if end is place:
                continue
            del self._pins[node_id]
            if node is not None and end is not None and end.ids() == pin.place.ids():
                self._pins[node_id] = pin, end
                continue
            released.append(pin)
            if node is not None and end is not None:
                self._replace_pin(node, end, pin)
        if released:
            for node in () if change is None else _changed_nodes(change):
                self._inherit_path(node, released)
        for pin in released:
            pin.unpin()

    def _replace_pin(self, node: Heddle, end: Place, previous: Pin) -> None:
        """Pin the new end of a node before releasing its old pin, if there is room for both."""
        lm = node.lm
        if lm is None or not end.depth:
            return
        pin = lm.kv.try_pin(end)
        if pin is None:
            previous.unpin()
            pin = lm.kv.try_pin(end)
        if pin is not None:
            self._pins[node.id] = pin, end

    def _inherit_path(self, node: Heddle, released: list[Pin]) -> None:
        """Give a node the released pin of another node whose path has the same tokens."""
        end = None if node.id in self._pins else _place_of(node)
        if end is None:
            return
        for pin in released:
            if pin.is_pinned and pin.place.depth == end.depth and pin.place.ids() == end.ids():
                self._pins[node.id] = pin, end
                released.remove(pin)
                return


def _find_node(stored: StoredLoom, node_id: str) -> Heddle | None:
    """Return the node with this id; None if it does not exist any more."""
    try:
        return stored.node(node_id)
    except ConfigError:
        return None


def _place_of(node: Heddle) -> Place | None:
    """Return the end of a node's path; None if the path is too long or the model is unloaded."""
    try:
        return node.place
    except WeftError:
        return None


def _changed_nodes(change: Change) -> Iterable[Heddle]:
    """Yield the nodes whose path a change may have altered."""
    others = change.others
    yield from () if others is None else (*others.added, *others.changed)
    yield from change.added
    yield from change.changed
