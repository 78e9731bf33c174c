"""How good a candidate is: its likelihood, a vote, a verifier, or the model's own verdict.

`likelihood`, `mean_logprob`, and what `majority`, `verifier` and `judge` return are values for any
search: nodes → scores, higher is better.
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
    """A value that may have to ask the model: a search takes its steps, others call it."""

    def __init__(self, steps: Callable[[Sequence[Heddle]], Steps[list[float]]]) -> None:
        self.steps = steps
        self.__doc__ = steps.__doc__

    def __call__(self, nodes: Sequence[Heddle]) -> list[float]:
        """Return a number for each node."""
        return run(self.steps(nodes))


class Verdicts(NamedTuple):
    """values: one a question. n_tokens: of all questions together."""

    values: list[float]
    n_tokens: int


@blocking
def verdicts(
    lm: LM, questions: Sequence[str], words: tuple[str, str], adapter: str | None = None
) -> Steps[Verdicts]:
    """Return, for each question, the probability of the first word against the second.

    Both from the next-token logprobs after the question, at the token where the words part; all
    questions are one batch and nothing is generated. adapter: a LoRA adapter's name.
    """
    return verdict_steps(lm, questions, words, adapter)


averdicts = awaitable(verdicts)


def verdict_steps(
    lm: LM, questions: Sequence[str], words: tuple[str, str], adapter: str | None
) -> Steps[Verdicts]:
    """As `verdicts`, as a part of a search."""
    good, bad = (lm.text.continuation(word) for word in words)
    shared = commonprefix([good, bad])
    if len(shared) in (len(good), len(bad)):
        raise ConfigError(f"one of the verdicts {words!r} begins with the other; take others")
    places = [_question_place(lm, question, shared, adapter) for question in questions]
    answers = yield Read(lm, [Extend(place, (), (Logits(place.depth),)) for place in places])
    at_good, at_bad = good[len(shared)], bad[len(shared)]
    values = [_odds(float(logits[at_good]) - float(logits[at_bad])) for logits in answers]
    return Verdicts(values, sum(place.depth for place in places))


@Scorer
def mean_logprob(nodes: Sequence[Heddle]) -> Steps[list[float]]:
    """Return the mean logprob of all tokens after the prompt, down to each node; -inf for none.

    Of sampled tokens as they were recorded; text that was added is read by the model, in one batch
    for all nodes, and its logprob is noted in the node's `meta["measured"]`.
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
                f"{lm.info.model} on the {lm.info.name} engine neither tells the log-probabilities"
                " of this text nor measures it, so there is no likelihood to score by: give"
                " value= or score=",
                hint="--strategy best-of-n counts votes, which want none",
            )
        items = [measure_item(node.parent, node.tokens) for node in unread.values() if node.parent]
        found = yield Read(lm, items)
        for node, read in zip(unread.values(), found, strict=True):
            node.meta["measured"] = math.fsum(read.logprobs.tolist())
    return [_mean(path) for path in paths]


@Scorer
def likelihood(nodes: Sequence[Heddle]) -> Steps[list[float]]:
    """Return one over the perplexity of each path, 0 to 1: the geometric mean probability."""
    return [math.exp(each) for each in (yield from mean_logprob.steps(nodes))]


@Scorer
def perplexity(nodes: Sequence[Heddle]) -> Steps[list[float]]:
    """Return the perplexity of each path's tokens: lower is better, inf if there are none."""
    return [math.exp(-each) for each in (yield from mean_logprob.steps(nodes))]


def majority(extract: Callable[[str], Hashable | None]) -> Value:
    """Return a value that gives each node the share of the votes that its answer got.

    extract: the answer in a text, or None if it has none: 0. The nodes of one round vote.
    """

    def shares(nodes: Sequence[Heddle]) -> list[float]:
        answers = [extract(text_of(node)) for node in nodes]
        votes = Counter(answer for answer in answers if answer is not None)
        return [0.0 if each is None else votes[each] / votes.total() for each in answers]

    return shares


def verifier(check: Callable[[str], float]) -> Value:
    """Return a value that gives each node what `check` says of its text after the prompt."""
    return lambda nodes: [float(check(text_of(node))) for node in nodes]


def judge(question: Callable[[str], str], words: tuple[str, str] = ("yes", "no")) -> Scorer:
    """Return a value that asks the model itself: the probability of the first of two words.

    question: the text after the prompt → the prompt to ask. Equal prompts are asked once; all of
    them are one batch and nothing is generated.
    """

    def asked(nodes: Sequence[Heddle]) -> Steps[list[float]]:
        prompts = [question(text_of(node)) for node in nodes]
        if not prompts:
            return []
        distinct = list(dict.fromkeys(prompts))
        lm = nodes[0].lm
        if lm is None:
            raise ConfigError("a judge asks the model, and this loom has none")
        root = nodes[0].path[0]
        adapter = root.adapter if isinstance(root, Loom) else None
        found = yield from verdict_steps(lm, distinct, words, adapter)
        values = dict(zip(distinct, found.values, strict=True))
        return [values[prompt] for prompt in prompts]

    return Scorer(asked)


def own_mean_logprob(node: Heddle) -> float:
    """Return the mean logprob of the node's own tokens, sampled or read; -inf where unknown."""
    return _mean([node])


def _mean(path: Sequence[Heddle]) -> float:
    known = [node for node in path if node.logprobs or "measured" in node.meta]
    n_tokens = sum(len(node.logprobs or node.tokens) for node in known)
    totals = [math.fsum(node.logprobs) if node.logprobs else _measured(node) for node in known]
    return math.fsum(totals) / n_tokens if n_tokens else -math.inf


def _measured(node: Heddle) -> float:
    return float(node.meta["measured"])


def _question_place(lm: LM, question: str, shared: Sequence[int], adapter: str | None) -> Place:
    with Loom(lm, question, adapter=adapter) as loom:
        return lm.place([*loom.tokens, *shared], namespace=adapter)


def _odds(margin: float) -> float:
    """The softmax over two logits that differ by `margin`."""
    if margin >= 0:
        return 1 / (1 + math.exp(-margin))
    return math.exp(margin) / (1 + math.exp(margin))
