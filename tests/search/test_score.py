"""Scorers rank nodes; they are values for any search."""

from __future__ import annotations

import asyncio
import math

import pytest

import weft
from weft import Heddle, Loom, samples, search
from weft.search import answer_number, score


@pytest.fixture
def nodes(lm: weft.LM) -> list[Heddle]:
    loom = Loom(lm, samples.sum)
    new = [loom.add(text) for text in ("The answer is 95.", "The answer is 95", "It is 96", "no")]
    for node, logprob in zip(new, (-0.1, -0.5, -1.0, -2.0), strict=True):
        node.logprobs = [logprob, logprob]
    return new


def test_likelihoods_agree_with_each_other(nodes: list[Heddle]) -> None:
    assert score.mean_logprob(nodes) == [-0.1, -0.5, -1.0, -2.0]
    assert score.likelihood(nodes) == pytest.approx([math.exp(x) for x in (-0.1, -0.5, -1, -2)])
    assert score.perplexity(nodes) == pytest.approx([1 / x for x in score.likelihood(nodes)])
    assert score.perplexity([nodes[0].path[0]]) == [math.inf]


def test_majority_is_the_share_of_votes(nodes: list[Heddle]) -> None:
    assert score.majority(answer_number)(nodes) == [1.0, 1.0, 0.0, 0.0]
    assert score.majority(lambda text: text[:2])(nodes) == [0.5, 0.5, 0.25, 0.25]


def test_verifier_sees_the_text_after_the_prompt(nodes: list[Heddle]) -> None:
    assert score.verifier(lambda text: text.endswith("95."))(nodes) == [1.0, 0.0, 0.0, 0.0]


def test_judge_is_the_models_verdict(lm: weft.LM) -> None:
    def asks(text: str) -> str:
        return f"Can {text.split('left: ')[1].rstrip(')')} make 24?"

    words = ("sure", "impossible")
    lines = ["13 - 9 = 4 (left: 4 4 10)\n", "4 + 9 = 13 (left: 10 13 13)\n"]
    options = {"propose": lambda nodes: [lines] * len(nodes), "depth": 1}
    value = score.judge(asks, words)
    result = search.tot(lm, samples.game24, value=value, **options)
    good, bad = [node.score for node in result.loom.children[:2]]
    direct = score.verdicts(lm, ["Can 4 4 10 make 24?", "Can 10 13 13 make 24?"], words).values
    assert [good, bad] == direct
    assert direct[0] > 0.9 > 0.1 > direct[1]
    matches = asyncio.run(score.averdicts(lm, ["Can 4 4 10 make 24?"], words))
    assert matches.values == pytest.approx(direct[:1])
    awaited = asyncio.run(search.atot(lm, samples.game24, value=value, **options))
    assert [node.score for node in awaited.loom.children[:2]] == direct
