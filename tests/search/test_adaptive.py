"""Wider or deeper: what the draws follow."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

import weft
from weft import Loom, samples
from weft.search.core import Settings
from weft.search.driver import Search
from weft.search.judge import Judge
from weft.search.propose import Proposer
from weft.search.ranking import Frontier
from weft.search.thompson import Thompson, beta, descent


def test_posterior_mean_is_that_of_the_beta() -> None:
    """20,000 draws: the mean within 0.01 is seven standard errors."""
    rng = Random(1)
    assert fmean(beta(8, 6.0, rng) for _ in range(20_000)) == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize(("score", "goes_deeper"), [(0.98, True), (0.02, False)])
def test_a_good_family_is_followed_and_a_bad_one_gets_new_members(
    lm: weft.LM, score: float, goes_deeper: bool
) -> None:
    """200 descents each; the odds of the wrong majority are below 1 in 10,000."""
    loom = Loom(lm, samples.game24)
    step = loom.add("13 - 9 = 4 (left: 4 4 10)\n")
    step.score = score
    for line in (
        "10 - 4 = 6 (left: 4 6)\n",
        "4 + 4 = 8 (left: 8 10)\n",
        "4 + 10 = 14 (left: 4 14)\n",
    ):
        step.add(line).score = score
    loom.add("4 + 9 = 13 (left: 10 13 13)\n").score = 0.02
    found = Search(lm, loom, Settings.read({"seed": 1}, max_tokens=8), "adaptive")
    judge = Judge(found, as_share=True)
    frontier = Frontier(found, judge, 3)
    open_ids, rng = frontier.open(widens=True), Random(2)
    ends = [descent(loom, frontier, open_ids, rng) for _ in range(200)]
    deeper = sum(step in node.path for node in ends)
    assert deeper > 110 if goes_deeper else deeper < 60
    proposer = Proposer(found, n_continue=1, n_suggest=1)
    wanted = Thompson(judge, proposer, 3, 4, 10, 2).ask(found)
    assert sum(want.n or 0 for want in wanted) == 20
