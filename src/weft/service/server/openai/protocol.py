"""Models of the responses and stream events of `/v1`.

Routes build complete responses as models. Chunks of streams are dicts, as a model takes four times
as long to build and encode: with 128 streams at 20 chunks per second that is 5 % of a core.
`tests/service/server/test_openai_schema.py` validates both against the OpenAPI schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from ...api.base import ErrorDetail, ResponseModel

Json = dict[str, Any]
FinishReason = Literal["stop", "length"]


class TokenLogprob(ResponseModel):
    """A token with its log-probability."""

    token: str
    logprob: float = Field(description="Natural logarithm; -9999 for an impossible token.")
    bytes: list[int] = Field(description="The token's UTF-8 bytes.")


class ChosenLogprob(TokenLogprob):
    """A generated token and the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob]
    asked: list[TokenLogprob] = Field(
        default=[], description="The tokens of `loom.logprob_tokens`, if the request names any."
    )


class ChatLogprobs(ResponseModel):
    """Log-probabilities of a chat's generated tokens."""

    content: list[ChosenLogprob]
    refusal: None


class CompletionLogprobs(ResponseModel):
    """Log-probabilities of a completion's tokens: four lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="Where each token begins, in characters.")
    asked: list[dict[str, float]] = Field(
        default=[], description="The tokens of `loom.logprob_tokens`, if the request names any."
    )


class PromptLogprob(ResponseModel):
    """The logprob of one prompt token; an entry of `prompt_logprobs`, by token id."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CachedTokens(ResponseModel):
    """Details of `prompt_tokens`."""

    cached_tokens: int = Field(description="Prompt tokens whose KV was cached.")


class CompletionUsage(ResponseModel):
    """Token counts of a completion or a chat completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CallFunction(ResponseModel):
    """The function that a tool call names, and its arguments."""

    name: str
    arguments: str = Field(description="The arguments, as JSON text.")


class ReplyCall(ResponseModel):
    """A tool call that the model makes in a chat completion."""

    id: str
    type: Literal["function"]
    function: CallFunction


class CallDelta(ReplyCall):
    """A tool call in a stream; each call arrives in one chunk."""

    index: int


class ReplyMessage(ResponseModel):
    """The assistant's message in a chat completion."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = Field(default=None, description="Text of the reasoning.")
    tool_calls: list[ReplyCall] = []


class MessageDelta(ResponseModel):
    """The new part of an assistant's message, in a chunk of a stream."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] = []


class ChatChoice(ResponseModel):
    """One of the n answers of a chat completion."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    token_ids: list[int] = Field(default=[], description="With `return_token_ids`.")


class ChatChunkChoice(ResponseModel):
    """The new part of one of the n answers."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    token_ids: list[int] = Field(default=[], description="With `return_token_ids`.")


class _Head(ResponseModel):
    """Fields that all answers of completions and chat completions begin with."""

    id: str
    created: int = Field(description="Unix time in seconds.")
    model: str
    loom: Json = Field(default={}, description="With `loom`: the loom and its new nodes.")


class ChatCompletion(_Head):
    """A chat completion of `/v1/chat/completions`: n answers and the token counts."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: CompletionUsage
    prompt_token_ids: list[int] = Field(default=[], description="With `return_token_ids`.")
    prompt_logprobs: PromptLogprobs = Field(default=[], description="With `prompt_logprobs`.")


class ChatCompletionChunk(_Head):
    """An event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | None = None
    prompt_token_ids: list[int] = Field(default=[], description="With `return_token_ids`.")
    prompt_logprobs: PromptLogprobs = Field(default=[], description="With `prompt_logprobs`.")


class CompletionChoice(ResponseModel):
    """One of the n continuations of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    prompt_token_ids: list[int] = Field(default=[], description="With `return_token_ids`.")
    token_ids: list[int] = Field(default=[], description="With `return_token_ids`.")
    prompt_logprobs: PromptLogprobs = Field(default=[], description="With `prompt_logprobs`.")


class CompletionChunkChoice(CompletionChoice):
    """The new part of one of the n continuations of a prompt."""

    finish_reason: FinishReason | None  # type: ignore[assignment]


class TextCompletion(_Head):
    """A completion of `/v1/completions`: the continuations of all prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: CompletionUsage


class TextCompletionChunk(_Head):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: CompletionUsage | None = None


class EmbeddingUsage(ResponseModel):
    """Token counts of an embedding."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(ResponseModel):
    """The vector of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Floats, or base64 of little-endian float32.")


class EmbeddingList(ResponseModel):
    """The vectors of all inputs, in their order."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class OutputText(ResponseModel):
    """The text of an output message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    logprobs: list[ChosenLogprob]


class ReasoningText(ResponseModel):
    """The text of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(ResponseModel):
    """An output item: a message of the model."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(ResponseModel):
    """An output item: the model's reasoning."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Json]
    content: list[ReasoningText]


class OutputCall(ResponseModel):
    """An output item: a call of a function."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]


class InputDetails(ResponseModel):
    """Details of a response's `input_tokens`."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(ResponseModel):
    """Details of a response's `output_tokens`."""

    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    """Token counts of a response of `/v1/responses`."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(ResponseModel):
    """The error of a response whose status is "failed"."""

    code: str
    message: str


class ResponseObject(ResponseModel):
    """A response of `/v1/responses`: status, output items, and the options of its request."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix time in seconds.")
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: Json | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Json
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: str
    dropped_messages: int = Field(description="Oldest messages that truncation left out.")
    usage: ResponseUsage | None
    user: Any
    metadata: Any


class DeletedResponse(ResponseModel):
    """The id of a response that is deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemPage(ResponseModel):
    """A page of the input items of a stored response."""

    object: Literal["list"]
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEvent(ResponseModel):
    """An event of a streamed response; its type decides which fields it has."""

    type: str = Field(description="As the event's name: response.output_text.delta and others.")
    sequence_number: int
    response: ResponseObject | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    item_id: str = ""
    output_index: int = 0
    content_index: int = 0
    delta: str = ""
    text: str = ""
    arguments: str = ""
    name: str = ""
    logprobs: list[ChosenLogprob] = []


class StreamError(ResponseModel):
    """The last event of a stream that failed."""

    error: ErrorDetail


EVENTS = (ChatCompletionChunk, TextCompletionChunk, ResponseEvent, StreamError)
_REF = "#/components/schemas/{model}"


def to_response(reply: ResponseModel) -> Response:
    """Return a model as an HTTP response, without fields that were not set."""
    return Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")


def ok(reply: type[ResponseModel], *events: type[ResponseModel]) -> dict[int | str, Json]:
    """Return the description of a route's 200 response, for FastAPI's `responses`.

    events: models of the events, if the route can also stream.
    """
    described: Json = {"model": reply, "description": reply.__doc__}
    if events:
        data = {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {
                "anyOf": [{"$ref": _REF.format(model=event.__name__)} for event in events]
            },
        }
        event = {"type": "object", "required": ["data"], "properties": {"data": data}}
        described["content"] = {"text/event-stream": {"itemSchema": event}}
        described["description"] += " With `stream`: its events."
    return {200: described}


def add_stream_events(schema: Json, events: Sequence[type[ResponseModel]]) -> None:
    """Add the models of stream events, which no route returns, to an OpenAPI schema."""
    _, models = models_json_schema(
        [(event, "serialization") for event in events], ref_template=_REF
    )
    known = schema["components"]["schemas"]
    known |= {name: model for name, model in models["$defs"].items() if name not in known}
