"""The part of a loom to export."""

from __future__ import annotations

from enum import StrEnum

from ...errors import ConfigError


class Scope(StrEnum):
    """The part of a loom to export.

    path: from the prompt to a node.
    subtree: the node and all nodes below it; in some formats also the path to it.
    tree: the full loom.
    """

    PATH = "path"
    SUBTREE = "subtree"
    TREE = "tree"

    @classmethod
    def from_name(cls, name: str) -> Scope:
        """Return the scope of this name. Raises: ConfigError for another name."""
        try:
            return cls(name)
        except ValueError:
            allowed = ", ".join(cls)
            raise ConfigError(f"scope is {name!r}; allowed are {allowed}") from None
