"""Routes of Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ....lm.lm import LM
from ..dependencies import ERRORS
from ..errors import RequestError
from ..openai.chat import ChatCall, ChatRequest
from ..openai.field_errors import invalid, translate_overflow
from ..openai.messages import reads_variable
from ..openai.protocol import ok
from ..openai.request_fields import (
    Finite,
    LoomOptions,
    OpenAIModel,
    OpenAISampling,
    ProtocolRequest,
)
from ..openai.runs import Runs
from ..openai.stream import SSE, run_call, sse_line
from ..openai.usage import CallUsage
from ..service import ServiceDep
from .blocks import BlockMessage, TextBlocks, chat_messages
from .events import BlockWriter
from .protocol import EVENTS, MessageError, MessageReply

Json = dict[str, Any]

_VERSIONS = ("2023-06-01", "2026-10-21")  # they differ only in what they reject
_PING: Json = {"type": "ping"}
_EVENTS = SSE._replace(ping=sse_line(_PING))
# Names of chat completions' fields, to the names here.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}


def check_version(version: Annotated[str | None, Header(alias="anthropic-version")] = None) -> None:
    """Raise RequestError for an unknown version of the protocol."""
    if version is not None and version not in _VERSIONS:
        raise invalid(
            "anthropic-version",
            f"anthropic-version is {version!r:.40}; allowed are {' and '.join(_VERSIONS)}",
        )


router = APIRouter(
    prefix="/v1/messages",
    tags=["anthropic"],
    dependencies=[Depends(check_version)],
    responses={
        status: {**described, "model": MessageError} for status, described in ERRORS.items()
    },
)


class ClientTool(OpenAIModel):
    """A tool that the client runs; Anthropic's own tools are rejected by their `type`."""

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    input_schema: dict[str, Any]
    input_examples: list[dict[str, Any]] | None = Field(
        None, description="Passed to the model as `examples` of the schema."
    )
    strict: bool | None = Field(
        None,
        description="true: reject a schema that cannot be compiled, instead of enforcing only names"
        " and types.",
    )
    cache_control: Any = Field(None, description="Accepted; changes nothing.")
    eager_input_streaming: bool | None = Field(None, description="Accepted; changes nothing.")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def chat_tool(self) -> Json:
        """Return the tool as an entry of a chat completion's `tools`."""
        examples = {"examples": self.input_examples} if self.input_examples else {}
        function: Json = {"name": self.name, "parameters": {**self.input_schema, **examples}}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ClientToolChoice(OpenAIModel):
    """The choice of tools: allowed, required, forbidden, or one that the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, min_length=1)
    disable_parallel_tool_use: bool | None = Field(None, description="true: one call per turn.")

    @model_validator(mode="before")
    @classmethod
    def _from_openai_choice(cls, given: Any) -> Any:
        """Accept OpenAI's `tool_choice`, a string; "required" becomes "any"."""
        if isinstance(given, str):
            return {"type": "any" if given == "required" else given}
        return given

    def chat_choice(self) -> Any:
        """Return the choice as a chat completion's `tool_choice`. Raises: RequestError."""
        if self.type == "tool":
            if self.name is None:
                raise invalid("tool_choice.name", "tool_choice.name is missing")
            return {"type": "function", "function": {"name": self.name}}
        if self.name is not None:
            raise invalid(
                "tool_choice.name", f'tool_choice.name: only with type "tool", not {self.type!r}'
            )
        return "required" if self.type == "any" else self.type


class ThinkingConfig(OpenAIModel):
    """Turns reasoning on or off, if the chat template reads enable_thinking."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description='"adaptive": the default of the chat template.'
    )
    budget_tokens: int | None = Field(
        None, ge=1, description="A target, as in Anthropic's API; only max_tokens is a limit."
    )
    display: Literal["summarized"] | None = None


class OutputFormat(OpenAIModel):
    """The JSON schema that the answer's text must match."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenAIModel):
    """The format of the answer, and the effort, if the chat template reads reasoning_effort."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description='"high" is the default of the protocol, and accepted by every model.'
    )


class ThinkingEdit(OpenAIModel):
    """The edit that removes no thinking, and so changes nothing."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(OpenAIModel):
    """Edits of the context; only the one that changes nothing is accepted."""

    edits: list[ThinkingEdit] = []


class CountRequest(ProtocolRequest):
    """The fields that make up the prompt of a message."""

    model: str | None = Field(
        None, description="A loaded model's id; default: the first loaded one."
    )
    messages: list[BlockMessage] = Field(min_length=1)
    system: TextBlocks | None = None
    tools: list[ClientTool] | None = Field(None, max_length=128)
    tool_choice: ClientToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="As `output_config.format`.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Weft's extension: variables of the chat template."
    )
    cache_control: Any = Field(None, description="Accepted: every prefix is cached.")
    context_management: ContextManagement | None = None
    mcp_servers: list[Any] | None = Field(None, max_length=0)
    speed: Literal["standard"] | None = None

    def chat(self, lm: LM, **more: Any) -> ChatRequest:
        """Return the equivalent chat completion. Raises: RequestError."""
        messages = chat_messages(self.system, self.messages)
        choice = self.tool_choice
        body: Json = {
            "messages": messages,
            "continue_final_message": messages[-1]["role"] == "assistant" or None,
            "tools": [tool.chat_tool() for tool in self.tools] if self.tools else None,
            "tool_choice": None if choice is None else choice.chat_choice(),
            "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
            "response_format": self._response_format(),
            "reasoning_effort": self._effort(lm),
            "chat_template_kwargs": self._template_kwargs(lm),
            **more,
        }
        try:
            return ChatRequest.model_validate(body)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error

    def _response_format(self) -> Json | None:
        """Return the schema of the answer as a chat completion's `response_format`."""
        config = self.output_config
        form = self.output_format or (None if config is None else config.format)
        if form is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}}

    def _effort(self, lm: LM) -> str | None:
        """Return the reasoning effort, if the chat template reads it."""
        effort = None if self.output_config is None else self.output_config.effort
        return effort if effort != "high" or reads_variable(lm, "reasoning_effort") else None

    def _template_kwargs(self, lm: LM) -> Json | None:
        """Return the variables of the chat template that turn thinking on or off."""
        kwargs = dict(self.chat_template_kwargs or {})
        kind = "adaptive" if self.thinking is None else self.thinking.type
        if kind == "enabled" or (kind == "disabled" and reads_variable(lm, "enable_thinking")):
            kwargs.setdefault("enable_thinking", kind == "enabled")
        return kwargs or None


class MessagesRequest(CountRequest, OpenAISampling):
    """Request of a message; every parameter is either honoured or rejected by name.

    The fields of `OpenAISampling` are Weft's extension, as in chat completions.
    """

    max_tokens: int = Field(
        ge=1, description="Maximum of new tokens; fewer if the context is full."
    )
    temperature: Finite | None = Field(None, ge=0)
    top_p: Finite | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    loom: LoomOptions | None = Field(None, description="Weft's extension, as in chat completions.")
    thread: Any = Field(None, description="Rejected: conversations are not stored.")
    container: None = None
    diagnostics: Any = Field(None, description="Accepted; changes nothing.")
    inference_geo: Any = Field(None, description="Accepted; changes nothing.")
    metadata: Any = Field(None, description="Accepted; changes nothing.")
    service_tier: Any = Field(None, description="Accepted; changes nothing.")
    user_profile_id: Any = Field(None, description="Accepted; changes nothing.")
    workspace_id: Any = Field(None, description="Accepted; changes nothing.")

    @field_validator("thread")
    @classmethod
    def _reject_thread(cls, value: Any) -> None:
        """Reject a stored conversation, in the way that Anthropic's SDK expects."""
        if value is not None:
            # These details make Anthropic's SDK send the full conversation instead.
            raise RequestError(
                400,
                "unsupported_parameter",
                "thread: conversations are not stored; send all messages",
                param="thread",
                details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
            )

    def completion(self, lm: LM) -> ChatRequest:
        """Return the equivalent chat completion. Raises: RequestError."""
        sampling = {name: getattr(self, name) for name in OpenAISampling.model_fields}
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        sampling["stop"] = [*(self.stop_sequences or ()), *stop]
        return self.chat(
            lm,
            **sampling,
            max_completion_tokens=min(self.max_tokens, lm.n_ctx),
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            loom=None if self.loom is None else self.loom.model_dump(exclude_none=True),
        )


@router.post(
    "",
    response_model=None,
    responses=ok(MessageReply, *EVENTS),
)
async def create(body: MessagesRequest, request: Request, service: ServiceDep) -> Response | Json:
    """Answer a conversation with the assistant's next message."""

    async def plan(lm: LM, name: str) -> MessagesCall:
        try:
            chat = body.completion(lm)
            chat.check(service)
            with translate_overflow("messages", body.max_tokens):
                call = await ChatCall.create(chat, lm, name, service, fits_context=True)
        except RequestError as error:
            error.param = _rename_param(error.param)
            raise
        return MessagesCall(body, call, name)

    return await run_call(
        request,
        service,
        "message",
        body.model,
        is_streamed=bool(body.stream),
        plan=plan,
        format=_EVENTS,
    )


class TokenCount(BaseModel):
    """The size of a prompt."""

    input_tokens: int


@router.post("/count_tokens")
async def count_tokens(body: CountRequest, service: ServiceDep) -> TokenCount:
    """Count the tokens of the prompt that a message would have."""
    with service.models.get(body.model).in_use() as lm:
        try:
            with translate_overflow("messages"):
                prompt = await asyncio.to_thread(body.chat(lm).prompt, lm)
        except RequestError as error:
            error.param = _rename_param(error.param)
            raise
    return TokenCount(input_tokens=len(prompt.ids))


def _rename_param(param: str | None) -> str | None:
    """Translate a chat completion's field, in an error, to Anthropic's name."""
    return None if param is None else _NAMES.get(param, param)


class MessagesCall:
    """A planned message: a chat completion with one choice, returned as content blocks.

    Has the methods of `PlannedCall`.
    """

    def __init__(self, body: MessagesRequest, call: ChatCall, name: str) -> None:
        self._body = body
        self._call = call
        self._name = name
        self._id = f"msg_{secrets.token_hex(12)}"
        self._writer = BlockWriter()

    def release(self) -> None:
        """Cancel the choice if it is saved in a loom, and commit it; see `Runs.release`."""
        self._call.release()

    @property
    def runs(self) -> Runs:
        """The choices of the call, for metrics."""
        return self._call.runs

    async def answer(self) -> MessageReply:
        """Run the call and return the complete message."""
        await self.runs.finish()
        self._new_events()
        return MessageReply.model_validate(self._message(**self._stop_fields()))

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Run the call and yield the events of the stream, as dicts."""
        is_first = True
        async with aclosing(self.runs.updates()) as updates:
            async for _ in updates:
                if is_first:  # the number of cached tokens is known now
                    yield {"type": "message_start", "message": self._message()}
                    yield _PING
                    is_first = False
                for event in self._new_events():
                    yield event
        yield {"type": "message_delta", "delta": self._stop_fields(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _new_events(self) -> list[Json]:
        """Return events for the part of the turn that has become final since the last call."""
        (reply,), (turn,) = self.runs.replies, self._call.turns
        events = self._writer.write(turn.new())
        return [*events, *self._writer.close()] if reply.is_over else events

    def _stop_fields(self) -> Json:
        """Return `stop_reason` and `stop_sequence`."""
        (reply,), (turn,) = self.runs.replies, self._call.turns
        stop_string = reply.node.stop_string
        reason = turn.finish_reason(turn.n_calls)
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "length":
            is_max_tokens = len(reply.tokens) >= self._body.max_tokens
            reason = "max_tokens" if is_max_tokens else "model_context_window_exceeded"
            return {"stop_reason": reason, "stop_sequence": None}
        reason = "end_turn" if stop_string is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop_string}

    def _message(self, **stop: Any) -> Json:
        """Return the message object.

        stop: fields about its end, such as the stop reason; none at the start of a stream.
        """
        message: Json = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._name,
            "content": self._writer.content if stop else [],
            "stop_reason": None,
            "stop_sequence": None,
            **stop,
            "usage": self._usage(),
        }
        return message if self._body.loom is None else {**message, "loom": self.runs.to_dict()}

    def _usage(self) -> Json:
        """Return the token counts in Anthropic's form."""
        usage = CallUsage(self.runs.replies)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }
