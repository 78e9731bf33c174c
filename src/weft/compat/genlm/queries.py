"""Queries put in by hand and answered together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...aio.tree import TreeLM


@dataclass(slots=True)
class Query:
    """A context that waits, and the future of its answer. `past` is taken and not needed."""

    prompt: Sequence[int]
    future: asyncio.Future[Any]
    past: Any = None
    lora_name: str | None = None


@dataclass(slots=True)
class Queries:
    """The queries of one model that wait to be evaluated."""

    waiting: list[Query] = field(default_factory=list)

    def evaluate(self, model: TreeLM) -> None:
        """Answer all that wait, in one call; each gets its own answer or error."""
        queries, self.waiting = self.waiting, []
        for name in dict.fromkeys(query.lora_name for query in queries):
            self._evaluate(model, [query for query in queries if query.lora_name == name], name)

    def _evaluate(self, model: TreeLM, queries: list[Query], name: str | None) -> None:
        open_ones = [query for query in queries if not query.future.done()]
        try:
            prompts = [list(query.prompt) for query in open_ones]
            rows = model.batch_next_token_logprobs_sync(prompts, name)
        except Exception as error:
            if len(open_ones) == 1:
                open_ones[0].future.set_exception(error)
                return
            for query in open_ones:  # the error is one query's own
                self._evaluate(model, [query], name)
            return
        for query, row in zip(open_ones, rows, strict=True):
            query.future.set_result(row)
