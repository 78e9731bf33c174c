"""Best of n with majority vote, and greedy."""

from __future__ import annotations

import numpy as np
import pytest

import weft
from cases import one_in
from weft import Loom, samples
from weft.errors import ConfigError
from weft.search import Game24, answer_number, best_of_n, greedy
from weft.search._best_of_n import count_votes


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is 5.", "5"),
        ("The answer is 4.\nNo: the answer is $1,216.50.", "1216.50"),
        ("Answer: 4 * 6 = 24", "24"),
        ("the ANSWER IS -3", "-3"),
        ("5 drives", None),
        ("The answer is hidden", None),
        ("", None),
    ],
)
def test_answer_number_is_the_last_after_the_last_answer(text: str, answer: str | None) -> None:
    assert answer_number(text) == answer


def test_majority_wins_and_all_branches_stay(lm: weft.LM) -> None:
    result = best_of_n(lm, samples.large_problem, n=6, seed=1)
    assert answer_number(result.text) == "1216"
    assert len(result.loom.children) == result.cost.candidates == 6
    assert result.votes[0].answer == "1216"
    assert sum(vote.count for vote in result.votes) <= 6
    assert result.best in result.votes[0].nodes
    assert result.best.score == result.votes[0].count / 6
    assert all(node.score is not None for node in result.loom.children)
    assert "1216" in repr(result)


def test_votes_count_answers_and_ties_prefer_the_likelier(lm: weft.LM) -> None:
    with Loom(lm, samples.sum) as loom:
        new = []
        for text, logprob in [("a", -1.0), ("b", -0.5), ("a", -2.0), ("b", -3.0), ("", -0.1)]:
            node = loom.add(text or "-")
            node.logprobs, node.finish_reason = [logprob], "stop"
            new.append(node)
        votes = count_votes(new, lambda text: text if text in "ab" else None)
    assert [(vote.answer, vote.count, vote.mean_logprob) for vote in votes] == [
        ("b", 2, -0.5),
        ("a", 2, -1.0),
    ]


def test_cut_branches_vote_only_if_no_complete_branch_does(lm: weft.LM) -> None:
    with Loom(lm, samples.sum) as loom:
        cut, full = loom.add("The answer is 1"), loom.add("The answer is 95.")
        cut.finish_reason, full.finish_reason = "length", "stop"
        assert [vote.answer for vote in count_votes([cut, full], answer_number)] == ["95"]
        assert [vote.answer for vote in count_votes([cut], answer_number)] == ["1"]


def test_checker_selects_a_right_answer(lm: weft.LM) -> None:
    puzzle = Game24((6, 9, 12, 12))
    result = best_of_n(lm, puzzle.prompt, n=12, seed=1)
    right = [puzzle.is_solved(node.text) for node in result.loom.children]
    assert result.solved is any(right)
    unchecked = best_of_n(lm, puzzle.prompt, n=12, seed=1, checked=False)
    assert sum(vote.count for vote in unchecked.votes) >= sum(vote.count for vote in result.votes)


def test_same_seed_same_answers(lm: weft.LM) -> None:
    result = [best_of_n(lm, samples.word_problem, n=3, seed=5, max_tokens=40) for _ in range(2)]
    assert [node.text for node in result[0].loom.children] == [
        node.text for node in result[1].loom.children
    ]


@pytest.mark.parametrize("budget", one_in(3, [1, 40, 200]))
def test_token_budget_is_never_exceeded(lm: weft.LM, budget: int) -> None:
    before = lm.stats().decoded
    result = best_of_n(lm, samples.large_problem, n=8, seed=1, budget_tokens=budget, max_tokens=90)
    assert result.cost.tokens == lm.stats().decoded - before <= budget
    assert result.cost.stopped == "tokens"


def test_budget_of_seconds_ends_the_search(lm: weft.LM) -> None:
    result = best_of_n(lm, samples.story, n=8, seed=1, budget_s=0.02)
    assert result.cost.stopped == "seconds"
    assert all(node.tokens for node in result.loom.children)


def test_greedy_is_the_likeliest_answer(lm: weft.LM) -> None:
    result = greedy(lm, samples.game24)
    (alone,) = Loom(lm, samples.game24).grow(temperature=0, max_tokens=256)
    assert result.text == alone.text.strip()
    assert result.solved is Game24((4, 9, 10, 13)).is_solved(alone.text)
    assert result.cost.tokens == len(alone.tokens) + 1


def test_numpy_numbers_are_accepted(lm: weft.LM) -> None:
    assert best_of_n(lm, samples.sum, n=np.int64(2), max_tokens=4).cost.candidates == 2


def test_invalid_options_raise_and_are_named(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match="n is 0"):
        best_of_n(lm, samples.sum, n=0)
    with pytest.raises(ConfigError, match="from 1 to 65536"):
        best_of_n(lm, samples.sum, n=10**23)
    with pytest.raises(ConfigError, match="empty"):
        best_of_n(lm, "")
    with weft.load("tiny") as other, pytest.raises(ConfigError, match="another model"):
        best_of_n(lm, Loom(other, samples.sum))
