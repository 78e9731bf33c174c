"""Nodes that display a user message without its chat template."""

from __future__ import annotations

from ..loom import Heddle
from ..service.interchange.user_text import user_text_of


class ChatNode(Heddle):
    """A node that displays a user message as it was typed, without the chat template's tokens."""

    def display_text(self) -> str:
        """Return the node's text, or "> " and the user message."""
        message = user_text_of(self)
        return self.text if message is None else f"> {message}"
