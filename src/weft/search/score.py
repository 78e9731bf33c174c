"""How good a candidate is: the model's own verdict, or the likelihood of what it wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from ..lm import LM
from ..loom import Heddle, Loom
from ..sched.work import Extend, Logits
from .steps import Read, Steps, awaitable, plain

if TYPE_CHECKING:
    from ..kv.cursor import Place


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


def _asked(lm: LM, question: str, shared: Sequence[int]) -> Place:
    with Loom(lm, question) as loom:
        return lm.place([*loom.tokens, *shared])


def _odds(margin: float) -> float:
    """The softmax over two logits that differ by `margin`."""
    if margin >= 0:
        return 1 / (1 + math.exp(-margin))
    return math.exp(margin) / (1 + math.exp(margin))
