"""What the user said in a chat, noted on its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...loom import Heddle

SAID = "said"  # in a node's meta: what the user said, without the template around it


def said_at(node: Heddle) -> str | None:
    """Return what the user said at this node; None for what a model made or was added as text."""
    said = node.meta.get(SAID)
    return said if isinstance(said, str) else None


def written(nodes: Sequence[Heddle]) -> str:
    """Return the text of nodes below a root, turns set apart."""
    parts = []
    for node in nodes:
        said = said_at(node)
        parts.append(node.text if said is None else f"\n\n> {said}\n\n")
    return "".join(parts)
