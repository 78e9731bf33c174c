"""POST /v1/completions: continuations of prompts."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, field_validator

from ...._core.sampling.params import SamplingParams
from ....constraints import Constraint
from ....lm.lm import LM
from ..dependencies import ERRORS
from ..limits import check_limit
from ..service import Service, ServiceDep
from . import logprobs
from .constraints import ConstraintFields
from .field_errors import check_room, invalid, translate_overflow, unsupported
from .logprobs import LogprobsRequest, ScoredToken
from .persistence import SavedCompletion, open_target_node, should_save
from .prompts import TextPrompt, is_short, n_tokens, read_prompts
from .protocol import StreamError, TextCompletion, TextCompletionChunk, ok
from .request_fields import GeneratingRequest, TokenId, check_one_kind
from .runs import ChoiceRun, Runs
from .stream import run_call
from .usage import CallUsage

router = APIRouter(prefix="/v1", tags=["openai"], responses=ERRORS)
Json = dict[str, Any]

_MAX_TOKENS = 16  # OpenAI's default
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
TokenLists = Annotated[list[TokenIds], Field(min_length=1)]
Texts = Annotated[list[str], Field(min_length=1)]


class CompletionRequest(ConstraintFields, GeneratingRequest):
    """Request of a completion; every parameter is either honoured or rejected by name."""

    prompt: str | Texts | TokenIds | TokenLists | None = Field(
        None,
        description="A text, texts, token ids, or lists of them. Default: an empty text, if the"
        " model has a begin token.",
    )
    add_special_tokens: bool | None = Field(
        None, description="false: no begin token before a text."
    )
    best_of: int | None = Field(
        None,
        ge=1,
        description="Choices to generate; the n with the highest mean logprob are returned.",
    )
    logprobs: int | None = Field(None, ge=0, description="Number of alternatives per token.")
    echo: bool | None = Field(None, description="Prepend the prompt to each choice.")
    suffix: str | None = Field(None, description="Not supported: only an empty text is accepted.")

    @property
    def n_run(self) -> int:
        """Number of choices to generate for a prompt: `best_of` if it is set, else `n`."""
        return self.n_choices if self.best_of is None else self.best_of

    @property
    def n_new(self) -> int:
        """Maximum number of new tokens of a choice; -1: all that the context has room for."""
        return _MAX_TOKENS if self.max_tokens is None else self.max_tokens

    _one_kind = field_validator("prompt", mode="before")(check_one_kind)

    def check(self, service: Service) -> None:
        """Raise RequestError for parameters that are not supported together or exceed a limit."""
        self.check_options()
        if self.suffix:
            raise unsupported("suffix", "fill-in-the-middle is not supported; leave it out")
        if self.n_run < self.n_choices:
            raise invalid("best_of", f"best_of is {self.best_of}; it must be n or more")
        if self.stream and self.n_run > self.n_choices:
            raise invalid(
                "best_of", "best_of cannot be streamed: the best choices are known only at the end"
            )
        limits = service.config.limits
        check_limit("n" if self.best_of is None else "best_of", self.n_run, limits.n, "n_too_large")
        check_limit("max_tokens", self.n_new, limits.tokens)
        check_limit("logprobs", self.logprobs or 0, limits.top)
        check_limit("prompt_logprobs", self.prompt_logprobs or 0, limits.top)


@router.post(
    "/completions",
    response_model=None,
    responses=ok(TextCompletion, TextCompletionChunk, StreamError),
)
async def complete(
    body: CompletionRequest, request: Request, service: ServiceDep
) -> Response | Json:
    """Continue prompts."""
    body.check(service)

    async def plan(lm: LM, name: str) -> Completion:
        with translate_overflow("prompt", max(body.n_new, 0)):
            return await Completion.create(body, lm, name, service)

    return await run_call(
        request, service, "completion", body.model, is_streamed=bool(body.stream), plan=plan
    )


class Completion:
    """A planned call of /v1/completions, with the methods of `PlannedCall`."""

    @classmethod
    async def create(
        cls, body: CompletionRequest, lm: LM, name: str, service: Service
    ) -> Completion:
        """Check the request, tokenize its prompts, and plan the choices. Nothing is generated yet.

        name: the model's name, for the answer. Raises: RequestError.
        """
        adds_begin = body.add_special_tokens is not False
        read = partial(read_prompts, lm, body.prompt, adds_begin=adds_begin)
        # Tokenizing a long prompt takes a while; in a thread it does not delay other calls.
        prompts = read() if is_short(body.prompt) else await asyncio.to_thread(read)
        given = body.text_constraint()
        constraint = None if given is None else await given.compile(lm)
        call = cls(body, lm, name, prompts, service, constraint)
        is_path = body.prompt is None and body.loom is not None and body.loom.loom is not None
        if not is_path:
            call._check_room()
        if not should_save(body.loom, len(prompts)):
            call.runs = call.plan(None)
            return call
        assert body.loom is not None
        (prompt,) = prompts
        ids = None if is_path else prompt.ids
        exact = not prompt.is_text
        async with open_target_node(
            service, body.loom, name, ids, prompt.loom, is_exact=exact
        ) as saved:
            path = saved.node.get_prefix_tokens()
            if is_path:
                call.prompts = [TextPrompt(lm, path, None)]
            call.prompts[0].ids, call.prompts[0].node = path, saved.node
            if is_path:
                call._check_room()
            call.runs = call.plan(saved)
            await call.runs.begin_saving()
        return call

    def __init__(
        self,
        body: CompletionRequest,
        lm: LM,
        name: str,
        prompts: list[TextPrompt],
        service: Service,
        constraint: Constraint | None,
    ) -> None:
        """Check the request; `plan` plans the choices.

        constraint: the compiled constraint of the choices; None without one.
        """
        self.body = body
        self.lm = lm
        self.ticker = service.ticker
        self.prompts = prompts
        body.check_prompt_length(max(len(prompt.ids) for prompt in self.prompts))
        n = body.n_run * len(self.prompts)
        check_limit("n", n, service.config.limits.branches, "n_too_large")
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        self.logprobs: LogprobsRequest | None = None
        if body.logprobs is not None:
            token_ids = () if body.loom is None else tuple(body.loom.logprob_tokens or ())
            self.logprobs = LogprobsRequest(body.logprobs, token_ids)
        logprobs.check_logprobs_supported(lm, body.logprobs or 0, needs_prompt=self.reads_prompt)
        max_tokens = body.n_new
        if max_tokens < 0:
            shortest = min(len(prompt.ids) for prompt in self.prompts)
            max_tokens = min(max(lm.n_ctx - shortest, 1), service.config.limits.tokens)
        self.params = body.sampling(
            lm, SamplingParams(), max_tokens=max_tokens, constraint=constraint
        )

    runs: Runs

    def _check_room(self) -> None:
        """Raise ContextOverflow if a prompt and `max_tokens` exceed the context."""
        longest = max(len(prompt.ids) for prompt in self.prompts)
        check_room(longest, max(self.body.n_new, 0), self.lm.n_ctx)

    def plan(self, saved: SavedCompletion | None) -> Runs:
        """Plan the choices, without starting them. saved: where to save them; None: nowhere."""
        return Runs(
            self.lm,
            [prompt.node for prompt in self.prompts],
            self.params,
            self.body.n_run if self.body.n_new else 0,
            ticker=self.ticker,
            is_streamed=bool(self.body.stream),
            skips_special=bool(self.body.skip_special_tokens),
            keeps_stop=bool(self.body.include_stop_str_in_output),
            saved=saved,
        )

    def release(self) -> None:
        """Cancel the choices if they are saved in a loom, and commit them; see `Runs.release`."""
        self.runs.release()

    @property
    def reads_prompt(self) -> bool:
        """True if the model must score the tokens of the prompt, for their logprobs."""
        return self.body.prompt_logprobs is not None or bool(
            self.body.echo and self.body.logprobs is not None
        )

    # Complete answers

    async def answer(self) -> TextCompletion:
        """Run the call and return the complete answer."""
        await self.runs.finish()
        prompt_scores = await self._score_prompts()
        replies = self._returned()
        parts = [self._new_tokens(reply) for reply in replies]
        scores = await self._score(parts)
        if replies:
            pairs = enumerate(zip(replies, scores, strict=True))
            choices = [
                self._choice(i, r.prompt, r, scored, prompt_scores) for i, (r, scored) in pairs
            ]
        else:  # max_tokens is 0
            numbers = range(len(self.prompts) * self.body.n_choices)
            n = self.body.n_choices
            choices = [self._choice(i, i // n, None, (), prompt_scores) for i in numbers]
        loom = {} if self.body.loom is None else {"loom": self.runs.to_dict()}
        return TextCompletion.model_validate(
            {**self._head, "choices": choices, "usage": self._usage(), **loom}
        )

    def _returned(self) -> list[ChoiceRun]:
        """Return the choices of the answer: for each prompt, the n likeliest ones of `best_of`."""
        body, replies = self.body, self.runs.replies
        if body.n_run == body.n_choices:
            return replies
        best: list[ChoiceRun] = []
        for prompt in range(len(self.prompts)):
            own = [reply for reply in replies if reply.prompt == prompt]
            best += sorted(own, key=lambda reply: -reply.node.mean_logprob)[: body.n_choices]
        return best

    def _choice(
        self,
        index: int,
        prompt: int,
        reply: ChoiceRun | None,
        scored: Sequence[ScoredToken],
        prompt_scores: Sequence[list[ScoredToken]],
    ) -> Json:
        """Return a choice as the answer has it.

        Args:
            index: its index in the answer.
            prompt: the index of its prompt.
            reply: the generated choice; None for one that is only the echoed prompt, or empty.
            scored: scores of its tokens; empty if logprobs are not requested.
            prompt_scores: scores of each prompt's tokens.
        """
        echo = self.prompts[prompt].text if self.body.echo else ""
        head = self._echoed_scores(prompt, prompt_scores)
        choice: Json = {
            "index": index,
            "text": echo + ("" if reply is None else reply.text),
            "logprobs": None,
            "finish_reason": "length" if reply is None else reply.finish_reason,
        }
        if self.logprobs is not None:
            offsets = self.prompts[prompt].offsets() if head else []
            offsets += [] if reply is None else self._offsets(reply, 0, len(scored))
            choice["logprobs"] = logprobs.completion_logprobs(self.lm, [*head, *scored], offsets)
        if self.body.return_token_ids:
            choice["prompt_token_ids"] = self.prompts[prompt].ids
            choice["token_ids"] = [] if reply is None else reply.tokens
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = logprobs.prompt_logprobs_entries(
                self.lm, prompt_scores[prompt]
            )
        return choice

    def _echoed_scores(
        self, prompt: int, prompt_scores: Sequence[list[ScoredToken]]
    ) -> Sequence[ScoredToken]:
        """Return the scores of the prompt's tokens, if the answer echoes them."""
        return prompt_scores[prompt] if self.body.echo and self.logprobs is not None else ()

    def _new_tokens(self, reply: ChoiceRun) -> tuple[ChoiceRun, int, list[int]]:
        """Return (choice, index of its first new token, new tokens), as `of_replies` takes them.

        With `echo` the end token is one of them: evaluation harnesses request one extra token and
        drop the last.
        """
        first, tokens = reply.new_tokens()
        ended_by = reply.ended_by if self.body.echo and reply.is_over else None
        if ended_by is not None and reply.n_prompt + reply.n_sent < self.lm.n_ctx:
            tokens.append(ended_by)
        return reply, first, tokens

    async def _score(
        self, parts: Sequence[tuple[ChoiceRun, int, Sequence[int]]]
    ) -> list[list[ScoredToken]]:
        """Return the scores of tokens of choices; arguments as for `logprobs.of_replies`."""
        if self.logprobs is None:
            return [[] for _ in parts]
        return await logprobs.of_replies(self.lm, parts, self.logprobs)

    async def _score_prompts(self) -> list[list[ScoredToken]]:
        """Return the scores of each prompt's tokens; [] if no logprobs of prompts are requested."""
        if not self.reads_prompt:
            return []
        top = max(self.body.logprobs or 0, self.body.prompt_logprobs or 0)
        request = LogprobsRequest(top, () if self.logprobs is None else self.logprobs.tokens)
        places = [prompt.node.place for prompt in self.prompts]
        return await logprobs.of_prompts(self.lm, places, request)

    def _usage(self) -> Json:
        """Return the token counts of the call."""
        if self.runs.replies:
            return CallUsage(self.runs.replies).chat()
        return CallUsage((), n_prompt=n_tokens(self.prompts)).chat()

    # Streams

    async def chunks(self) -> AsyncGenerator[Json, None]:
        """Run the call and yield the chunks of the stream. A chunk has a part of one choice."""
        usage = {"usage": None} if self.body.includes_usage else {}
        first = {} if self.body.loom is None else {"loom": self.runs.to_dict()}
        async with aclosing(self._stream_choices()) as pieces:
            async for choice in pieces:
                for part in _by_token(choice):
                    yield {**self._head, "choices": [part], **first, **usage}
                    first = {}
        if usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    async def _stream_choices(self) -> AsyncGenerator[Json, None]:
        """Run the call and yield the choices of the stream's chunks."""
        if self.body.echo or self.body.prompt_logprobs is not None or not self.runs.replies:
            prompt_scores = await self._score_prompts()
            n = self.body.n_choices
            for number in range(len(self.prompts) * n):
                piece = self._choice(number, number // n, None, (), prompt_scores)
                yield {**piece, "finish_reason": None if self.runs.replies else "length"}
        async with aclosing(self.runs.updates()) as updates:
            async for changed in updates:
                for piece in await self._new_choices(changed):
                    yield piece

    async def _new_choices(self, changed: Sequence[ChoiceRun]) -> list[Json]:
        """Return stream choices with the text and tokens that became final since the last call.

        changed: the generated choices that have new tokens or have ended.
        """
        parts = [self._new_tokens(reply) for reply in changed]
        scores = await self._score(parts)
        choices = []
        for (reply, first, tokens), scored in zip(parts, scores, strict=True):
            text = reply.piece()
            if not (text or tokens or reply.is_over):
                continue
            choice: Json = {"index": reply.index, "text": text, "logprobs": None}
            if scored:
                offsets = self._offsets(reply, first, len(scored))
                choice["logprobs"] = logprobs.completion_logprobs(self.lm, scored, offsets)
            if self.body.return_token_ids:
                choice["token_ids"] = list(tokens)
            choices.append({**choice, "finish_reason": reply.finish_reason})
        return choices

    def _offsets(self, reply: ChoiceRun, first: int, n: int) -> list[int]:
        """Return the index of the character at which each of `n` tokens begins.

        It counts the characters of the prompt and the choice. An end token has no text; its offset
        is the end of the text. first: index of the first token in the choice.
        """
        shift = len(self.prompts[reply.prompt].text)
        ends = [0, *reply.ends]
        return [shift + ends[min(first + i, len(ends) - 1)] for i in range(n)]


def _by_token(choice: Json) -> list[Json]:
    """Split a streamed choice with logprobs of several tokens into one choice for each token.

    Some clients read only the first token of a chunk.
    """
    lists = choice["logprobs"]
    if lists is None or len(lists["tokens"]) < 2:
        return [choice]
    text, offsets = choice["text"], lists["text_offset"]
    bounds = [*(offset - offsets[0] for offset in offsets), len(text)]
    parts = []
    for i in range(len(offsets)):
        part = {
            "index": choice["index"],
            "text": text[bounds[i] : bounds[i + 1]],
            "logprobs": {name: values[i : i + 1] for name, values in lists.items()},
            "finish_reason": None,
        }
        if "token_ids" in choice:
            part["token_ids"] = choice["token_ids"][i : i + 1]
        parts.append(part)
    parts[0].update({name: choice[name] for name in choice if name.startswith("prompt_")})
    parts[-1]["finish_reason"] = choice["finish_reason"]
    return parts
