"""Wider or deeper: what the draws follow."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest

import weft
from weft import Loom, samples, search
from weft.errors import ConfigError
from weft.search._adaptive import TRUST, Thompson, descend, draw_from_posterior
from weft.search.core import Settings
from weft.search.driver import Search
from weft.search.judge import Frontier, Judge
from weft.search.propose import Proposer


def test_posterior_mean_is_that_of_the_beta() -> None:
    """20,000 draws: the mean within 0.01 is more than seven standard errors."""
    rng, mean = Random(1), (1 + TRUST * 6) / (2 + TRUST * 8)
    assert fmean(draw_from_posterior(8, 6.0, rng) for _ in range(20_000)) == pytest.approx(
        mean, abs=0.01
    )


@pytest.mark.parametrize(("score", "is_followed"), [(0.98, True), (0.02, False)])
def test_good_line_is_continued_and_a_bad_one_gets_siblings(
    lm: weft.LM, score: float, is_followed: bool
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
    result = Search(lm, loom, Settings.read(search.adaptive, {"seed": 1}, max_tokens=8), "adaptive")
    result.add(loom.walk())
    judge = Judge(result, as_share=True)
    frontier = Frontier(result, judge, 3)
    open_ids, rng = frontier.expandable(widens=True), Random(2)
    ends = [descend(loom, frontier, open_ids, rng) for _ in range(200)]
    deeper = sum(step in node.path for node in ends)
    assert deeper > 110 if is_followed else deeper < 60
    for node in list(loom.walk()):  # all of them have been completed
        ended = node.add("no")
        ended.terminal, ended.meta["answer"] = True, "likeliest"
    result.add(loom.walk())
    proposer = Proposer(result, n_continue=1, n_suggest=1)
    wanted = Thompson(judge, proposer, 3, 4, 10, 2).next_work(result)
    assert sum(want.n or 0 for want in wanted) == 20


def search_with_lines(lm: weft.LM, lines: dict[str, float]) -> tuple[Search, Loom]:
    """A search of the sample puzzle with these first lines and their scores."""
    loom = Loom(lm, samples.game24)
    for line, score in lines.items():
        loom.add(line).score = score
    settings = Settings.read(search.adaptive, {"seed": 1}, max_tokens=8)
    result = Search(lm, loom, settings, "adaptive")
    result.add(loom.walk())
    return result, loom


def test_line_completed_from_its_parent_is_not_completed_once_more(lm: weft.LM) -> None:
    """The likeliest tokens after the likeliest line are known; a drawn answer does not count."""
    likely, other = "13 - 10 = 3 (left: 3 4 9)\n", "4 + 9 = 13 (left: 10 13 13)\n"
    result, loom = search_with_lines(lm, {likely: 0.9, other: 0.8, "4 - 4 = 0 (left: 0)\n": 0.1})
    judge = Judge(result, as_share=True)

    def first(*, anywhere: bool = True) -> list[str]:
        return [n.text for n in Frontier(result, judge, 3).paths_to_complete(anywhere=anywhere)]

    assert first() == [loom.text, likely, other]
    assert first(anywhere=False) == []
    answer = loom.add(likely + "9 - 3 = 6 (left: 4 6)\n4 * 6 = 24 (left: 24)\nAnswer: 1 = 24")
    answer.score, answer.terminal, answer.meta["answer"] = 0.0, True, "likeliest"
    result.add([answer])
    assert first() == [other]
    answer.meta["answer"] = "drawn"
    assert first() == [likely, other]


def test_existing_lines_reduce_the_value_of_drawing_more(lm: weft.LM) -> None:
    """200 descents each; the odds of failing by chance are below 1 in 10,000."""
    result, loom = search_with_lines(lm, {"13 - 10 = 3 (left: 3 4 9)\n": 0.3})
    step = loom.children[0]

    def wider() -> int:
        frontier, rng = Frontier(result, Judge(result, as_share=True), 3), Random(5)
        open_ids = frontier.expandable(widens=True)
        return sum(descend(loom, frontier, open_ids, rng) is loom for _ in range(200))

    fresh = wider()
    loom.meta["drawn"] = 12
    assert wider() < fresh / 2
    step.meta["drawn"] = 40
    assert wider() > fresh


def test_repeated_lines_are_counted_where_they_were_drawn(lm: weft.LM) -> None:
    result = search.adaptive(lm, "Use 1 3 3 8 to make 24.", seed=1)
    drawn = sum(node.meta.get("drawn", 0) for node in result.loom.walk())
    steps = [n for n in result.loom.walk() if n.score is not None and not n.meta.get("answer")]
    assert drawn > len(steps) > 0
    assert result.solved


def test_easy_puzzle_costs_one_answer(lm: weft.LM) -> None:
    result, likeliest = search.adaptive(lm, samples.game24), search.greedy(lm, samples.game24)
    assert (result.text, result.cost.tokens) == (likeliest.text, likeliest.cost.tokens)


def test_value_outside_0_to_1_is_rejected(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match=r"value returned -1.5 .* needs scores from 0 to 1"):
        search.adaptive(lm, "Once upon a time", rounds=1, max_tokens=2, value=lambda node: -1.5)


def test_score_of_another_search_is_ignored(lm: weft.LM) -> None:
    loom = Loom(lm, "Once upon a time")
    loom.add("there was\n").score = -1.5
    result = search.adaptive(lm, loom, rounds=1, max_tokens=2, answer_tokens=4, seed=1)
    assert loom.children[0] not in {node for group in result.answers for node in group.nodes}
