"""Nodes that show what the user said without the chat template around it."""

from __future__ import annotations

from ..loom import Heddle
from ..service.interchange.said import said_at


class ChatNode(Heddle):
    """A node of a loom that the command opened; its pictures show turns as they were typed."""

    def display_text(self) -> str:
        """Return the node's text, or what the user said."""
        said = said_at(self)
        return self.text if said is None else f"> {said}"
