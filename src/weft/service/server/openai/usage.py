"""Token counts of a call, in the formats of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runs import ChoiceRun


class CallUsage:
    """Token counts of a call.

    prompt_tokens: tokens of all prompts. A prompt with several choices counts once.
    completion_tokens: generated tokens of all choices.
    cached_tokens: prompt tokens whose KV was cached before the call.

    Args:
    replies: all choices that were generated, also those that the answer leaves out.
    n_prompt: number of prompt tokens, if nothing was generated. None: counted from `replies`.
    """

    def __init__(self, replies: Iterable[ChoiceRun], *, n_prompt: int | None = None) -> None:
        prompts: dict[int, list[ChoiceRun]] = {}
        self.completion_tokens = 0
        for reply in replies:
            prompts.setdefault(reply.prompt, []).append(reply)
            self.completion_tokens += len(reply.tokens)
        self.prompt_tokens = sum(choices[0].n_prompt for choices in prompts.values())
        self.cached_tokens = sum(map(_cached, prompts.values()))
        if n_prompt is not None:
            self.prompt_tokens = n_prompt

    def chat(self) -> dict[str, Any]:
        """Return the `usage` object of completions and chat completions."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def responses(self) -> dict[str, Any]:
        """Return the `usage` object of /v1/responses."""
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": self.prompt_tokens - self.cached_tokens,
            },
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def _cached(replies: Sequence[ChoiceRun]) -> int:
    """Return the number of a prompt's tokens whose KV was cached before the call.

    replies: the prompt's choices. A later choice may also reuse KV that the first one computed.
    """
    reused = [reply.reused for reply in replies]
    return min(min(reused), replies[0].n_prompt)
