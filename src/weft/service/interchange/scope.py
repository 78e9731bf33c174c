"""How much of a loom is exported."""

from __future__ import annotations

from enum import StrEnum

from ...errors import ConfigError


class Scope(StrEnum):
    """path: prompt to node; subtree: that and all below the node; tree: the whole loom."""

    PATH = "path"
    SUBTREE = "subtree"
    TREE = "tree"

    @classmethod
    def from_name(cls, name: str) -> Scope:
        """Return the scope of this name. Raises: ConfigError."""
        try:
            return cls(name)
        except ValueError:
            allowed = ", ".join(cls)
            raise ConfigError(f"scope is {name!r}; allowed are {allowed}") from None
