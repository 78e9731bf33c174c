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
    """The meaning of the option `breadth` or `n` of `weft solve` for one strategy.

    counts: the things that it counts, for help texts ("particles").
    keywords: the keywords of the search function that receive it.
    default: the function's default; None if the default depends on the prompt.
    """

    counts: str
    keywords: tuple[str, ...]
    default: int | None = None


@dataclass(frozen=True, slots=True)
class Strategy:
    """A search that users select by name: a search function with some options fixed.

    For example, "tot-dfs" is `tot` with `order="dfs"`.
    """

    name: str
    title: str
    summary: str  # one line of help text
    call: str  # the function in `weft.search`
    fixed: Mapping[str, Any] = field(default_factory=dict)  # options that it always sets
    breadth: Count | None = None  # the meaning of `breadth`; None: not accepted
    n: Count | None = None  # the meaning of `n`; None: not accepted
    refused: tuple[str, ...] = ()  # other options that it does not accept
    neutral: Mapping[str, Any] = field(default_factory=dict)  # values of these that it accepts
    asks: bool = False  # it scores a task's questions by next-token distributions

    def unused(self) -> list[str]:
        """Return the names of the options that this strategy rejects.

        They include `breadth` and `n` if these have no meaning for the strategy.
        """
        numbers = [name for name in ("breadth", "n") if getattr(self, name) is None]
        return [*numbers, *self.refused]

    def rejected(self, given: Mapping[str, Any]) -> list[str]:
        """Return the names of given options that this strategy rejects.

        given: options by name; None is not given. A value in `neutral` is accepted.
        """
        values = {name: given.get(name) for name in self.unused()}
        return [
            name
            for name, value in values.items()
            if value is not None and (name not in self.neutral or value != self.neutral[name])
        ]

    def options(
        self, breadth: int | None = None, n: int | None = None, **rest: Any
    ) -> dict[str, Any]:
        """Return the search function's keywords: `breadth` and `n` renamed, `fixed` added.

        Args:
            breadth, n: the user's numbers; None keeps the function's default.
            rest: other options, returned unchanged.

        Raises: ConfigError for an option that the strategy rejects, or fixes to another value. Also
        if the caller sets a keyword that `breadth` or `n` stands for.
        """
        given = {"breadth": breadth, "n": n, **rest}
        for name in self.rejected(given):
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
        """Run the search and return its result.

        breadth, n, options: as for `options`.
        """
        from .core import run

        return run(self.steps(lm, prompt, **self.options(breadth, n, **options)))

    def steps(self, lm: LM | None, prompt: Prompt, **options: Any) -> Steps[SearchResult]:
        """Return the search as a generator of model calls, for `core.run` or `core.arun`.

        The generator validates its arguments when it starts.

        options: keywords of the search function, as `options` returns them.
        """
        call = getattr(import_module("weft.search"), self.call)
        steps: Steps[SearchResult] = call.__wrapped__(lm, prompt, **options)
        return steps


_LEVEL, _ROUND = "paths kept per level", "nodes expanded per round"
_KINDS = "lines per node: n that continue the text; for a known task also n from the task's prompt"
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
            "a tree of lines, the best of each level continue",
            call="tot",
            asks=True,
            breadth=Count(_LEVEL, ("breadth",), 5),
            n=_PROPOSALS,
        ),
        Strategy(
            "best-of-n",
            "best of n",
            "several full answers, then a majority vote",
            call="best_of_n",
            n=Count("answers", ("n",), 16),
        ),
        Strategy(
            "greedy",
            "greedy",
            "one answer, always the likeliest token",
            call="greedy",
            refused=("temperature", "propose", "state", "score"),
            neutral={"temperature": 0},
        ),
        Strategy(
            "tot-dfs",
            "tree of thoughts, depth first",
            "a tree of lines, one path at a time",
            call="tot",
            asks=True,
            fixed={"order": "dfs"},
            breadth=Count("children continued per node", ("breadth",), 5),
            n=_PROPOSALS,
        ),
        Strategy(
            "beam",
            "beam",
            "the likeliest paths, line by line",
            call="beam",
            breadth=Count(_LEVEL, ("width",), 8),
            n=Count("lines per path", ("n",), 8),
        ),
        Strategy(
            "mcts",
            "Monte Carlo tree search",
            "high scores or few visits first",
            call="mcts",
            asks=True,
            breadth=Count(_ROUND, ("batch",), 4),
            n=_PROPOSALS,
        ),
        Strategy(
            "adaptive",
            "adaptive branching",
            "wider or deeper, by Thompson sampling",
            call="adaptive",
            asks=True,
            breadth=Count(_ROUND, ("batch",), 2),
            n=Count(_KINDS, ("widen",), 1),
        ),
        Strategy(
            "smc",
            "sequential Monte Carlo",
            "weighted particles that are resampled",
            call="smc",
            asks=True,
            n=Count("particles", ("n",), 32),
        ),
        Strategy(
            "weighted-best-of-n",
            "weighted best of n",
            "several full answers, weighted by their scores",
            call="weighted_best_of_n",
            n=Count("answers", ("n",), 16),
        ),
        Strategy(
            "dvts",
            "diverse verifier tree search",
            "independent subtrees, each greedy by score",
            call="dvts",
            asks=True,
            breadth=Count("subtrees", ("trees",), 4),
            n=Count("lines per path", ("width",), 4),
        ),
        Strategy(
            "rebase",
            "reward-balanced search",
            "nodes with better scores get more of the next lines",
            call="rebase",
            asks=True,
            n=Count("lines per level", ("width",), 16),
        ),
    )
}


def default_for(prompt: str) -> str:
    """Return the strategy to use for a prompt: "tot" for a Game of 24, else "best-of-n"."""
    from .task import Game24

    return DEFAULT if Game24.read(prompt) is None else FOR_TASKS


WITHOUT_VERDICTS = tuple(name for name, row in STRATEGIES.items() if not row.asks)


def meanings(number: Literal["breadth", "n"]) -> str:
    """Return a sentence of help text that lists what `breadth` or `n` counts, by strategy."""
    names_of: dict[str, list[str]] = {}
    for row in STRATEGIES.values():
        if (count := getattr(row, number)) is not None:
            names_of.setdefault(count.counts, []).append(row.name)
    ranked = sorted(names_of.items(), key=lambda each: (-len(each[1]), min(each[1])))
    *parts, last = (f"{counts} ({', '.join(names)})" for counts, names in ranked)
    sentence = "; ".join([*parts, f"or {last}" if parts else last])
    return f"{sentence[0].upper()}{sentence[1:]}."


def defaults(number: Literal["breadth", "n"]) -> str:
    """Return help text with the defaults of `breadth` or `n`: "5; 8 for beam, 4 for mcts"."""
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


LINE_TOKENS, ANSWER_TOKENS = 40, 256  # tokens of a line and of an answer, unless given
FULL_ANSWERS = ("best-of-n", "weighted-best-of-n", "greedy")  # others go line by line
_LEVELS, _EACH = 16, 8


class Estimate(NamedTuple):
    """An upper bound of the tokens that a search generates; `str()` makes a sentence of it.

    tokens: the bound; None if there is none.
    parts: how the bound is computed, such as "16 answers of up to 256".
    """

    tokens: int | None
    parts: str

    def __str__(self) -> str:
        if self.tokens is None:
            return f"no limit without a budget ({self.parts})"
        return f"at most {self.tokens:,} tokens ({self.parts})"


def estimate(strategy: Strategy, options: Mapping[str, Any], prompt: str) -> Estimate:
    """Return an upper bound of the tokens that a search will generate, to show before it runs.

    options: the caller's options; `breadth`, `n`, `max_tokens` and `budget_tokens` are used.
    """
    from .task import Game24

    bound = _unlimited(strategy, options, Game24.read(prompt))
    budget = options.get("budget_tokens")
    if budget is None or (bound.tokens is not None and bound.tokens <= budget):
        return bound
    return Estimate(budget, f"the budget; {bound.parts}")


def _unlimited(strategy: Strategy, options: Mapping[str, Any], task: Game24 | None) -> Estimate:
    """Return the upper bound of generated tokens, ignoring `budget_tokens`.

    task: the puzzle, if the prompt states one; it changes the numbers of lines.
    """
    breadth = options.get("breadth") or (strategy.breadth.default if strategy.breadth else None)
    n = options.get("n") or (strategy.n.default if strategy.n else None)
    max_tokens = options.get("max_tokens")
    if strategy.name in FULL_ANSWERS:
        n, length = n or 1, max_tokens or ANSWER_TOKENS
        return Estimate(n * length, f"{_with_plural(n, 'answer')} of up to {length:,}")
    length = max_tokens or LINE_TOKENS
    if strategy.name == "tot-dfs":
        return Estimate(None, f"lines of up to {length:,}, until an answer is known")
    n_lines = _max_proposed_lines(strategy.name, breadth or 1, n, task)
    n_answers = (
        1 if task is None else {"tot": breadth or 1, "mcts": 5, "adaptive": 5}.get(strategy.name, 1)
    )
    answers = _with_plural(n_answers, "answer")
    parts = f"{n_lines:,} lines of up to {length:,}, {answers} of {ANSWER_TOKENS}"
    if task is not None:
        parts += ", fewer if a correct answer comes early"
    return Estimate(n_lines * length + n_answers * ANSWER_TOKENS, parts)


def _max_proposed_lines(name: str, breadth: int, n: int | None, task: Game24 | None) -> int:
    """Return the maximum number of lines that the strategy `name` generates in one search.

    breadth, n: the options of that name; None of `n` means the default.
    task: the puzzle, if the prompt states one.
    """
    levels = _LEVELS if task is None else task.steps
    if name == "smc":
        return (n or 1) * 32
    if name in ("dvts", "rebase"):
        return breadth * (n or 1) * levels
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
    """Return a count with its noun: (2, "answer") → "2 answers"."""
    return f"{n:,} {noun}{'s' * (n != 1)}"
