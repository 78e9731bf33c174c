"""What the user said in a chat, noted on its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...loom import Heddle

USER_TEXT_KEY = "said"  # in a node's meta: what the user said, without the template around it


def user_text_of(node: Heddle) -> str | None:
    """Return what the user said at this node; None for what a model made or was added as text."""
    user_text = node.meta.get(USER_TEXT_KEY)
    return user_text if isinstance(user_text, str) else None


def joined_text(nodes: Sequence[Heddle]) -> str:
    """Return the text of nodes below a root, turns set apart."""
    parts = []
    for node in nodes:
        user_text = user_text_of(node)
        parts.append(node.text if user_text is None else f"\n\n> {user_text}\n\n")
    return "".join(parts)
