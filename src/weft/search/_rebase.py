"""REBASE: the widths of a level are balanced by reward."""

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
    """Share `width` lines per level among all nodes of the level in proportion to exp(score).

    Good nodes get many lines and bad ones few or none, so that a level is neither a beam nor one
    path (Wu et al. 2024, "Inference scaling laws"). Paths that have ended keep their place: each
    takes one line from the later levels.

    Args:
        lm, prompt, depth: as for `tot`.
        width: lines of a level.
        balance: a node's share is exp(score / balance): small numbers follow the best nodes.
        options: SearchOptions; lines have `max_tokens` 40, `temperature` 1.0 and end at a newline
            (`stop`) unless given. `value` scores the lines, such as a RewardModel.

    Returns: a SearchResult.

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
    """The algorithm behind `rebase`; `search.state["level"]` has each round's nodes by id."""

    def __init__(self, judge: Judge, width: int, balance: float, depth: int) -> None:
        self.judge = judge
        self.width = width
        self.balance = balance
        self.depth = depth

    def next_work(self, search: Search) -> Sequence[WorkItem]:
        """Return lines below the nodes of the level; [] after a correct answer."""
        if search.round >= self.depth or has_correct_answer(search):
            return []
        if not search.round:
            return [WorkItem(search.start, n=self.width)]
        n_ended = sum(map(search.is_end, search.start.walk()))
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
    """Return `width` split in proportion to exp(score / balance), in whole numbers.

    The largest remainders are rounded up, the first of equal ones first.
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
