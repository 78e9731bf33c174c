"""Every search with small numbers, and what a search decides about its tree."""

from __future__ import annotations

from typing import Any

import weft
from weft import Heddle, samples, search
from weft.search import SearchResult

FEW: dict[str, Any] = {"n_continue": (3, 2, 1), "n_suggest": (4, 2, 1)}
SMALL: dict[str, dict[str, Any]] = {
    "tot": {"breadth": 3, **FEW},
    "tot-dfs": {"breadth": 3, "order": "dfs", **FEW},
    "mcts": {"batch": 1, "rounds": 8, **FEW},
    "adaptive": {"batch": 2, "rounds": 8},
    "beam": {"width": 3, "n": 3},
    "smc": {"n": 5},
    "best_of_n": {"n": 4},
}


def puzzle(name: str) -> str:
    """Return a puzzle that takes the search several rounds; the sample is the model's first try."""
    return "Use 1 3 5 8 to make 44." if name == "adaptive" else samples.game24


def small(name: str, lm: weft.LM, prompt: Any, **options: Any) -> SearchResult:
    """Run a search of `SMALL` by its plain call."""
    call = getattr(search, name.removesuffix("-dfs"))
    result: SearchResult = call(lm, prompt, **{"seed": 1, **SMALL[name], **options})
    return result


def tree(top: Heddle) -> list[tuple[str, float | None, str | None]]:
    """Return every node's text, score and end, in the order of the tree."""
    return [(node.text, node.score, node.finish_reason) for node in top.walk()]
