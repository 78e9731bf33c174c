"""Beam search over lines: the likeliest paths continue, and ended ones keep their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from .._core.validation import check_int
from ..lm.lm import LM
from ..loom import Heddle
from ._tot import BreadthFirst
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
from .judge import DEFAULT_DEPTH, Judge, ranked
from .propose import Proposer


@blocking
def beam(
    lm: LM | None,
    prompt: Prompt,
    *,
    width: int = 8,
    n: int = 8,
    depth: int = DEFAULT_DEPTH,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Beam search over lines: keep the `width` likeliest paths at every line; return the best one.

    Each path gets `n` sampled next lines. Equal lines are merged, and lines that the task's `state`
    rejects are not continued. If all are rejected, the search ends with the paths before them.

    Paths that have ended compete with new ones by the mean logprob of all their tokens. The search
    ends when all kept paths have ended. If there is a checker, the answer is the best path that it
    accepts.

    Args:
        lm, prompt: as for `tot`.
        width: number of paths to keep.
        n: lines to sample after each path; a batch has up to width * n rows.
        depth: maximum number of lines; the model completes unfinished paths greedily.
        options: SearchOptions; lines have `max_tokens` 40, `temperature` 0.8 and end at a newline
            (`stop`) unless given. A beam over tokens is `max_tokens=1` and `stop=None`.

    Returns: a SearchResult.

    Raises:
        ConfigError: an argument is outside what is allowed.
    """
    settings = Settings.read(beam, options, temperature=0.8, max_tokens=40)
    counts = {"width": check_int("width", width, 1), "n": check_branches("n", n)}
    numbers = (depth, settings.answer_tokens)
    search = Search(lm, prompt, settings, "beam", **counts, numbers=numbers)
    proposer = Proposer(search, n_continue=n, n_suggest=0, default="continue")
    judge = Judge(search, asks=False)
    algorithm = Beam(judge, width, check_int("depth", depth, 1))
    return (yield from search.run(algorithm, judge, proposer, tries=width, depth=depth))


abeam = awaitable(beam)


class Beam(BreadthFirst):
    """The algorithm behind `beam`: each round keeps the best paths by score, also ended ones."""

    def next_work(self, search: Search) -> Sequence[WorkItem]:
        """Return this round's work: propose lines below every kept path that has not ended."""
        if search.round >= self.depth:
            return []
        kept = self.kept(search, search.round)
        return [WorkItem(node) for node in kept if not search.is_end(node)]

    def record(self, search: Search, candidates: Sequence[Heddle]) -> Sequence[Heddle]:
        """Keep the best of the new paths and the ended ones; return them, best first.

        Lines that the task rejects are not kept.
        """
        ended = [node for node in self.kept(search, search.round) if search.is_end(node)]
        new = [node for node in candidates if not search.is_rejected(node)]
        kept = ranked(search.in_order([*ended, *new]))[: self.breadth]
        search.state.setdefault("kept", {})[str(search.round + 1)] = [node.id for node in kept]
        return kept

    def best(self, search: Search) -> Sequence[Heddle]:
        """Return the last kept paths: those with a correct answer first, then by score."""
        rounds = range(search.round, 0, -1)
        last = next((kept for n in rounds if (kept := self.kept(search, n))), [])
        return sorted(last, key=lambda node: not search.is_solved(node))
