"""The table of strategies, for commands, servers and pages.

Cheap to import: a search is imported when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .._core.validation import check_int
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..lm.lm import LM
    from .core import Prompt, SearchResult, Steps
    from .task import Game24


class Count(NamedTuple):
    """The meaning of `breadth` or `n` for a strategy.

    counts: what the number counts, in words.
    keywords: the keywords of the search function that get the number.
    default: the function's default; None if it depends on the prompt.
    """

    counts: str
    keywords: tuple[str, ...]
    default: int | None = None


@dataclass(frozen=True, slots=True)
class Strategy:
    """A named way to search: a search function, and the options that define the way."""

    name: str
    title: str
    summary: str  # one line of help text
    call: str  # the function in `weft.search`
    fixed: Mapping[str, Any] = field(default_factory=dict)  # options that it always sets
    breadth: Count | None = None  # the meaning of `breadth`; None: not accepted
    n: Count | None = None  # the meaning of `n`; None: not accepted
    refused: tuple[str, ...] = ()  # other options that it does not accept
    asks: bool = False  # it scores a task's questions by next-token distributions

    def unused(self) -> list[str]:
        """Return the names of options that this strategy does not accept.

        `breadth` and `n` are among them if they have no meaning for it.
        """
        numbers = [name for name in ("breadth", "n") if getattr(self, name) is None]
        return [*numbers, *self.refused]

    def options(
        self, breadth: int | None = None, n: int | None = None, **rest: Any
    ) -> dict[str, Any]:
        """Return the keywords for the strategy's function.

        Args:
            breadth, n: numbers of the strategy; None keeps the function's default.
            rest: further options, passed on.

        Raises: ConfigError if a number is given by two names, or if a fixed option has another
        value.
        """
        given = {"breadth": breadth, "n": n, **rest}
        for name in self.unused():
            if given.get(name) is not None:
                raise ConfigError(f"{name} has no meaning for {self.name}; leave it out")
        for name, value in self.fixed.items():
            if rest.get(name, value) != value:
                raise ConfigError(f"{name} is {value!r} for {self.name}; leave it out")
        if isinstance(n, int):
            check_int("n", n, 1)
        named = {**self.fixed, **rest}
        for name, number, count in (("breadth", breadth, self.breadth), ("n", n, self.n)):
            if number is None or count is None:
                continue
            for keyword in count.keywords:
                if rest.get(keyword) is not None:
                    raise ConfigError(
                        f"{name} and {keyword} are one number for {self.name}; leave out one"
                    )
                named[keyword] = number
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
        """Search by this strategy and return the result.

        breadth, n, options: as for `options`.
        """
        from .core import run

        return run(self.steps(lm, prompt, **self.options(breadth, n, **options)))

    def steps(self, lm: LM | None, prompt: Prompt, **options: Any) -> Steps[SearchResult]:
        """Return the search as a generator of work, for `core.run` or `core.arun`.

        Its arguments are validated when it starts.

        options: keywords of the strategy's function, as `options` returns them.
        """
        call = getattr(import_module("weft.search"), self.call)
        steps: Steps[SearchResult] = call.__wrapped__(lm, prompt, **options)
        return steps


_LEVEL, _ROUND = "paths kept a level", "nodes opened a round"
_KINDS = "proposals of each kind a node"
_PROPOSALS = Count(_KINDS, ("n_continue", "n_suggest"))
# Default strategies for a prompt that states a known task, and for any other. For an unknown task
# only the likelihood scores steps, and it does not measure whether an answer is right.
FOR_TASKS, DEFAULT = "tot", "best-of-n"
STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        Strategy(
            "tot",
            "tree of thoughts",
            "a tree of lines, the best few go on",
            call="tot",
            asks=True,
            breadth=Count(_LEVEL, ("breadth",), 5),
            n=_PROPOSALS,
        ),
        Strategy(
            "best-of-n",
            "best of n",
            "full answers and a vote",
            call="best_of_n",
            n=Count("answers", ("n",), 16),
        ),
        Strategy(
            "greedy",
            "greedy",
            "one answer",
            call="greedy",
            refused=("temperature", "propose", "state", "score"),
        ),
        Strategy(
            "tot-dfs",
            "tree of thoughts, depth first",
            "one path of the tree at a time",
            call="tot",
            asks=True,
            fixed={"order": "dfs"},
            breadth=Count(_LEVEL, ("breadth",), 5),
            n=_PROPOSALS,
        ),
        Strategy(
            "beam",
            "beam",
            "the likeliest paths",
            call="beam",
            breadth=Count(_LEVEL, ("width",), 8),
            n=Count("lines a path", ("n",), 8),
        ),
        Strategy(
            "mcts",
            "Monte Carlo tree search",
            "where values and curiosity lead",
            call="mcts",
            asks=True,
            breadth=Count(_ROUND, ("batch",), 4),
            n=_PROPOSALS,
        ),
        Strategy(
            "adaptive",
            "adaptive branching",
            "wider or deeper by draws",
            call="adaptive",
            asks=True,
            breadth=Count(_ROUND, ("batch",), 2),
            n=Count(_KINDS, ("widen",), 1),
        ),
        Strategy(
            "smc",
            "sequential Monte Carlo",
            "weighted particles",
            call="smc",
            asks=True,
            n=Count("particles", ("n",), 32),
        ),
    )
}


def default_for(prompt: str) -> str:
    """Return the name of the default strategy for a prompt."""
    from .task import Game24

    return DEFAULT if Game24.read(prompt) is None else FOR_TASKS


WITHOUT_VERDICTS = tuple(name for name, row in STRATEGIES.items() if not row.asks)


def meanings(number: Literal["breadth", "n"]) -> str:
    """Return a sentence with the meanings of a number, most common first."""
    names_of: dict[str, list[str]] = {}
    for row in STRATEGIES.values():
        if (count := getattr(row, number)) is not None:
            names_of.setdefault(count.counts, []).append(row.name)
    ranked = sorted(names_of.items(), key=lambda each: (-len(each[1]), min(each[1])))
    *parts, last = (f"{counts} ({', '.join(names)})" for counts, names in ranked)
    sentence = ", ".join([*parts, f"or {last}" if parts else last])
    return f"{sentence[0].upper()}{sentence[1:]}."


def defaults(number: Literal["breadth", "n"]) -> str:
    """Return a text with the defaults of `breadth` or `n`.

    The default of `FOR_TASKS` comes first, then those of the other strategies.
    """
    by_value: dict[int, list[str]] = {}
    for row in STRATEGIES.values():
        count: Count | None = getattr(row, number)
        if count is not None and count.default is not None:
            by_value.setdefault(count.default, []).append(row.name)
    usual = [default for default, names in by_value.items() if FOR_TASKS in names]
    others = [
        f"{at} for {' and '.join(names)}" for at, names in by_value.items() if at not in usual
    ]
    return "; ".join(filter(None, [*map(str, usual), ", ".join(others)]))


_LINE, _ANSWER = 40, 256  # tokens of a line and of an answer, unless given
_LEVELS, _EACH = 16, 8


class Estimate(NamedTuple):
    """An upper bound of the tokens that a search generates.

    tokens: the bound; None if there is none.
    parts: the terms of the bound, in words.
    """

    tokens: int | None
    parts: str

    def __str__(self) -> str:
        if self.tokens is None:
            return f"no bound but a budget ({self.parts})"
        return f"at most {_with_spaces(self.tokens)} tokens ({self.parts})"


def estimate(strategy: Strategy, options: Mapping[str, Any], prompt: str) -> Estimate:
    """Return an upper bound of the tokens that a search generates.

    options: the caller's options; only `breadth`, `n` and `budget_tokens` are used.
    """
    from .task import Game24

    bound = _unlimited(strategy, options, Game24.read(prompt))
    budget = options.get("budget_tokens")
    if budget is None or (bound.tokens is not None and bound.tokens <= budget):
        return bound
    return Estimate(budget, f"the budget; {bound.parts}")


def _unlimited(strategy: Strategy, options: Mapping[str, Any], task: Game24 | None) -> Estimate:
    breadth = options.get("breadth") or (strategy.breadth.default if strategy.breadth else None)
    n = options.get("n") or (strategy.n.default if strategy.n else None)
    if strategy.name in ("best-of-n", "greedy"):
        n = n or 1
        return Estimate(n * _ANSWER, f"{_with_plural(n, 'answer')} of up to {_ANSWER}")
    if strategy.name == "tot-dfs":
        return Estimate(None, f"lines of up to {_LINE}, until an answer is known")
    n_lines = _max_proposed_lines(strategy.name, breadth or 1, n, task)
    n_answers = (
        1 if task is None else {"tot": breadth or 1, "mcts": 5, "adaptive": 5}.get(strategy.name, 1)
    )
    answers = _with_plural(n_answers, "answer")
    parts = f"{_with_spaces(n_lines)} lines of up to {_LINE}, {answers} of {_ANSWER}"
    if task is not None:
        parts += ", less if a correct answer comes early"
    return Estimate(n_lines * _LINE + n_answers * _ANSWER, parts)


def _max_proposed_lines(name: str, breadth: int, n: int | None, task: Game24 | None) -> int:
    """Return the maximum number of lines that a search proposes.

    name: the strategy.
    """
    levels = _LEVELS if task is None else task.steps
    if name == "smc":
        return (n or 1) * 32
    if name == "beam":
        return (n or 1) * (1 + breadth * (_LEVELS - 1))
    if name == "adaptive":
        return breadth * (n or 1) * (32 if task is None else 1000 * 2)
    per_node = [_EACH] if task is None else _pairwise_sums(task.n_continue, task.n_suggest)
    if n is not None:
        per_node = [n if task is None else 2 * n]
    if name == "mcts":
        return (8 if task is None else 32) * breadth * max(per_node)
    at = [per_node[min(level, len(per_node) - 1)] for level in range(levels)]
    return at[0] + breadth * sum(at[1:])


def _pairwise_sums(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _with_plural(n: int, noun: str) -> str:
    return f"{_with_spaces(n)} {noun}{'s' * (n != 1)}"


def _with_spaces(n: int) -> str:
    return f"{n:,}".replace(",", " ")
