"""Scores of candidates: likelihood, votes, a verifier, or the model's own verdict.

`likelihood`, `mean_logprob`, and the results of `majority`, `verifier` and `judge` are values for
any search: nodes → scores, higher is better.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

from .._core.sched.work import Extend, Logits
from ..errors import ConfigError, Unsupported
from ..lm.lm import LM
from ..loom import Heddle, Loom
from ..loom.heddle import measure_item
from .core import Read, Steps, Value, awaitable, blocking, run, text_of

if TYPE_CHECKING:
    from .._core.kv.place import Place


class Scorer:
    """A function from nodes to scores that may run the model.

    A search runs its `steps` in its own batches. Other callers call the object, which blocks.
    """

    def __init__(self, steps: Callable[[Sequence[Heddle]], Steps[list[float]]]) -> None:
        self.steps = steps
        self.__doc__ = steps.__doc__

    def __call__(self, nodes: Sequence[Heddle]) -> list[float]:
        """Return a number for each node."""
        return run(self.steps(nodes))


class Verdicts(NamedTuple):
    """Answers to questions. values: probabilities of the first word, one per question.

    n_tokens: the tokens of all questions together.
    """

    values: list[float]
    n_tokens: int


@blocking
def verdicts(
    lm: LM, questions: Sequence[str], words: tuple[str, str], adapter: str | None = None
) -> Steps[Verdicts]:
    """Return, for each question, the probability of the first word against the second.

    Both come from the next-token logprobs after the question, at the first token where the words
    differ. All questions are one batch, and nothing is generated.

    Args:
        words: the positive and the negative answer; neither is a prefix of the other.
        adapter: the name of a LoRA adapter.

    Raises: ConfigError.
    """
    return verdict_steps(lm, questions, words, adapter)


averdicts = awaitable(verdicts)


def verdict_steps(
    lm: LM, questions: Sequence[str], words: tuple[str, str], adapter: str | None
) -> Steps[Verdicts]:
    """Return `verdicts` as a generator of work, which a search runs in its own batches."""
    good, bad = (lm.text.continuation(word) for word in words)
    shared = commonprefix([good, bad])
    if len(shared) in (len(good), len(bad)):
        raise ConfigError(f"one of the verdicts {words!r} begins with the other; take others")
    places = [_question_place(lm, question, shared, adapter) for question in questions]
    answers = yield Read(lm, [Extend(place, (), (Logits(place.depth),)) for place in places])
    at_good, at_bad = good[len(shared)], bad[len(shared)]
    values = [_sigmoid(float(logits[at_good]) - float(logits[at_bad])) for logits in answers]
    return Verdicts(values, sum(place.depth for place in places))


@Scorer
def mean_logprob(nodes: Sequence[Heddle]) -> Steps[list[float]]:
    """Return the mean logprob of all tokens after the prompt, down to each node; -inf for none.

    Logprobs of sampled tokens are recorded on the nodes. The model reads added text, in one batch
    for all nodes, and stores its logprob in the node's `meta["measured"]`.
    """
    paths = [node.path[1:] for node in nodes]
    unread = {
        node.id: node
        for path in paths
        for node in path
        if not node.logprobs and node.text and "measured" not in node.meta
    }
    if unread:
        lm = next(iter(unread.values())).lm
        if lm is None:
            raise ConfigError(
                "without a model there is no likelihood to score by: give value= or score="
            )
        if not (lm.info.capabilities.steps or lm.info.capabilities.scoring):
            raise Unsupported(
                f"{lm.info.model} on the {lm.info.name} engine neither reports the"
                " log-probabilities of this text nor measures it, so there is no likelihood to"
                " score by: give value= or score=",
                hint="--strategy best-of-n counts votes, which need no likelihood",
            )
        items = [measure_item(node.parent, node.tokens) for node in unread.values() if node.parent]
        scores = yield Read(lm, items)
        for node, read in zip(unread.values(), scores, strict=True):
            node.meta["measured"] = math.fsum(read.logprobs.tolist())
    return [_path_logprob(path) for path in paths]


@Scorer
def likelihood(nodes: Sequence[Heddle]) -> Steps[list[float]]:
    """Return the geometric mean probability of each path's tokens: 1 / perplexity, 0 to 1."""
    return [math.exp(each) for each in (yield from mean_logprob.steps(nodes))]


@Scorer
def perplexity(nodes: Sequence[Heddle]) -> Steps[list[float]]:
    """Return the perplexity of each path's tokens: lower is better; inf without tokens."""
    return [math.exp(-each) for each in (yield from mean_logprob.steps(nodes))]


def majority(extract: Callable[[str], Hashable | None]) -> Value:
    """Return a value that gives each node its answer's share of the votes.

    extract: returns the answer in a text, or None, which scores 0. The nodes of one round vote.
    """

    def shares(nodes: Sequence[Heddle]) -> list[float]:
        answers = [extract(text_of(node)) for node in nodes]
        votes = Counter(answer for answer in answers if answer is not None)
        return [0.0 if each is None else votes[each] / votes.total() for each in answers]

    return shares


def verifier(check: Callable[[str], float]) -> Value:
    """Return a value that gives each node the result of `check` for its text after the prompt."""
    return lambda nodes: [float(check(text_of(node))) for node in nodes]


def judge(question: Callable[[str], str], words: tuple[str, str] = ("yes", "no")) -> Scorer:
    """Return a value that asks the model a question per node: the probability of the first word.

    Equal prompts run once. All of them are one batch, and nothing is generated.

    Args:
        question: text after the prompt → the question's prompt.
        words: the positive and the negative answer.
    """

    def steps(nodes: Sequence[Heddle]) -> Steps[list[float]]:
        prompts = [question(text_of(node)) for node in nodes]
        if not prompts:
            return []
        distinct = list(dict.fromkeys(prompts))
        lm = nodes[0].lm
        if lm is None:
            raise ConfigError("a judge needs a model, and this loom has none")
        root = nodes[0].path[0]
        adapter = root.adapter if isinstance(root, Loom) else None
        verdicts = yield from verdict_steps(lm, distinct, words, adapter)
        values = dict(zip(distinct, verdicts.values, strict=True))
        return [values[prompt] for prompt in prompts]

    return Scorer(steps)


def mean_logprob_of_node(node: Heddle) -> float:
    """Return the mean logprob of the node's own tokens, sampled or read; -inf if unknown."""
    return _path_logprob([node])


def _path_logprob(path: Sequence[Heddle]) -> float:
    known = [node for node in path if node.logprobs or "measured" in node.meta]
    n_tokens = sum(len(node.logprobs or node.tokens) for node in known)
    totals = [math.fsum(node.logprobs) if node.logprobs else _stored_sum(node) for node in known]
    return math.fsum(totals) / n_tokens if n_tokens else -math.inf


def _stored_sum(node: Heddle) -> float:
    return float(node.meta["measured"])


def _question_place(lm: LM, question: str, shared: Sequence[int], adapter: str | None) -> Place:
    with Loom(lm, question, adapter=adapter) as loom:
        return lm.place([*loom.tokens, *shared], namespace=adapter)


def _sigmoid(margin: float) -> float:
    """Return the probability of the first of two logits, which is larger by `margin`."""
    if margin >= 0:
        return 1 / (1 + math.exp(-margin))
    return math.exp(margin) / (1 + math.exp(margin))
