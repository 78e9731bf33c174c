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
    """A scoring function that needs model calls: nodes → scores, higher is better.

    Pass it as `value=` to a search, which runs its model calls in the search's batches. Call it to
    score nodes outside a search; that blocks.

    is_verdict: scores are probabilities that a text is right, 0 to 1. A search that excludes lines
        by the model's own verdicts then excludes lines by these scores, too.
    """

    is_verdict = False

    def __init__(self, steps: Callable[[Sequence[Heddle]], Steps[list[float]]]) -> None:
        self.steps = steps
        self.__doc__ = steps.__doc__

    def __call__(self, nodes: Sequence[Heddle]) -> list[float]:
        """Return a number for each node."""
        return run(self.steps(nodes))


class Verdicts(NamedTuple):
    """Results of yes-no questions.

    values: probability of the first word against the second, one per question.
    n_tokens: number of prompt tokens of all questions together.
    """

    values: list[float]
    n_tokens: int


@blocking
def verdicts(
    lm: LM, questions: Sequence[str], words: tuple[str, str], adapter: str | None = None
) -> Steps[Verdicts]:
    """Ask the model yes-no questions; return the probability of the first word for each.

    Nothing is generated: the probabilities come from the next-token logprobs at the first token
    where the two words differ. All questions run as one batch.

    Args:
        questions: full prompts, one per question.
        words: the positive and the negative answer; neither is a prefix of the other.
        adapter: the name of a LoRA adapter.

    Raises: ConfigError if one word is a prefix of the other.
    """
    return verdict_steps(lm, questions, words, adapter)


averdicts = awaitable(verdicts)


def verdict_steps(
    lm: LM, questions: Sequence[str], words: tuple[str, str], adapter: str | None
) -> Steps[Verdicts]:
    """Like `verdicts`, but a generator of model calls, for use inside a search."""
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
    """Return, for each node, the mean logprob of all tokens from the prompt down to the node.

    -inf if there are no such tokens. Sampled tokens have logprobs already. For added text the model
    computes them, in one batch for all nodes, and stores their sum in `meta["measured"]`.
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
    return [path_logprob(path) for path in paths]


@Scorer
def likelihood(nodes: Sequence[Heddle]) -> Steps[list[float]]:
    """Return, for each node, the geometric mean probability (0 to 1) of the tokens on its path.

    That is 1 / perplexity.
    """
    return [math.exp(each) for each in (yield from mean_logprob.steps(nodes))]


@Scorer
def perplexity(nodes: Sequence[Heddle]) -> Steps[list[float]]:
    """Return, for each node, the perplexity of the tokens on its path.

    Lower is better; inf without tokens.
    """
    return [math.exp(-each) for each in (yield from mean_logprob.steps(nodes))]


def majority(extract: Callable[[str], Hashable | None]) -> Value:
    """Create a scoring function for `value=`: a node's score is the share of nodes with its answer.

    extract: returns the answer in a text. None scores 0. The nodes that are scored together vote.
    """

    def shares(nodes: Sequence[Heddle]) -> list[float]:
        answers = [extract(text_of(node)) for node in nodes]
        votes = Counter(answer for answer in answers if answer is not None)
        return [0.0 if each is None else votes[each] / votes.total() for each in answers]

    return shares


def verifier(check: Callable[[str], float]) -> Value:
    """Create a scoring function for `value=` that returns `check` of the text after the prompt."""
    return lambda nodes: [float(check(text_of(node))) for node in nodes]


def judge(question: Callable[[str], str], words: tuple[str, str] = ("yes", "no")) -> Scorer:
    """Create a scoring function that asks the model a yes-no question about each node.

    The score is the probability of the first word. Equal questions run once, in one batch, and
    nothing is generated.

    Args:
        question: text after the prompt → the prompt of the question.
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
    """Return the mean logprob of the node's own tokens, without its ancestors'; -inf if unknown."""
    return path_logprob([node])


def path_logprob(path: Sequence[Heddle]) -> float:
    """Return the mean logprob of all tokens of these nodes; -inf if none is known."""
    known = [node for node in path if node.logprobs or "measured" in node.meta]
    n_tokens = sum(len(node.logprobs or node.tokens) for node in known)
    totals = [math.fsum(node.logprobs) if node.logprobs else _stored_sum(node) for node in known]
    return math.fsum(totals) / n_tokens if n_tokens else -math.inf


def _stored_sum(node: Heddle) -> float:
    """Return the summed logprob of added text that `mean_logprob` stored in the node's `meta`."""
    return float(node.meta["measured"])


def _question_place(lm: LM, question: str, shared: Sequence[int], adapter: str | None) -> Place:
    """Return the place in the token tree after a question and `shared`.

    shared: the first tokens that both verdict words have in common.
    """
    with Loom(lm, question, adapter=adapter) as loom:
        return lm.place([*loom.tokens, *shared], namespace=adapter)


def _sigmoid(margin: float) -> float:
    """Return 1 / (1 + exp(-margin)), the probability of the larger of two logits."""
    if margin >= 0:
        return 1 / (1 + math.exp(-margin))
    return math.exp(margin) / (1 + math.exp(margin))
