"""The judge of a search: what candidates are worth, and which answers are right."""

from __future__ import annotations

from collections.abc import Sequence

from ..loom import Heddle
from .driver import Search
from .score import likelihood, mean_logprob, verdict_steps
from .steps import Steps
from .task import Task, overrides

# Below this verdict a candidate is not followed: the model rules it out.
HOPELESS = 1e-3


class Judge:
    """Scores candidates, and asks the checker about whole answers; one batch for all of a round.

    A score is what `value` or `score` says, else the model's verdict on a task that words a
    question, else the likelihood; where there is no model, what the checker says.
    as_share: likelihoods are mean token probabilities, 0 to 1, and whole answers that a checker
    has seen score what it says; else they are mean logprobs. asks: verdicts are asked for.
    """

    def __init__(self, search: Search, *, as_share: bool = False, asks: bool = True) -> None:
        self.search = search
        self.as_share = as_share
        self.task: Task | None = None
        if asks and search.lm is not None and search.value is None:
            self.task = search.task if overrides(search.task, "question") else None
        self._known: dict[str, float] = {}

    def score(self, nodes: list[Heddle]) -> Steps[None]:
        """Set the score of each node, and for whole answers whether they are right."""
        yield from self.verify(nodes)
        scores = yield from self._scores(nodes)
        for node, score in zip(nodes, scores, strict=True):
            node.score = score
        self.search.meter.valued += len(nodes)

    def verify(self, nodes: Sequence[Heddle], *, cut: bool = False) -> Steps[None]:
        """Note in `meta["solved"]` of each whole answer what the checker says, if there is one.

        cut: of the others too.
        """
        search = self.search
        if search.verifier is not None:
            whole = [node for node in nodes if cut or search.is_whole(node)]
            found = yield from search.verifier.verdicts(whole, search.state_of)
            for node, is_right in zip(whole, found, strict=True):
                node.meta["solved"] = is_right

    def is_hopeless(self, node: Heddle) -> bool:
        """Say whether the model itself rules the candidate out, or the checker the answer."""
        if self.task is None or (node.terminal and not self.search.checks):
            return False
        return (node.score or 0.0) < HOPELESS

    def _scores(self, nodes: list[Heddle]) -> Steps[list[float]]:
        search = self.search
        if search.value is not None:
            return (yield from search.value.numbers(nodes, search.state_of))
        if self.task is not None:
            scores = yield from self._verdicts(self.task, nodes)
        elif search.lm is None and search.checks:
            scores = [float(search.is_solved(node)) for node in nodes]
        else:
            scores = yield from (likelihood if self.as_share else mean_logprob).steps(nodes)
        if not self.as_share or not search.checks:
            return scores
        return [
            float(search.is_solved(node)) if node.terminal else score
            for node, score in zip(nodes, scores, strict=True)
        ]

    def _verdicts(self, task: Task, nodes: list[Heddle]) -> Steps[list[float]]:
        questions = [task.question(self.search.lines_of(node)) for node in nodes]
        new = [q for q in dict.fromkeys(questions) if q is not None and q not in self._known]
        if new:
            assert self.search.lm is not None
            lm, adapter = self.search.lm, self.search.loom.adapter
            answers = yield from verdict_steps(lm, new, task.verdicts, adapter)
            self.search.meter.prompt_tokens += answers.n_tokens
            self._known.update(zip(new, answers.values, strict=True))
        return [0.0 if question is None else self._known[question] for question in questions]
