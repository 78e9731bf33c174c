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
    """Writes a turn as content blocks: thinking, text, calls.

    content: the blocks; the last one may still grow.
    """

    def __init__(self) -> None:
        self.content: list[Json] = []
        self._open: str | None = None  # the type of the block that still grows

    def write(self, said: ChatDelta) -> list[Json]:
        """Add what is new in a turn; return the events."""
        made: list[Json] = []
        if said.reasoning:
            made += self._text("thinking", said.reasoning)
        if said.content:
            made += self._text("text", said.content)
        for call in said.calls:
            made += self._call(call)
        return made

    def close(self) -> list[Json]:
        """End the block that still grows; return the events."""
        if self._open is None:
            return []
        made = []
        if self._open == "thinking":
            made.append(self._delta({"type": "signature_delta", "signature": ""}))
        self._open = None
        return [*made, {"type": "content_block_stop", "index": len(self.content) - 1}]

    def _text(self, kind: str, text: str) -> list[Json]:
        made: list[Json] = []
        if self._open != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            made += [*self.close(), self._start({"type": kind, kind: "", **signature})]
            self._open = kind
        self.content[-1][kind] += text
        return [*made, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: ToolCall) -> list[Json]:
        made = self.close()
        name = call.id or f"toolu_{secrets.token_hex(12)}"
        made.append(self._start({"type": "tool_use", "id": name, "name": call.name, "input": {}}))
        self.content[-1]["input"] = json.loads(call.arguments)
        self._open = "tool_use"
        delta = self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        return [*made, delta, *self.close()]

    def _start(self, block: Json) -> Json:
        self.content.append(dict(block))
        index = len(self.content) - 1
        return {"type": "content_block_start", "index": index, "content_block": block}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}
