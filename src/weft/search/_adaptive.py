"""Adaptive branching: at each node draw whether to go wider or deeper, by Thompson sampling."""

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
from .judge import Frontier, Judge, is_answered, max_depth, max_rounds, paths, ranked
from .propose import Proposer

# A score counts as so many throws of a coin: it is a probability, and no throw.
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
    """Search a tree whose nodes get more children for as long as that pays; complete the best path.

    A round goes down `batch` times from the start. At each node it draws one number for "wider",
    from a Beta posterior over the scores of the node's children, and one for each child, over all
    scores at or below it; the largest is followed. Wider proposes `widen` lines of each kind. So a
    good child is followed before its siblings are many, and a bad family gets new members.

    Where a checker can end the search, the prompt is completed first, and each path that the model
    finds likely before it is searched further; a right answer ends the search.

    Args:
        rounds: at most. None: 1,000 where a checker can end the search, else 32.
        batch: descents in each; all their lines are one batch. More take fewer, larger steps of the
            model, and more tokens.
        widen: lines of each kind that a descent asks for; of what a function proposes, so many.
            Where several write, one of them is drawn each time, by the scores of its lines so far.
        options: SearchOptions; lines have `max_tokens` 40 and `temperature` 1.0 unless given, and
            scores have to lie in 0 to 1.

    The other arguments, and Raises, are those of `tot`. Cost: O(nodes) of host work a round.
    """
    settings = Settings.read(adaptive, options, temperature=1.0, max_tokens=40)
    counts = {"rounds": rounds, "batch": check_int("batch", batch, 1)}
    numbers = (check_int("widen", widen, 1), depth, settings.answer_tokens)
    search = Search(lm, prompt, settings, "adaptive", **counts, numbers=numbers)
    proposer = Proposer(search, n_continue=1, n_suggest=1)
    judge = Judge(search, as_share=True)
    limit = max_rounds(rounds, search, checked=1000, blind=32)
    levels = max_depth(depth, search)
    algorithm = Thompson(judge, proposer, levels, limit, batch, widen)
    return (yield from search.run(algorithm, judge, proposer, tries=5, depth=levels))


aadaptive = awaitable(adaptive)


class Thompson:
    """Where to go wider next. All it knows are the scores in the tree and the round's stream."""

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
        """Ask for the answer of the likeliest path, else for lines below the nodes drawn."""
        if search.round >= self.rounds or is_answered(search):
            return []
        frontier, rng = Frontier(search, self.judge, self.depth), search.rng()
        check_shares(frontier.nodes[1:], "a node below the start has the score {}")
        if likely := frontier.promising(anywhere=search.checks):
            return [WorkItem(likely[0], "answers", 1, 0.0)]
        drawn = Counter[tuple[Heddle, str | None]]()
        open_ids = frontier.open(widens=True)
        if search.start.id in open_ids:
            for _ in range(self.batch):
                node = descend(search.start, frontier, open_ids, rng)
                drawn[node, self._writer(node, frontier, rng)] += 1
        return [WorkItem(node, n=times * self.widen, by=by) for (node, by), times in drawn.items()]

    def record(self, search: Search, candidates: Sequence[Heddle]) -> Sequence[Heddle]:
        """Check the scores; nothing else to note, for they are in the tree."""
        check_shares(candidates, "value returned {} for a node")
        return ranked(search.in_order(candidates))

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the paths to answer with."""
        return paths(search)

    def _writer(self, node: Heddle, frontier: Frontier, rng: Random) -> str | None:
        """Draw who writes below the node; None where there is one only."""
        names = self.proposer.open_sources(node)
        if len(self.proposer.sources) == 1:
            return None
        scores: dict[str, list[float]] = {name: [] for name in names}
        for each in frontier.nodes:
            if each.meta.get("by") in scores:
                scores[each.meta["by"]].append(each.score or 0.0)
        return max(names, key=lambda name: posterior(scores[name], rng))


def check_shares(nodes: Iterable[Heddle], what: str) -> None:
    """Raise ConfigError for a node whose score is not from 0 to 1; `what` formats the score."""
    for node in nodes:
        if not 0 <= (node.score or 0.0) <= 1:
            raise ConfigError(
                f"{what.format(node.score)}; adaptive needs scores from 0 to 1",
                hint="search below another node, or remove the nodes that another search scored",
            )


def descend(start: Heddle, frontier: Frontier, open_ids: set[str], rng: Random) -> Heddle:
    """Go down from the start by draws, to the node that is to get wider."""
    node = start
    while True:
        steps = frontier.steps[node.id]
        # A line that was there already says as much against drawing there as a bad one.
        n_drawn = max(node.meta.get("drawn", 0), len(steps))
        wider = beta(n_drawn, sum(child.score or 0.0 for child in steps), rng)
        if node.meta.get("closed"):
            wider = -1.0
        drawn = {
            child.id: beta(
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


def posterior(scores: Iterable[float], rng: Random) -> float:
    """Draw from the Beta posterior of scores in 0 to 1 under a uniform prior."""
    found = list(scores)
    return beta(len(found), sum(found), rng)


def beta(n: int, total: float, rng: Random) -> float:
    """Draw from the Beta posterior of `n` scores with this sum."""
    return rng.betavariate(1 + TRUST * total, 1 + TRUST * (n - total))
