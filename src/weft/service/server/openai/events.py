"""The output items of a response, and the events that stream them."""

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
    """Writes an assistant's turn as output items: reasoning, message, function calls.

    output: the items so far; the last one may still grow.
    new_id: creates the id of an item, from its prefix.
    """

    def __init__(self, new_id: Callable[[str], str]) -> None:
        self._new_id = new_id
        self.output: list[Json] = []
        self._open: Json | None = None

    def write(self, delta: ChatDelta, logprobs: Sequence[Json]) -> Events:
        """Add the new part of a turn to the items; return the events that report it.

        logprobs: of the new tokens; empty if not requested.
        """
        events: Events = []
        if delta.reasoning:
            events += self._write_text("reasoning", delta.reasoning, ())
        if delta.content or logprobs:
            events += self._write_text("message", delta.content, logprobs)
        for call in delta.calls:
            events += self._write_call(call)
        return events

    def close(self, status: str) -> Events:
        """End the last item and return the last events. A turn without items gets an empty message.

        status: of the last item: "completed" or "incomplete".
        """
        events: Events = []
        if not self.output:
            events += self._start_item("message")
        return [*events, *self._end_item(status)]

    def _is_open(self, kind: str) -> bool:
        """Return True if the last item is of this kind and may still grow."""
        return self._open is not None and self._open["type"] == kind

    def _position(self, *, part: bool = True) -> Json:
        """Return the fields that locate the last item. part: also its content part."""
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self.output) - 1}
        return {**place, "content_index": 0} if part else place

    def _write_text(self, kind: str, text: str, logprobs: Sequence[Json]) -> Events:
        """Add text to a message or reasoning item; return the events."""
        events: Events = []
        if not self._is_open(kind):
            events += [*self._end_item("completed"), *self._start_item(kind)]
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        if kind == "reasoning":
            events.append(("response.reasoning_text.delta", {**self._position(), "delta": text}))
            return events
        part["logprobs"] += logprobs
        data = {**self._position(), "delta": text, "logprobs": list(logprobs)}
        return [*events, ("response.output_text.delta", data)]

    def _start_item(self, kind: str) -> Events:
        """Append an empty item; return the events."""
        if kind == "reasoning":
            item: Json = {"id": self._new_id("rs"), "type": kind, "summary": []}
            part: Json = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": self._new_id("msg"), "type": kind, "role": "assistant"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open = {**item, "status": "in_progress", "content": [part]}
        self.output.append(self._open)
        empty_item = {**self._open, "content": []}
        return [
            (
                "response.output_item.added",
                {"output_index": len(self.output) - 1, "item": empty_item},
            ),
            ("response.content_part.added", {**self._position(), "part": _copied(part)}),
        ]

    def _end_item(self, status: str) -> Events:
        """End the last item; return the events."""
        if self._open is None:
            return []
        item, self._open["status"] = self._open, status
        (part,) = item["content"]
        place = self._position()
        data: Json = {**place, "text": part["text"]}
        kind = "reasoning_text"
        if item["type"] == "message":
            kind, data["logprobs"] = "output_text", list(part["logprobs"])
        self._open = None
        return [
            (f"response.{kind}.done", data),
            ("response.content_part.done", {**place, "part": _copied(part)}),
            ("response.output_item.done", {"output_index": place["output_index"], "item": item}),
        ]

    def _write_call(self, call: ToolCall) -> Events:
        """Add a complete function call as an item; return the events."""
        events = self._end_item("completed")
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
        started = {**item, "status": "in_progress", "arguments": ""}
        arguments = call.arguments
        return [
            *events,
            ("response.output_item.added", {"output_index": index, "item": started}),
            ("response.function_call_arguments.delta", {**place, "delta": arguments}),
            (
                "response.function_call_arguments.done",
                {**place, "arguments": arguments, "name": call.name},
            ),
            ("response.output_item.done", {"output_index": index, "item": item}),
        ]


def _copied(part: Json) -> Json:
    """Return a copy of a content part, as later text changes the part in place."""
    return {name: list(value) if isinstance(value, list) else value for name, value in part.items()}
