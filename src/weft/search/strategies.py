"""The strategies, one row each: what a command, a server or a page needs to know of them.

Light to import: the searches themselves are loaded when one is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..checks import whole_number
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..lm import LM
    from .core import Prompt, SearchResult


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to search, by name.

    title, says: in words, short and longer. call: the function in `weft.search`, and what it is
    given always. breadth, n: what these two numbers are called there; nothing: it has no use for
    them. refused: other options that it has no use for.
    """

    name: str
    title: str
    says: str
    call: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    breadth: str | None = None
    n: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def unused(self) -> list[str]:
        """Return which of `breadth`, `n` and the options this strategy has no use for."""
        numbers = [name for name in ("breadth", "n") if not getattr(self, name)]
        return [*numbers, *self.refused]

    def options(
        self, breadth: int | None = None, n: int | None = None, **rest: Any
    ) -> dict[str, Any]:
        """Return the keywords of its function. Not given is not a number: it keeps its own."""
        given = {"breadth": breadth, "n": n, **rest}
        for name in self.unused():
            if given[name] is not None if name in given else False:
                raise ConfigError(f"{name} has no meaning for {self.name}; leave it out")
        named = {**self.fixed, **rest}
        if breadth is not None and self.breadth is not None:
            named[self.breadth] = breadth
        if n is not None:
            if isinstance(n, int):
                whole_number("n", n, 1)
            named |= dict.fromkeys(self.n, n)
        return named

    def run(
        self,
        lm: LM | None,
        prompt: Prompt,
        *,
        breadth: int | None = None,
        n: int | None = None,
        **options: Any,
    ) -> SearchResult:
        """Search by this strategy; the other options are those of its function."""
        call = getattr(import_module(__package__), self.call)
        result: SearchResult = call(lm, prompt, **self.options(breadth, n, **options))
        return result


_BOTH = ("n_continue", "n_suggest")
STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(
            "tot",
            "tree of thoughts",
            "a tree of lines, the best few go on",
            call="tot",
            breadth="breadth",
            n=_BOTH,
        ),
        Strategy("best-of-n", "best of n", "whole answers and a vote", call="best_of_n", n=("n",)),
        Strategy("greedy", "greedy", "one answer", call="greedy", refused=("temperature",)),
        Strategy(
            "tot-dfs",
            "tree of thoughts, depth first",
            "one path of the tree at a time",
            call="tot",
            fixed={"order": "dfs"},
            breadth="breadth",
            n=_BOTH,
        ),
        Strategy("beam", "beam", "the likeliest paths", call="beam", breadth="width", n=("n",)),
        Strategy(
            "mcts",
            "Monte Carlo tree search",
            "where values and curiosity lead",
            call="mcts",
            breadth="batch",
            n=_BOTH,
        ),
        Strategy(
            "adaptive",
            "adaptive branching",
            "wider or deeper by draws",
            call="adaptive",
            breadth="batch",
            n=("widen",),
        ),
        Strategy("smc", "sequential Monte Carlo", "weighted particles", call="smc", n=("n",)),
    )
}
