"""The models of `llm`: options, answers, and the response of an answer."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import llm
from pydantic import Field, field_validator

from .choices import EMBEDDED, Choice
from .talk import Speaker, Turn

if TYPE_CHECKING:
    from weft import Heddle
    from weft.lm.results import Delta

# Options that are not for the draw of tokens.
_OWN = frozenset({"logprobs", "raw", "keep_kv"})


class WeftOptions(llm.Options):
    """Options of `-o`. Options that are not given have the model's own defaults."""

    max_tokens: int | None = Field(None, description="Maximum number of new tokens; 256")
    temperature: float | None = Field(None, description="0 is greedy; 1 is the model's own")
    top_p: float | None = Field(None, description="Keep the likeliest tokens of this total mass")
    top_k: int | None = Field(None, description="Keep this many of the likeliest tokens; 0: all")
    min_p: float | None = Field(
        None, description="Drop tokens less likely than this share of the best token"
    )
    top_n_sigma: float | None = Field(
        None, description="Keep logits within this many standard deviations of the best; 0: all"
    )
    typical_p: float | None = Field(None, description="Keep the most typical tokens")
    xtc_probability: float | None = Field(
        None, description="Probability of dropping the top choices of a draw; 0: never"
    )
    xtc_threshold: float | None = Field(
        None, description="Tokens at least this likely are top choices"
    )
    repetition_penalty: float | None = Field(None, description="On prompt and answer; 1: none")
    presence_penalty: float | None = Field(None, description="On tokens of the answer; 0: none")
    frequency_penalty: float | None = Field(
        None, description="On tokens of the answer, for each time; 0: none"
    )
    penalty_last_n: int | None = Field(None, description="Number of tokens that penalties count")
    dry_multiplier: float | None = Field(
        None, description="Penalty on continuing a repeated sequence; 0: none"
    )
    dry_base: float | None = Field(None, description="Growth of that penalty per repeated token")
    dry_allowed_length: int | None = Field(None, description="Shorter repetitions are free")
    dry_penalty_last_n: int | None = Field(None, description="Number of tokens that DRY looks back")
    dry_sequence_breakers: str | list[str] | None = Field(
        None, description='A text that ends a repetition, or a JSON list: ["\\n", ":"]'
    )
    logit_bias: dict[int, float] | None = Field(
        None, description='Added to logits by token id, as JSON: {"50256": -100}'
    )
    seed: int | None = Field(None, description="The same seed gives the same answer")
    stop: str | list[str] | None = Field(
        None, description='A text that ends the answer, or a JSON list: ["\\n", "."]'
    )
    logprobs: int | None = Field(
        None,
        ge=0,
        le=20,
        description="Log the answer's log-probabilities, and this many alternatives per token",
    )
    raw: bool = Field(False, description="No chat template: the text is continued")
    keep_kv: bool = Field(
        False, description="Keep a conversation's KV in a file, for -c in another process"
    )

    @field_validator("stop", "dry_sequence_breakers", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) and value.startswith("[") else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _mapped(cls, value: Any) -> Any:
        return json.loads(value) if isinstance(value, str) else value


class _Shared:
    """Shared by both models."""

    needs_key = None
    can_stream = True
    supports_schema = True
    Options = WeftOptions

    def __init__(self, choice: Choice, speaker: Speaker) -> None:
        self.model_id = choice.model_id
        self.choice = choice
        self.speaker = speaker

    def __str__(self) -> str:
        what = "embedded; a small demo model" if self.choice is EMBEDDED else self.choice.model
        return f"Weft: {self.model_id} ({what})"

    def _begin(self, prompt: llm.Prompt, conversation: Any) -> tuple[Turn, dict[str, Any]]:
        options = prompt.options.model_dump(exclude_none=True)
        sampling = {name: value for name, value in options.items() if name not in _OWN}
        if prompt.schema:
            sampling["constraint"] = prompt.schema
        return self.speaker.turn(prompt, conversation, raw=prompt.options.raw), sampling

    def _end(self, turn: Turn, stop_buffer: StopBuffer, prompt: llm.Prompt, response: Any) -> None:
        if (answer := stop_buffer.answer) is None:
            return
        options = prompt.options
        cached = {} if turn.n_cached is None else {"cached_tokens": turn.n_cached}
        response.set_usage(input=turn.n_prompt, output=len(answer.tokens), details=cached or None)
        details: dict[str, Any] = {
            "finish_reason": answer.finish_reason,
            "seed": None if answer.params is None else answer.params.seed,
        }
        if options.logprobs is not None:
            details["logprobs"] = _logprobs(answer, options.logprobs)
        response.response_json = details
        if answer.stop_string is None:  # else the path holds more than was answered
            self.speaker.answered(turn, answer, keep_kv=options.keep_kv)


class Weft(_Shared, llm.Model):
    """A model that runs in Weft."""

    def execute(
        self, prompt: llm.Prompt, stream: bool, response: Any, conversation: Any = None
    ) -> Iterator[str]:
        """Answer a prompt, a piece of text at a time."""
        with _one_line_errors():
            turn, sampling = self._begin(prompt, conversation)
            stop_buffer = StopBuffer(prompt.options.stop)
            for delta in turn.node.stream(**sampling):
                if text := stop_buffer.push(delta):
                    yield text
            self._end(turn, stop_buffer, prompt, response)


class AsyncWeft(_Shared, llm.AsyncModel):
    """A model that runs in Weft, awaited in a running event loop."""

    async def execute(
        self, prompt: llm.Prompt, stream: bool, response: Any, conversation: Any = None
    ) -> AsyncGenerator[str, None]:
        """Answer a prompt, a piece of text at a time."""
        import asyncio

        with _one_line_errors():
            turn, sampling = await asyncio.to_thread(self._begin, prompt, conversation)
            stop_buffer = StopBuffer(prompt.options.stop)
            async for delta in turn.node.astream(**sampling):
                if text := stop_buffer.push(delta):
                    yield text
            await asyncio.to_thread(self._end, turn, stop_buffer, prompt, response)


class StopBuffer:
    """An answer's text without the string that stopped it, which nodes of Weft hold.

    A possible start of a stop string waits until it is decided. answer: the node.
    """

    def __init__(self, stop: str | list[str] | None) -> None:
        self.answer: Heddle | None = None
        self._stops = [stop] if isinstance(stop, str) else stop or []
        self.pending = ""

    def push(self, delta: Delta) -> str:
        """Return the text that is complete by now."""
        self.answer = delta.node
        text = self.pending + delta.text
        if delta.finish_reason is not None:
            stop, self.pending = delta.node.stop_string, ""
            return text if stop is None else text.partition(stop)[0]
        starts = [text.index(stop) for stop in self._stops if stop in text]
        longest = max(map(len, self._stops), default=1)
        tails = range(max(len(text) - longest + 1, 0), len(text))
        starts += [at for at in tails if any(stop.startswith(text[at:]) for stop in self._stops)]
        n_ready = min(starts, default=len(text))
        self.pending = text[n_ready:]
        return text[:n_ready]


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Say what is wrong in one line, with what to do."""
    from weft import WeftError

    try:
        yield
    except WeftError as error:
        text = " ".join(str(error).split())
        hint = f" ({error.hint})" if error.hint and error.hint not in text else ""
        raise llm.ModelError(text + hint) from error


def _logprobs(answer: Heddle, n_top: int) -> list[dict[str, Any]]:
    """Return the answer's tokens with their logprobs; n_top: alternatives of each, raw."""
    from weft._core.atomic_files import json_number
    from weft.viz.tokens import rank_tokens

    assert answer.lm is not None
    text = answer.lm.text
    ranked = rank_tokens([answer], n_top).get(answer.id, [])
    rows = []
    for index, token in enumerate(answer.tokens):
        row: dict[str, Any] = {
            "token": text.token_text(token),
            "token_id": token,
            "logprob": json_number(answer.logprobs[index]) if answer.logprobs else None,
        }
        if n_top and ranked:
            row["top_logprobs"] = [
                {"token": each.text, "token_id": each.id, "logprob": json_number(each.logprob)}
                for each in ranked[index].top
            ]
        rows.append(row)
    return rows
