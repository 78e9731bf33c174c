"""Select test cases from a product of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pytest


def one_in(n: int, values: Iterable[Any]) -> list[Any]:
    """Return values as parameters; all but each n-th are marked as `programs`."""
    return [
        pytest.param(value, marks=pytest.mark.programs) if number % n else value
        for number, value in enumerate(values)
    ]


def covering(cases: Sequence[Mapping[str, Hashable]]) -> set[int]:
    """Return the numbers of cases that contain each value of each parameter at least once.

    Values are combined evenly: a value that few chosen cases have is preferred.

    Args:
        cases: one mapping from parameter to value per case.

    Cost: O(n²) for n cases.
    """
    names = {name for case in cases for name in case}
    if any(len({case.get(name) for case in cases}) == len(cases) for name in names) or not names:
        return set(range(len(cases)))  # each case has a value that no other has
    values = [set(case.items()) for case in cases]
    missing = set().union(*values)
    uses: Counter[tuple[str, Hashable]] = Counter()
    chosen: set[int] = set()
    while missing:
        best = max(
            range(len(cases)),
            key=lambda n: (len(values[n] & missing), -sum(uses[value] for value in values[n])),
        )
        chosen.add(best)
        missing -= values[best]
        uses.update(values[best])
    return chosen


def first_of(cases: Sequence[Any], n: int = 1) -> list[Any]:
    """Return the cases as parameters of a test; all after the first n are marked `slow`.

    A tuple has the values of several arguments.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.slow] * (at >= n)
        )
        for at, case in enumerate(cases)
    ]
