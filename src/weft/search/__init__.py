"""Search functions over looms: `best_of_n`, `beam`, `tot`, `mcts`, `adaptive`, `smc`, `greedy`.

Each has an async form: `atot` of `tot`. Names load at first use, so that reading the table of
strategies imports little. The modules of single searches are private, because a submodule would
shadow the function of its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._core.lazy import lazy_getattr

if TYPE_CHECKING:
    from . import score
    from ._adaptive import aadaptive, adaptive
    from ._beam import abeam, beam
    from ._best_of_n import abest_of_n, agreedy, best_of_n, greedy
    from ._dvts import advts, dvts
    from ._mcts import amcts, mcts
    from ._rebase import arebase, rebase
    from ._smc import asmc, smc
    from ._tot import atot, tot
    from ._weighted_best_of_n import aweighted_best_of_n, weighted_best_of_n
    from .answers import AnswerGroup, answer_number, answer_text
    from .core import Cost, Level, Particle, SearchOptions, SearchResult, Vote
    from .reward import RewardModel
    from .strategies import STRATEGIES, Strategy
    from .task import Game24, Task

__all__ = [
    "STRATEGIES",
    "AnswerGroup",
    "Cost",
    "Game24",
    "Level",
    "Particle",
    "RewardModel",
    "SearchOptions",
    "SearchResult",
    "Strategy",
    "Task",
    "Vote",
    "aadaptive",
    "abeam",
    "abest_of_n",
    "adaptive",
    "advts",
    "agreedy",
    "amcts",
    "answer_number",
    "answer_text",
    "arebase",
    "asmc",
    "atot",
    "aweighted_best_of_n",
    "beam",
    "best_of_n",
    "dvts",
    "greedy",
    "mcts",
    "rebase",
    "score",
    "smc",
    "tot",
    "weighted_best_of_n",
]

_load = lazy_getattr(
    __name__,
    {
        "": "score",
        "_best_of_n": "abest_of_n agreedy best_of_n greedy",
        "answers": "AnswerGroup answer_number answer_text",
        "_beam": "abeam beam",
        "core": "Cost Level Particle SearchOptions SearchResult Vote",
        "_smc": "asmc smc",
        "reward": "RewardModel",
        "strategies": "STRATEGIES Strategy",
        "task": "Game24 Task",
        "_adaptive": "aadaptive adaptive",
        "_tot": "atot tot",
        "_dvts": "advts dvts",
        "_rebase": "arebase rebase",
        "_weighted_best_of_n": "aweighted_best_of_n weighted_best_of_n",
        "_mcts": "amcts mcts",
    },
)


if not TYPE_CHECKING:  # type checkers report unknown names themselves

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return _load(name)
        from .other_libraries import function_for

        equivalent = function_for(name)
        hint = f"; it is {equivalent}" if equivalent else f"; it has {', '.join(__all__)}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name)


def __dir__() -> list[str]:
    return list(__all__)
