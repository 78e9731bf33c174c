"""/v1/responses: turns of text, stored as nodes of looms unless the request disables that."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError

from ....errors import WeftError
from ....lm.lm import LM
from ....loom import Heddle
from ..dependencies import ERRORS, check_query_names
from ..errors import RequestError, serialize_error
from ..service import Service, ServiceDep
from . import logprobs
from .chat import ChatCall, ChatRequest
from .constraints import ConstraintFields, ResponseFormat, Schema, TextConstraint
from .events import OutputWriter
from .field_errors import invalid, translate_overflow, unsupported
from .items import InputItem, as_messages
from .protocol import (
    DeletedResponse,
    InputItemPage,
    ResponseEvent,
    ResponseObject,
    StreamError,
    ok,
    to_response,
)
from .request_fields import Finite, OpenAIModel, OpenAISampling, StreamOptions
from .runs import Runs
from .stored import (
    ResponseContext,
    ResponseKey,
    delete,
    new_item_id,
    open_response,
    store,
)
from .stream import run_call
from .usage import CallUsage

router = APIRouter(prefix="/v1", tags=["openai"], responses=ERRORS)
Json = dict[str, Any]

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"  # accepted without effect: reasoning is plain text
# Names of chat completions' fields, to the names here.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "enable_thinking": "reasoning.enabled",
    "verbosity": "text.verbosity",
}


class TextFormat(OpenAIModel):
    """The format of a response's text: free text, JSON, or JSON of a schema."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(OpenAIModel):
    """Options of a response's text."""

    format: TextFormat | None = None
    verbosity: str | None = Field(
        None, description='For chat templates with this variable; else only "medium".'
    )


class ReasoningOptions(OpenAIModel):
    """Options of a response's reasoning."""

    effort: str | None = Field(
        None, description="For chat templates with this variable; else only none and minimal."
    )
    enabled: bool | None = Field(
        None, description="SGLang's: for chat templates with enable_thinking; false for all."
    )
    summary: Literal["auto"] | None = Field(
        None, description='Only "auto": the full reasoning is returned, without a summary.'
    )


class ResponseTool(OpenAIModel):
    """A function that the model may call; other types of tools are rejected."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(OpenAIModel):
    """The function that the model must call."""

    type: Literal["function"]
    name: str = Field(min_length=1)


class ResponseRequest(ConstraintFields, OpenAISampling):
    """Request of a response; every parameter is either honoured or rejected by name."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1)] = Field(
        description="A text, or items: messages, calls, results of calls, reasoning."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=-1)
    temperature: Finite | None = Field(None, ge=0)
    top_p: Finite | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=128)
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        Field(None, description="Reasoning is always plain text: encrypted_content adds nothing.")
    )
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description='"auto": drop the oldest turns of an input that is too long;'
        " the response counts them in dropped_messages.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Any = Field(None, description="Accepted; changes nothing.")
    store: bool | None = Field(None, description="false: the response is not stored.")
    previous_response_id: str | None = Field(
        None, description="The stored response to continue; its instructions do not carry over."
    )
    metadata: Any = Field(None, description="Returned in the response; changes nothing.")
    service_tier: Any = Field(None, description="Accepted; changes nothing.")
    safety_identifier: Any = Field(None, description="Accepted; changes nothing.")
    prompt_cache_key: Any = Field(None, description="Accepted; prefixes are cached without a key.")
    prompt_cache_retention: Any = Field(None, description="Accepted; changes nothing.")

    def chat(self, context: ResponseContext) -> ChatRequest:
        """Return the equivalent chat completion.

        Raises: RequestError, with this API's field names.
        """
        wants_logprobs = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not wants_logprobs:
            raise invalid("top_logprobs", f"top_logprobs: only with include: [{_LOGPROBS!r}]")
        body: Json = {
            "messages": as_messages(self.instructions, context.items, n_before=context.n_before),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_chat_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            **self._constraints(),
            **{name: getattr(self, name) for name in OpenAISampling.model_fields},
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "enable_thinking": None if self.reasoning is None else self.reasoning.enabled,
            "verbosity": None if self.text is None else self.text.verbosity,
            "logprobs": wants_logprobs or None,
            "top_logprobs": self.top_logprobs if wants_logprobs else None,
            "stream": self.stream,
        }
        try:
            request = ChatRequest.model_validate(body)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        if self.truncation == "auto":
            request.drop_turns()
        return request

    def _constraints(self) -> Json:
        """Return the fields of a chat completion that constrain the text. Raises: RequestError."""
        self.text_constraint()
        given = {name: getattr(self, name) for name in ConstraintFields.model_fields}
        return {**given, "response_format": self.response_format or self._text_format()}

    def _text_constraints(self) -> Iterator[TextConstraint]:
        """Yield the constraints of the request's fields."""
        form = self._text_format()
        constraint = None if form is None else form.constraint()
        if constraint is not None:
            yield TextConstraint("text.format", constraint)
        yield from super()._text_constraints()

    def _text_format(self) -> ResponseFormat | None:
        """Return `text.format` as a `response_format` of chat completions."""
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        place = "json_schema" if form.type == "json_schema" else "schema"
        schema = {"schema": form.schema_} if form.type == "json_schema" else form.schema_
        return ResponseFormat.model_validate({"type": form.type, place: schema})


def _chat_tool(tool: ResponseTool) -> Json:
    """Return a function as an entry of a chat completion's `tools`."""
    function = tool.model_dump(exclude_none=True, exclude={"type"})
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: Any) -> Any:
    """Return the choice of tools as a chat completion's `tool_choice`."""
    if isinstance(choice, ResponseToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


@router.post(
    "/responses", response_model=None, responses=ok(ResponseObject, ResponseEvent, StreamError)
)
async def respond(body: ResponseRequest, request: Request, service: ServiceDep) -> Response | Json:
    """Answer an input."""

    async def plan(lm: LM, name: str) -> ResponseCall:
        try:
            return await ResponseCall.create(body, lm, name, service)
        except RequestError as error:
            is_own = (error.param or "").startswith("response_format")
            if not is_own or body.response_format is None:
                error.param = _rename_param(error.param)
            raise

    return await run_call(
        request, service, "response", body.model, is_streamed=bool(body.stream), plan=plan
    )


def _rename_param(param: str | None) -> str | None:
    """Translate a chat completion's field, in an error, to the name in this API."""
    if param is None:
        return None
    return re.sub(r"^[^.\[]+", lambda name: _NAMES.get(name[0], name[0]), param)


@router.get(
    "/responses/{response_id}",
    response_model=None,
    responses=ok(ResponseObject),
    dependencies=[Depends(check_query_names)],
)
async def read_response(
    response_id: str,
    service: ServiceDep,
    include: Annotated[list[str] | None, Query()] = None,
    include_: Annotated[list[str] | None, Query(alias="include[]")] = None,
    stream: bool | None = None,
) -> Response:
    """Return a stored response."""
    _check_include([*(include or ()), *(include_ or ())])
    if stream:
        raise unsupported("stream", "stored responses cannot be streamed; leave it out")
    async with open_response(service, response_id) as response:
        return to_response(ResponseObject.model_validate(response.response_object))


@router.delete("/responses/{response_id}", response_model=None, responses=ok(DeletedResponse))
async def delete_response(response_id: str, service: ServiceDep) -> Response:
    """Delete a stored response."""
    response_id = await delete(service, response_id)
    return to_response(DeletedResponse(id=response_id, object="response", deleted=True))


@router.get(
    "/responses/{response_id}/input_items",
    response_model=None,
    responses=ok(InputItemPage),
    dependencies=[Depends(check_query_names)],
)
async def list_input_items(
    response_id: str,
    service: ServiceDep,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: Annotated[str | None, Query(description="The id of the item before the page.")] = None,
    include: Annotated[list[str] | None, Query()] = None,
    include_: Annotated[list[str] | None, Query(alias="include[]")] = None,
) -> Response:
    """List the input items of a stored response, including those of earlier responses."""
    _check_include([*(include or ()), *(include_ or ())])
    async with open_response(service, response_id) as response:
        items = response.items()
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid("after", f"after is {after!r:.80}; it must be the id of an input item")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    return to_response(
        InputItemPage(
            object="list",
            data=page,
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=len(items) > limit,
        )
    )


def _check_include(names: Sequence[str]) -> None:
    """Raise RequestError for an unknown name in `include`."""
    for name in names:
        if name not in (_LOGPROBS, _ENCRYPTED):
            raise unsupported(
                "include",
                f"{name!r:.60} is not supported; allowed are {_LOGPROBS!r}, {_ENCRYPTED!r}",
            )


class ResponseCall:
    """A planned response: a chat completion with one choice, returned as output items.

    Has the methods of `PlannedCall`.
    """

    @classmethod
    async def create(
        cls, body: ResponseRequest, lm: LM, name: str, service: Service
    ) -> ResponseCall:
        """Check the request and plan the call. Nothing is generated yet. Raises: RequestError.

        name: the model's name, for the answer.
        """
        context = await ResponseContext.load(service, body.previous_response_id, body.input, name)
        chat = body.chat(context)
        chat.check(service)
        locations = context.locations if body.store is not False else (None,)
        for location in locations:
            chat.loom = location
            try:
                with translate_overflow("input", chat.max_new_tokens or 0):
                    call = await ChatCall.create(chat, lm, name, service, fits_context=True)
                return cls(body, call, name, context)
            except RequestError as error:
                # The prefix differs: other instructions, or a template that shortens earlier turns.
                if error.param not in ("loom.loom", "loom.parent") or location is locations[-1]:
                    raise
        raise AssertionError("there is always a location")

    def __init__(
        self, body: ResponseRequest, call: ChatCall, name: str, context: ResponseContext
    ) -> None:
        self.body = body
        self.call = call
        self.name = name
        self.created = time.time()
        self._context = context
        self._key: ResponseKey | None = None
        if (saved := call.runs.saved) is not None:
            self._key = ResponseKey(saved.live.stored.id, saved.live.number(self._node))
        key = self._key
        self.id = new_item_id("resp") if key is None else key.response_id
        self.writer = OutputWriter(new_item_id if key is None else key.item_id)
        self._store("in_progress")

    @property
    def _node(self) -> Heddle:
        """The node of the choice."""
        return self.call.runs.replies[0].node

    def _store(self, status: str) -> None:
        """Write the response with this status to the choice's node, if it is stored."""
        if self._key is not None:
            store(self._key, self._node, self._context, self._response_fields(status))

    def release(self) -> None:
        """Cancel the choice if it is saved in a loom, and commit it; see `Runs.release`."""
        self.call.release()

    @property
    def runs(self) -> Runs:
        """The choices of the call, for metrics."""
        return self.call.runs

    async def answer(self) -> ResponseObject:
        """Run the call and return the complete response."""
        if self._key is None:
            await self.call.runs.finish()
            await self._new_events()
        else:
            async with aclosing(self._events()) as events:
                async for _ in events:
                    pass
        return ResponseObject.model_validate(self._response_fields(self._status()))

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Run the call and yield the events of the stream, as dicts."""
        number = 0

        def event(kind: str, data: Json) -> Json:
            nonlocal number
            number += 1
            return {"type": kind, "sequence_number": number - 1, **data}

        try:
            yield event("response.created", {"response": self._response_fields("in_progress")})
            yield event("response.in_progress", {"response": self._response_fields("in_progress")})
            async with aclosing(self._events()) as events:
                async for kind, data in events:
                    yield event(kind, data)
            status = self._status()
            yield event(f"response.{status}", {"response": self._response_fields(status)})
        except WeftError as error:
            error_object = serialize_error(error)[1]
            failed = {
                **self._response_fields("failed"),
                "error": {"code": "server_error", "message": error_object["message"]},
            }
            yield event("response.failed", {"response": failed})

    async def _events(self) -> AsyncGenerator[tuple[str, Json], None]:
        """Run the call and yield (type, data) of the events of its items.

        The response is stored at the end.
        """
        async with aclosing(self.call.runs.updates()) as updates:
            async for _ in updates:
                for event in await self._new_events():
                    yield event

    async def _new_events(self) -> list[tuple[str, Json]]:
        """Return events for the part of the turn that has become final since the last call."""
        (reply,), (turn,) = self.call.runs.replies, self.call.turns
        first, tokens = reply.new_tokens()
        (scored,) = await self.call.score([(reply, first, tokens)])
        events: list[tuple[str, Json]] = []
        for step in turn.steps(first, tokens, scored):
            token_logprobs = logprobs.chat_logprobs(
                self.call.lm, step.scored if step.is_content else ()
            )
            events += self.writer.write(step.delta, token_logprobs)
        if reply.is_over:
            events += self.writer.close(self._status())
            self._store(self._status())
        return events

    def _status(self) -> Literal["completed", "incomplete"]:
        """Return "incomplete" for an answer cut by max_output_tokens, else "completed"."""
        (reply,) = self.call.runs.replies
        return "incomplete" if reply.finish_reason == "length" else "completed"

    def _response_fields(self, status: str) -> Json:
        """Return the response object as a dict."""
        body = self.body
        is_over = status in ("completed", "incomplete")
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        choice = body.tool_choice
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(self.created),
            "status": status,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.name,
            "output": self.writer.output if is_over else [],
            "parallel_tool_calls": not self.call.prompt.form.is_generic
            if body.parallel_tool_calls is None
            else body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id or None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort},
            "store": self._key is not None,
            "temperature": self.call.params.temperature,
            "text": {"format": self._text_format_fields()},
            "tool_choice": choice.model_dump()
            if isinstance(choice, OpenAIModel)
            else choice or "auto",
            "tools": [{"strict": None, "parameters": None, **tool} for tool in tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.call.params.top_p,
            "truncation": body.truncation or "disabled",
            "dropped_messages": self.call.body.n_dropped,
            "usage": CallUsage(self.call.runs.replies).responses() if is_over else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _text_format_fields(self) -> Json:
        """Return the `text.format` of the response."""
        form = None if self.body.text is None else self.body.text.format
        if form is None:
            return {"type": "text"}
        return form.model_dump(exclude_none=True, by_alias=True)
