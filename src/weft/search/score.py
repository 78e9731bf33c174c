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

from ..errors import ConfigError
from ..lm import LM
from ..loom import Heddle, Loom
from ..sched.work import Extend, Logits
from .steps import Read, Steps, awaitable, plain

if TYPE_CHECKING:
    from ..kv.cursor import Place


# Nodes → scores, at once or as work of the search.
Value = Callable[[list[Heddle]], Sequence[float] | Steps[list[float]]]


class Verdicts(NamedTuple):
    """values: one a question. n_tokens: of all questions together."""

    values: list[float]
    n_tokens: int


@plain
def verdicts(lm: LM, questions: Sequence[str], words: tuple[str, str]) -> Steps[Verdicts]:
    """Return, for each question, the probability of the first word against the second.

    Both from the next-token logprobs after the question, at the token where the words part; all
    questions are one batch and nothing is generated.
    """
    return verdict_steps(lm, questions, words)


averdicts = awaitable(verdicts)


def verdict_steps(lm: LM, questions: Sequence[str], words: tuple[str, str]) -> Steps[Verdicts]:
    """As `verdicts`, as a part of a search."""
    good, bad = (lm.text.continuation(word) for word in words)
    shared = commonprefix([good, bad])
    if len(shared) in (len(good), len(bad)):
        raise ConfigError(f"one of the verdicts {words!r} begins with the other; take others")
    places = [_asked(lm, question, shared) for question in questions]
    answers = yield Read(lm, [Extend(place, (), (Logits(place.depth),)) for place in places])
    at_good, at_bad = good[len(shared)], bad[len(shared)]
    values = [_odds(float(logits[at_good]) - float(logits[at_bad])) for logits in answers]
    return Verdicts(values, sum(place.depth for place in places))


def path_mean_logprob(node: Heddle) -> float:
    """Return the mean logprob of all sampled tokens from the root to the node; -inf if none."""
    sampled = [logprob for each in node.path for logprob in each.logprobs]
    return math.fsum(sampled) / len(sampled) if sampled else -math.inf


def mean_logprob(nodes: Sequence[Heddle]) -> list[float]:
    """Return the mean logprob of each path's sampled tokens; -inf where there are none."""
    return [path_mean_logprob(node) for node in nodes]


def likelihood(nodes: Sequence[Heddle]) -> list[float]:
    """Return one over the perplexity of each path, 0 to 1: the geometric mean probability."""
    return [math.exp(each) for each in mean_logprob(nodes)]


def perplexity(nodes: Sequence[Heddle]) -> list[float]:
    """Return the perplexity of each path's sampled tokens: lower is better, inf if none."""
    return [math.exp(-each) for each in mean_logprob(nodes)]


def majority(extract: Callable[[str], Hashable | None]) -> Value:
    """Return a value that gives each node the share of the votes that its answer got.

    extract: the answer in a text, or None if it has none: 0. The nodes of one round vote.
    """

    def shares(nodes: list[Heddle]) -> list[float]:
        answers = [extract(text_of(node)) for node in nodes]
        votes = Counter(answer for answer in answers if answer is not None)
        return [0.0 if each is None else votes[each] / votes.total() for each in answers]

    return shares


def verifier(check: Callable[[str], float]) -> Value:
    """Return a value that gives each node what `check` says of its text after the prompt."""
    return lambda nodes: [float(check(text_of(node))) for node in nodes]


def judge(question: Callable[[str], str], words: tuple[str, str] = ("yes", "no")) -> Value:
    """Return a value that asks the model itself: the probability of the first of two words.

    question: the text after the prompt → the prompt to ask. Equal prompts are asked once; all of
    them are one batch and nothing is generated.
    """

    def asked(nodes: list[Heddle]) -> Steps[list[float]]:
        prompts = [question(text_of(node)) for node in nodes]
        distinct = list(dict.fromkeys(prompts))
        lm = nodes[0].lm
        assert lm is not None
        found = yield from verdict_steps(lm, distinct, words)
        values = dict(zip(distinct, found.values, strict=True))
        return [values[prompt] for prompt in prompts]

    return asked


def text_of(node: Heddle) -> str:
    """Return the text after the prompt, down to the node."""
    return node.get_prefix_text(1).strip()


def _asked(lm: LM, question: str, shared: Sequence[int]) -> Place:
    with Loom(lm, question) as loom:
        return lm.place([*loom.tokens, *shared])


def _odds(margin: float) -> float:
    """The softmax over two logits that differ by `margin`."""
    if margin >= 0:
        return 1 / (1 + math.exp(-margin))
    return math.exp(margin) / (1 + math.exp(margin))
