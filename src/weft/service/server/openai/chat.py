"""POST /v1/chat/completions: an assistant's next turn."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, PrivateAttr

from ...._core.sampling.params import SamplingParams
from ....errors import ContextOverflow
from ....lm.chat import ChatPrompt
from ....lm.lm import LM
from ....loom import Heddle, Loom
from ..dependencies import ERRORS
from ..limits import check_limit
from ..service import Service, ServiceDep
from ..ticker import Ticker
from . import logprobs
from .constraints import ConstraintFields
from .field_errors import check_field, check_room, invalid, translate_overflow, unsupported
from .logprobs import LogprobsRequest, ScoredToken
from .messages import ChatMessage, TemplateFields, chat_prompt, latest_turns
from .persistence import SavedCompletion, open_target_node, should_save
from .protocol import ChatCompletion, ChatCompletionChunk, StreamError, ok
from .request_fields import GeneratingRequest
from .runs import ChoiceRun, Runs
from .stream import run_call
from .tools import OfferedTool, ToolChoice, answer_constraint, call_object, resolve_tool_choice
from .turns import ChatDelta, ChatTurn
from .usage import CallUsage

router = APIRouter(prefix="/v1", tags=["openai"], responses=ERRORS)
Json = dict[str, Any]

_MAX_TOP = 20  # OpenAI's maximum of alternatives


class ChatRequest(ConstraintFields, GeneratingRequest):
    """Request of a chat completion; every parameter is either honoured or rejected by name."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, ge=-1, description="Maximum of new tokens; default and -1: the context's rest."
    )
    logprobs: bool | None = Field(None, description="Return the logprob of every token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=_MAX_TOP, description="Number of alternatives per token."
    )
    tools: list[OfferedTool] | None = Field(None, max_length=128)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(
        None,
        description="false: one call per turn. null: false if the chat template has no tools.",
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message, an assistant's, instead of a new turn."
    )
    add_generation_prompt: bool | None = Field(
        None, description="false: the prompt ends after the last message."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )
    enable_thinking: bool | None = Field(
        None, description="As in chat_template_kwargs; every template accepts false."
    )
    reasoning_effort: str | None = Field(
        None,
        description="For chat templates with it or enable_thinking; else none or minimal.",
    )
    verbosity: str | None = Field(
        None, description='For chat templates with this variable; else only "medium".'
    )
    modalities: list[Literal["text"]] | None = None
    _drops_turns: bool = PrivateAttr(False)
    _n_dropped: int = PrivateAttr(0)

    def check(self, service: Service) -> None:
        """Raise RequestError for parameters that are not supported together or exceed a limit."""
        self.check_options()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs: only with logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            if self.max_tokens != self.max_completion_tokens:
                raise invalid(
                    "max_tokens", "max_tokens and max_completion_tokens differ; give one of them"
                )
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0:
                raise invalid(name, f"{name} is 0; it must be 1 or more")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid(
                "add_generation_prompt",
                "add_generation_prompt: not with continue_final_message; leave it out",
            )
        limits = service.config.limits
        check_limit("n", self.n_choices, min(limits.n, limits.branches), "n_too_large")
        check_limit("top_logprobs", self.top_logprobs or 0, limits.top)
        check_limit("prompt_logprobs", self.prompt_logprobs or 0, limits.top)
        check_limit("max_tokens", self.max_new_tokens or 0, limits.tokens)

    @property
    def max_new_tokens(self) -> int | None:
        """Maximum number of new tokens; None for what the context has room for."""
        given = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return None if given == -1 else given

    def drop_turns(self) -> None:
        """Let `prompt` drop the oldest turns of a conversation that is too long."""
        self._drops_turns = True

    @property
    def n_dropped(self) -> int:
        """Number of messages that `prompt` dropped."""
        return self._n_dropped

    def prompt(self, lm: LM) -> ChatPrompt:
        """Render the messages with the model's chat template and return the prompt.

        Raises: RequestError.
        """
        messages = [message.plain(number) for number, message in enumerate(self.messages)]
        if not self._drops_turns:
            return self._prompt_of(lm, messages)
        n_new = self.max_new_tokens or 1

        def fits(latest: Sequence[Json]) -> bool:
            try:
                return len(self._prompt_of(lm, latest).ids) + n_new <= lm.n_ctx
            except ContextOverflow:
                return False

        latest = latest_turns(messages, fits)
        self._n_dropped = len(messages) - len(latest)
        return self._prompt_of(lm, latest)

    def _prompt_of(self, lm: LM, messages: Sequence[Json]) -> ChatPrompt:
        """Render these messages as a prompt. Raises: RequestError."""
        tools = [tool.plain() for tool in self.tools or ()]
        # With "none" the prompt has no tools, as the model may not call any.
        offered = tools if self.tool_choice != "none" else []
        return chat_prompt(
            lm,
            messages,
            tools=offered or None,
            fields=TemplateFields(
                self.chat_template_kwargs or {},
                self.enable_thinking,
                self.reasoning_effort,
                self.verbosity,
            ),
            add_generation_prompt=self.add_generation_prompt is not False,
            continues=bool(self.continue_final_message),
        )


@router.post(
    "/chat/completions",
    response_model=None,
    responses=ok(ChatCompletion, ChatCompletionChunk, StreamError),
)
async def chat(body: ChatRequest, request: Request, service: ServiceDep) -> Response | Json:
    """Answer a chat."""
    body.check(service)

    async def plan(lm: LM, name: str) -> ChatCall:
        with translate_overflow("messages", body.max_new_tokens or 0):
            return await ChatCall.create(body, lm, name, service)

    return await run_call(
        request, service, "chat", body.model, is_streamed=bool(body.stream), plan=plan
    )


class ChatCall:
    """A planned call of /v1/chat/completions, with the methods of `PlannedCall`."""

    body: ChatRequest
    lm: LM
    ticker: Ticker
    prompt: ChatPrompt
    root: Loom
    start: Heddle  # the parent of the choices
    params: SamplingParams
    runs: Runs
    turns: list[ChatTurn]
    logprobs: LogprobsRequest | None
    head: Json
    reads_calls: bool
    has_format: bool  # a constraint applies to the text of the turn

    @classmethod
    async def create(
        cls,
        body: ChatRequest,
        lm: LM,
        name: str,
        service: Service,
        *,
        fits_context: bool = False,
    ) -> ChatCall:
        """Check the request, render its prompt, and plan the choices. Nothing is generated yet.

        name: the model's name, for the answer.
        fits_context: reduce max_tokens to what the context has room for, instead of rejecting it.
        """
        # Tokenizing a long chat takes a while; in a thread it does not delay other calls.
        prompt = await asyncio.to_thread(body.prompt, lm)
        body.check_prompt_length(len(prompt.ids))
        choice = resolve_tool_choice(body.tool_choice, prompt.tools)
        form = body.text_constraint()
        constraint = await answer_constraint(
            lm,
            prompt,
            choice,
            None if form is None else await form.compile(lm, prompt),
            strict=[tool.function.name for tool in body.tools or () if tool.function.strict],
            parallel=body.parallel_tool_calls,
        )
        call = cls()
        call.body, call.lm, call.prompt, call.reads_calls = body, lm, prompt, choice is not None
        call.has_format = form is not None
        call.ticker = service.ticker
        call.root = check_field("messages", lambda: Loom(lm, prompt))
        room = max(lm.n_ctx - len(prompt.ids), 1)
        max_tokens = (
            min(room, service.config.limits.tokens)
            if body.max_new_tokens is None
            else body.max_new_tokens
        )
        if fits_context:
            max_tokens = min(max_tokens, room)
        elif body.max_new_tokens is not None:
            check_room(len(prompt.ids), max_tokens, lm.n_ctx)
        call.params = body.sampling(
            lm, lm.chat_defaults, max_tokens=max_tokens, constraint=constraint
        )
        if body.skip_special_tokens and choice is not None:
            raise unsupported(
                "skip_special_tokens",
                "tool calls may contain special tokens; leave out one of the two",
            )
        if should_save(body.loom, 1):
            assert body.loom is not None
            root = call.root
            user_text = prompt.user_prompt
            async with open_target_node(
                service, body.loom, name, prompt.ids, lambda: root, user_text
            ) as saved:
                call.plan(saved)
                await call.runs.begin_saving()
        else:
            call.plan(None)
        call.logprobs = None
        if body.logprobs:
            token_ids = () if body.loom is None else tuple(body.loom.logprob_tokens or ())
            call.logprobs = LogprobsRequest(body.top_logprobs or 0, token_ids)
        needs_prompt = body.prompt_logprobs is not None
        logprobs.check_logprobs_supported(lm, body.top_logprobs or 0, needs_prompt=needs_prompt)
        call.head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": name,
        }
        return call

    def plan(self, saved: SavedCompletion | None) -> None:
        """Plan the choices, without starting them. saved: where to save them; None: nowhere."""
        self.start = self.root if saved is None else saved.node
        self.runs = Runs(
            self.lm,
            [self.start],
            self.params,
            self.body.n_choices,
            ticker=self.ticker,
            is_streamed=bool(self.body.stream),
            skips_special=bool(self.body.skip_special_tokens),
            keeps_stop=bool(self.body.include_stop_str_in_output),
            saved=saved,
        )
        self.turns = [
            ChatTurn(self.prompt, reply, reads_calls=self.reads_calls, has_format=self.has_format)
            for reply in self.runs.replies
        ]

    def release(self) -> None:
        """Cancel the choices if they are saved in a loom, and commit them; see `Runs.release`."""
        self.runs.release()

    # Complete answers

    async def answer(self) -> ChatCompletion:
        """Run the call and return the complete answer."""
        await self.runs.finish()
        parts = [(reply, *reply.new_tokens()) for reply in self.runs.replies]
        scored = await self.score(parts)
        pairs = zip(self.turns, scored, strict=True)
        return ChatCompletion.model_validate(
            {
                **self.head,
                "choices": [self._choice(turn, scores) for turn, scores in pairs],
                "usage": CallUsage(self.runs.replies).chat(),
                **await self._prompt_fields(),
            }
        )

    def _choice(self, turn: ChatTurn, scored: Sequence[ScoredToken]) -> Json:
        """Return one choice of the answer. scored: its tokens' logprobs, empty if not requested."""
        delta, reply = turn.all(), turn.reply
        message: Json = {"role": "assistant", "content": delta.content, "refusal": None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["content"] = delta.content or None
            message["tool_calls"] = [call_object(call) for call in delta.calls]
        choice: Json = {
            "index": reply.index,
            "message": message,
            "logprobs": self._chat_logprobs(scored),
            "finish_reason": turn.finish_reason(len(delta.calls)),
        }
        if self.body.return_token_ids:
            choice["token_ids"] = reply.tokens
        return choice

    async def score(
        self, parts: Sequence[tuple[ChoiceRun, int, Sequence[int]]]
    ) -> list[list[ScoredToken]]:
        """Return the scores of tokens of choices; an empty list for each part if not requested.

        parts: as for `logprobs.of_replies`.
        """
        if self.logprobs is None:
            return [[] for _ in parts]
        return await logprobs.of_replies(self.lm, parts, self.logprobs)

    def _chat_logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        """Return the `logprobs` of a choice; None if they are not requested."""
        if self.logprobs is None:
            return None
        return {"content": logprobs.chat_logprobs(self.lm, scored), "refusal": None}

    async def _prompt_fields(self) -> Json:
        """Return the answer's fields about the prompt: its logprobs, and the dropped turns."""
        fields: Json = {} if self.body.loom is None else {"loom": self.runs.to_dict()}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = self.start.get_prefix_tokens()
        if self.body.prompt_logprobs is not None:
            request = LogprobsRequest(self.body.prompt_logprobs)
            (scored,) = await logprobs.of_prompts(self.lm, [self.start.place], request)
            fields["prompt_logprobs"] = logprobs.prompt_logprobs_entries(self.lm, scored)
        return fields

    # Streams

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Run the call and yield the chunks of the stream. A chunk has a part of one choice."""
        usage = {"usage": None} if self.body.includes_usage else {}
        first = await self._prompt_fields()
        for reply in self.runs.replies:
            choice = _chunk_choice(reply, {"role": "assistant", "content": ""})
            yield {**self.head, "choices": [choice], **first, **usage}
            first = {}
        async with aclosing(self.runs.updates()) as updates:
            async for moved in updates:
                for choice in await self._new_choices(moved):
                    yield {**self.head, "choices": [choice], **usage}
        if usage:
            yield {**self.head, "choices": [], "usage": CallUsage(self.runs.replies).chat()}

    async def _new_choices(self, changed: Sequence[ChoiceRun]) -> list[Json]:
        """Return stream choices with the parts of turns that became final since the last call.

        changed: the generated choices that have new tokens or have ended.
        """
        parts = [(reply, *reply.new_tokens()) for reply in changed]
        scores = await self.score(parts)
        choices = []
        for (reply, first, tokens), scored in zip(parts, scores, strict=True):
            turn = self.turns[reply.index]
            n_calls = turn.n_calls
            for step in turn.steps(first, tokens, scored):
                delta = _delta(step.delta, n_calls)
                n_calls += len(step.delta.calls)
                if delta or step.scored or (self.body.return_token_ids and step.tokens):
                    choice = _chunk_choice(reply, delta, self._chat_logprobs(step.scored))
                    if self.body.return_token_ids:
                        choice["token_ids"] = list(step.tokens)
                    choices.append(choice)
            if reply.is_over:
                reason = turn.finish_reason(turn.n_calls)
                choices.append({**_chunk_choice(reply, {}), "finish_reason": reason})
        return choices


def _chunk_choice(reply: ChoiceRun, delta: Json, logprobs_object: Json | None = None) -> Json:
    """Return a choice of a stream's chunk."""
    return {
        "index": reply.index,
        "delta": delta,
        "logprobs": logprobs_object,
        "finish_reason": None,
    }


def _delta(delta: ChatDelta, n_before: int) -> Json:
    """Convert the new part of a turn to OpenAI's `delta`. n_before: number of calls sent before."""
    fields: Json = {}
    if delta.content:
        fields["content"] = delta.content
    if delta.reasoning:
        fields["reasoning_content"] = delta.reasoning
    if delta.calls:
        fields["tool_calls"] = [
            {"index": n_before + number, **call_object(call)}
            for number, call in enumerate(delta.calls)
        ]
    return fields
