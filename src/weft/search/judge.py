"""The judge, which scores candidates, and the frontier: which nodes of a tree can be expanded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .._core.validation import check_int
from ..errors import Unsupported
from ..loom import Heddle
from .core import Steps
from .driver import LIKELIEST, Search
from .score import likelihood, mean_logprob, verdict_steps
from .strategies import WITHOUT_VERDICTS
from .task import Task, overrides

# A candidate with a verdict below this is not followed: the model or reward model rules it out.
HOPELESS = 1e-3


class Judge:
    """Scores candidates and verifies full answers; one batch per round.

    A score is the result of the caller's `value` or `score`. Without these it is the model's yes-no
    verdict if there is a task, else the likelihood. Without a model it is the checker's verdict.

    as_share: likelihoods are mean token probabilities, 0 to 1. False: they are mean logprobs.
    checks_ends: if there is a checker, the score of an ended path is its verdict, 1 or 0. This also
        replaces the caller's `value`, for searches that average the scores below a node.
    asks: use the model's verdicts, if the task has questions.
    """

    def __init__(
        self,
        search: Search,
        *,
        as_share: bool = False,
        checks_ends: bool = False,
        asks: bool = True,
    ) -> None:
        self.search = search
        self.as_share = as_share
        self.checks_ends = checks_ends
        self.task: Task | None = None
        if asks and search.lm is not None and search.value is None:
            self.task = search.task if overrides(search.task, "question") else None
        self._known: dict[str, float] = {}

    def check_engine(self) -> None:
        """Raise Unsupported if scores need logprobs from the model, and its engine returns none."""
        lm = self.search.lm
        if lm is None or self.search.value is not None or lm.info.capabilities.steps:
            return
        if self.task is not None:
            raise Unsupported(
                "the model's verdicts on lines are read from its next-token distributions, which"
                f" {lm.info.model} on the {lm.info.name} engine does not give: give value= or"
                f" score=, or take a search without verdicts: {', '.join(WITHOUT_VERDICTS)}",
                hint=f"--strategy {WITHOUT_VERDICTS[0]}",
            )
        if not lm.info.capabilities.scoring and any(map(callable, self.search.proposers.values())):
            raise Unsupported(
                f"lines of a function are scored by their likelihood, which {lm.info.model} on"
                f" the {lm.info.name} engine does not measure: give value= or score="
            )

    def score(self, nodes: list[Heddle]) -> Steps[None]:
        """Score nodes: set the `score` of each, and `meta["solved"]` of each full answer."""
        yield from self.verify(nodes)
        scores = yield from self._scores(nodes)
        for node, score in zip(nodes, scores, strict=True):
            node.score = score
        self.search.meter.valued += len(nodes)

    def verify(self, nodes: Sequence[Heddle], *, cut: bool = False) -> Steps[None]:
        """Run the checker on full answers: set `meta["solved"]` of each to True or False.

        Do nothing without a checker.

        cut: verify the other nodes too, as if their texts were full answers.
        """
        search = self.search
        if search.verifier is not None:
            complete = [node for node in nodes if cut or search.is_complete(node)]
            verdicts = yield from search.verifier.verdicts(complete, search.state_of)
            for node, is_right in zip(complete, verdicts, strict=True):
                node.meta["solved"] = is_right

    def is_hopeless(self, node: Heddle) -> bool:
        """Return True if the verdict of the model, a reward model or a checker rules the node out.

        Likelihoods and the caller's other values never do.
        """
        value = self.search.value
        has_verdicts = self.task is not None or (value is not None and value.is_verdict)
        if not has_verdicts or (node.terminal and not self.search.checks):
            return False
        return (node.score or 0.0) < HOPELESS

    def _scores(self, nodes: list[Heddle]) -> Steps[list[float]]:
        """Return a score for each node; subclasses override this."""
        search = self.search
        if search.value is not None:
            scores = yield from search.value.numbers(nodes, search.state_of)
        elif self.task is not None:
            scores = yield from self._verdicts(self.task, nodes)
        elif search.lm is None and search.checks:
            scores = [float(search.is_solved(node)) for node in nodes]
        else:
            scores = yield from (likelihood if self.as_share else mean_logprob).steps(nodes)
        if not self.checks_ends or not search.checks:
            return scores
        return [
            float(search.is_solved(node)) if node.terminal else score
            for node, score in zip(nodes, scores, strict=True)
        ]

    def _verdicts(self, task: Task, nodes: list[Heddle]) -> Steps[list[float]]:
        """Return the model's probability of a good verdict on each node; 0 without a question."""
        questions = [task.question(self.search.lines_of(node)) for node in nodes]
        new = [q for q in dict.fromkeys(questions) if q is not None and q not in self._known]
        if new:
            assert self.search.lm is not None
            lm, adapter = self.search.lm, self.search.loom.adapter
            answers = yield from verdict_steps(lm, new, task.verdicts, adapter)
            self.search.meter.prompt_tokens += answers.n_tokens
            self._known.update(zip(new, answers.values, strict=True))
        return [0.0 if question is None else self._known[question] for question in questions]


# Levels of a search without a task and without `depth`.
DEFAULT_DEPTH = 16
# The model completes a path with at least this score.
LIKELY = 0.5


def best_per_state(search: Search, judge: Judge, candidates: Sequence[Heddle]) -> list[Heddle]:
    """Return the candidates to continue from, best first: one per state, without hopeless ones."""
    kept: dict[object, Heddle] = {}
    for node in ranked(search.in_order(candidates)):
        key = search.merge_key(node)
        if key is not None and not judge.is_hopeless(node):
            kept.setdefault(key, node)
    return list(kept.values())


def ranked(nodes: Sequence[Heddle]) -> list[Heddle]:
    """Return nodes sorted by score, highest first; nodes of equal score keep their order."""
    return sorted(nodes, key=lambda node: math.inf if node.score is None else -node.score)


def max_depth(depth: int | None, search: Search) -> int:
    """Return the maximum number of levels below the start.

    depth: the caller's limit; None means the remaining steps of the task, else DEFAULT_DEPTH.
    """
    given = DEFAULT_DEPTH if depth is None else check_int("depth", depth, 1)
    if search.uses_states or search.task is None or search.task.steps is None:
        return given
    remaining_steps = max(search.task.steps - len(search.lines_of(search.start)), 0)
    return remaining_steps if depth is None else min(given, remaining_steps)


def max_rounds(rounds: int | None, search: Search, *, checked: int, unchecked: int) -> int:
    """Return the maximum number of rounds of a search.

    Args:
        rounds: the caller's number; None means a default.
        checked: the default with a checker, which can end the search early.
        unchecked: the default without a checker.
    """
    if rounds is not None:
        return check_int("rounds", rounds, 1)
    return checked if search.checks else unchecked


def has_correct_answer(search: Search) -> bool:
    """Return True if there is a checker, and it has accepted some node."""
    return search.checks and any(map(search.is_solved, search.nodes()))


def rank_answers(search: Search) -> list[Heddle]:
    """Return the scored nodes, best answer first; those that a checker accepted lead.

    Lines that the task rejects are last.

    If `search.completes`, next come unfinished paths of at least `task.steps` lines. Then come
    ended paths by score, and then the others, deepest first.

    Otherwise ended paths come next, and then the others, each by the caller's score and then by
    depth. Without that score they come by depth first, because likelihood favors short paths.
    """
    nodes = [n for n in search.nodes() if n is not search.start and n.score is not None]
    if not search.completes:
        is_scored_by_caller = search.value is not None

        def worth(node: Heddle) -> tuple[float, ...]:
            """Sort key if the search does not complete paths; smaller is better."""
            depth, score = -len(node.path), -(node.score or 0.0)
            order = (score, depth) if is_scored_by_caller else (depth, score)
            return (
                *(not search.is_solved(node), search.is_rejected(node), not search.is_end(node)),
                *order,
            )

        return sorted(nodes, key=worth)
    steps = search.task.steps if search.task is not None else None

    def rank(node: Heddle) -> tuple[float, ...]:
        """Sort key if the search completes paths; smaller is better."""
        level = search.level(node)
        kind = 1 if node.terminal else 0
        if search.is_solved(node):
            kind = 3
        elif steps and level >= steps and not search.children(node) and not node.terminal:
            kind = 2
        level_key = 0 if node.terminal else -level
        return (search.is_rejected(node), -kind, level_key, -(node.score or 0.0))

    return sorted(nodes, key=rank)


def is_step(node: Heddle) -> bool:
    """Return True if a node is a scored step, not a full answer or part of a line."""
    return node.score is not None and not node.meta.get("answer")


def is_completed(search: Search, node: Heddle) -> bool:
    """Return True if the model has already completed this path to a full answer.

    That is so if an answer was drawn below the node. It is also so if the likeliest completion of
    an ancestor starts with this path.
    """
    text = ""
    for above in reversed(node.path):
        for child in search.children(above):
            is_likeliest = child.meta.get("answer") == LIKELIEST
            if is_likeliest and child.text.strip().startswith(text.strip()):
                return True
        text = above.text + text
    return any(child.meta.get("answer") for child in search.children(node))


class Frontier:
    """Statistics of a search tree, and which of its nodes can be expanded.

    The tree-search algorithms select nodes by it. It describes the tree at the time of its
    creation.

    visits: node id → number of scored nodes at or below the node.
    total: node id → sum of the scores of these nodes.
    repeats: node id → number of drawn lines at or below the node that existed already.
    steps: node id → the node's children that are steps (see `is_step`), in order.
    closed: ids of the nodes that the search does not follow.
    """

    def __init__(self, search: Search, judge: Judge, depth: int) -> None:
        """Read the search's tree.

        depth: maximum number of levels below the start.

        Cost: O(nodes); it reads the text of each path once.
        """
        self.search = search
        self.depth = depth
        self.nodes = search.nodes()
        self.visits: dict[str, int] = {}
        self.total: dict[str, float] = {}
        self.repeats: dict[str, int] = {}
        self.steps = {n.id: list(filter(is_step, search.children(n))) for n in self.nodes}
        self._sum_up()
        self.closed = self._find_closed(judge)

    def paths_to_complete(self, *, anywhere: bool = False) -> list[Heddle]:
        """Return the paths that the model should now complete to an answer, best first.

        These are full paths with a score of at least `LIKELY` that were not completed before, and
        the start. [] if the search completes no paths.

        anywhere: accept paths of any length, because a completion may cost less than a level.
        """
        if not self.search.completes:
            return []
        nodes = [
            node
            for node in self.nodes
            if node.id not in self.closed
            and (anywhere or self.is_full(node))
            and (node is self.search.start or (node.score or 0) >= LIKELY)
            and not is_completed(self.search, node)
        ]
        return sorted(ranked(nodes), key=lambda node: node is not self.search.start)

    def is_full(self, node: Heddle) -> bool:
        """Return True if the path to the node has the maximum number of levels."""
        return self.search.level(node) - self.search.level(self.search.start) >= self.depth

    def expandable(self, excluded: Iterable[str] = (), *, widens: bool = False) -> set[str]:
        """Return the ids of nodes that can be expanded, or have such a node below them.

        Args:
            excluded: ids of nodes that are being expanded already; they do not count.
            widens: nodes that have steps can get more. False: only nodes without steps count.
        """
        busy, open_ids = set(excluded), set[str]()
        for node in reversed(self.nodes):
            if node.id in self.closed or self.is_full(node):
                continue
            steps = self.steps[node.id]
            below = any(child.id in open_ids for child in steps)
            may_open = (widens or not steps) and not node.meta.get("closed")
            if below or (may_open and node.id not in busy):
                open_ids.add(node.id)
        return open_ids

    def _sum_up(self) -> None:
        """Compute `visits`, `total` and `repeats` of all nodes, leaves first."""
        for node in reversed(self.nodes):
            below = self.search.children(node)
            self.visits[node.id] = (node.score is not None) + sum(
                self.visits[child.id] for child in below
            )
            self.total[node.id] = (node.score or 0.0) + sum(self.total[child.id] for child in below)
            known = max(node.meta.get("drawn", 0) - len(self.steps[node.id]), 0)
            self.repeats[node.id] = known + sum(self.repeats[child.id] for child in below)

    def _find_closed(self, judge: Judge) -> set[str]:
        """Return the ids of the nodes that the search does not follow.

        These are ended and hopeless paths, repeated states, and nodes that are not steps.
        """
        search, closed, keys = self.search, set[str](), set[object]()
        for node in self.nodes:
            if node is search.start:
                continue
            key = search.merge_key(node)
            ended = search.is_end(node) or (self.is_full(node) and is_completed(search, node))
            if not is_step(node) or ended or key is None or key in keys:
                closed.add(node.id)
            elif judge.is_hopeless(node):
                closed.add(node.id)
            keys.add(key)
        return closed
