"""UCT against a naive twin, virtual visits, rollouts."""

from __future__ import annotations

import math
from random import Random

import pytest

import weft
from searches import FEW
from weft import Heddle, Loom, samples, search
from weft.search import Game24
from weft.search._mcts import UCT, upper_confidence_bounds
from weft.search.core import Settings
from weft.search.driver import Search
from weft.search.judge import Frontier, Judge

PUZZLE = Game24((4, 9, 10, 13))


@pytest.fixture
def scored(lm: weft.LM) -> Search:
    """A tree of two levels of steps with scores, and a state that two paths share."""
    loom = Loom(lm, PUZZLE.prompt)
    rng = Random(3)
    for line in ("13 - 9 = 4 (left: 4 4 10)\n", "13 - 10 = 3 (left: 3 4 9)\n"):
        step = loom.add(line)
        step.score = rng.random()
    below = loom.children[0]
    for line in ("10 - 4 = 6 (left: 4 6)\n", "4 + 4 = 8 (left: 8 10)\n"):
        below.add(line).score = rng.random()
    loom.children[1].add("9 - 3 = 6 (left: 4 6)\n").score = rng.random()
    result = Search(lm, loom, Settings.read(search.mcts, {"seed": 1}, max_tokens=8), "mcts")
    result.add(loom.walk())
    return result


def naive(node: Heddle, exploration: float) -> Heddle:
    """UCT by recursion, as it is written in textbooks; one descent."""

    def everything(top: Heddle) -> list[float]:
        own = [] if top.score is None else [top.score]
        return own + [score for child in top.children for score in everything(child)]

    if not node.children:
        return node
    n_above = len(everything(node)) + 1

    def bound(child: Heddle) -> float:
        scores = everything(child)
        mean = sum(scores) / len(scores)
        return mean + exploration * math.sqrt(math.log(n_above) / len(scores))

    return naive(max(node.children, key=bound), exploration)


@pytest.mark.parametrize("exploration", [0.0, 0.3, 1.0, 5.0])
def test_uct_picks_like_a_naive_twin(scored: Search, exploration: float) -> None:
    # The state that comes second is not followed: the twin has a tree without it.
    twin = scored.loom
    judge = Judge(scored, as_share=True)
    frontier = Frontier(scored, judge, 3)
    assert [node.text for node in scored.in_order(twin.leaves) if node.id in frontier.closed] == [
        "9 - 3 = 6 (left: 4 6)\n"
    ]
    twin.children[1].children[0].remove()
    picked = UCT(judge, 3, 8, 1, exploration, 0).next_work(scored)
    assert [want.node for want in picked] == [naive(twin, exploration)]


def test_batch_opens_different_nodes(scored: Search) -> None:
    judge = Judge(scored, as_share=True)
    wanted = [want.node.id for want in UCT(judge, 3, 8, 9, 0.5, 0).next_work(scored)]
    # Of four leaves one is a state that is followed elsewhere.
    assert len(wanted) == len(set(wanted)) == 2


def test_bounds_are_the_mean_and_the_uncertainty_of_few_visits() -> None:
    bounds = upper_confidence_bounds({"a": 1, "b": 4}, {"a": 0.5, "b": 2.0}, 5, 1.0)
    assert bounds["a"] == pytest.approx(0.5 + math.sqrt(math.log(5)))
    assert bounds["b"] == pytest.approx(0.5 + math.sqrt(math.log(5) / 4))


def test_rollouts_are_full_answers_that_count_as_visits(lm: weft.LM) -> None:
    options = {"rounds": 1, "batch": 1, "rollouts": 3, **FEW}
    result = search.mcts(lm, PUZZLE.prompt, seed=1, **options)
    answers = [node for node in result.loom.children if node.meta.get("answer")]
    assert len(answers) == 3
    for node in answers:
        assert node.score == float(PUZZLE.is_solved(node.text))


def test_without_a_checker_values_are_mean_token_probabilities(lm: weft.LM) -> None:
    result = search.mcts(lm, samples.sum, seed=1, rounds=1, n_continue=2, max_tokens=12)
    for node in result.loom.children:
        if node.score is not None:
            assert node.score == pytest.approx(math.exp(node.mean_logprob))
