"""The content blocks of an answer, and the events that stream them."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...._core.tokens.chat import ToolCall
    from ..openai.turns import ChatDelta

Json = dict[str, Any]


class BlockWriter:
    """Writes an assistant's turn as content blocks: thinking, text, calls.

    content: the blocks so far; the last one may still grow.
    """

    def __init__(self) -> None:
        self.content: list[Json] = []
        self._open: str | None = None  # the type of the unfinished block

    def write(self, delta: ChatDelta) -> list[Json]:
        """Add the new part of a turn to the blocks; return the events that report it."""
        events: list[Json] = []
        if delta.reasoning:
            events += self._write_text("thinking", delta.reasoning)
        if delta.content:
            events += self._write_text("text", delta.content)
        for call in delta.calls:
            events += self._write_call(call)
        return events

    def close(self) -> list[Json]:
        """End the unfinished block; return the events."""
        if self._open is None:
            return []
        events = []
        if self._open == "thinking":
            events.append(self._delta_event({"type": "signature_delta", "signature": ""}))
        self._open = None
        return [*events, {"type": "content_block_stop", "index": len(self.content) - 1}]

    def _write_text(self, kind: str, text: str) -> list[Json]:
        """Add text to a text or thinking block; return the events. kind: type of the block."""
        events: list[Json] = []
        if self._open != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events += [*self.close(), self._start_block({"type": kind, kind: "", **signature})]
            self._open = kind
        self.content[-1][kind] += text
        return [*events, self._delta_event({"type": f"{kind}_delta", kind: text})]

    def _write_call(self, call: ToolCall) -> list[Json]:
        """Add a complete tool call as a block; return the events."""
        events = self.close()
        name = call.id or f"toolu_{secrets.token_hex(12)}"
        events.append(
            self._start_block({"type": "tool_use", "id": name, "name": call.name, "input": {}})
        )
        self.content[-1]["input"] = json.loads(call.arguments)
        self._open = "tool_use"
        delta = self._delta_event({"type": "input_json_delta", "partial_json": call.arguments})
        return [*events, delta, *self.close()]

    def _start_block(self, block: Json) -> Json:
        """Append a block; return the event about it."""
        self.content.append(dict(block))
        index = len(self.content) - 1
        return {"type": "content_block_start", "index": index, "content_block": block}

    def _delta_event(self, delta: Json) -> Json:
        """Return the event about an addition to the last block."""
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}
