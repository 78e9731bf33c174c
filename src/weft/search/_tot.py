"""Tree of thoughts: propose lines, value them, keep the best, continue from those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from .._core.validation import check_int
from ..errors import ConfigError
from ..lm.lm import LM
from ..loom import Heddle
from .core import Prompt, SearchOptions, SearchResult, Settings, Steps, awaitable, blocking
from .driver import Algorithm, Search, WorkItem
from .judge import Judge, best_per_state, has_correct_answer, max_depth, rank_answers, ranked
from .propose import Counts, Proposer


@blocking
def tot(
    lm: LM | None,
    prompt: Prompt,
    *,
    order: Literal["bfs", "dfs"] = "bfs",
    breadth: int = 5,
    n_continue: Counts = None,
    n_suggest: Counts = None,
    depth: int | None = None,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Tree-of-thoughts search: propose lines, score them, keep the best; return the best path.

    Each level proposes lines after the current nodes, merges equal ones, scores them and keeps the
    `breadth` best. It keeps one node per state, and none that the model rules out. Every candidate
    stays in the tree with its `score`. The model then continues the best path greedily to its end.
    If a checker rejects it, the next best follow, `breadth` paths at most.

    Args:
        lm: the model. None: `propose` and `score` are functions of the caller's.
        prompt: a text, chat messages, token ids, or a node of a loom to search below. A Game of 24
            prompt is recognized. Other prompts are continued line by line and valued by their mean
            logprob. Without a model: the first state.
        order: "bfs" continues from the `breadth` best nodes of a level at once. "dfs" continues
            from the best child of one node at a time, up to `breadth` of each node, and backtracks.
            It completes each full path, and ends at the first accepted answer; without a checker,
            at the first full one.
        breadth: nodes kept per level, 1 or more.
        n_continue, n_suggest: lines to propose per node, by continuing the answer and by asking for
            a step with the task's prompt. A sequence has one number per level, its last for all
            further ones. None: as the task advises, else 8.
        depth: maximum number of levels. None: the task's steps, else until all paths have ended, at
            most 16.
        options: SearchOptions; lines have `max_tokens` 40 and `temperature` 1.0 unless given.

    Returns: a SearchResult.

    Raises:
        ConfigError: an argument is outside what is allowed.
    """
    if order not in ("bfs", "dfs"):
        raise ConfigError(f"order is {order!r}; allowed are 'bfs' and 'dfs'")
    settings = Settings.read(tot, options, temperature=1.0, max_tokens=40)
    numbers = (n_continue, n_suggest, depth, settings.answer_tokens)
    search = Search(lm, prompt, settings, "tot", order=order, breadth=breadth, numbers=numbers)
    proposer = Proposer(search, n_continue=n_continue, n_suggest=n_suggest)
    judge = Judge(search)
    algorithm_class = BreadthFirst if order == "bfs" else DepthFirst
    levels = max_depth(depth, search)
    algorithm: Algorithm = algorithm_class(judge, check_int("breadth", breadth, 1), levels)
    return (yield from search.run(algorithm, judge, proposer, tries=breadth, depth=levels))


atot = awaitable(tot)


class BreadthFirst:
    """The algorithm behind `tot(order="bfs")`: a round expands all kept nodes of a level.

    `search.state["kept"]` has the ids of the nodes that each round kept.
    """

    def __init__(self, judge: Judge, breadth: int, depth: int) -> None:
        self.judge = judge
        self.breadth = breadth
        self.depth = depth

    def next_work(self, search: Search) -> Sequence[WorkItem]:
        """Return this round's work: propose lines below the nodes that the last round kept.

        [] ends the search, as after a correct answer.
        """
        if search.round >= self.depth or has_correct_answer(search):
            return []
        kept = self.kept(search, search.round)
        return [WorkItem(node) for node in kept if not search.is_end(node)]

    def record(self, search: Search, candidates: Sequence[Heddle]) -> Sequence[Heddle]:
        """Keep the `breadth` best new nodes, one per state; return them, best first.

        States of the start node and of nodes that earlier rounds kept are left out. The ids of the
        kept nodes are stored in `search.state`.
        """
        earlier = [each for ids in self._ids(search, search.round) for each in ids]
        before = {search.merge_key(node) for node in [search.start, *search.nodes_by_id(earlier)]}
        new = best_per_state(search, self.judge, candidates)
        kept = [node for node in new if search.merge_key(node) not in before][: self.breadth]
        search.state.setdefault("kept", {})[str(search.round + 1)] = [node.id for node in kept]
        return kept

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the paths that ended and those of the last level, best first."""
        if not search.completes or has_correct_answer(search):
            return rank_answers(search)
        earlier = [each for ids in self._ids(search, search.round - 1) for each in ids]
        ended = [node for node in search.nodes_by_id(earlier) if node.terminal]
        return ranked([*ended, *self.kept(search, search.round)]) if search.round else []

    def kept(self, search: Search, number: int) -> list[Heddle]:
        """Return the nodes that round `number` kept; round 0 has the start node."""
        return search.nodes_by_id(search.state["kept"][str(number)]) if number else [search.start]

    def _ids(self, search: Search, rounds: int) -> list[list[str]]:
        """Return, for each of the first `rounds` rounds, the ids of the nodes that it kept."""
        return [search.state["kept"][str(number)] for number in range(1, rounds + 1)]


class DepthFirst:
    """The algorithm behind `tot(order="dfs")`: a round expands one node, best children first."""

    def __init__(self, judge: Judge, breadth: int, depth: int) -> None:
        self.judge = judge
        self.breadth = breadth
        self.depth = depth

    def next_work(self, search: Search) -> Sequence[WorkItem]:
        """Return this round's work: propose lines below the next node, or complete a full path.

        [] ends the search, as after an answer.
        """
        if self._has_answer(search):
            return []
        for node in self._depth_first_order(search):
            if node.meta.get("opened") or search.is_end(node):
                continue
            if not self._is_full(search, node):
                return [WorkItem(node)]
            if search.completes:
                return [WorkItem(node, "answers", 1, 0.0)]
        return []

    def record(self, search: Search, candidates: Sequence[Heddle]) -> Sequence[Heddle]:
        """Mark the parent as expanded, so that the next round expands another node."""
        for node in candidates:
            if node.parent is not None:
                node.parent.meta["opened"] = True
        return ranked(search.in_order(candidates))

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the nodes in the order of `judge.rank_answers`."""
        return rank_answers(search)

    def _has_answer(self, search: Search) -> bool:
        """Return True if the checker accepted an answer; without a checker, if a path has ended."""
        if search.checks:
            return has_correct_answer(search)
        below = (node for node in search.nodes() if node is not search.start)
        return any(
            search.is_end(node) or (self._is_full(search, node) and not search.completes)
            for node in below
            if not search.is_rejected(node)
        )

    def _is_full(self, search: Search, node: Heddle) -> bool:
        """Return True if the path has the maximum number of lines."""
        return search.level(node) - search.level(search.start) >= self.depth

    def _depth_first_order(self, search: Search) -> list[Heddle]:
        """Return the nodes in the order to expand them: `breadth` per node, one per state."""
        order, stack = list[Heddle](), [search.start]
        visited: set[object] = set()
        while stack:
            node = stack.pop()
            if (place := search.merge_key(node)) in visited and node is not search.start:
                continue
            visited.add(place)
            order.append(node)
            steps = [child for child in search.children(node) if child.score is not None]
            kept = best_per_state(search, self.judge, steps)[: self.breadth]
            stack += reversed(kept)
        return order
