"""Nodes that display a user message without its chat template."""

from __future__ import annotations

from ..loom import Heddle
from ..service.interchange.user_text import user_text_of


class ChatNode(Heddle):
    """A node whose drawings show user messages as they were typed."""

    def display_text(self) -> str:
        """Return the node's text, or "> " and the user message."""
        message = user_text_of(self)
        return self.text if message is None else f"> {message}"
