"""What one operation did to a loom."""

from __future__ import annotations

from typing import NamedTuple

from ...loom import Heddle
from .snapshot import MergedChanges


class Change(NamedTuple):
    """What was done to a loom, in nodes of its live tree.

    rev: the revision afterwards. removed: ids. others: what other processes had done meanwhile, and
    is in the tree now; None for nothing.
    """

    rev: int
    kind: str
    added: list[Heddle]
    changed: list[Heddle]
    removed: list[str]
    others: MergedChanges | None = None

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    def after(self, before: Change) -> Change:
        """Return it with what one that came just before had, as what others have done."""
        parts = [each for each in (before.others, before, self.others) if each]
        if not parts:
            return self
        taken = MergedChanges([], [], [])
        for each in parts:
            taken.added.extend(each.added)
            taken.changed.extend(each.changed)
            taken.removed.extend(each.removed)
        return self._replace(others=taken)
