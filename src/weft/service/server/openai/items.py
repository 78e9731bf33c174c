"""What a response is given: items of text, calls and their results, as chat messages."""

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
    """A part of an item's content; only text can be read here."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    # Of parts that are refused, so that the refusal can say what they are.
    image_url: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None


class InputItem(OpenAIModel):
    """One item: a message, a call, a call's result, or what was thought."""

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

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        made = {name: value for name, value in given.items() if value is not None}
        if set(made) == {"id"}:
            made["type"] = "item_reference"
        return made

    def stored(self, key: ResponseKey) -> Json:
        """Return the item as `input_items` lists it. key: of the response that it is given to."""
        made: Json = {"type": self.type, **self.model_dump(exclude_none=True)}
        made["id"] = self.id or key.item_id(_PREFIXES[self.type])
        made.setdefault("status", "completed")
        if self.type == "message" and isinstance(self.content, str):
            kind = "output_text" if self.role == "assistant" else "input_text"
            part: Json = {"type": kind, "text": self.content}
            made["content"] = [{**part, "annotations": []} if kind == "output_text" else part]
        return made

    def text(self, number: int, content: str | Sequence[ItemPart] | None) -> str:
        """Return the text of a content. Raises: Refused for what is none."""
        if content is None or isinstance(content, str):
            return content or ""
        return "\n".join(_part_text(number, part) for part in content)


def _part_text(number: int, part: ItemPart) -> str:
    if part.type in ("input_text", "output_text", "text", "reasoning_text", "summary_text"):
        return part.text or ""
    if part.type == "refusal":
        return part.refusal or ""
    raise unsupported(f"input[{number}].content", f"is {part.type!r:.40}; only text is read here")


def as_items(given: str | Sequence[InputItem]) -> list[InputItem]:
    """Return the items of an input; a text is a message of the user."""
    if isinstance(given, str):
        return [InputItem.model_validate({"role": "user", "content": given})]
    return list(given)


def as_messages(
    instructions: str | None, given: Sequence[InputItem], *, n_before: int = 0
) -> list[Json]:
    """Return the chat that items are. Calls in a row, and the text before them, are one turn.

    n_before: how many of the items are not the request's; errors number the request's from 0.
    """
    made: list[Json] = []
    if instructions:
        made.append({"role": "system", "content": instructions})
    thought = ""
    for number, item in enumerate(given, start=-n_before):
        if item.type == "reasoning":
            thought += item.text(number, item.content)
        elif item.type == "function_call":
            _add_call(made, number, item, thought)
            thought = ""
        elif item.type == "function_call_output":
            if item.call_id is None:
                raise invalid(f"input[{number}].call_id", f"input[{number}].call_id is missing")
            said = item.text(number, item.output)
            made.append({"role": "tool", "tool_call_id": item.call_id, "content": said})
        else:
            made.append(_message(number, item, thought))
            thought = ""
    return made


def _message(number: int, item: InputItem, thought: str) -> Json:
    if item.role is None:
        raise invalid(f"input[{number}].role", f"input[{number}].role is missing")
    made: Json = {"role": item.role, "content": item.text(number, item.content)}
    if thought and item.role == "assistant":
        made["reasoning_content"] = thought
    return made


def _add_call(made: list[Json], number: int, item: InputItem, thought: str) -> None:
    if not item.name:
        raise invalid(f"input[{number}].name", f"input[{number}].name is missing")
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
        if thought:
            made[-1]["reasoning_content"] = thought
    function = {"name": item.name, "arguments": item.arguments or "{}"}
    call = {"type": "function", "function": function}
    made[-1].setdefault("tool_calls", []).append(
        {**call, "id": item.call_id} if item.call_id else call
    )
