"""Models of the responses and stream events of `/v1/messages`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ...api.base import ResponseModel

Json = dict[str, Any]


class MessageUsage(ResponseModel):
    """Token counts. The prompt's size is the sum of the three counts of input tokens."""

    input_tokens: int = Field(description="Prompt tokens that were computed.")
    cache_creation_input_tokens: int = Field(description="Always 0.")
    cache_read_input_tokens: int = Field(description="Prompt tokens whose KV was cached.")
    output_tokens: int


class MessageReply(ResponseModel):
    """The assistant's message: content blocks, stop reason and token counts."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json] = Field(description="Blocks of the types text, thinking and tool_use.")
    stop_reason: (
        Literal[
            "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
        ]
        | None
    ) = Field(description="`null` in the event `message_start`.")
    stop_sequence: str | None
    usage: MessageUsage
    loom: Json | None = Field(default=None, description="Only if the request has `loom`.")


class MessageError(ResponseModel):
    """An error, in Anthropic's form. `error` also has Weft's `code`, `param` and `hint`."""

    type: Literal["error"]
    error: Json
    request_id: str | None


class MessageEvent(ResponseModel):
    """An event of a streamed message; its type decides which fields it has."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: MessageReply | None = None
    index: int = 0
    content_block: Json = {}
    delta: Json = {}
    usage: MessageUsage | None = None


EVENTS = (MessageEvent, MessageError)
