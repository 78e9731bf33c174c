"""Searches over the public faces: tree of thoughts, best of n with majority vote, greedy."""

from .best_of_n import answer_number, best_of_n
from .game24 import Game24
from .greedy import greedy
from .result import Cost, SearchResult, Vote
from .task import Task
from .tot import Level, tot

__all__ = [
    "Cost",
    "Game24",
    "Level",
    "SearchResult",
    "Task",
    "Vote",
    "answer_number",
    "best_of_n",
    "greedy",
    "tot",
]
