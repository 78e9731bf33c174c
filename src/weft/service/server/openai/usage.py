"""The tokens of a call, as OpenAI counts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runs import ChoiceRun


class CallUsage:
    """prompt_tokens: of all prompts, each once. cached_tokens: those of them that had their KV."""

    def __init__(self, replies: Iterable[ChoiceRun], *, n_prompt: int | None = None) -> None:
        """replies: all that were run, told or not. n_prompt: of prompts that nothing follows."""
        prompts: dict[int, list[ChoiceRun]] = {}
        self.completion_tokens = 0
        for reply in replies:
            prompts.setdefault(reply.prompt, []).append(reply)
            self.completion_tokens += len(reply.tokens)
        self.prompt_tokens = sum(each[0].n_prompt for each in prompts.values())
        self.cached_tokens = sum(map(_cached, prompts.values()))
        if n_prompt is not None:
            self.prompt_tokens = n_prompt

    def chat(self) -> dict[str, Any]:
        """Return it as completions and chat completions have it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def responses(self) -> dict[str, Any]:
        """Return it as responses have it."""
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
    """The first of a prompt's choices finds what others left; the rest find what it computes."""
    found = [reply.reused for reply in replies]
    return min(min(found), replies[0].n_prompt)
