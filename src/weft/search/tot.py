"""Tree of thoughts, breadth first: propose lines, value them, keep the best, go on from those."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..lm import LM
from ..loom import Heddle, Loom
from .core import Budget, Meter, Prompt, begin, lines_of, read_task, text_of, whole
from .propose import Counts, Propose, Proposer
from .result import Cost, SearchResult
from .score import path_mean_logprob, verdicts
from .task import Task

Value = Callable[[list[Heddle]], Sequence[float]]
Progress = Callable[["Level"], object]
# Below this verdict a candidate is not followed: the model rules it out.
HOPELESS = 1e-3
# Levels of a search that knows neither a task nor a depth.
DEEPEST = 16


@dataclass(frozen=True, slots=True)
class Level:
    """What a search reports of a level: its candidates, those kept, best first, the cost so far."""

    depth: int
    candidates: tuple[Heddle, ...]
    kept: tuple[Heddle, ...]
    cost: Cost


def tot(
    lm: LM,
    prompt: Prompt,
    *,
    task: Task | None = None,
    breadth: int = 5,
    n_continue: Counts = None,
    n_suggest: Counts = None,
    depth: int | None = None,
    propose: Propose = "both",
    value: Value | None = None,
    temperature: float = 1.0,
    max_tokens: int = 40,
    answer_tokens: int = 256,
    budget_tokens: int | None = None,
    budget_s: float | None = None,
    seed: int | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Search a tree of lines breadth first and return the best path, completed by the model.

    A level proposes lines after the nodes in play, merges equal ones, values them and keeps the
    `breadth` best: of one state one only, none that the model calls impossible. Every candidate
    stays in the tree with its `score`. The best path is then continued greedily to its end; with a
    task's checker, the next best too until an answer is right.

    Args:
        prompt: a text, chat messages, token ids, or a node of a loom to search below.
        task: words the questions and checks the answer. None recognises a Game of 24 prompt; any
            other is continued line by line and valued by its mean logprob.
        n_continue, n_suggest: proposals a node, of either kind; a sequence is one number a level,
            its last for all further ones. None: as the task advises, else 8.
        depth: levels at most. None: the task's steps, else until all paths have ended, 16 at most.
        propose: "both", "continue" (the answer, line by line), "suggest" (ask for a step), or a
            callable: nodes → texts of new children, a list a node.
        value: nodes → scores, higher is better. None: the model's verdicts, if there is a task.
        max_tokens, answer_tokens: of a line, and of the final completion.
        budget_tokens, budget_s: what may be spent; `cost.stopped` says which one ended the search.
        seed: the same seed gives the same tree, unless `budget_s` cuts it.
        progress: called after each level.
    """
    start, loom = begin(lm, prompt)
    task = read_task(loom) if task is None else task
    meter = Meter(Budget(budget_tokens, budget_s), seed)
    proposer = Proposer(
        lm,
        task,
        meter,
        propose=propose,
        n_continue=n_continue,
        n_suggest=n_suggest,
        sampling={"temperature": temperature, "max_tokens": max_tokens},
        reserve=whole("answer_tokens", answer_tokens),
    )
    search = _Search(start, loom, task, meter, proposer, Judge(lm, task, meter, value))
    return search.run(whole("breadth", breadth), _depth(depth, task, start), progress)


class Judge:
    """Scores candidates: by a callable, by the model's verdicts on a task, or by mean logprob."""

    def __init__(self, lm: LM, task: Task | None, meter: Meter, value: Value | None) -> None:
        self.lm = lm
        self.task = task
        self.meter = meter
        self.value = value
        self._known: dict[str, float] = {}

    def score(self, nodes: list[Heddle]) -> None:
        """Set the score of each node; one batch for all, and no question is asked twice."""
        for node, score in zip(nodes, self._scores(nodes), strict=True):
            node.score = score
        self.meter.valued += len(nodes)

    def is_hopeless(self, node: Heddle) -> bool:
        """Say whether the model itself rules the candidate out."""
        by_verdict = self.value is None and self.task is not None
        return by_verdict and (node.score or 0.0) < HOPELESS

    def _scores(self, nodes: list[Heddle]) -> list[float]:
        if self.value is not None:
            return _checked(self.value(nodes), len(nodes))
        if self.task is not None:
            return self._verdicts(self.task, nodes)
        return [path_mean_logprob(node) for node in nodes]

    def _verdicts(self, task: Task, nodes: list[Heddle]) -> list[float]:
        questions = [task.question(lines_of(node)) for node in nodes]
        new = [q for q in dict.fromkeys(questions) if q is not None and q not in self._known]
        if new:
            answers = verdicts(self.lm, new, task.verdicts)
            self.meter.prompt_tokens += answers.n_tokens
            self._known.update(zip(new, answers.values, strict=True))
        return [0.0 if question is None else self._known[question] for question in questions]


class _Search:
    """One search on its way. Between calls of the loom the tree is whole."""

    def __init__(
        self,
        start: Heddle,
        loom: Loom,
        task: Task | None,
        meter: Meter,
        proposer: Proposer,
        judge: Judge,
    ) -> None:
        self.start = start
        self.loom = loom
        self.task = task
        self.meter = meter
        self.proposer = proposer
        self.judge = judge

    def run(self, breadth: int, depth: int, progress: Progress | None) -> SearchResult:
        """Go down level by level, then have the best path completed."""
        frontier, ended = [self.start], list[Heddle]()
        # A search below a node that has lines already goes on at its level.
        first = len(lines_of(self.start)) if self.task is not None else 0
        for level in range(first, first + depth):
            candidates = self.proposer.below(frontier, level)
            if not candidates:
                break
            self.judge.score(candidates)
            kept = self._kept(candidates)[:breadth]
            ended += [node for node in kept if node.terminal]
            frontier = [node for node in kept if not node.terminal]
            if progress is not None:
                cost = self.meter.cost()
                progress(Level(level + 1, tuple(candidates), tuple(kept), cost))
            if not frontier or self.meter.stopped is not None:
                break
        return self._answer(_ranked([*ended, *frontier])[:breadth])

    def _kept(self, candidates: list[Heddle]) -> list[Heddle]:
        """Return the candidates worth following, best first, the first of each state."""
        ranked = _ranked(candidates)
        if self.task is None:
            return ranked
        kept: dict[Hashable, Heddle] = {}
        for node in ranked:
            lines = lines_of(node)
            state = self.task.state(lines)
            if state is not None and not self.judge.is_hopeless(node):
                # Whole paths differ in their answers even where they end alike.
                kept.setdefault(node.id if len(lines) >= self.task.steps else state, node)
        return list(kept.values())

    def _answer(self, paths: list[Heddle]) -> SearchResult:
        """Complete the best path, and the next ones as long as a checker says no."""
        best: Heddle | None = None
        for path in paths or [self.start]:
            end = path if path.terminal else self._completed(path)
            best = best or end
            if end is None or self.task is None or self.task.is_solved(text_of(end)):
                best = end or best
                break
        if best is None:
            best = paths[0] if paths else self.start
        text = text_of(best)
        solved = None if self.task is None else self.task.is_solved(text)
        return SearchResult(best, text, self.loom, self.meter.cost(), solved)

    def _completed(self, path: Heddle) -> Heddle | None:
        room = int(min(self.proposer.reserve, self.meter.room()))
        if room < 1:
            self.meter.stopped = "tokens"
            return None
        made = self.meter.grow([path], max_tokens=room, temperature=0.0)
        for end in made:
            end.score = path.score
        return made[0] if made else None


def _ranked(nodes: list[Heddle]) -> list[Heddle]:
    """Best first; equal scores in the order in which they were found."""
    return sorted(nodes, key=lambda node: math.inf if node.score is None else -node.score)


def _depth(depth: int | None, task: Task | None, start: Heddle) -> int:
    given = DEEPEST if depth is None else whole("depth", depth)
    if task is None:
        return given
    missing = max(task.steps - len(lines_of(start)), 0)
    return missing if depth is None else min(given, missing)


def _checked(scores: Sequence[float], n_nodes: int) -> list[float]:
    try:
        values = [float(score) for score in scores]
    except (TypeError, ValueError):
        values = []
    if len(values) != n_nodes or any(math.isnan(value) for value in values):
        raise ConfigError(
            f"value returned {reprlib.repr(scores)} for {n_nodes} nodes; it has to return one "
            "number a node"
        )
    return values
