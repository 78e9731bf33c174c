"""Adaptive branching: Thompson sampling decides whether a node gets wider or deeper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import Unpack

from .._core.validation import check_int
from ..errors import ConfigError
from ..lm.lm import LM
from ..loom import Heddle
from .core import Prompt, SearchOptions, SearchResult, Settings, Steps, awaitable, blocking
from .driver import Search, WorkItem
from .judge import Frontier, Judge, has_correct_answer, max_depth, max_rounds, rank_answers, ranked
from .known_lines import KnownLines
from .propose import Proposer

# A score counts as this many coin tosses, because it is a probability and not one outcome.
TRUST = 6.0


@blocking
def adaptive(
    lm: LM | None,
    prompt: Prompt,
    *,
    rounds: int | None = None,
    batch: int = 2,
    widen: int = 1,
    depth: int | None = None,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Search a tree of lines with adaptive branching: each round widens the tree or deepens it.

    A round descends `batch` times from the start. At each node it draws one number for "add lines
    here" from a Beta posterior over the scores of the node's children. It draws one number for each
    child from a Beta posterior over all scores at or below that child. The largest number wins
    (Thompson sampling). If "add lines here" wins, the model proposes `widen` lines of each kind. So
    a good child is followed early, and a node with bad children gets more children. A draw that
    repeats a line costs no tokens, at temperature 1 without filters and constraint.

    If answers can be checked, the model first completes the prompt, and later each likely path. A
    correct answer ends the search.

    Args:
        lm, prompt, depth: as for `tot`.
        rounds: maximum number of rounds. None: 1,000 if a checker can end the search, else 32.
        batch: descents per round; all their lines are one batch. Larger batches need fewer steps of
            the model and more tokens.
        widen: lines of each kind per descent. Several proposers are chosen by Thompson sampling
            over the scores of their lines.
        options: SearchOptions; lines have `max_tokens` 40 and `temperature` 1.0 unless given.
            Scores must be from 0 to 1. If there is a checker, full answers have the score 1 or 0
            by its verdict, whatever `value` returns.

    Returns: a SearchResult; `best` is the best path, completed by the model.

    Raises:
        ConfigError: an argument is outside what is allowed.

    Cost: O(nodes) of host work per round.
    """
    settings = Settings.read(adaptive, options, temperature=1.0, max_tokens=40)
    counts = {"rounds": rounds, "batch": check_int("batch", batch, 1)}
    numbers = (check_int("widen", widen, 1), depth, settings.answer_tokens)
    search = Search(lm, prompt, settings, "adaptive", **counts, numbers=numbers)
    proposer = Proposer(search, n_continue=1, n_suggest=1)
    proposer.known_lines = KnownLines(search)
    judge = Judge(search, as_share=True, checks_ends=True)
    limit = max_rounds(rounds, search, checked=1000, unchecked=32)
    levels = max_depth(depth, search)
    algorithm = Thompson(judge, proposer, levels, limit, batch, widen)
    return (yield from search.run(algorithm, judge, proposer, tries=5, depth=levels))


aadaptive = awaitable(adaptive)


class Thompson:
    """The algorithm behind `adaptive`: Thompson sampling selects the nodes that get new lines.

    Draws depend only on the scores in the tree and the search's seed, so a resumed search repeats
    them. `batch` is the number of descents per round, `widen` the lines of each kind per descent.
    """

    def __init__(
        self, judge: Judge, proposer: Proposer, depth: int, rounds: int, batch: int, widen: int
    ) -> None:
        self.judge = judge
        self.proposer = proposer
        self.depth = depth
        self.rounds = rounds
        self.batch = batch
        self.widen = widen

    def next_work(self, search: Search) -> Sequence[WorkItem]:
        """Return this round's work: complete the likeliest path, else add lines below drawn nodes.

        [] ends the search.
        """
        if search.round >= self.rounds or has_correct_answer(search):
            return []
        frontier, rng = Frontier(search, self.judge, self.depth), search.rng()
        if likely := frontier.paths_to_complete(anywhere=search.checks):
            return [WorkItem(likely[0], "answers", 1, 0.0)]
        drawn = Counter[tuple[Heddle, str | None]]()
        open_ids = frontier.expandable(widens=True)
        if search.start.id in open_ids:
            for _ in range(self.batch):
                node = descend(search.start, frontier, open_ids, rng)
                drawn[node, self._draw_proposer(node, frontier, rng)] += 1
        return [WorkItem(node, n=times * self.widen, by=by) for (node, by), times in drawn.items()]

    def record(self, search: Search, candidates: Sequence[Heddle]) -> Sequence[Heddle]:
        """Return the new nodes, best first; raise ConfigError for scores outside 0 to 1."""
        _check_scores(candidates)
        return ranked(search.in_order(candidates))

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the nodes in the order of `judge.rank_answers`."""
        return rank_answers(search)

    def _draw_proposer(self, node: Heddle, frontier: Frontier, rng: Random) -> str | None:
        """Choose one of several proposers for a node by Thompson sampling; return its name.

        None if there is only one proposer.
        """
        names = self.proposer.open_sources(node)
        if len(self.proposer.sources) == 1:
            return None
        scores: dict[str, list[float]] = {name: [] for name in names}
        for scored in frontier.nodes:
            if scored.meta.get("by") in scores:
                scores[scored.meta["by"]].append(scored.score or 0.0)
        return max(names, key=lambda name: draw_from_scores(scores[name], rng))


def _check_scores(nodes: Iterable[Heddle]) -> None:
    """Raise ConfigError if a node's score is outside 0 to 1."""
    for node in nodes:
        if not 0 <= (node.score or 0.0) <= 1:
            raise ConfigError(
                f"value returned {node.score} for a node; adaptive needs scores from 0 to 1"
            )


def descend(start: Heddle, frontier: Frontier, open_ids: set[str], rng: Random) -> Heddle:
    """Return the node to add lines to, by Thompson sampling at each node from `start` downwards.

    open_ids: ids of nodes at or below which lines can be added; the descent avoids others.
    """
    node = start
    while True:
        steps = frontier.steps[node.id]
        # A repeated line is as much evidence against widening as a bad one.
        n_drawn = max(node.meta.get("drawn", 0), len(steps))
        wider = draw_from_posterior(n_drawn, sum(child.score or 0.0 for child in steps), rng)
        if node.meta.get("closed"):
            wider = -1.0
        drawn = {
            child.id: draw_from_posterior(
                frontier.visits[child.id] + frontier.repeats[child.id],
                frontier.total[child.id],
                rng,
            )
            for child in steps
            if child.id in open_ids
        }
        if not drawn or wider >= max(drawn.values()):
            return node
        node = max((child for child in steps if child.id in drawn), key=lambda c: drawn[c.id])


def draw_from_scores(scores: Iterable[float], rng: Random) -> float:
    """Draw a number (0 to 1) from the Beta posterior of these scores under a uniform prior."""
    values = list(scores)
    return draw_from_posterior(len(values), sum(values), rng)


def draw_from_posterior(n: int, total: float, rng: Random) -> float:
    """Draw a number (0 to 1) from the Beta posterior of `n` scores (0 to 1) with sum `total`.

    Each score counts as `TRUST` coin tosses.
    """
    return rng.betavariate(1 + TRUST * total, 1 + TRUST * (n - total))
