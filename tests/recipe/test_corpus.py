"""The corpus is the one that trained the embedded model, and what it teaches is right."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from itertools import islice
from random import Random

import pytest

from recipe.corpus import FAMILIES, game24, render, sample
from recipe.corpus.arithmetic import NotArithmetic, evaluate, numbers_in
from recipe.corpus.problem_templates import LARGE, SMALL
from recipe.corpus.stories import plain_story
from recipe.corpus.word_problems import SECOND_LOOK, word_problem

N = 2000
# Of the corpus that trained the embedded model: a change of any text is a change of that corpus.
DIGEST = "9f153523bd577d36158b800ea85f2805201ae8419bb3a9d6374fd93c89a5e498"


def test_same_seed_gives_the_corpus_of_the_embedded_model() -> None:
    rng, digest = Random(0), hashlib.sha256()
    for _ in range(N):
        digest.update(render(sample(rng)).encode())
    assert digest.hexdigest() == DIGEST


def test_shares_add_up_to_one() -> None:
    assert sum(share for share, _ in FAMILIES) == pytest.approx(1.0)


def test_plain_texts_have_no_user_turn() -> None:
    example = plain_story(Random(1))
    assert render(example) == f"<|bos|>{example.assistant}<|end|>"


@pytest.mark.parametrize("template", {*SMALL, *LARGE}, ids=lambda template: template.__name__)
def test_each_step_of_a_template_is_exact(template: object) -> None:
    rng = Random(2)
    drawn = (template(rng) for _ in range(200))  # type: ignore[operator]
    problems = [problem for problem in drawn if problem is not None]
    assert problems
    for problem in problems:
        for step in problem.steps:
            assert evaluate(f"{step.left} {step.op} {step.right}") == step.result


def test_word_problems_end_in_their_answer_and_only_slips_are_wrong() -> None:
    rng = Random(3)
    for _ in range(N):
        example = word_problem(rng)
        assert example.assistant.endswith(f"The answer is {example.answer}.")
        last_try = example.assistant.rpartition(SECOND_LOOK)[2]
        for line, result in re.findall(r": (\d+ . \d+) = (-?\d+)\.", last_try):
            assert evaluate(line) == int(result)


def test_holdout_puzzles_never_enter_the_corpus() -> None:
    puzzles, rng = set(game24.holdout24()), Random(4)
    assert len(puzzles) == 100
    for _ in range(N):
        match = re.fullmatch(r"Use ([\d ]+) to make 24\.", game24.make24(rng).user or "")
        if match:
            assert tuple(sorted(map(int, match[1].split()))) not in puzzles


def test_holdout_puzzles_are_pinned() -> None:
    spelled = json.dumps(game24.holdout24())
    assert len(game24.puzzles()) == 1346
    assert (
        hashlib.sha256(spelled.encode()).hexdigest()
        == "6bde81e98fad102282b1644fc3090010c16f2271517ecd529198e9747a32189a"
    )


def test_solutions_solve_their_puzzles() -> None:
    rng = Random(5)
    for _ in range(N):
        example = game24.make24(rng)
        *numbers, target = map(int, re.findall(r"\d+", example.user or ""))
        assert game24.solves(example.assistant, numbers, target)


def test_reach_equals_trying_every_step() -> None:
    """Naive twin: play every sequence of legal steps, remember nothing."""
    rng = Random(6)
    for _ in range(40):
        numbers = tuple(sorted(rng.randint(1, 13) for _ in range(3)))
        ends = Counter(_ends(numbers))
        for target in (24, 7, 1):
            assert game24.can_reach(numbers, target) == (ends[target] > 0)


def _ends(numbers: tuple[int, ...]) -> list[int]:
    if len(numbers) == 1:
        return list(numbers)
    ends: list[int] = []
    for i, a in enumerate(numbers):
        for j, b in enumerate(numbers):
            if i == j:
                continue
            rest = tuple(n for k, n in enumerate(numbers) if k not in (i, j))
            results = [a + b, a * b, *([a - b] if a >= b else [])]
            results += [a // b] if b and a % b == 0 else []
            for result in results:
                if result <= game24.LARGEST:
                    ends += _ends((*rest, result))
    return ends


def test_moves_lead_to_legal_numbers() -> None:
    for numbers in islice(game24.puzzles(), 0, None, 60):
        for move in game24.moves(numbers):
            assert evaluate(f"{move.left} {move.op} {move.right}") == move.result
            assert len(move.rest) == 3
            assert move.result in move.rest


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Answer: (10 - 4) * (13 - 9) = 24", True),
        ("steps\nAnswer: (13 - 9) * (10 - 4) = 24\n", True),
        ("Answer: (10 - 4) * (13 - 9) = 24 or so", False),
        ("Answer: 4 * 6 = 24", False),
        ("Answer: (10 - 4) * (13 - 9) + 4 - 4 = 24", False),
        ("Answer: 4 + 9 + 10 + 13 = 24", False),
        ("Answer: __import__('os').getpid() = 24", False),
        ("Answer: 4 / (9 - 9) + 10 + 13 = 24", False),
        ("Answer: 4 ** 9 + 10 + 13 = 24", False),
        ("", False),
    ],
)
def test_only_right_answers_with_the_given_numbers_solve(text: str, right: bool) -> None:
    assert game24.solves(text, (4, 9, 10, 13)) is right


def test_fractions_on_the_way_are_exact() -> None:
    assert game24.solves("Answer: 8 / (3 - 8 / 3) = 24", (3, 3, 8, 8))


@pytest.mark.parametrize(
    "text",
    ["", "1 +", "x", "1 ** 2", "-1", "1.5", "True", "1 // 2", "1 / 0", "(" * 300, "f(1)", "\0"],
)
def test_text_that_is_not_arithmetic_raises(text: str) -> None:
    with pytest.raises(NotArithmetic):
        evaluate(text)


def test_numbers_are_listed_with_repeats() -> None:
    assert numbers_in("(4 + 4) * 10 - 1") == [1, 4, 4, 10]
