"""Greedy: the one answer made of the likeliest tokens, what every search is compared with."""

from __future__ import annotations

from ..lm import LM
from .core import Budget, Meter, Prompt, begin, read_task, whole
from .result import SearchResult
from .score import text_of
from .steps import Steps, awaitable, plain
from .task import Task


@plain
def greedy(
    lm: LM,
    prompt: Prompt,
    *,
    task: Task | None = None,
    max_tokens: int = 256,
    budget_s: float | None = None,
    seed: int | None = None,
) -> Steps[SearchResult]:
    """Return the answer that takes the likeliest token each time; `tot` has the arguments.

    seed: taken like every search's, and of no effect: nothing is drawn.
    """
    start, loom = begin(lm, prompt)
    task = read_task(loom) if task is None else task
    meter = Meter(Budget(None, budget_s), seed=seed)
    tokens = whole("max_tokens", max_tokens)
    made = yield from meter.grow([start], max_tokens=tokens, temperature=0.0)
    meter.candidates = len(made)
    best = made[0] if made else start
    text = text_of(best)
    solved = None if task is None else task.is_solved(text)
    return SearchResult(best, text, loom, meter.cost(), solved)


agreedy = awaitable(greedy)
