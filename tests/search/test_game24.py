"""The task's words and its checker, against the training recipe's own, which shares no code."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest

from recipe.corpus import game24 as recipe
from recipe.corpus.arithmetic import NotArithmetic
from recipe.corpus.arithmetic import evaluate as evaluate_by_ast
from weft import samples
from weft.search import Game24
from weft.search.task import evaluate

PUZZLE = Game24((4, 9, 10, 13))


def test_prompts_are_those_the_model_was_trained_on() -> None:
    assert PUZZLE.prompt == samples.game24 == recipe.ask(PUZZLE.numbers)
    assert PUZZLE.suggestion(()) == samples.step
    assert PUZZLE.question(("13 - 9 = 4 (left: 4 4 10)",)) == samples.verdict


def test_read_takes_puzzles_only() -> None:
    assert Game24.read("Use 4 9 10 13 to make 24.") == PUZZLE
    assert Game24.read("Use 1 2 3 to make 6.") == Game24((1, 2, 3), 6)
    for other in ("", "Use 4 to make 4.", "Use a b to make 24.", samples.word_problem, "Use 4 9"):
        assert Game24.read(other) is None


def test_left_follows_the_lines() -> None:
    lines = ("13 - 9 = 4 (left: 4 4 10)", "10 - 4 = 6 (left: 4 6)", "4 * 6 = 24 (left: 24)")
    result = [PUZZLE.left(lines[:n]) for n in range(4)]
    assert result == [(4, 9, 10, 13), (4, 4, 10), (4, 6), (24,)]
    assert PUZZLE.suggestion(lines) is None
    assert PUZZLE.question(lines) == "Can 24 make 24?"


@pytest.mark.parametrize(
    "line",
    ["", "nonsense", "13 - 9 = 4", "13 - 9 = 4 (left: 4 4)", "13 - 9 = 4 (left: 4 4 9 10)"],
)
def test_unreadable_lines_have_no_state(line: str) -> None:
    assert PUZZLE.state((line,)) is None
    assert PUZZLE.question((line,)) is None
    assert PUZZLE.suggestion((line,)) is None


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Answer: 4 * (9 - (13 - 10)) = 24", True),
        ("10 - 4 = 6 (left: 6 9 13)\nAnswer: (13 - 9) * (10 - 4) = 24", True),
        ("Answer: (13 - 9) * (10 - 4) = 24\n", True),
        ("Answer: (13 - 9) * (10 - 4) = 25", False),
        ("Answer: (13 - 9) * 10 - 4 = 24", False),
        ("Answer: 4 * 6 = 24", False),
        ("Answer: (13 - 9) * (10 - 4) + 9 - 9 = 24", False),
        ("Answer: 24 = 24", False),
        ("Answer: __import__('os') = 24", False),
        ("Answer: 4 ** 9 - 10 - 13 = 24", False),
        ("Answer: (13 - 9) * (10 - 4)) = 24", False),
        ("Answer: 4 9 10 13 = 24", False),
        ("The answer is (13 - 9) * (10 - 4) = 24", False),
        ("Answer: (13 - 9) * (10 - 4) = 24\nor so", False),
        ("", False),
    ],
)
def test_answer_solves_only_if_true_and_of_exactly_the_numbers(answer: str, right: bool) -> None:
    assert PUZZLE.is_solved(answer) is right


def test_evaluate_equals_the_recipes_syntax_tree_on_random_expressions() -> None:
    """Odds of a false pass are nil for what is drawn: the twin shares no code."""
    rng = Random(7)
    for _ in range(3000):
        text = _expression(rng)
        try:
            expected: Fraction | None = evaluate_by_ast(text)
        except NotArithmetic:
            expected = None
        assert evaluate(text) == expected, text


@pytest.mark.parametrize(
    "text", ["", "()", "1 +", "* 2", "-1", "1 2", "(1", "1)", "1 / 0", "2 // 1"]
)
def test_evaluate_of_text_that_is_no_arithmetic_returns_none(text: str) -> None:
    assert evaluate(text) is None


def test_checker_agrees_with_the_recipes_on_its_own_solutions() -> None:
    rng = Random(3)
    for _ in range(200):
        example = recipe.make24(rng)
        puzzle = Game24.read(example.user or "")
        assert puzzle is not None
        assert puzzle.is_solved(example.assistant)


def _expression(rng: Random) -> str:
    parts = [str(rng.randint(0, 13)) for _ in range(rng.randint(1, 5))]
    while len(parts) > 1:
        at = rng.randrange(len(parts) - 1)
        joined = f"{parts[at]} {rng.choice('+-*/')} {parts[at + 1]}"
        parts[at : at + 2] = [f"({joined})" if rng.random() < 0.5 else joined]
    return parts[0]
