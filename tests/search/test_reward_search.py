"""Searches that follow a reward: weighted best of n, diverse subtrees, balanced widths."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

import weft
from weft import samples, search
from weft.errors import ConfigError
from weft.search._rebase import balanced

PROMPT = "Use 1 3 5 8 to make 44."


def length(text: str) -> float:
    """A value from 0 to 1 that grows with the text."""
    return min(len(text) / 100, 1.0)


@pytest.mark.programs
def test_weighted_votes_add_up_the_scores_of_equal_answers(lm: weft.LM) -> None:
    result = search.weighted_best_of_n(
        lm, samples.large_problem, n=12, seed=1, temperature=1.5, value=length, checked=False
    )
    sums = [math.fsum(node.score or 0.0 for node in vote.nodes) for vote in result.votes]
    assert sums == sorted(sums, reverse=True)
    assert len(sums) > 1
    assert {round(node.score or 0.0, 9) for node in result.loom.children} == {
        round(length(node.text.strip()), 9) for node in result.loom.children
    }
    first = result.votes[0].nodes
    assert result.best is max(first, key=lambda node: node.score or 0.0)


def test_two_low_scores_of_one_answer_outweigh_a_higher_score_of_another(lm: weft.LM) -> None:
    scores = {"Answer: 1": 0.4, "Answer: 1.0": 0.4, "Answer: 2": 0.6}
    result = search.weighted_best_of_n(
        lm,
        "Give a number.",
        n=3,
        propose=lambda nodes: [list(scores)] * len(nodes),
        value=lambda text: scores[text],
        extract=lambda text: text[:9],
    )
    assert [vote.answer for vote in result.votes] == ["Answer: 1", "Answer: 2"]
    assert result.text in ("Answer: 1", "Answer: 1.0")


def test_weighted_best_of_n_without_a_value_weighs_by_likelihood(lm: weft.LM) -> None:
    result = search.weighted_best_of_n(lm, samples.large_problem, n=2, seed=1)
    assert all(0 < (node.score or 0.0) <= 1 for node in result.loom.children)


def test_weighted_best_of_n_without_a_value_ignores_an_unused_verifier(lm: weft.LM) -> None:
    options: dict[str, Any] = {"n": 2, "seed": 1, "checked": False, "max_tokens": 40}
    free = search.weighted_best_of_n(lm, samples.large_problem, **options)
    checked = search.weighted_best_of_n(
        lm, samples.large_problem, verifier=lambda text: False, **options
    )
    scores, expected = ([node.score for node in r.loom.children] for r in (checked, free))
    assert scores == expected


@pytest.mark.parametrize(
    "strategy", [pytest.param(search.adaptive, marks=pytest.mark.programs), search.mcts]
)
def test_wrong_answers_score_0_whatever_their_value(lm: weft.LM, strategy: Any) -> None:
    result = strategy(
        lm,
        PROMPT,
        rounds=2,
        depth=1,
        seed=1,
        value=lambda text: 0.9,
        verifier=lambda text: False,
    )
    answers = [node for node in result.loom.walk() if "answer" in node.meta and node.terminal]
    steps = [node for node in result.loom.walk() if node.score is not None and not node.terminal]
    assert answers
    assert {node.score for node in answers} == {0.0}
    assert {node.score for node in steps} == {0.9}


def test_subtrees_of_dvts_have_distinct_first_lines_and_follow_their_best(lm: weft.LM) -> None:
    result = search.dvts(
        lm, PROMPT, trees=3, width=4, depth=2, seed=1, value=length, answer_tokens=0
    )
    opened = [node for node in result.loom.children if node.children]
    assert 1 < len(opened) <= 3
    drawn = result.loom.children
    for number in range(3):
        dealt = drawn[number::3]
        best = max((n for n in dealt if n.score is not None), key=lambda n: n.score or 0.0)
        assert [node for node in dealt if node.children] in ([best], [])
    for node in opened:
        assert node.meta["drawn"] == 4


def test_dvts_of_one_tree_and_width_is_one_path(lm: weft.LM) -> None:
    result = search.dvts(lm, PROMPT, trees=1, width=1, depth=3, seed=1, answer_tokens=0)
    assert all(len(node.children) <= 1 for node in result.loom.walk())


def test_rebase_gives_the_best_node_the_largest_width(lm: weft.LM) -> None:
    result = search.rebase(
        lm, PROMPT, width=12, balance=0.05, depth=2, seed=1, value=length, answer_tokens=0
    )
    drawn = {node: node.meta.get("drawn", 0) for node in result.loom.children}
    assert sum(drawn.values()) == 12
    counts = Counter(node.score for node in drawn)
    open_nodes = [node for node in drawn if not node.terminal and drawn[node]]
    best = max(open_nodes, key=lambda node: node.score or 0.0)
    assert drawn[best] == max(drawn.values())
    assert counts.total() >= len(open_nodes)


@pytest.mark.parametrize(
    ("scores", "width", "expected"),
    [
        ([], 4, []),
        ([0.5, 0.5], 5, [3, 2]),
        ([1.0, 0.0], 4, [4, 0]),
        ([0.3, 0.2, 0.2], 0, [0, 0, 0]),
        ([math.log(2) / 10, 0.0], 6, [4, 2]),
    ],
)
def test_balanced_widths_are_proportional_to_exp_of_scores(
    scores: list[float], width: int, expected: list[int]
) -> None:
    assert balanced(scores, width, 0.1) == expected


def test_rebase_with_balance_0_raises_config_error(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match="balance is 0"):
        search.rebase(lm, PROMPT, balance=0)
