"""Searches over the public faces; each has an awaitable twin, `atot` of `tot`."""

from . import score
from .adaptive import aadaptive, adaptive
from .beam import abeam, beam
from .best_of_n import abest_of_n, answer_number, best_of_n
from .game24 import Game24
from .greedy import agreedy, greedy
from .mcts import amcts, mcts
from .options import SearchOptions
from .result import Cost, Level, SearchResult, Vote
from .smc import asmc, smc
from .task import Task
from .tot import atot, tot

__all__ = [
    "Cost",
    "Game24",
    "Level",
    "SearchOptions",
    "SearchResult",
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
