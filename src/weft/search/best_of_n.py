"""Best of n: many whole answers in one batch, and the one that most of them agree on."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence

from ..lm import LM
from ..loom import Heddle
from .core import Budget, Meter, Prompt, begin, branches, read_task, text_of
from .result import SearchResult, Vote
from .task import Task

Extract = Callable[[str], Hashable | None]
_SAID = re.compile(r"(?:answer is|Answer:)[^\n]*", re.IGNORECASE)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def answer_number(text: str) -> str | None:
    """Return the last number after the last "answer is" or "Answer:", in plain digits, or None.

    "The answer is $1,216." → "1216"; "Answer: 4 * 6 = 24" → "24".
    """
    said = _SAID.findall(text)
    numbers = _NUMBER.findall(said[-1]) if said else []
    return numbers[-1].replace(",", "") if numbers else None


def best_of_n(
    lm: LM,
    prompt: Prompt,
    *,
    n: int = 16,
    extract: Extract = answer_number,
    task: Task | None = None,
    checked: bool = True,
    temperature: float = 0.8,
    max_tokens: int = 256,
    budget_tokens: int | None = None,
    budget_s: float | None = None,
    seed: int | None = None,
) -> SearchResult:
    """Grow `n` answers in one batch and return the likeliest of those with the most voted answer.

    All branches stay in the tree; `votes` has the count of each answer, and `score` of a branch is
    the share of the votes that its answer got. Ties go to the answer with the likeliest branch.

    Args:
        extract: the answer in a text, or None if it has none (then the branch has no vote).
        task: None recognises a Game of 24 prompt.
        checked: where there is a task, only answers that its checker calls right are voted on, if
            there are any; False votes on all and checks the winner only.
        budget_tokens, budget_s: what may be spent; `cost.stopped` says which one ended it.

    Raises:
        ConfigError: an argument is outside what is allowed.
    """
    start, loom = begin(lm, prompt)
    task = read_task(loom) if task is None else task
    meter = Meter(Budget(budget_tokens, budget_s), seed)
    rows = [start] * branches("n", n)
    if (room := meter.room()) < max_tokens:
        max_tokens = max(int(room), 1)
    made = meter.grow(rows, max_tokens=max_tokens, temperature=temperature)
    meter.candidates = len(made)
    votes = count_votes(made, extract, task if checked else None)
    best = _likeliest(votes[0].nodes) if votes else _likeliest(made or [start])
    for node in made:
        node.score = next((vote.count for vote in votes if node in vote.nodes), 0) / len(made)
    text = text_of(best)
    solved = None if task is None else task.is_solved(text)
    return SearchResult(best, text, loom, meter.cost(), solved, tuple(votes))


def count_votes(nodes: Sequence[Heddle], extract: Extract, task: Task | None = None) -> list[Vote]:
    """Return the answers of whole branches, most votes first, ties by their likeliest branch.

    With a task, right branches only, if there are any; cut ones only if none is whole.
    """
    whole_ones = [node for node in nodes if node.finish_reason == "stop"]
    right = [n for n in whole_ones if task is not None and task.is_solved(text_of(n))]
    by_answer: dict[Hashable, list[Heddle]] = {}
    for node in right or whole_ones or nodes:
        answer = extract(text_of(node))
        if answer is not None:
            by_answer.setdefault(answer, []).append(node)
    votes = [
        Vote(answer, tuple(voters), _likeliest(voters).mean_logprob)
        for answer, voters in by_answer.items()
    ]
    return sorted(votes, key=lambda vote: (-vote.count, -vote.mean_logprob))


def _likeliest(nodes: Sequence[Heddle]) -> Heddle:
    return max(nodes, key=lambda node: node.mean_logprob)
