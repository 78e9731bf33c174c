"""Tests of the selection of cases."""

from __future__ import annotations

from itertools import product

import pytest

from cases import covering, one_in


def test_covering_of_a_product_has_each_value_and_as_many_cases_as_the_longest_axis() -> None:
    cases = [{"a": a, "b": b, "c": c} for a, b, c in product(range(3), range(5), range(2))]
    chosen = [cases[number] for number in covering(cases)]
    assert len(chosen) == 5
    assert {case["a"] for case in chosen} == set(range(3))
    assert {case["b"] for case in chosen} == set(range(5))
    assert {case["c"] for case in chosen} == set(range(2))


def test_covering_of_a_product_combines_values_evenly() -> None:
    cases = [{"a": a, "b": b} for a, b in product(range(6), range(2))]
    assert sum(cases[number]["b"] for number in covering(cases)) == 3


def test_covering_of_one_list_has_all_cases() -> None:
    assert covering([{"a": a} for a in range(4)]) == set(range(4))


@pytest.mark.parametrize("cases", [[], [{}]])
def test_covering_of_no_parameters_has_all_cases(cases: list[dict[str, int]]) -> None:
    assert covering(cases) == set(range(len(cases)))


def test_one_in_three_marks_the_other_values() -> None:
    first, second, third, fourth = one_in(3, "abcd")
    assert (first, fourth) == ("a", "d")
    assert [param.marks[0].name for param in (second, third)] == ["programs"] * 2
