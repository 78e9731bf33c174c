"""Pins by users: paths whose KV stays, in addition to the pins of running work."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from .place import Cursor, Place


class PinHold(weakref.ref[Any]):
    """One owner's pin on the path to `place`; its weakref callback queues the release."""

    __slots__ = ("place",)
    place: Place

    @property
    def cursor(self) -> Cursor:
        """The end of the pinned path, resolved; valid under the lock."""
        cursor = self.place.cursor
        assert cursor is not None
        return cursor


class Pins:
    """Registry of the pins by users of one tree. Iterating yields them.

    It records owners only: `TokenTree.pin` and `TokenTree.unpin` pin and unpin the nodes. If an
    owner is garbage-collected, a weakref callback without Python code queues its pin in `released`.
    """

    __slots__ = ("_active", "_release", "released")

    def __init__(self) -> None:
        # By id: two holds of one owner are equal to each other, being weak references.
        self._active: dict[int, PinHold] = {}
        self.released: deque[weakref.ref[Any]] = deque()
        self._release = self.released.append

    def __iter__(self) -> Iterator[PinHold]:
        return iter(list(self._active.values()))

    def __contains__(self, hold: object) -> bool:
        return id(hold) in self._active

    def add(self, owner: object, place: Place) -> PinHold:
        """Record that `owner` has pinned the path to `place`; the caller has pinned its nodes."""
        hold = PinHold(owner, self._release)
        hold.place = place
        self._active[id(hold)] = hold
        return hold

    def drop(self, hold: PinHold) -> bool:
        """Remove a pin from the registry; return True if it was there.

        The KV stays pinned until the caller calls `TokenTree.unpin`.
        """
        return self._active.pop(id(hold), None) is not None

    def drain(self) -> Iterator[PinHold]:
        """Remove and yield the pins whose owners were garbage-collected.

        The KV stays pinned until the caller calls `TokenTree.unpin`.
        """
        while self.released:
            hold = self._active.pop(id(self.released.popleft()), None)
            if hold is not None:
                yield hold
