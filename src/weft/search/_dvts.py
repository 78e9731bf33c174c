"""Diverse verifier tree search (DVTS): independent subtrees, each greedy by the value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from .._core.validation import check_int
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
from .judge import Judge, best_per_state, has_correct_answer, max_depth, ranked
from .propose import Proposer


@blocking
def dvts(
    lm: LM | None,
    prompt: Prompt,
    *,
    trees: int = 4,
    width: int = 4,
    depth: int | None = None,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Grow `trees` independent paths, each greedy by the value of its lines; return the best one.

    Use it instead of `beam` if the value is sometimes wrong, such as a reward model. A score that
    is too high misleads one path, not all of them.

    The first round draws trees * width first lines and splits them evenly into subtrees. Each
    subtree keeps its line of the best score. In later rounds it draws `width` lines after its path
    and appends the best one. The lines of all subtrees run in one batch.

    Args:
        lm, prompt, depth: as for `tot`.
        trees: number of paths.
        width: lines that each path draws per round.
        options: SearchOptions; lines have `max_tokens` 40, `temperature` 1.0 and end at a newline
            (`stop`) unless given. `value` scores the lines: usually a `RewardModel`.

    Returns: a SearchResult; `best` is a path that the checker accepts, else the ended path with the
    best score.

    Raises:
        ConfigError: an argument is outside what is allowed.
    """
    settings = Settings.read(dvts, options, temperature=1.0, max_tokens=40)
    counts = {"trees": check_int("trees", trees, 1), "width": check_branches("width", width)}
    numbers = (depth, settings.answer_tokens)
    search = Search(lm, prompt, settings, "dvts", **counts, numbers=numbers)
    proposer = Proposer(search, n_continue=width, n_suggest=0, default="continue")
    judge = Judge(search)
    levels = max_depth(depth, search)
    algorithm = Subtrees(judge, trees, width, levels)
    return (yield from search.run(algorithm, judge, proposer, tries=trees, depth=levels))


advts = awaitable(dvts)


class Subtrees:
    """The algorithm behind `dvts`: `next_work`, `record` and `best` of `Algorithm`.

    `search.state["tips"]` has, for each round, the ids of the last nodes of the paths.
    """

    def __init__(self, judge: Judge, trees: int, width: int, depth: int) -> None:
        self.judge = judge
        self.trees = trees
        self.width = width
        self.depth = depth

    def next_work(self, search: Search) -> Sequence[WorkItem]:
        """Return the lines to draw after each path; [] after a correct answer or `depth` rounds."""
        if search.round >= self.depth or has_correct_answer(search):
            return []
        if not search.round:
            return [WorkItem(search.start, n=self.trees * self.width)]
        tips = self._tips(search)
        return [WorkItem(node, n=self.width) for node in tips if not search.is_end(node)]

    def record(self, search: Search, candidates: Sequence[Heddle]) -> Sequence[Heddle]:
        """Extend each path by its best new line; return the new last nodes, best first.

        A path whose new lines are all invalid stays as it is.
        """
        new = search.in_order(candidates)
        if not search.round:
            dealt = [new[number :: self.trees] for number in range(self.trees)]
            tips = [best[0] for some in dealt if (best := self._valid_by_score(search, some))]
        else:
            tips = [
                next(iter(self._valid_by_score(search, [n for n in new if n.parent is tip])), tip)
                for tip in self._tips(search)
            ]
        ids = [node.id for node in tips]
        search.state.setdefault("tips", {})[str(search.round + 1)] = ids
        return ranked(tips)

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the last nodes of the paths, best first.

        Correct ones lead, then ended ones, then deeper ones; equal ones are in order of score.
        """
        tips = self._tips(search) if search.round else []

        def rank(node: Heddle) -> tuple[bool, bool, int]:
            return (not search.is_solved(node), not search.is_end(node), -search.level(node))

        return sorted(ranked(tips), key=rank)

    def _valid_by_score(self, search: Search, nodes: Sequence[Heddle]) -> list[Heddle]:
        """Return the nodes that the search can follow, best first, one per state."""
        return best_per_state(search, self.judge, nodes)

    def _tips(self, search: Search) -> list[Heddle]:
        """Return the last nodes of the paths."""
        return search.nodes_by_id(search.state["tips"][str(search.round)])
