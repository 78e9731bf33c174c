"""REBASE (reward-balanced search): nodes with better scores get more of a level's lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

from .._core.validation import check_number
from ..lm.lm import LM
from ..loom import Heddle
from .core import (
    Prompt,
    SearchOptions,
    SearchResult,
    Settings,
    Steps,
    awaitable,
    blocking,
    check_branches,
)
from .driver import Search, WorkItem
from .judge import Judge, best_per_state, has_correct_answer, max_depth, rank_answers, ranked
from .propose import Proposer


@blocking
def rebase(
    lm: LM | None,
    prompt: Prompt,
    *,
    width: int = 16,
    balance: float = 0.1,
    depth: int | None = None,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Draw `width` lines per level, more below nodes with better scores; return the best path.

    Use it with a good value, usually a `RewardModel` (Wu et al. 2024, "Inference scaling laws").
    Unlike `beam` it drops no node early. Unlike `best_of_n` it stops bad paths early.

    The nodes of a level share the next level's lines in proportion to exp(score / balance), in
    whole numbers. Each path that has ended takes one line from all later levels. The lines of a
    level run in one batch.

    Args:
        lm, prompt, depth: as for `tot`.
        width: lines per level.
        balance: a smaller number gives more lines to the best nodes; above 0. For scores from 0 to
            1, 0.1 is usual.
        options: SearchOptions; lines have `max_tokens` 40, `temperature` 1.0 and end at a newline
            (`stop`) unless given. `value` scores the lines: usually a `RewardModel`.

    Returns: a SearchResult; `best` is a path that the checker accepts, else the best path after the
    last round, completed by the model.

    Raises:
        ConfigError: an argument is outside what is allowed.
    """
    settings = Settings.read(rebase, options, temperature=1.0, max_tokens=40)
    count = check_branches("width", width)
    numbers = (depth, settings.answer_tokens)
    balance = check_number("balance", balance, low=0, open_low=True)
    search = Search(lm, prompt, settings, "rebase", width=width, balance=balance, numbers=numbers)
    proposer = Proposer(search, n_continue=1, n_suggest=0, default="continue")
    judge = Judge(search)
    levels = max_depth(depth, search)
    algorithm = BalancedWidths(judge, count, balance, levels)
    return (yield from search.run(algorithm, judge, proposer, tries=5, depth=levels))


arebase = awaitable(rebase)


class BalancedWidths:
    """The algorithm behind `rebase`: `next_work`, `record` and `best` of `Algorithm`.

    `search.state["level"]` has, for each round, the ids of the nodes of its level.
    """

    def __init__(self, judge: Judge, width: int, balance: float, depth: int) -> None:
        self.judge = judge
        self.width = width
        self.balance = balance
        self.depth = depth

    def next_work(self, search: Search) -> Sequence[WorkItem]:
        """Return how many lines to draw below each node of the level.

        [] after a correct answer or `depth` rounds.
        """
        if search.round >= self.depth or has_correct_answer(search):
            return []
        if not search.round:
            return [WorkItem(search.start, n=self.width)]
        n_ended = sum(map(search.is_end, search.nodes()))
        nodes = search.nodes_by_id(search.state["level"][str(search.round)])
        open_nodes = [node for node in nodes if not search.is_end(node)]
        scores = [node.score or 0.0 for node in open_nodes]
        widths = balanced(scores, max(self.width - n_ended, 0), self.balance)
        return [WorkItem(node, n=n) for node, n in zip(open_nodes, widths, strict=True) if n]

    def record(self, search: Search, candidates: Sequence[Heddle]) -> Sequence[Heddle]:
        """Make the new lines the next level, one per state; return them, best first."""
        level = best_per_state(search, self.judge, candidates)
        ids = [node.id for node in level]
        search.state.setdefault("level", {})[str(search.round + 1)] = ids
        return ranked(level)

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the nodes in the order of `judge.rank_answers`."""
        return rank_answers(search)


def balanced(scores: Sequence[float], width: int, balance: float) -> list[int]:
    """Split `width` lines among nodes in proportion to exp(score / balance).

    Returns one whole number per score, with the sum `width`; [] without scores. Largest remainders
    are rounded up, and among equal ones the first. A score of -inf gets 0, unless all are -inf.
    """
    if not scores:
        return []
    top = max(scores)
    if top == -math.inf:
        scores, top = [0.0] * len(scores), 0.0
    weights = [math.exp((score - top) / balance) for score in scores]
    exact = [width * weight / math.fsum(weights) for weight in weights]
    widths = [int(each) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda at: widths[at] - exact[at])
    for at in by_remainder[: width - sum(widths)]:
        widths[at] += 1
    return widths
