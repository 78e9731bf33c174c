"""The judge of a search: by a callable, by the model's verdicts on a task, or by mean logprob."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Generator, Sequence

from ..errors import ConfigError
from ..lm import LM
from ..loom import Heddle
from .core import Meter, lines_of
from .score import Value, path_mean_logprob, text_of, verdict_steps
from .steps import Steps
from .task import Task

# Below this verdict a candidate is not followed: the model rules it out.
HOPELESS = 1e-3


class Judge:
    """Scores candidates: by a callable, by the model's verdicts on a task, or by likelihood.

    as_share: likelihoods are mean token probabilities, 0 to 1, and whole answers to a task score
    what its checker says; else they are mean logprobs, and only the verdict counts.
    """

    def __init__(
        self,
        lm: LM,
        task: Task | None,
        meter: Meter,
        value: Value | None,
        *,
        as_share: bool = False,
    ) -> None:
        self.lm = lm
        self.task = task
        self.meter = meter
        self.value = value
        self.as_share = as_share
        self._known: dict[str, float] = {}

    def score(self, nodes: list[Heddle]) -> Steps[None]:
        """Set the score of each node; one batch for all, and no question is asked twice."""
        scores = yield from self._scores(nodes)
        for node, score in zip(nodes, scores, strict=True):
            node.score = score
        self.meter.valued += len(nodes)

    def is_hopeless(self, node: Heddle) -> bool:
        """Say whether the model itself rules the candidate out."""
        by_verdict = self.value is None and self.task is not None
        return by_verdict and (node.score or 0.0) < HOPELESS

    def _scores(self, nodes: list[Heddle]) -> Steps[list[float]]:
        if self.value is not None:
            found = self.value(nodes) if nodes else []
            if isinstance(found, Generator):
                found = yield from found
            return checked(found, len(nodes))
        if self.task is not None:
            return (yield from self._verdicts(self.task, nodes))
        likely = [path_mean_logprob(node) for node in nodes]
        return [math.exp(each) for each in likely] if self.as_share else likely

    def _verdicts(self, task: Task, nodes: list[Heddle]) -> Steps[list[float]]:
        questions = [task.question(lines_of(node)) for node in nodes]
        new = [q for q in dict.fromkeys(questions) if q is not None and q not in self._known]
        if new:
            answers = yield from verdict_steps(self.lm, new, task.verdicts)
            self.meter.prompt_tokens += answers.n_tokens
            self._known.update(zip(new, answers.values, strict=True))
        return [
            float(task.is_solved(text_of(node)))
            if self.as_share and node.terminal
            else 0.0
            if question is None
            else self._known[question]
            for node, question in zip(nodes, questions, strict=True)
        ]


def checked(scores: Sequence[float], n_nodes: int) -> list[float]:
    """Return what a caller's function found for nodes, or refuse it."""
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
