"""Searches over the public faces; each has an awaitable twin, `atot` of `tot`.

Names are loaded when first used, so that the table of strategies costs a command little. Hence no
file is called like a search: a submodule would stand in its function's place.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import score
    from .answers import abest_of_n, agreedy, answer_number, best_of_n, greedy
    from .beams import abeam, beam
    from .core import Cost, Level, SearchOptions, SearchResult, Vote
    from .particles import asmc, smc
    from .strategies import STRATEGIES, Strategy
    from .task import Game24, Task
    from .thompson import aadaptive, adaptive
    from .thoughts import atot, tot
    from .uct import amcts, mcts

__all__ = [
    "STRATEGIES",
    "Cost",
    "Game24",
    "Level",
    "SearchOptions",
    "SearchResult",
    "Strategy",
    "Task",
    "Vote",
    "aadaptive",
    "abeam",
    "abest_of_n",
    "adaptive",
    "agreedy",
    "amcts",
    "answer_number",
    "asmc",
    "atot",
    "beam",
    "best_of_n",
    "greedy",
    "mcts",
    "score",
    "smc",
    "tot",
]

_HOME = {
    "Cost": "core",
    "Game24": "task",
    "Level": "core",
    "STRATEGIES": "strategies",
    "SearchOptions": "core",
    "SearchResult": "core",
    "Strategy": "strategies",
    "Task": "task",
    "Vote": "core",
    "aadaptive": "thompson",
    "abeam": "beams",
    "abest_of_n": "answers",
    "adaptive": "thompson",
    "agreedy": "answers",
    "amcts": "uct",
    "answer_number": "answers",
    "asmc": "particles",
    "atot": "thoughts",
    "beam": "beams",
    "best_of_n": "answers",
    "greedy": "answers",
    "mcts": "uct",
    "smc": "particles",
    "tot": "thoughts",
}


def __getattr__(name: str) -> Any:
    if name == "score":
        return import_module(".score", __name__)
    if name in _HOME:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'weft.search' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
