"""The output items of a response, and the events that tell of them as they come."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...._core.tokens.chat import ToolCall
    from .turns import ChatDelta

Json = dict[str, Any]
Events = list[tuple[str, Json]]


class OutputWriter:
    """Writes a turn as items: what was thought, then what was said, then what is called.

    output: the items; the last one may still be open. new_id: makes the id of an item of a kind.
    """

    def __init__(self, new_id: Callable[[str], str]) -> None:
        self._new_id = new_id
        self.output: list[Json] = []
        self._open: Json | None = None

    def write(self, said: ChatDelta, figures: Sequence[Json]) -> Events:
        """Take what is new in a turn, with the figures of its tokens; return the events."""
        made: Events = []
        if said.reasoning:
            made += self._text("reasoning", said.reasoning, ())
        if said.content or figures:
            made += self._text("message", said.content, figures)
        for call in said.calls:
            made += self._call(call)
        return made

    def close(self, status: str) -> Events:
        """End the turn; return the last events. A turn that says nothing is an empty message."""
        made: Events = []
        if not self.output:
            made += self._begin("message")
        return [*made, *self._end(status)]

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _place(self, *, part: bool = True) -> Json:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.output) - 1}
        return {**place, "content_index": 0} if part else place

    def _text(self, kind: str, text: str, figures: Sequence[Json]) -> Events:
        made: Events = []
        if not self._is_open(kind):
            made += [*self._end("completed"), *self._begin(kind)]
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        if kind == "reasoning":
            made.append(("response.reasoning_text.delta", {**self._place(), "delta": text}))
            return made
        part["logprobs"] += figures
        told = {**self._place(), "delta": text, "logprobs": list(figures)}
        return [*made, ("response.output_text.delta", told)]

    def _begin(self, kind: str) -> Events:
        if kind == "reasoning":
            item: Json = {"id": self._new_id("rs"), "type": kind, "summary": []}
            part: Json = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": self._new_id("msg"), "type": kind, "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open = {**item, "status": "in_progress", "content": [part]}
        self.output.append(self._open)
        empty = {**self._open, "content": []}
        return [
            ("response.output_item.added", {"output_index": len(self.output) - 1, "item": empty}),
            ("response.content_part.added", {**self._place(), "part": _copied(part)}),
        ]

    def _end(self, status: str) -> Events:
        if self._open is None:
            return []
        item, self._open["status"] = self._open, status
        (part,) = item["content"]
        place = self._place()
        done: Json = {**place, "text": part["text"]}
        kind = "reasoning_text"
        if item["type"] == "message":
            kind, done["logprobs"] = "output_text", list(part["logprobs"])
        self._open = None
        return [
            (f"response.{kind}.done", done),
            ("response.content_part.done", {**place, "part": _copied(part)}),
            ("response.output_item.done", {"output_index": place["output_index"], "item": item}),
        ]

    def _call(self, call: ToolCall) -> Events:
        made = self._end("completed")
        item: Json = {
            "id": self._new_id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": call.id or f"call_{secrets.token_hex(12)}",
            "name": call.name,
            "arguments": call.arguments,
        }
        self.output.append(item)
        index = len(self.output) - 1
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        arguments = call.arguments
        return [
            *made,
            ("response.output_item.added", {"output_index": index, "item": begun}),
            ("response.function_call_arguments.delta", {**place, "delta": arguments}),
            (
                "response.function_call_arguments.done",
                {**place, "arguments": arguments, "name": call.name},
            ),
            ("response.output_item.done", {"output_index": index, "item": item}),
        ]


def _copied(part: Json) -> Json:
    """Return a part as it is now: it goes on growing."""
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
