"""The numbers of a tree's nodes: once told they stay; new nodes get the next ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import ConfigError, TreeError

if TYPE_CHECKING:
    from ..loom import Heddle


class Numbering:
    """Ids by number; 0 is the root. A number whose node is gone is not given again."""

    def __init__(self, ids: Iterable[str] = ()) -> None:
        self.ids = list(ids)

    @property
    def next(self) -> int:
        """The number that the next new node gets."""
        return len(self.ids)

    def by_id(self) -> dict[str, int]:
        """Return number by id."""
        return {node_id: number for number, node_id in enumerate(self.ids)}

    def extend(self, root: Heddle) -> dict[str, int]:
        """Number what has no number yet, as it is drawn; return number by id."""
        from ..loom.walk import numbered

        known = self.by_id()
        for node in numbered(root):
            if node.id not in known:
                known[node.id] = len(self.ids)
                self.ids.append(node.id)
        return known

    def node(self, root: Heddle, given: str) -> Heddle:
        """Return the node with this number or id. Raises ConfigError for none such."""
        if not given.isdecimal() or len(given) > 9:
            try:
                return root.find(given)
            except TreeError:
                pass
            raise ConfigError(
                f"NODE is {given!r}; allowed is {self._allowed()}", hint="weft tree shows them"
            )
        if not self.ids:
            raise ConfigError(
                "no tree of this loom has been drawn yet, so its nodes have no numbers",
                hint="weft tree draws it",
            )
        number = int(given)
        if number >= len(self.ids):
            raise ConfigError(
                f"there is no node {number}; allowed is {self._allowed()}",
                hint="weft tree draws it again",
            )
        try:
            return root.find(self.ids[number])
        except TreeError:
            raise ConfigError(
                f"node {number} is not in the loom any more", hint="weft tree draws what is there"
            ) from None

    def _allowed(self) -> str:
        return f"a number of the last tree drawn: 0 (the prompt) to {max(len(self.ids) - 1, 0)}"
