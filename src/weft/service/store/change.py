"""The result of an operation on an open loom."""

from __future__ import annotations

from typing import NamedTuple

from ...loom import Heddle
from .snapshot import MergedChanges


class Change(NamedTuple):
    """The nodes of the live tree that an operation has added, changed and removed.

    `others`: nodes that changed in other processes and were merged at the same time.
    """

    rev: int  # the loom's revision afterwards
    kind: str
    added: list[Heddle]
    changed: list[Heddle]
    removed: list[str]  # node ids
    others: MergedChanges | None = None  # changes of other processes that were merged before

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def after(self, previous: Change) -> Change:
        """Return this change, with the nodes of an earlier change added to `others`."""
        parts = [each for each in (previous.others, previous, self.others) if each]
        if not parts:
            return self
        merged = MergedChanges([], [], [])
        for part in parts:
            merged.added.extend(part.added)
            merged.changed.extend(part.changed)
            merged.removed.extend(part.removed)
        return self._replace(others=merged)
