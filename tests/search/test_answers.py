"""Answers of a search: reading, judging, checking and grouping them, and the reason of a choice."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import weft
from shallow import shallow
from weft import LM, Heddle, Loom
from weft.errors import ConfigError
from weft.search import Level, SearchResult, beam, best_of_n, greedy, smc, tot, weighted_best_of_n
from weft.search.answers import answer_reader, answer_verifier

TEXTS = ["It is 4.\nAnswer: 4", "Answer: 4", "So 5?", "Answer: 7"]


@cache
def model() -> LM:
    return weft.load(shallow(), engine="numpy")


def propose(nodes: list[Heddle]) -> list[list[str]]:
    return [TEXTS for _ in nodes]


def vote_on(**options: Any) -> Any:
    return best_of_n(model(), "2 + 2?", n=len(TEXTS), propose=propose, seed=1, **options)


@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("last_number", "first 3, then 1,216 km", "1216"),
        ("last_number", "none", None),
        ("last_line", "a\n  Paris. ", "Paris"),
        ("auto", "The answer is Paris.\nParis", "paris"),
        (r"x = (\d+)", "x = 1; x = 23", "23"),
        (r"\d+", "4 or 5", "5"),
        (r"a(b)?|c(d)", "cd", "d"),
        (r"\d+", "none", None),
    ],
)
def test_answer_is_read_by_name_or_expression(answer: str, text: str, expected: str | None) -> None:
    assert answer_reader(answer)(text) == expected


def test_check_matches_the_full_answer() -> None:
    check = answer_verifier("4|four", answer_reader("last_number"))
    assert [check(text) for text in ("It is 4.", "It is 44.", "four")] == [True, False, False]


def test_equal_answers_are_one_group_and_votes_are_the_reason() -> None:
    result = vote_on()
    assert (result.measure, result.votes[0].answer) == ("share of votes", "4")
    assert [(group.answer, group.count) for group in result.answers] == [
        ("4", 2),
        ("So 5", 1),
        ("7", 1),
    ]
    assert result.answers[0].share == result.answers[0].score == 0.5
    assert result.reason == "2 of 4 texts have the answer 4"
    assert f"chosen because {result.reason}" in repr(result)


def test_answers_are_compared_without_case_and_shown_as_written() -> None:
    texts = ["The largest planet is Jupiter.", "the largest planet is jupiter", "Saturn"]
    result = best_of_n(model(), "2?", n=3, propose=lambda nodes: [texts for _ in nodes], seed=1)
    assert {group.answer: group.count for group in result.answers} == {
        "The largest planet is Jupiter": 2,
        "Saturn": 1,
    }
    assert result.votes[0].answer == "The largest planet is Jupiter"
    assert result.reason == "2 of 3 texts have the answer The largest planet is Jupiter"
    one = best_of_n(model(), "2?", n=3, propose=lambda nodes: [["A", "B", "C"] for _ in nodes])
    assert one.reason.startswith("1 of 3 texts has the answer ")


def test_equal_numbers_of_votes_are_decided_by_the_mean_logprob() -> None:
    result = vote_on(answer=r"^(So|It|Answer)")
    assert result.reason == "2 of 4 texts have the answer Answer"
    tied = vote_on(answer=r"Answer: (4)|So (5)|Answer: (7)", check="5|7")
    passing = [group for group in tied.answers if group.solved]
    assert {group.answer for group in passing} == {"5", "7"}
    assert "no other answer has more, and it has the highest mean log-probability" in tied.reason


def test_weighted_vote_gives_the_sum_and_the_number_of_all_texts() -> None:
    scores = {TEXTS[0]: 0.25, TEXTS[1]: 0.5, TEXTS[2]: 0.5, TEXTS[3]: 0.625}
    options = {"n": 4, "propose": propose, "value": lambda text: scores[text], "seed": 1}
    result = weighted_best_of_n(model(), "2 + 2?", **options)
    assert result.text == TEXTS[1]
    assert result.reason == "the answer 4 of 2 of 4 texts has the highest sum of scores, 0.75"
    passing = weighted_best_of_n(model(), "2 + 2?", answer="last_number", check="7", **options)
    assert passing.reason == (
        "it passes the check, and the answer 7 of 1 of 4 texts has the highest sum of scores, 0.62"
    )


@pytest.mark.parametrize("call", [best_of_n, weighted_best_of_n])
def test_reason_without_votes_ranks_complete_texts_only(call: Any) -> None:
    cut = {"n": 12, "max_tokens": 12, "stop": ".", "temperature": 1.5, "seed": 3}
    result = call(model(), "Once upon a time", extract=lambda text: None, **cut)
    complete = [node for node in result.loom.children if node.finish_reason == "stop"]
    assert 0 < len(complete) < 12
    assert result.best in complete
    measure = "mean token probability" if call is weighted_best_of_n else "mean log-probability"
    assert result.reason == (
        f"no answer can be read in the texts, and this text has the highest {measure} of the "
        f"{len(complete)} complete ones"
    )


def test_check_decides_between_answers_and_is_named() -> None:
    result = vote_on(answer="last_number", check="7")
    assert (result.answer, result.solved) == ("7", True)
    assert "passes the check" in result.reason
    assert [group.solved for group in result.answers] == [True, False, False]
    none = vote_on(answer="last_number", check="8")
    assert none.solved is False
    assert none.reason == (
        "no answer passes the check, and this text has the highest mean log-probability of 4"
    )


def answer_nodes(result: SearchResult) -> set[Heddle]:
    return {node for group in result.answers for node in group.nodes}


def test_second_vote_counts_only_its_own_answers() -> None:
    loom = Loom(model(), "2 + 2?")
    loom.add("Answer: 7")
    first = best_of_n(model(), loom, n=4, propose=propose, seed=1)
    loom.grow(n=1, max_tokens=2)
    earlier = set(loom.children)
    second = best_of_n(model(), loom, n=3, propose=lambda ns: [TEXTS[1:] for _ in ns], seed=1)
    assert answer_nodes(first) == set(loom.children[1:5])
    assert answer_nodes(second) == set(loom.children) - earlier
    assert [group.count for group in second.answers] == [1, 1, 1]


def test_tree_search_after_a_vote_ranks_only_its_own_lines() -> None:
    loom = Loom(model(), "Once")
    voted = best_of_n(model(), loom, n=4, max_tokens=4, seed=1)
    result = tot(model(), loom, breadth=2, n_continue=2, depth=2, max_tokens=6, seed=2)
    assert result.best not in answer_nodes(voted)
    assert not answer_nodes(voted) & answer_nodes(result)
    alone = tot(model(), "Once", breadth=2, n_continue=2, depth=2, max_tokens=6, seed=2)
    assert (result.text, result.reason) == (alone.text, alone.reason)


@pytest.mark.parametrize("n", [2, 3])
def test_resumed_search_counts_the_answers_that_it_continues(n: int, tmp_path: Path) -> None:
    loom = Loom(model(), "2 + 2?")
    loom.add("Answer: 7")
    file = tmp_path / "search.loom.json"
    options = {"breadth": n, "depth": 2, "n_continue": n, "max_tokens": 6, "answer_tokens": 4}

    def stop(level: Level) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tot(model(), loom, seed=1, resume=file, progress=stop, **options)
    resumed = tot(model(), loom, seed=1, resume=file, **options)
    alone = tot(model(), "2 + 2?", seed=1, **options)
    assert [(g.answer, g.count) for g in resumed.answers] == [
        (g.answer, g.count) for g in alone.answers
    ]
    assert "Answer: 7" not in {node.text for node in answer_nodes(resumed)}


def test_judge_scores_answers_by_the_probability_of_yes() -> None:
    result = vote_on(judge="Q: {prompt} A: {answer} / {text}. Right?")
    best = max(result.loom.children, key=lambda node: node.score or 0.0)
    assert result.measure == "judge"
    assert result.best is best
    assert 0 <= best.score <= 1
    assert result.reason == f"its score by the judge, {best.score:.2f}, is the highest of 4"
    expected = weft.search.score.judge(lambda text: f"Q: 2 + 2? A: 4 / {text}. Right?")
    (first,) = (node for node in result.loom.children if node.text == TEXTS[1])
    assert first.score == pytest.approx(expected([first])[0])


def test_reason_of_a_value_counts_texts_that_are_cut() -> None:
    result = best_of_n(model(), "Once", n=4, max_tokens=3, value=lambda text: 2.0, seed=1)
    assert {node.finish_reason for node in result.loom.children} == {"length"}
    assert result.reason == "its value, 2.00, is the highest of 4 (this text is cut at its length)"


@pytest.mark.parametrize(
    ("call", "options", "measure"),
    [
        (tot, {"breadth": 2, "n_continue": 2, "n_suggest": 0, "depth": 2}, "mean log-probability"),
        (beam, {"width": 2, "n": 2, "depth": 2}, "mean log-probability"),
        (greedy, {}, "mean log-probability"),
        (smc, {"n": 3, "depth": 2}, "particle weight"),
    ],
)
def test_every_search_names_its_measure_and_a_reason(call: Any, options: Any, measure: str) -> None:
    result = (
        call(model(), "Once", max_tokens=6, answer_tokens=8, seed=1, **options)
        if (call is not greedy)
        else call(model(), "Once", max_tokens=6)
    )
    assert result.measure == measure
    assert result.reason
    assert any(result.best in group.nodes for group in result.answers)
    assert sum(group.share for group in result.answers) == pytest.approx(1)


def test_task_is_named_as_the_model_s_verdict() -> None:
    result = tot(model(), "Use 1 1 1 21 to make 24.", breadth=1, depth=1, seed=1, answer_tokens=4)
    assert result.measure == "model's verdict on each step"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"answer": "("}, "answer is '\\('; allowed is auto, last_number, last_line, or a regular"),
        ({"answer": ""}, "answer is ''"),
        ({"check": "["}, "check is '\\['"),
        ({"judge": "Is it right?"}, "it must be a question with {text} or {answer}"),
        ({"judge": "{text}?", "value": len}, "judge and value have the same purpose"),
        ({"check": "4", "verifier": bool}, "check and verifier have the same purpose"),
        ({"answer": "auto", "extract": len}, "extract and answer both read answers"),
    ],
)
def test_wrong_answer_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vote_on(**options)
