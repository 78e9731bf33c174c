"""Anthropic's messages of content blocks, and the chat messages that they become."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from ..openai.field_errors import unsupported
from ..openai.request_fields import OpenAIModel

Json = dict[str, Any]


class CacheableBlock(OpenAIModel):
    """Base of blocks with `cache_control`, which is accepted and has no effect."""

    cache_control: Any = None


class TextBlock(CacheableBlock):
    """A content block with text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, max_length=0)


class ThinkingBlock(OpenAIModel):
    """Reasoning of an earlier assistant turn. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(CacheableBlock):
    """A content block with a tool call of an earlier assistant turn."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]
    caller: Any = None


def _as_blocks(content: object) -> object:
    """Convert a text to a list with one text block; other contents stay."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


TextBlocks = Annotated[
    list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


class ToolResultBlock(CacheableBlock):
    """A content block with the result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: TextBlocks | None = None
    is_error: bool | None = Field(None, description='true: the result begins with "Error: ".')


# Class names as tags: errors leave them out of a field's path.
_TAGS = {
    "text": "TextBlock",
    "thinking": "ThinkingBlock",
    "tool_use": "ToolUseBlock",
    "tool_result": "ToolResultBlock",
}


def _tag_of(block: Any) -> str | None:
    """Return the tag of a block's model; None for an unknown type."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return _TAGS.get(kind) if isinstance(kind, str) else None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("TextBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")]
    | Annotated[ToolResultBlock, Tag("ToolResultBlock")],
    Discriminator(
        _tag_of,
        custom_error_type="block_type",
        custom_error_message="blocks of this type are not supported; allowed are text, thinking,"
        " tool_use and tool_result",
    ),
]
ContentBlocks = Annotated[
    list[ContentBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[ContentBlock])
]
_BLOCKS_OF = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


class BlockMessage(OpenAIModel):
    """One turn of a conversation: a role, and a text or content blocks."""

    role: Literal["user", "assistant", "system"]
    content: ContentBlocks


def chat_messages(system: TextBlocks | None, messages: Sequence[BlockMessage]) -> list[Json]:
    """Return the chat messages; consecutive turns of one role are joined, as in Anthropic's API.

    Raises: RequestError for a block that its role cannot have.
    """
    chat: list[Json] = [{"role": "system", "content": text_of(system)}] if system else []
    for number, message in enumerate(messages):
        for place, block in enumerate(message.content):
            allowed = _BLOCKS_OF[message.role]
            if block.type not in allowed:
                raise unsupported(
                    f"messages.{number}.content.{place}.type",
                    f"is {block.type!r}; a message of role {message.role!r} has"
                    f" {' or '.join(allowed)}",
                )
        for turn in _turns(message):
            _append_turn(chat, turn)
    return chat


def text_of(blocks: Sequence[Any]) -> str:
    """Return the joined text of the text blocks, with line breaks between them."""
    return "\n".join(block.text for block in blocks if block.type == "text")


def _turns(message: BlockMessage) -> list[Json]:
    """Return a message as chat messages: results of calls become messages of their own."""
    blocks = message.content
    turn: Json = {"role": message.role, "content": text_of(blocks)}
    results = [_tool_message(block) for block in blocks if block.type == "tool_result"]
    if results and not turn["content"]:
        return results
    if thinking := "".join(block.thinking for block in blocks if block.type == "thinking"):
        turn["reasoning_content"] = thinking
    if calls := [_chat_call(block) for block in blocks if block.type == "tool_use"]:
        turn["tool_calls"] = calls
    return [*results, turn]


def _tool_message(block: ToolResultBlock) -> Json:
    """Return a tool's result as a chat message."""
    prefix = "Error: " if block.is_error else ""
    content = prefix + text_of(block.content or ())
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _chat_call(block: ToolUseBlock) -> Json:
    """Return a tool call as an entry of a chat message's `tool_calls`."""
    arguments = json.dumps(block.input, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _append_turn(messages: list[Json], turn: Json) -> None:
    """Append a chat message, or join it to the last one if the role is the same."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != turn["role"] or turn["role"] not in ("user", "assistant"):
        messages.append(turn)
        return
    last["content"] = "\n".join(filter(None, (last["content"], turn["content"])))
    for name, empty in (("reasoning_content", ""), ("tool_calls", [])):
        if name in turn:
            last[name] = last.get(name, empty) + turn[name]
