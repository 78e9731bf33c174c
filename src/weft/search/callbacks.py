"""The caller's own functions in a search: what they are handed, and what they must return."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from inspect import Parameter, isawaitable, signature
from typing import Any, Literal, cast, get_args

from .._core.validation import check_unary
from ..errors import ConfigError
from ..loom import Heddle
from .core import Gather, Steps, text_of
from .score import Scorer

Takes = Literal["node", "nodes", "text", "texts", "state", "states"]
StateOf = Callable[[Heddle], Any]


class Callback:
    """A function of the caller's. The name of its first parameter says what it is handed.

    `node`, `text` (what stands after the prompt) or `state`: one at a time. `nodes`, `texts` or
    `states`: all of a round in one call, and it returns a list. Any other name: what the argument
    takes by default. Plain or async; what is to be awaited is awaited all at once.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        default: Takes,
        *,
        allows_minus_inf: bool = True,
    ) -> None:
        """allows_minus_inf: of numbers, -inf is one, too; not where means are made of them."""
        self.name = name
        self.function = function
        if not callable(function):
            raise ConfigError(f"{name} is {reprlib.repr(function)}; allowed is a function")
        check_unary(name, function, f"named {', '.join(get_args(Takes))}")
        named = "nodes" if isinstance(function, Scorer) else _first_parameter(function)
        self.takes: Takes = cast("Takes", named) if named in get_args(Takes) else default
        self.one = self.takes.removesuffix("s")
        # A log of nothing: of a path without tokens, as `mean_logprob` has it.
        self.allows_minus_inf = allows_minus_inf or isinstance(function, Scorer)

    @property
    def over_states(self) -> bool:
        """Whether it is handed states of the caller's own."""
        return self.one == "state"

    def call_on(self, nodes: Sequence[Heddle], state_of: StateOf) -> Steps[list[Any]]:
        """Return what it says of each node."""
        if not nodes:
            return []
        if isinstance(self.function, Scorer):
            return (yield from self.function.steps(list(nodes)))
        view = {"node": lambda node: node, "text": text_of, "state": state_of}[self.one]
        seen = [view(node) for node in nodes]
        if self.takes == self.one:
            return (yield from _await_all(self._each(seen)))
        (found,) = yield from _await_all([self.function(seen)])
        try:
            answers = None if isinstance(found, str | bytes) else list(found)
        except TypeError:
            answers = None
        if answers is None:
            raise ConfigError(
                f"{self._message(found, f'{len(nodes)} {self.takes}')}; or name its parameter "
                f"`{self.one}`, to be asked for one at a time"
            )
        if len(answers) != len(nodes):
            raise ConfigError(self._message(found, f"{len(nodes)} {self.takes}"))
        return answers

    def numbers(self, nodes: Sequence[Heddle], state_of: StateOf) -> Steps[list[float]]:
        """Return a finite number for each node, or -inf where it may be, or refuse what came."""
        found = yield from self.call_on(nodes, state_of)
        values = [_number(each) for each in found]
        for value, each in zip(values, found, strict=True):
            if not (math.isfinite(value) or (value == -math.inf and self.allows_minus_inf)):
                raise self.error_for(each)
        return values

    def verdicts(self, nodes: Sequence[Heddle], state_of: StateOf) -> Steps[list[bool]]:
        """Return yes or no for each node, or refuse what came."""
        found = yield from self.call_on(nodes, state_of)
        for each in found:
            if _number(each) not in (0, 1):
                raise self.error_for(each)
        return [bool(_number(each)) for each in found]

    def error_for(self, found: object) -> ConfigError:
        """Return the error for what was returned for one of them."""
        said = self._message(found, f"one {self.one}")
        if self.takes == self.one and isinstance(found, list):
            said += f"; or name its parameter `{self.one}s`, to be asked for all at once"
        return ConfigError(said)

    def _message(self, found: object, what: str) -> str:
        wanted = {
            "propose": "a list of (text, state) pairs for each state"
            if self.over_states
            else f"a list of texts for each {self.one}",
            "verifier": f"True or False for each {self.one}",
        }.get(self.name, f"one finite number a {self.one}{', or -inf' * self.allows_minus_inf}")
        return f"{self.name} returned {reprlib.repr(found)} for {what}; it has to return {wanted}"

    def _each(self, seen: Sequence[Any]) -> list[Any]:
        answers: list[Any] = []
        try:
            for each in seen:
                answers.append(self.function(each))
        except BaseException:
            for answer in answers:
                if isinstance(answer, Coroutine):
                    answer.close()
            raise
        return answers


def _first_parameter(function: Callable[..., Any]) -> str:
    try:
        first = next(iter(signature(function).parameters.values()), None)
    except (TypeError, ValueError):
        return ""  # built in: nobody can read what it takes
    nameless = (Parameter.VAR_POSITIONAL, Parameter.KEYWORD_ONLY)
    return "" if first is None or first.kind in nameless else first.name


def _number(found: object) -> float:
    try:
        return math.nan if isinstance(found, str | bytes) else float(found)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _await_all(answers: list[Any]) -> Steps[list[Any]]:
    """Return the answers; those that have to be awaited are awaited together."""
    late = [at for at, answer in enumerate(answers) if isawaitable(answer)]
    if late:
        waited = yield Gather([cast("Awaitable[Any]", answers[at]) for at in late])
        for at, answer in zip(late, waited, strict=True):
            answers[at] = answer
    return answers
