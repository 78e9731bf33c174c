"""What all branches of one LM share: who lives, the logits rows kept, and what room there is."""

from __future__ import annotations

import itertools
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..kv.place import climb, resolve

if TYPE_CHECKING:
    from ..kv.place import Node
    from ..lm import LM
    from .branch import Branch
    from .state import State


@dataclass(frozen=True, slots=True)
class Pressure:
    """How full an LM is.

    capacity: slots of the KV budget, None without one. resident: slots that hold tokens.
    pinned: slots that nothing can evict now. n_branches: live ones; n_active: those whose KV is
    resident.
    """

    capacity: int | None
    resident: int
    pinned: int
    n_branches: int
    n_active: int

    @property
    def remaining(self) -> int | None:
        """Slots that new tokens can have, what is evicted for them included."""
        return None if self.capacity is None else self.capacity - self.pinned


class Tenancy:
    """Per LM: its live branches."""

    def __init__(self, lm: LM) -> None:
        self._lm = weakref.ref(lm)
        self.branches: weakref.WeakSet[Branch] = weakref.WeakSet()
        self.numbers = itertools.count(1)
        self.turns = threading.Lock()

    @classmethod
    def of(cls, lm: LM) -> Tenancy:
        """Return the one of an LM."""
        found: Tenancy | None = lm.of_faces.get(cls)
        return lm.of_faces.setdefault(cls, cls(lm)) if found is None else found

    def active(self, branch: State) -> bool:
        """Whether a branch's KV is resident. Cost: O(nodes of the path)."""
        lm = self.lm()
        with lm.scheduler.lock:
            node = node_of(branch)
            if branch.line is not None and branch.line.is_open:
                return lm.tree.fragments is not None
            return lm.tree.fragments is not None and node is not None and node.resident

    def kv_tokens(self, branch: State) -> int:
        """Return how many tokens of a branch's path have KV."""
        lm = self.lm()
        with lm.scheduler.lock:
            cursor = branch.base.cursor
            if cursor is None or lm.tree.fragments is None:
                return 0
            line = branch.line
            own = len(line.tokens) if line is not None and line.is_open else 0
            depth = resolve(cursor).depth
            spans = ((node, min(node.end, depth) - node.start) for node in climb(cursor))
            return own + sum(length for node, length in spans if node.fragment is not None)

    def available(self) -> int | None:
        """Return how many more different tips can be resident; None without a limit of paths."""
        lm = self.lm()
        limit = lm.tree.room.max_paths
        if limit is None:
            return None
        with lm.scheduler.lock:
            tips: set[Any] = set()
            above: set[Node] = set()
            for each in list(self.branches):
                node = node_of(each)
                if node is None or not node.resident:
                    continue
                own = each.line is not None and each.line.tail is not None and each.line.tokens
                tips.add(each.line if own else node)
                up = node if own else node.parent
                while up is not None and up not in above:
                    above.add(up)
                    up = up.parent
            return limit - len(tips - above)

    def pressure(self) -> Pressure:
        """Return how full the LM is. Cost: O(live branches)."""
        lm = self.lm()
        lm.driver.exclusive(lm.scheduler.settle)
        room = lm.tree.room
        branches = list(self.branches)
        return Pressure(
            capacity=room.capacity,
            resident=room.resident + room.tails,
            pinned=room.must,
            n_branches=len(branches),
            n_active=sum(self.active(branch) for branch in branches),
        )

    def lm(self) -> LM:
        """Return the LM; its branches hold it."""
        lm = self._lm()
        assert lm is not None
        return lm


def node_of(branch: State) -> Node | None:
    """Return the node at a branch's tip; None while that is not in the tree. Under the lock."""
    cursor = branch.base.cursor
    return None if cursor is None or cursor.node.parent is None else cursor.node
