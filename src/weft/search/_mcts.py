"""Monte Carlo tree search: descend by UCT, expand a node, and propagate its values upwards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Unpack

from .._core.validation import check_int, check_number
from ..errors import ConfigError
from ..lm.lm import LM
from ..loom import Heddle
from .core import Prompt, SearchOptions, SearchResult, Settings, Steps, awaitable, blocking
from .driver import Search, WorkItem
from .judge import Frontier, Judge, has_correct_answer, max_depth, max_rounds, rank_answers, ranked
from .propose import Counts, Proposer


@blocking
def mcts(
    lm: LM | None,
    prompt: Prompt,
    *,
    rounds: int | None = None,
    batch: int = 4,
    exploration: float = 0.5,
    rollouts: int = 0,
    n_continue: Counts = None,
    n_suggest: Counts = None,
    depth: int | None = None,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Monte Carlo tree search over lines; return the best path, completed by the model.

    A round descends `batch` times to a node without steps. Each descent follows the child with the
    largest `mean + exploration * sqrt(ln(parent visits) / visits)` (UCT). Nodes selected earlier in
    the round count as visits of value 0. All these nodes are expanded in one batch. New steps are
    valued by the model's yes-no verdict on a task, else by the path's mean token probability. The
    model completes a full path that it finds likely. A correct answer ends the search.

    Args:
        lm, prompt, n_continue, n_suggest, depth: as for `tot`.
        rounds: maximum number of rounds. None: 32 if a checker can end the search, else 8.
        batch: nodes expanded per round.
        exploration: weight of rarely visited nodes; 0 follows the best mean only.
        rollouts: full answers drawn from each expanded node. They count as visits, with the task's
            check (1 or 0), else with their mean token probability.
        options: SearchOptions; lines have `max_tokens` 40 and `temperature` 1.0 unless given.
            Scores should be from 0 to 1. If there is a checker, full answers have the score 1 or 0
            by its verdict, whatever `value` returns.

    Returns: a SearchResult.

    Raises:
        ConfigError: an argument is outside what is allowed.

    Cost: O(nodes) of host work per round.
    """
    settings = Settings.read(mcts, options, temperature=1.0, max_tokens=40)
    counts = {"rounds": rounds, "batch": check_int("batch", batch, 1)}
    exploration = check_number("exploration", exploration, low=0)
    numbers = (n_continue, n_suggest, depth, settings.answer_tokens, exploration, rollouts)
    search = Search(lm, prompt, settings, "mcts", **counts, numbers=numbers)
    proposer = Proposer(search, n_continue=n_continue, n_suggest=n_suggest)
    judge = Judge(search, as_share=True, checks_ends=True)
    if rollouts and not search.completes:
        raise ConfigError("rollouts need completions by the model, which are off here: give 0")
    limit = max_rounds(rounds, search, checked=32, unchecked=8)
    levels = max_depth(depth, search)
    algorithm = UCT(judge, levels, limit, batch, exploration, rollouts)
    return (yield from search.run(algorithm, judge, proposer, tries=5, depth=levels))


amcts = awaitable(mcts)


class UCT:
    """The algorithm behind `mcts`: UCT selects the nodes to expand, from the scores in the tree.

    `batch` is the number of nodes per round. `exploration` and `rollouts` are as for `mcts`.
    """

    def __init__(
        self, judge: Judge, depth: int, rounds: int, batch: int, exploration: float, rollouts: int
    ) -> None:
        self.judge = judge
        self.depth = depth
        self.rounds = rounds
        self.batch = batch
        self.exploration = exploration
        self.rollouts = check_int("rollouts", rollouts, 0)

    def next_work(self, search: Search) -> Sequence[WorkItem]:
        """Return this round's work: complete likely full paths, else expand nodes chosen by UCT."""
        if search.round >= self.rounds or has_correct_answer(search):
            return []
        frontier = Frontier(search, self.judge, self.depth)
        if likely := frontier.paths_to_complete():
            return [WorkItem(node, "answers", 1, 0.0) for node in likely[: self.batch]]
        selected = self._select_nodes(search.start, frontier)
        drawn = [WorkItem(node, "answers", self.rollouts) for node in selected if self.rollouts]
        return [*map(WorkItem, selected), *drawn]

    def record(self, search: Search, candidates: Sequence[Heddle]) -> Sequence[Heddle]:
        """Return the new nodes, best first; their scores are in the tree already."""
        return ranked(search.in_order(candidates))

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the nodes in the order of `judge.rank_answers`."""
        return rank_answers(search)

    def _select_nodes(self, start: Heddle, frontier: Frontier) -> list[Heddle]:
        """Return up to `batch` nodes to expand, one per descent from `start`."""
        pending_visits: Counter[str] = Counter()
        selected: list[Heddle] = []
        while len(selected) < self.batch:
            open_ids = frontier.expandable([node.id for node in selected])
            if start.id not in open_ids:
                break
            node = start
            pending_visits[node.id] += 1
            while children := [c for c in frontier.steps[node.id] if c.id in open_ids]:
                visits = {c.id: frontier.visits[c.id] + pending_visits[c.id] for c in children}
                parent_visits = frontier.visits[node.id] + pending_visits[node.id]
                bounds = upper_confidence_bounds(
                    visits, frontier.total, parent_visits, self.exploration
                )
                node = max(children, key=lambda child: bounds[child.id])
                pending_visits[node.id] += 1
            selected.append(node)
        return selected


def upper_confidence_bounds(
    visits: Mapping[str, int], total: Mapping[str, float], parent_visits: int, exploration: float
) -> dict[str, float]:
    """Return the upper confidence bound of each visited child: child id → bound.

    Args:
        visits, total: number of visits and sum of values, by the child's id.
        parent_visits: number of visits of the parent.
        exploration: the weight of the uncertainty.
    """
    spread = math.log(max(parent_visits, 1))
    return {
        each: total[each] / n + exploration * math.sqrt(spread / n) for each, n in visits.items()
    }
