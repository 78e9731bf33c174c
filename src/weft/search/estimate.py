"""The most that a search by a strategy generates, known before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .strategies import Strategy
from .task import Game24

LINE, ANSWER = 40, 256  # tokens of a line and of an answer, unless given
_LEVELS, _PROPOSALS = 16, 8


class Estimate(NamedTuple):
    """An upper bound. tokens: None where there is no bound but a budget. parts: what adds up."""

    tokens: int | None
    parts: str

    def __str__(self) -> str:
        if self.tokens is None:
            return f"no bound but a budget ({self.parts})"
        return f"at most {_spaced(self.tokens)} tokens ({self.parts})"


def estimate(strategy: Strategy, options: Mapping[str, Any], prompt: str) -> Estimate:
    """Return the most that a search generates.

    options: `breadth`, `n`, `budget_tokens`, as given; others are not looked at.
    """
    found = _unbudgeted(strategy, options, Game24.read(prompt))
    budget = options.get("budget_tokens")
    if budget is None or (found.tokens is not None and found.tokens <= budget):
        return found
    return Estimate(budget, f"the budget; {found.parts}")


def _unbudgeted(strategy: Strategy, options: Mapping[str, Any], task: Game24 | None) -> Estimate:
    breadth = options.get("breadth") or (strategy.breadth.default if strategy.breadth else None)
    n = options.get("n") or (strategy.n.default if strategy.n else None)
    if strategy.name in ("best-of-n", "greedy"):
        answers = n or 1
        return Estimate(answers * ANSWER, f"{_counted(answers, 'answer')} of up to {ANSWER}")
    if strategy.name == "tot-dfs":
        return Estimate(None, f"lines of up to {LINE}, until an answer is found")
    n_lines = _lines(strategy.name, breadth or 1, n, task)
    n_answers = (
        1 if task is None else {"tot": breadth or 1, "mcts": 5, "adaptive": 5}.get(strategy.name, 1)
    )
    parts = f"{_spaced(n_lines)} lines of up to {LINE}, {_counted(n_answers, 'answer')} of {ANSWER}"
    if task is not None:
        parts += ", less if a right answer is found early"
    return Estimate(n_lines * LINE + n_answers * ANSWER, parts)


def _lines(name: str, breadth: int, n: int | None, task: Game24 | None) -> int:
    """Return how many lines a search proposes at most."""
    levels = _LEVELS if task is None else task.steps
    if name == "smc":
        return (n or 1) * 32
    if name == "beam":
        return (n or 1) * (1 + breadth * (_LEVELS - 1))
    if name == "adaptive":
        return breadth * (n or 1) * (32 if task is None else 1000 * 2)
    per_node = [_PROPOSALS] if task is None else _summed(task.n_continue, task.n_suggest)
    if n is not None:
        per_node = [n if task is None else 2 * n]
    if name == "mcts":
        return (8 if task is None else 32) * breadth * max(per_node)
    at = [per_node[min(level, len(per_node) - 1)] for level in range(levels)]
    return at[0] + breadth * sum(at[1:])


def _summed(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _counted(n: int, what: str) -> str:
    return f"{_spaced(n)} {what}{'s' * (n != 1)}"


def _spaced(n: int) -> str:
    return f"{n:,}".replace(",", " ")
