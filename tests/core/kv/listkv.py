"""A KV memory without KV: every slot is the (token, position) it stands for."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.engines.base import Fragment, Fragments, Usage


class ListFragment(Fragment):
    __slots__ = ("freed", "slots")

    def __init__(self, slots: list[tuple[int, int]]) -> None:
        super().__init__(len(slots))
        self.slots = slots
        self.freed = False


class ListFragments(Fragments):
    """Keeps the contract of `Fragments` and checks that its caller does."""

    def __init__(self) -> None:
        self.alive: set[ListFragment] = set()

    def _keep(self, slots: list[tuple[int, int]]) -> ListFragment:
        fragment = ListFragment(slots)
        self.alive.add(fragment)
        return fragment

    def _use(self, fragment: Fragment) -> ListFragment:
        assert isinstance(fragment, ListFragment)
        assert fragment in self.alive, "a freed fragment was used"
        assert fragment.length == len(fragment.slots)
        return fragment

    def new(self, parent: Fragment | None) -> ListFragment:
        if parent is not None:
            self._use(parent)
        return self._keep([])

    def write(self, fragment: Fragment, tokens: list[int], position: int) -> None:
        own = self._use(fragment)
        own.slots += [(token, position + i) for i, token in enumerate(tokens)]
        own.length = len(own.slots)

    def split(self, fragment: Fragment, at: int) -> ListFragment:
        own = self._use(fragment)
        assert 0 < at < own.length
        upper = self._keep(own.slots[:at])
        own.slots = own.slots[at:]
        own.length = len(own.slots)
        return upper

    def join(self, upper: Fragment, lower: Fragment) -> None:
        above, below = self._use(upper), self._use(lower)
        below.slots = above.slots + below.slots
        below.length = len(below.slots)
        self.alive.discard(above)

    def trim(self, fragment: Fragment, length: int) -> None:
        own = self._use(fragment)
        assert 0 <= length <= own.length
        own.slots = own.slots[:length]
        own.length = length

    def settle(self, fragment: Fragment) -> None:
        self._use(fragment)

    def free(self, fragment: Fragment) -> None:
        self.alive.discard(self._use(fragment))

    def export(self, fragment: Fragment) -> dict[str, Any]:
        return {"k.0": np.array([self._use(fragment).slots]), "note": np.array(7)}

    def load(self, data: dict[str, Any], parent: Fragment | None) -> ListFragment:
        return self._keep([(int(token), int(at)) for token, at in data["k.0"][0]])

    def usage(self) -> Usage:
        n = sum(fragment.length for fragment in self.alive)
        return Usage(n, n)
