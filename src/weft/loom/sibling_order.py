"""Orders of siblings: by probability, entropy, length, score or rating."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from ..errors import ConfigError

if TYPE_CHECKING:
    from .heddle import Heddle

RATING = "rating"  # key in a node's meta: a person's rating, higher is better
SiblingKey = Literal["probability", "entropy", "length", "score", "rating"]
SIBLING_KEYS: tuple[str, ...] = get_args(SiblingKey)


def rating_of(node: Heddle) -> float | None:
    """Return the rating in a node's meta; None without a finite number."""
    value = node.meta.get(RATING)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _probability(node: Heddle) -> float | None:
    return node.mean_logprob if node.logprobs else None


def _certainty(node: Heddle) -> float | None:
    return -math.fsum(node.entropies) / len(node.entropies) if node.entropies else None


def _length(node: Heddle) -> float:
    return len(node.tokens) or len(node.text)


_VALUES: dict[str, Callable[[Heddle], float | None]] = {
    "probability": _probability,
    "entropy": _certainty,
    "length": _length,
    "score": lambda node: node.score,
    "rating": rating_of,
}


def sort_siblings(nodes: Sequence[Heddle], by: str) -> list[Heddle]:
    """Return nodes sorted by a value; nodes without the value come last, in their order.

    by: "probability" (geometric mean over the tokens), "entropy" (mean over the tokens), "length"
        (in tokens, or in characters without tokens), "score", or "rating" (`meta["rating"]`). The
        lowest entropy comes first; of the others, the highest value does.

    Raises: ConfigError for another value of `by`.
    """
    if by not in _VALUES:
        raise ConfigError(f"sort is {by!r}; allowed are {', '.join(SIBLING_KEYS)}")
    values = {node.id: _VALUES[by](node) for node in nodes}

    def key(node: Heddle) -> float:
        value = values[node.id]
        return math.inf if value is None or math.isnan(value) else -value

    return sorted(nodes, key=key)
