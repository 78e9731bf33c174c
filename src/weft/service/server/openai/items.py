"""The input items of a response, and the chat messages that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from .field_errors import invalid, unsupported
from .request_fields import OpenAIModel

if TYPE_CHECKING:
    from .stored import ResponseKey

Json = dict[str, Any]
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


class ItemPart(OpenAIModel):
    """A part of an item's content; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    id: str | None = None
    cache_control: Any = Field(None, description="Accepted; prefixes are cached without it.")
    extra_content: Any = Field(None, description="Accepted; changes nothing.")
    # Fields of unsupported parts, accepted so that the error can name the part's type.
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None


class InputItem(OpenAIModel):
    """A message, a function call, a call's result, or reasoning."""

    type: Literal[
        "message", "function_call", "function_call_output", "reasoning", "item_reference"
    ] = "message"
    id: str | None = None
    status: str | None = None
    role: str | None = Field(None, min_length=1)
    phase: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: None = None
    cache_control: Any = Field(None, description="Accepted; prefixes are cached without it.")
    extra_content: Any = Field(None, description="Accepted; changes nothing.")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, given: Any) -> Any:
        """Remove null fields before validation."""
        if not isinstance(given, Mapping):
            return given
        fields = {name: value for name, value in given.items() if value is not None}
        if set(fields) == {"id"}:
            fields["type"] = "item_reference"
        return fields

    def stored(self, key: ResponseKey) -> Json:
        """Return the item as `input_items` lists it. key: of the response it is part of."""
        item: Json = {"type": self.type, **self.model_dump(exclude_none=True)}
        item["id"] = self.id or key.item_id(_PREFIXES[self.type])
        item.setdefault("status", "completed")
        if self.type == "message" and isinstance(self.content, str):
            kind = "output_text" if self.role == "assistant" else "input_text"
            part: Json = {"type": kind, "text": self.content}
            item["content"] = [{**part, "annotations": []} if kind == "output_text" else part]
        return item

    def text(self, number: int, content: str | Sequence[ItemPart] | None) -> str:
        """Return the text of a content of this item.

        number: the item's index in `input`, for errors.
        Raises: RequestError for parts that are no text.
        """
        if content is None or isinstance(content, str):
            return content or ""
        return "\n".join(_part_text(number, part) for part in content)


def _part_text(number: int, part: ItemPart) -> str:
    """Return the text of a part. Raises: RequestError for images, files, audio and video."""
    if part.type in ("input_text", "output_text", "text", "reasoning_text", "summary_text"):
        return part.text or ""
    if part.type == "refusal":
        return part.refusal or ""
    raise unsupported(f"input.{number}.content", f"is {part.type!r:.40}; only text is supported")


def as_items(given: str | Sequence[InputItem]) -> list[InputItem]:
    """Return a request's input as a list of items. A text becomes a user message."""
    if isinstance(given, str):
        return [InputItem.model_validate({"role": "user", "content": given})]
    return list(given)


def as_messages(
    instructions: str | None, given: Sequence[InputItem], *, n_before: int = 0
) -> list[Json]:
    """Convert items to chat messages. Consecutive calls and the text before them become one turn.

    Args:
        instructions: text of the system message; None without one.
        n_before: number of items of earlier responses. Error messages count the request's own
            items from 0.
    """
    messages: list[Json] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    reasoning = ""
    for number, item in enumerate(given, start=-n_before):
        if item.type == "reasoning":
            reasoning += item.text(number, item.content)
        elif item.type == "function_call":
            _append_call(messages, number, item, reasoning)
            reasoning = ""
        elif item.type == "function_call_output":
            if item.call_id is None:
                raise invalid(f"input.{number}.call_id", f"input.{number}.call_id is missing")
            output = item.text(number, item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        else:
            messages.append(_chat_message(number, item, reasoning))
            reasoning = ""
    return messages


def _chat_message(number: int, item: InputItem, reasoning: str) -> Json:
    """Convert a message item to a chat message. reasoning: the reasoning before it."""
    if item.role is None:
        raise invalid(f"input.{number}.role", f"input.{number}.role is missing")
    message: Json = {"role": item.role, "content": item.text(number, item.content)}
    if reasoning and item.role == "assistant":
        message["reasoning_content"] = reasoning
    return message


def _append_call(messages: list[Json], number: int, item: InputItem, reasoning: str) -> None:
    """Add a function call to the assistant's turn at the end of `messages`."""
    if not item.name:
        raise invalid(f"input.{number}.name", f"input.{number}.name is missing")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
        if reasoning:
            messages[-1]["reasoning_content"] = reasoning
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    call = {"type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(
        {**call, "id": item.call_id} if item.call_id else call
    )
