"""POST /v1/responses: one turn of text, without a memory of earlier ones."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError, model_validator

from ...errors import WeftError
from ...lm import LM
from ..asked import ERRORS
from ..errors import Refused, told_of
from ..service import Here
from . import logprobs
from .chat import ChatCall, ChatRequest
from .constraints import ConstraintFields, ResponseFormat, Schema, TextConstraint
from .events import OutputWriter
from .fields import Finite, OpenAIModel, StreamOptions
from .items import InputItem, as_messages
from .refusals import invalid, unsupported, without_switched_off
from .replies import ResponseEvent, ResponseObject, ok
from .runs import Runs
from .stream import answered
from .usage import CallUsage

router = APIRouter(prefix="/v1", tags=["openai"], responses=ERRORS)
Json = dict[str, Any]

_LOGPROBS = "message.output_text.logprobs"
# What a response would have to remember, or do, beyond one turn of text.
_ELSEWHERE = {
    "previous_response_id": "responses are not kept; send the whole conversation as input",
    "conversation": "conversations are not kept; send all of it as input",
    "prompt": "there are no stored prompts; send instructions and input",
    "background": "a response is made while its client waits",
    "max_tool_calls": "tools are called by the client, who can count them",
    "context_management": "nothing of the input is left out",
}
# As chat completions call it, to as it is called here.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class TextFormat(OpenAIModel):
    """The form of the answer."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(OpenAIModel):
    """What is said of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = Field(
        None, description='Only "medium" is taken: no model here reads it.'
    )


class ReasoningOptions(OpenAIModel):
    """What is said of the reasoning."""

    effort: str | None = Field(None, description="Where the chat template reads it; else refused.")


class ResponseTool(OpenAIModel):
    """A function that may be called; other tools are refused by their type."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(OpenAIModel):
    """The function that must be called."""

    type: Literal["function"]
    name: str = Field(min_length=1)


class ResponseRequest(ConstraintFields):
    """What a response is asked for; a parameter is honoured or refused by name."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1)] = Field(
        description="A text, or items: messages, calls, results of calls, reasoning."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Finite | None = Field(None, ge=0)
    top_p: Finite | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=128)
    tool_choice: Literal["auto", "none", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = Field(None, description=f'Only "{_LOGPROBS}".')
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["disabled"] | None = Field(
        None, description='Only "disabled": what is too long is refused.'
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Any = Field(None, description="Taken; changes nothing.")
    store: Any = Field(None, description="Taken; nothing is kept.")
    metadata: Any = Field(None, description="Told again in the answer; changes nothing.")
    service_tier: Any = Field(None, description="Taken; changes nothing.")
    safety_identifier: Any = Field(None, description="Taken; changes nothing.")
    prompt_cache_key: Any = Field(None, description="Taken; prefixes are found without a key.")
    prompt_cache_retention: Any = Field(None, description="Taken; changes nothing.")

    @model_validator(mode="before")
    @classmethod
    def _of_one_turn(cls, body: Any) -> Any:
        if not isinstance(body, Mapping):
            return body
        kept = without_switched_off(body)
        for name, why in _ELSEWHERE.items():
            if kept.get(name):
                raise unsupported(name, why)
            kept.pop(name, None)
        return kept

    def chat(self) -> ChatRequest:
        """Return the chat completion that this is. Raises: Refused, by the names here."""
        for each in self.include or ():
            if each != _LOGPROBS:
                raise unsupported("include", f"{each!r:.60} is not here; allowed is {_LOGPROBS!r}")
        wants_logprobs = _LOGPROBS in (self.include or ())
        if self.top_logprobs and not wants_logprobs:
            raise invalid("top_logprobs", f"top_logprobs: only with include: [{_LOGPROBS!r}]")
        body: Json = {
            "messages": as_messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_offered(each) for each in self.tools] if self.tools else None,
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            **self._constraints(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "logprobs": wants_logprobs or None,
            "top_logprobs": self.top_logprobs if wants_logprobs else None,
            "stream": self.stream,
        }
        try:
            return ChatRequest.model_validate(body)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error

    def _constraints(self) -> Json:
        """Return the fields of a chat completion that constrain the text. Raises: Refused."""
        self.text_constraint()
        given = {name: getattr(self, name) for name in ConstraintFields.model_fields}
        return {**given, "response_format": self.response_format or self._text_format()}

    def _text_constraints(self) -> Iterator[TextConstraint]:
        form = self._text_format()
        constraint = None if form is None else form.constraint()
        if constraint is not None:
            yield TextConstraint("text.format", constraint)
        yield from super()._text_constraints()

    def _text_format(self) -> ResponseFormat | None:
        """Return `text.format` in the shape of chat completions."""
        form = None if self.text is None else self.text.format
        if form is None:
            return None
        place = "json_schema" if form.type == "json_schema" else "schema"
        schema = {"schema": form.schema_} if form.type == "json_schema" else form.schema_
        return ResponseFormat.model_validate({"type": form.type, place: schema})


def _offered(tool: ResponseTool) -> Json:
    function = tool.model_dump(exclude_none=True, exclude={"type"})
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if isinstance(choice, ResponseToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


@router.post("/responses", response_model=None, responses=ok(ResponseObject, ResponseEvent))
async def respond(body: ResponseRequest, request: Request, service: Here) -> Response | Json:
    """Answer an input."""

    async def plan(lm: LM, name: str) -> ResponseCall:
        try:
            asked = body.chat()
            asked.check(service)
            return ResponseCall(body, await ChatCall.begin(asked, lm, name, service), name)
        except Refused as error:
            if error.param != "response_format" or body.response_format is None:
                error.param = _renamed(error.param)
            raise

    return await answered(
        request, service, "response", body.model, is_streamed=bool(body.stream), plan=plan
    )


def _renamed(param: str | None) -> str | None:
    if param is None:
        return None
    return re.sub(r"^[^.\[]+", lambda name: _NAMES.get(name[0], name[0]), param)


class ResponseCall:
    """One call on its way: a chat completion of one choice, told as output items."""

    def __init__(self, body: ResponseRequest, call: ChatCall, name: str) -> None:
        self.body = body
        self.call = call
        self.name = name
        self.id = f"resp_{secrets.token_hex(16)}"
        self.created = time.time()
        self.writer = OutputWriter()

    def let_go(self) -> None:
        """End what has not ended; the call is over."""
        self.call.let_go()

    @property
    def runs(self) -> Runs:
        """The one choice."""
        return self.call.runs

    async def answer(self) -> Json:
        """Run it and return the response."""
        await self.call.runs.finish()
        for _ in await self._new():
            pass
        return self._object(self._status())

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Run it and yield its events."""
        number = 0

        def event(kind: str, data: Json) -> Json:
            nonlocal number
            number += 1
            return {"type": kind, "sequence_number": number - 1, **data}

        try:
            yield event("response.created", {"response": self._object("in_progress")})
            yield event("response.in_progress", {"response": self._object("in_progress")})
            news = self.call.runs.news()
            try:
                async for _ in news:
                    for kind, data in await self._new():
                        yield event(kind, data)
            finally:
                await news.aclose()
            status = self._status()
            yield event(f"response.{status}", {"response": self._object(status)})
        except WeftError as error:
            told = told_of(error)[1]
            failed = {
                **self._object("failed"),
                "error": {"code": "server_error", "message": told["message"]},
            }
            yield event("response.failed", {"response": failed})

    async def _new(self) -> list[tuple[str, Json]]:
        """Return the events of what is new."""
        (reply,), (turn,) = self.call.runs.replies, self.call.turns
        first, tokens = reply.new_tokens()
        (figures,) = await self.call.figures([(reply, first, tokens)])
        made: list[tuple[str, Json]] = []
        for step in turn.steps(first, tokens, figures):
            told = logprobs.as_content(self.call.lm, step.figures if step.is_content else ())
            made += self.writer.write(step.said, told)
        return [*made, *self.writer.close(self._status())] if reply.is_over else made

    def _status(self) -> Literal["completed", "incomplete"]:
        (reply,) = self.call.runs.replies
        return "incomplete" if reply.finish_reason == "length" else "completed"

    def _object(self, status: str) -> Json:
        body = self.body
        is_over = status in ("completed", "incomplete")
        tools = [each.model_dump(exclude_none=True) for each in body.tools or ()]
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
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort},
            "store": False,
            "temperature": self.call.params.temperature,
            "text": {"format": self._format()},
            "tool_choice": choice.model_dump()
            if isinstance(choice, OpenAIModel)
            else choice or "auto",
            "tools": [{"strict": None, "parameters": None, **each} for each in tools],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self.call.params.top_p,
            "truncation": "disabled",
            "usage": CallUsage(self.call.runs.replies).responses() if is_over else None,
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _format(self) -> Json:
        form = None if self.body.text is None else self.body.text.format
        if form is None:
            return {"type": "text"}
        return form.model_dump(exclude_none=True, by_alias=True)
