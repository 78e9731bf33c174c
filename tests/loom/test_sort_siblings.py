"""Orders of siblings: each key, missing values, and unknown keys."""

from __future__ import annotations

import math

import pytest

from weft import Heddle, Loom
from weft.errors import ConfigError
from weft.loom.sibling_order import SIBLING_KEYS, sort_siblings
from weft.viz.outline import facts


def siblings() -> list[Heddle]:
    """Return four siblings; the last has no values."""
    loom = Loom(None, "Once")
    values = [(0.5, 2.0, "aa", 1.0, 2), (0.9, 1.0, "a", 3.0, 5), (0.7, 3.0, "aaa", 2.0, 1.5)]
    nodes = []
    for p, entropy, text, score, rating in values:
        node = loom.add(text)
        node.logprobs, node.entropies, node.score = [math.log(p)], [entropy], score
        node.meta["rating"] = rating
        nodes.append(node)
    return [*nodes, loom.add("")]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("probability", [1, 2, 0, 3]),
        ("entropy", [1, 0, 2, 3]),
        ("length", [2, 0, 1, 3]),
        ("score", [1, 2, 0, 3]),
        ("rating", [1, 0, 2, 3]),
    ],
)
def test_siblings_are_sorted_with_missing_values_last(by: str, expected: list[int]) -> None:
    nodes = siblings()
    assert sort_siblings(nodes, by) == [nodes[at] for at in expected]


def test_probability_is_the_geometric_mean_in_the_order_and_in_the_facts() -> None:
    loom = Loom(None, "Once")
    uneven, even = loom.add("a"), loom.add("b")
    uneven.logprobs = [math.log(1.0), math.log(0.5)]  # means: arithmetic 0.75, geometric 0.71
    even.logprobs = [math.log(0.74), math.log(0.74)]
    assert sort_siblings([uneven, even], "probability") == [even, uneven]
    assert [facts(node)[1] for node in (uneven, even)] == ["p 0.71", "p 0.74"]


def test_equal_values_keep_their_order() -> None:
    nodes = [Loom(None, "Once").add(text) for text in ("b", "a", "c")]
    for by in SIBLING_KEYS:
        assert sort_siblings(nodes, by) == nodes


@pytest.mark.parametrize("rating", [True, "5", math.nan, None])
def test_rating_that_is_no_number_counts_as_missing(rating: object) -> None:
    nodes = siblings()
    nodes[1].meta["rating"] = rating
    assert sort_siblings(nodes, "rating")[0] is nodes[0]


def test_unknown_key_raises_with_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match="sort is 'age'; allowed are probability, entropy"):
        sort_siblings(siblings(), "age")
