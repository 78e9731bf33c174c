"""Best of n: many whole answers in one batch, and the one that most of them agree on."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Unpack

from ..lm import LM
from ..loom import Heddle
from .core import Prompt, branches
from .driver import Search
from .options import SearchOptions, Settings
from .result import Level, SearchResult, Vote
from .score import text_of
from .steps import Steps, awaitable, plain
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


@plain
def best_of_n(
    lm: LM,
    prompt: Prompt,
    *,
    n: int = 16,
    extract: Extract = answer_number,
    checked: bool = True,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Grow `n` answers in one batch and return the likeliest of those with the most voted answer.

    All branches stay in the tree; `votes` has the count of each answer, and `score` of a branch is
    the share of the votes that its answer got. Ties go to the answer with the likeliest branch.

    Args:
        extract: the answer in a text, or None if it has none (then the branch has no vote).
        checked: where there is a task, only answers that its checker calls right are voted on, if
            there are any; False votes on all and checks the winner only.
        options: SearchOptions; answers have `max_tokens` 256 and `temperature` 0.8 unless given.

    Raises:
        ConfigError: an argument is outside what is allowed.
    """
    settings = Settings.read(options, temperature=0.8, max_tokens=256)
    count = branches("n", n)
    search = Search(lm, prompt, settings, "best_of_n", n=n, checked=checked)
    meter, sampling = search.meter, dict(settings.sampling)
    if (room := meter.longest()) < sampling["max_tokens"]:
        sampling["max_tokens"] = max(int(room), 1)
    made = search.found(search.state["answers"]) if search.done else []
    if not made:
        made = yield from meter.grow([search.start] * count, **sampling)
        meter.candidates = len(made)
    votes = count_votes(made, extract, search.task if checked else None)
    best = _likeliest(votes[0].nodes) if votes else _likeliest(made or [search.start])
    for node in made:
        node.score = next((vote.count for vote in votes if node in vote.nodes), 0) / len(made)
    if meter.stopped is None:
        search.done, search.state = True, {"answers": [node.id for node in made]}
        search.save()
    text = text_of(best)
    solved = None if search.task is None else search.task.is_solved(text)
    if settings.progress is not None:
        settings.progress(Level(1, tuple(made), (best,), meter.cost()))
    return SearchResult(best, text, search.loom, meter.cost(), solved, tuple(votes))


abest_of_n = awaitable(best_of_n)


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
