"""Nodes that display a user message without its chat template."""

from __future__ import annotations

from ..loom import Heddle
from ..service.interchange.said import said_at


class ChatNode(Heddle):
    """A node whose drawings show user messages as they were typed."""

    def display_text(self) -> str:
        """Return the node's text, or "> " and the user message."""
        message = said_at(self)
        return self.text if message is None else f"> {message}"
