"""Patterns of number ranges, compared with arithmetic."""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from typing import Any

import pytest

from weft.constraints.number_ranges import Bound, integer_pattern, number_pattern

EDGES = [0, 1, 9, 10, 99, 100, 101, 2**53, 2**53 + 1, 2**63, 10**18, 10**25]


def is_between(value: Fraction, low: Bound | None, high: Bound | None) -> bool:
    above = low is None or value > low[0] or (value == low[0] and not low[1])
    below = high is None or value < high[0] or (value == high[0] and not high[1])
    return above and below


def takes(pattern: str | None, text: str) -> bool:
    return pattern is not None and re.fullmatch(pattern, text) is not None


def some_bounds(rng: random.Random) -> tuple[Bound | None, Bound | None]:
    low, high = sorted(
        rng.choice([-1, 1]) * (rng.choice(EDGES) + rng.randint(0, 12)) for _ in range(2)
    )
    return (
        rng.choice([None, (low, False), (low, True)]),
        rng.choice([None, (high, False), (high, True)]),
    )


@pytest.mark.parametrize("seed", range(4))
def test_integer_pattern_takes_exactly_the_integers_of_its_range(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        low, high = some_bounds(rng)
        pattern = integer_pattern(low, high)
        for edge in [*EDGES, *(abs(bound[0]) for bound in (low, high) if bound)]:
            for value in {sign * (edge + step) for sign in (-1, 1) for step in range(-2, 3)}:
                assert takes(pattern, str(value)) == is_between(Fraction(value), low, high)
        assert not takes(pattern, "007")
        assert not takes(pattern, "1.0")


@pytest.mark.parametrize("seed", range(4))
def test_number_pattern_takes_exactly_the_numbers_of_its_range(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        low, high = some_bounds(rng)
        pattern = number_pattern(low, high)
        for edge in [*EDGES, *(abs(bound[0]) for bound in (low, high) if bound)]:
            for step in (-1, 0, 1):
                for fraction in ("", ".0", ".00", ".5", ".001", ".10"):
                    for text in (f"{edge + step}{fraction}", f"-{edge + step}{fraction}"):
                        if text.startswith("--") or not Fraction(text) and text.startswith("-"):
                            continue
                        is_inside = is_between(Fraction(text), low, high)
                        assert takes(pattern, text) == is_inside, (text, low, high)


@pytest.mark.parametrize(
    ("low", "high", "good", "bad"),
    [
        ((0.5, False), (3.5, False), [1, 3], [0, 4]),
        ((-2.5, True), None, [-2, 0, 10**20], [-3]),
        ((1, True), (2, True), [], [1, 2]),
    ],
)
def test_integer_pattern_of_fractional_bounds(low: Any, high: Any, good: Any, bad: Any) -> None:
    pattern = integer_pattern(low, high)
    assert all(takes(pattern, json.dumps(value)) for value in good)
    assert not any(takes(pattern, json.dumps(value)) for value in bad)
