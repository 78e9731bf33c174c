"""Every strategy with small numbers, and what a search decides about its tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from itertools import zip_longest
from typing import Any

import pytest

import weft
from weft import Heddle, samples, search
from weft.search import STRATEGIES, SearchResult

FEW: dict[str, Any] = {"n_continue": (3, 2, 1), "n_suggest": (4, 2, 1)}
# A row per strategy, by its name in STRATEGIES; options that are fixed there are left out.
SMALL: dict[str, dict[str, Any]] = {
    "tot": {"breadth": 3, **FEW},
    "tot-dfs": {"breadth": 3, **FEW},
    "mcts": {"batch": 1, "rounds": 8, **FEW},
    "adaptive": {"batch": 2, "rounds": 8},
    "beam": {"width": 3, "n": 3},
    "smc": {"n": 5},
    "best-of-n": {"n": 4},
    "weighted-best-of-n": {"n": 4},
    "dvts": {"trees": 2, "width": 3},
    "rebase": {"width": 6},
    "greedy": {},
}
# By levels, particles, rounds and full answers; `make test-programs` runs the other searches.
DEFAULT = ("tot", "smc", "adaptive", "best-of-n")
# Strategies that grow line by line; the others grow complete answers.
DEEP = [
    name
    for name, row in STRATEGIES.items()
    if "depth" in signature(getattr(search, row.call)).parameters
]


def by_default(names: Iterable[str]) -> list[Any]:
    """Return names as parameters; a strategy outside of `DEFAULT` is marked as `programs`."""
    return [
        name if name in DEFAULT else pytest.param(name, marks=pytest.mark.programs)
        for name in names
    ]


def puzzle(name: str) -> str:
    """Return a puzzle that takes the search several rounds; the sample is the model's first try."""
    return "Use 1 3 3 8 to make 24." if name == "adaptive" else samples.game24


def small(name: str, lm: weft.LM, prompt: Any, **options: Any) -> SearchResult:
    """Run a search of `SMALL` by its plain call."""
    result: SearchResult = call(name)(lm, prompt, **{"seed": 1, **given(name), **options})
    return result


def call(name: str, prefix: str = "") -> Callable[..., Any]:
    """Return the function of a strategy; with "a" before it, its awaitable twin."""
    result: Callable[..., Any] = getattr(search, prefix + STRATEGIES[name].call)
    return result


def given(name: str) -> dict[str, Any]:
    """Return the keywords of a search of `SMALL`."""
    return {**STRATEGIES[name].fixed, **SMALL[name]}


def tree(top: Heddle) -> list[tuple[str, float | None, str | None]]:
    """Return every node's text, score and end, in the order of the tree."""
    return [(node.text, node.score, node.finish_reason) for node in top.walk()]


def alike(one: Heddle, other: Heddle) -> bool:
    """Say whether two trees are one: each text and end, and the scores but for their last bits.

    What is cached already decides how a prompt is read in batches, and these how sums are rounded.
    """
    return all(
        mine and yours and mine[::2] == yours[::2] and mine[1] == pytest.approx(yours[1], abs=1e-6)
        for mine, yours in zip_longest(tree(one), tree(other))
    )
