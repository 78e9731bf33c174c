"""Ollama's API: `/api/chat`, `/api/generate`, and its routes about models."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError

from ... import __version__
from ...lm.lm import LM
from .dependencies import ERRORS
from .events import json_of
from .models import ServedModel
from .openai.chat import ChatCall, ChatRequest
from .openai.completions import Completion, CompletionRequest
from .openai.field_errors import invalid, translate_overflow, unsupported
from .openai.messages import reads_variable
from .openai.prompts import read_prompts
from .openai.request_fields import Finite, OpenAIModel, ProtocolRequest
from .openai.runs import Runs
from .openai.stream import StreamFormat, run_call
from .openai.turns import ChatDelta
from .openai.usage import CallUsage
from .service import Service, ServiceDep

Json = dict[str, Any]


class OllamaError(BaseModel):
    """An error in Ollama's form."""

    error: str


_ERRORS: dict[int | str, Json] = {
    status: {**described, "model": OllamaError} for status, described in ERRORS.items()
}
_LINES: dict[int | str, Json] = {200: {"content": {"application/x-ndjson": {}}}}


class JsonRoute(APIRoute):
    """Read every body as JSON, as Ollama does: its examples use `curl -d` without a header."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the route's handler with the content type replaced by JSON."""
        handle = super().get_route_handler()

        async def read_as_json(request: Request) -> Response:
            headers = [(k, v) for k, v in request.scope["headers"] if k != b"content-type"]
            scope = {**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}
            return await handle(Request(scope, request.receive))

        return read_as_json


router = APIRouter(prefix="/api", tags=["ollama"], route_class=JsonRoute, responses=_ERRORS)


def _json_line(chunk: Json) -> bytes:
    """Encode a chunk as one line of JSON."""
    return f"{json_of(chunk)}\n".encode("utf-8", "replace")


_NOTHING = ChatDelta("", "", ())
_NDJSON = StreamFormat("application/x-ndjson", _json_line, None, b"")
_SAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop")
_PENALTIES = {
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "penalty_last_n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


class OllamaOptions(ProtocolRequest):
    """Sampling parameters. Ollama's loading options have no effect; see `known_fields`."""

    temperature: Finite | None = Field(None, ge=0)
    num_predict: int | None = Field(
        None, ge=-2, description="Maximum of new tokens; below 0: the context's rest."
    )
    stop: str | list[str] | None = None
    seed: int | None = None
    top_k: int | None = Field(None, ge=0)
    top_p: Finite | None = None
    min_p: Finite | None = None
    typical_p: Finite | None = None
    repeat_penalty: Finite | None = None
    repeat_last_n: int | None = Field(None, ge=-1, description="0: no penalties.")
    presence_penalty: Finite | None = None
    frequency_penalty: Finite | None = None
    num_ctx: int | None = Field(None, description="At most the loaded model's context length.")

    def sampling(self) -> Json:
        """Return the sampling parameters as chat completions take them."""
        fields = {name: getattr(self, name) for name in _SAME}
        if self.repeat_last_n != 0:
            fields |= {right: getattr(self, name) for name, right in _PENALTIES.items()}
        return fields

    def max_new_tokens(self, lm: LM) -> int:
        """Return the maximum of new tokens. Raises: RequestError if num_ctx exceeds the context."""
        if (self.num_ctx or 0) > lm.n_ctx:
            raise invalid(
                "options.num_ctx",
                f"options.num_ctx is {self.num_ctx}; the loaded model has {lm.n_ctx}: load it with"
                " a larger --n-ctx",
            )
        n = self.num_predict
        return lm.n_ctx if n is None or n < 0 else max(n, 1)


class OllamaRequest(ProtocolRequest):
    """Fields of both calls; every parameter is either honoured or rejected by name."""

    model: str | None = None
    stream: bool | None = Field(None, description="Default: true.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description='"json" or a JSON schema.'
    )
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None

    @property
    def given_options(self) -> OllamaOptions:
        """The options; without values if the request has none."""
        return self.options or OllamaOptions.model_validate({})

    def shared(self) -> Json:
        """Return the fields that completions and chat completions share."""
        fields = {**self.given_options.sampling(), "stream": True}
        if self.format:
            schema = {"type": "object"} if self.format == "json" else self.format
            schema_field = {"name": "answer", "schema": schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema_field}
        return fields

    async def chat(self, messages: list[Json], tools: Any, lm: LM, service: Service) -> ChatCall:
        """Plan the call as a chat completion. Raises: RequestError.

        messages, tools: as chat completions take them.
        """
        kwargs = None
        if self.think is True or (self.think is False and reads_variable(lm, "enable_thinking")):
            kwargs = {"enable_thinking": self.think}
        body: Json = {
            **self.shared(),
            "messages": messages,
            "tools": tools,
            "max_completion_tokens": self.given_options.max_new_tokens(lm),
            "chat_template_kwargs": kwargs,
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
        }
        try:
            request = ChatRequest.model_validate(body)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from error
        request.check(service)
        name = service.models.name_of(lm)
        with translate_overflow("messages"):
            return await ChatCall.create(request, lm, name, service, fits_context=True)


class OllamaMessage(OpenAIModel):
    """A message of a chat: a role, and content or tool calls."""

    role: str = Field(min_length=1)
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = Field(None, max_length=0)
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None

    def plain(self) -> Json:
        """Return the message as a dict with the fields of a chat completion's message."""
        message: Json = {"role": self.role, "content": self.content, "name": self.tool_name}
        message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [_as_call(call) for call in self.tool_calls]
        return message


def _as_call(call: Json) -> Json:
    """Convert a tool call in Ollama's form to that of chat completions."""
    function = dict(call.get("function") or {})
    function.pop("index", None)
    function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "type": "function", "function": function}


class OllamaChat(OllamaRequest):
    """Request of a chat; without messages it only checks that the model is loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(OllamaRequest):
    """Request of a completion; without a prompt it only checks that the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = Field(None, description="true: no chat template.")

    async def plan_raw(self, lm: LM, service: Service) -> Completion:
        """Plan the call as a completion without a chat template. Raises: RequestError."""
        for name in ("system", "think"):
            if getattr(self, name):
                raise unsupported(name, "not with raw: true")
        with translate_overflow("prompt"):
            (prompt,) = read_prompts(lm, self.prompt)
        room = max(lm.n_ctx - len(prompt.ids), 1)
        n = min(self.given_options.max_new_tokens(lm), room, service.config.limits.tokens)
        body = {**self.shared(), "prompt": prompt.ids, "max_tokens": n}
        request = CompletionRequest.model_validate(body)
        request.check(service)
        return await Completion.create(request, lm, service.models.name_of(lm), service)

    async def plan(self, lm: LM, service: Service) -> ChatCall | Completion:
        """Plan the call: a completion if `raw` is set, else a chat of one user message.

        Raises: RequestError.
        """
        if self.raw:
            return await self.plan_raw(lm, service)
        messages: list[Json] = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return await self.chat(messages, None, lm, service)


def _model_id(model: str | None) -> str | None:
    """Return the model's name without the tag ":latest", which Ollama's clients add."""
    return None if model is None else model.removesuffix(":latest")


@router.post("/chat", response_model=None, responses=_LINES)
async def chat(body: OllamaChat, request: Request, service: ServiceDep) -> Response | Json:
    """Answer a chat."""

    async def plan(lm: LM, name: str) -> OllamaCall:
        messages = [message.plain() for message in body.messages or ()]
        return OllamaCall(body, await body.chat(messages, body.tools, lm, service))

    if not body.messages:
        return _loaded_response(body, service)
    return await _run(body, request, service, plan)


@router.post("/generate", response_model=None, responses=_LINES)
async def generate(body: OllamaGenerate, request: Request, service: ServiceDep) -> Response | Json:
    """Continue a prompt."""

    async def plan(lm: LM, name: str) -> OllamaCall:
        return OllamaCall(body, await body.plan(lm, service))

    if not body.prompt:
        return _loaded_response(body, service)
    return await _run(body, request, service, plan)


async def _run(
    body: OllamaRequest, request: Request, service: Service, plan: Any
) -> Response | Json:
    """Plan and run a call, and return its answer or its stream of JSON lines."""
    return await run_call(
        request,
        service,
        "ollama",
        _model_id(body.model),
        is_streamed=body.stream is not False,
        plan=plan,
        format=_NDJSON,
    )


def _loaded_response(body: OllamaRequest, service: Service) -> Json:
    """Return the answer to a request without a prompt, which only loads a model."""
    service.models.lm(_model_id(body.model))
    return {**_chunk(body, _NOTHING), "done": True, "done_reason": "load"}


def _ollama_time(seconds: float) -> str:
    """Format a Unix time as Ollama does, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _chunk(body: OllamaRequest, delta: ChatDelta) -> Json:
    """Return a chunk of a stream, in the form of the route."""
    head: Json = {"model": body.model, "created_at": _ollama_time(time.time())}
    thinking = {"thinking": delta.reasoning} if delta.reasoning else {}
    if isinstance(body, OllamaGenerate):
        return {**head, "response": delta.content, **thinking}
    message: Json = {"role": "assistant", "content": delta.content, **thinking}
    if delta.calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in delta.calls
        ]
    return {**head, "message": message}


class OllamaCall:
    """A planned call in Ollama's format: a chat, or a completion without a template."""

    def __init__(self, body: OllamaRequest, call: ChatCall | Completion) -> None:
        self._body, self._call = body, call
        self._began = time.perf_counter_ns()

    @property
    def runs(self) -> Runs:
        """The choices of the call, for metrics."""
        return self._call.runs

    def release(self) -> None:
        """Cancel the choice if it is saved in a loom, and commit it; see `Runs.release`."""
        self._call.release()

    async def answer(self) -> Json:
        """Run the call and return the complete answer, with its token counts and times."""
        async for _ in self.runs.updates():
            pass
        return {**self._chunk(self._new_delta()), **self._final_fields()}

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Run the call and yield the new parts of the answer; the last chunk has the counts."""
        async with aclosing(self.runs.updates()) as updates:
            async for _ in updates:
                if delta := self._new_delta():
                    yield {**self._chunk(delta), "done": False}
        yield {**self._chunk(_NOTHING), **self._final_fields()}

    def _chunk(self, delta: ChatDelta) -> Json:
        """Return a chunk of the stream for the new part of an answer."""
        return _chunk(self._body, delta)

    def _new_delta(self) -> ChatDelta:
        """Return the part of the answer that has become final since the last call."""
        if isinstance(self._call, ChatCall):
            return self._call.turns[0].new()
        return ChatDelta(self.runs.replies[0].piece(), "", ())

    def _final_fields(self) -> Json:
        """Return the fields of the last chunk: reason of the end, token counts and times."""
        usage = CallUsage(self.runs.replies)
        total = time.perf_counter_ns() - self._began
        first = min(int(1e9 * (self.runs.first_token_s or 0.0)), total)
        return {
            "done": True,
            "done_reason": self.runs.replies[0].finish_reason,
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first,
            "eval_count": usage.completion_tokens,
            "eval_duration": total - first,
        }


# About models


class ShowRequest(OpenAIModel):
    """The model to describe, for `/api/show`."""

    model: str
    verbose: bool | None = None


@router.get("/version")
async def version() -> dict[str, str]:
    """Return Weft's version."""
    return {"version": __version__}


@router.get("/ps")
@router.get("/tags")
async def tags(service: ServiceDep) -> dict[str, list[Json]]:
    """List the loaded models."""
    return {"models": [_model_entry(model) for model in service.models if model.lm is not None]}


@router.post("/show")
async def show(body: ShowRequest, service: ServiceDep) -> Json:
    """Describe a model."""
    model = service.models.get(_model_id(body.model))
    lm = model.ready()
    capabilities = [
        name
        for name, is_supported in (
            ("tools", lm.text.tool_form is not None),
            ("thinking", reads_variable(lm, "enable_thinking")),
        )
        if is_supported
    ]
    return {
        "details": _DETAILS,
        "modified_at": _ollama_time(model.created),
        "template": lm.text.chat_template or "",
        "model_info": {"general.architecture": "weft", "weft.context_length": lm.n_ctx},
        "capabilities": ["completion", *capabilities],
    }


_DETAILS: Json = {"format": "", "family": "", "families": [], "parameter_size": ""}


def _model_entry(model: ServedModel) -> Json:
    """Return a model as `/api/tags` lists it."""
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _ollama_time(model.created),
        "size": model.n_bytes,
        "size_vram": model.n_bytes,
        "digest": "",
        "details": _DETAILS,
    }
