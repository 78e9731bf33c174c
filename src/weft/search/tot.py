"""Tree of thoughts: propose lines, value them, keep the best, go on from those."""

from __future__ import annotations

from typing import Literal, Unpack

from ..errors import ConfigError
from ..lm import LM
from .breadth import BreadthFirst
from .core import Prompt, whole
from .depth import DepthFirst
from .driver import Algorithm, Search
from .judge import Judge
from .options import SearchOptions, Settings
from .propose import Counts, Propose, Proposer
from .ranking import deepest
from .result import SearchResult
from .score import Value
from .steps import Steps, awaitable, plain


@plain
def tot(
    lm: LM,
    prompt: Prompt,
    *,
    order: Literal["bfs", "dfs"] = "bfs",
    breadth: int = 5,
    n_continue: Counts = None,
    n_suggest: Counts = None,
    depth: int | None = None,
    propose: Propose = "both",
    value: Value | None = None,
    answer_tokens: int = 256,
    **options: Unpack[SearchOptions],
) -> Steps[SearchResult]:
    """Search a tree of lines and return the best path, completed by the model.

    A level proposes lines after the nodes in play, merges equal ones, values them and keeps the
    `breadth` best: of one state one only, none that the model calls impossible. Every candidate
    stays in the tree with its `score`. The best path is then continued greedily to its end; with a
    task's checker, the next best too until an answer is right.

    Args:
        prompt: a text, chat messages, token ids, or a node of a loom to search below. A Game of 24
            is recognised; any other is continued line by line and valued by its mean logprob.
        order: "bfs" goes on from the `breadth` best of a level at once; "dfs" from the best child
            of one node at a time, the `breadth` best of each node in turn, and back up from a node
            without hope. It completes each full path that it comes to, and ends at the first right
            answer; without a checker, at the first whole one.
        n_continue, n_suggest: proposals a node, of either kind; a sequence is one number a level,
            its last for all further ones. None: as the task advises, else 8.
        depth: levels at most. None: the task's steps, else until all paths have ended, 16 at most.
        propose: "both", "continue" (the answer, line by line), "suggest" (ask for a step), or a
            callable: nodes → texts of new children, a list a node.
        value: nodes → scores, higher is better. None: the model's verdicts, if there is a task.
        answer_tokens: of the final completion.
        options: SearchOptions; lines have `max_tokens` 40 and `temperature` 1.0 unless given.

    Raises:
        ConfigError: an argument is outside what is allowed.
    """
    if order not in ("bfs", "dfs"):
        raise ConfigError(f"order is {order!r}; allowed are 'bfs' and 'dfs'")
    settings = Settings.read(options, temperature=1.0, max_tokens=40)
    numbers = (n_continue, n_suggest, depth, answer_tokens)
    search = Search(lm, prompt, settings, "tot", order=order, breadth=breadth, numbers=numbers)
    proposer = Proposer(
        lm,
        search.task,
        search.meter,
        propose=propose,
        n_continue=n_continue,
        n_suggest=n_suggest,
        sampling=settings.sampling,
        reserve=whole("answer_tokens", answer_tokens),
    )
    judge = Judge(lm, search.task, search.meter, value)
    made = BreadthFirst if order == "bfs" else DepthFirst
    algorithm: Algorithm = made(judge, whole("breadth", breadth), deepest(depth, search))
    return (yield from search.run(algorithm, judge, proposer, tries=breadth))


atot = awaitable(tot)
