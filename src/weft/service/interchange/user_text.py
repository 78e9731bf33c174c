"""The user's texts in a chat, stored in the meta of their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...loom import Heddle

USER_TEXT_KEY = "said"  # key in a node's meta: the user's text without the template


def user_text_of(node: Heddle) -> str | None:
    """Return a node's user message as it was typed, without the chat template.

    Returns None for a node that is not a user message.
    """
    user_text = node.meta.get(USER_TEXT_KEY)
    return user_text if isinstance(user_text, str) else None


def joined_text(nodes: Sequence[Heddle]) -> str:
    """Return the joined text of consecutive nodes below a root.

    User messages are separate paragraphs, "> " and the message as it was typed.
    """
    parts = []
    for node in nodes:
        user_text = user_text_of(node)
        parts.append(node.text if user_text is None else f"\n\n> {user_text}\n\n")
    return "".join(parts)
