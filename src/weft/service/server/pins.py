"""The nodes of an open loom whose KV is pinned by hand; their pins follow them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...errors import ConfigError, WeftError

if TYPE_CHECKING:
    from ..._core.kv.place import Place
    from ...lm.path_kv import Pin
    from ...loom import Heddle
    from ..store.change import Change
    from ..store.kept import KeptLoom


class NodePins:
    """Pins by the ids of their nodes; they last as long as this process has the model.

    A pin follows its node: where the path to that is another one, that is pinned instead, its new
    tokens promised; both halves of one that is split are pinned, and what takes in a pinned one is.
    It ends with its node, and where there is no room. Blocks as `Pin` does: for threads.
    """

    def __init__(self) -> None:
        self._pins: dict[str, tuple[Pin, Place]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter([each for each in self._pins if each in self])

    def __contains__(self, node_id: str) -> bool:
        found = self._pins.get(node_id)
        return found is not None and found[0].is_pinned

    def __bool__(self) -> bool:
        return any(pin.is_pinned for pin, _ in self._pins.values())

    def take(self, node: Heddle, pin: Pin) -> None:
        """Note the pin of a node; one that it has already is let go of."""
        before = self._pins.get(node.id)
        self._pins[node.id] = pin, pin.place
        if before is not None:
            before[0].unpin()

    def drop(self, node_id: str) -> None:
        """Unpin a node; one that is not pinned is let alone."""
        found = self._pins.pop(node_id, None)
        if found is not None:
            found[0].unpin()

    def clear(self) -> None:
        """Let go of all, without waiting for the model: it does so by itself."""
        self._pins.clear()

    def inherit(self, before: NodePins, kept: KeptLoom) -> None:
        """Take over what a loom had that is opened anew: other nodes, by the same ids."""
        self._pins, before._pins = before._pins, {}
        self.follow(kept)

    def follow(self, kept: KeptLoom, change: Change | None = None) -> None:
        """See that what is pinned is the paths to the nodes. Cost: O(pins), where nothing moved."""
        left: list[Pin] = []
        for node_id, (pin, place) in list(self._pins.items()):
            node = _find(kept, node_id) if pin.is_pinned else None
            end = None if node is None else _place_of(node)
            if end is place:
                continue
            del self._pins[node_id]
            if node is not None and end is not None and end.ids() == pin.place.ids():
                self._pins[node_id] = pin, end
                continue
            left.append(pin)
            if node is not None and end is not None:
                self._pin_instead(node, end, pin)
        if left:
            for node in () if change is None else _touched(change):
                self._inherit_path(node, left)
        for pin in left:
            pin.unpin()

    def _pin_instead(self, node: Heddle, end: Place, before: Pin) -> None:
        """Pin where a node ends now, before what it had is let go of, if there is room for both."""
        lm = node.lm
        if lm is None or not end.depth:
            return
        pin = lm.kv.try_pin(end)
        if pin is None:
            before.unpin()
            pin = lm.kv.try_pin(end)
        if pin is not None:
            self._pins[node.id] = pin, end

    def _inherit_path(self, node: Heddle, left: list[Pin]) -> None:
        """Let a node have the pin of another one that ended where it ends now."""
        end = None if node.id in self._pins else _place_of(node)
        if end is None:
            return
        for pin in left:
            if pin.is_pinned and pin.place.depth == end.depth and pin.place.ids() == end.ids():
                self._pins[node.id] = pin, end
                left.remove(pin)
                return


def _find(kept: KeptLoom, node_id: str) -> Heddle | None:
    try:
        return kept.node(node_id)
    except ConfigError:
        return None


def _place_of(node: Heddle) -> Place | None:
    """Return where a node ends; None where its path is too long by now, or its model is gone."""
    try:
        return node.place
    except WeftError:
        return None


def _touched(change: Change) -> Iterable[Heddle]:
    others = change.others
    yield from () if others is None else (*others.added, *others.changed)
    yield from change.added
    yield from change.changed
