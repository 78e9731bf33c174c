"""Call the caller's functions (`propose`, `value`, `verifier`, …) and validate their results."""

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
    """Wraps a function of the caller's, such as `value=`, and calls it with the argument it takes.

    The name of its first parameter selects the argument. `node`, `text` (the text after the prompt)
    or `state`: called once per candidate. `nodes`, `texts` or `states`: called once per round with
    a list, and returns a list. Other names get the default of the option. The function may be plain
    or async; awaitables of a round are awaited together.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        default: Takes,
        *,
        allows_minus_inf: bool = True,
    ) -> None:
        """Read the function's signature.

        Args:
            name: the option's name, for error messages.
            function: the caller's function.
            default: the argument that it gets if its parameter has another name.
            allows_minus_inf: accept -inf as a number; False if a search averages values.
        """
        self.name = name
        self.function = function
        if not callable(function):
            raise ConfigError(f"{name} is {reprlib.repr(function)}; allowed is a function")
        check_unary(name, function, f"named {', '.join(get_args(Takes))}")
        named = "nodes" if isinstance(function, Scorer) else _first_parameter(function)
        self.parameter: Takes = cast("Takes", named) if named in get_args(Takes) else default
        self.singular = self.parameter.removesuffix("s")
        # `mean_logprob` of a path without tokens is -inf.
        self.allows_minus_inf = allows_minus_inf or isinstance(function, Scorer)

    @property
    def is_verdict(self) -> bool:
        """True if results are probabilities that a text is right; see `Scorer`."""
        return isinstance(self.function, Scorer) and self.function.is_verdict

    @property
    def takes_states(self) -> bool:
        """True if the function receives the caller's states instead of nodes or texts."""
        return self.singular == "state"

    def results(self, nodes: Sequence[Heddle], state_of: StateOf) -> Steps[list[Any]]:
        """Call the function for the nodes; return one result per node, without validation.

        state_of: returns the state of a node.
        """
        if not nodes:
            return []
        if isinstance(self.function, Scorer):
            return (yield from self.function.steps(list(nodes)))
        view = {"node": lambda node: node, "text": text_of, "state": state_of}[self.singular]
        arguments = [view(node) for node in nodes]
        if self.parameter == self.singular:
            return (yield from _await_all(self._call_for_each(arguments)))
        (result,) = yield from _await_all([self.function(arguments)])
        try:
            answers = None if isinstance(result, str | bytes) else list(result)
        except TypeError:
            answers = None
        if answers is None:
            raise ConfigError(
                f"{self._complaint(result, f'{len(nodes)} {self.parameter}')}; or name its "
                f"parameter `{self.singular}`, to be called for one at a time"
            )
        if len(answers) != len(nodes):
            raise ConfigError(self._complaint(result, f"{len(nodes)} {self.parameter}"))
        return answers

    def numbers(self, nodes: Sequence[Heddle], state_of: StateOf) -> Steps[list[float]]:
        """Call a scoring function; return one number per node: finite, or -inf if allowed.

        Raises: ConfigError for other results.
        """
        results = yield from self.results(nodes, state_of)
        values = [_float_or_nan(result) for result in results]
        for value, result in zip(values, results, strict=True):
            if not (math.isfinite(value) or (value == -math.inf and self.allows_minus_inf)):
                raise self.invalid_result_error(result)
        return values

    def verdicts(self, nodes: Sequence[Heddle], state_of: StateOf) -> Steps[list[bool]]:
        """Call a checking function; return True or False per node.

        Raises: ConfigError for other results.
        """
        results = yield from self.results(nodes, state_of)
        for result in results:
            if _float_or_nan(result) not in (0, 1):
                raise self.invalid_result_error(result)
        return [bool(_float_or_nan(result)) for result in results]

    def invalid_result_error(self, result: object) -> ConfigError:
        """Return the error to raise for an invalid result, with what the function has to return."""
        message = self._complaint(result, f"one {self.singular}")
        if self.parameter == self.singular and isinstance(result, list):
            message += f"; or name its parameter `{self.singular}s`, to be called for all at once"
        return ConfigError(message)

    def _complaint(self, result: object, subject: str) -> str:
        """Return an error message that names the result and what the function has to return.

        subject: what the function was called for, such as "one node".
        """
        wanted = {
            "propose": "a list of (text, state) pairs for each state"
            if self.takes_states
            else f"a list of texts for each {self.singular}",
            "verifier": f"True or False for each {self.singular}",
        }.get(
            self.name, f"one finite number per {self.singular}{', or -inf' * self.allows_minus_inf}"
        )
        return (
            f"{self.name} returned {reprlib.repr(result)} for {subject}; it has to return {wanted}"
        )

    def _call_for_each(self, arguments: Sequence[Any]) -> list[Any]:
        """Call the function once per argument; return the results, which may be awaitables."""
        answers: list[Any] = []
        try:
            for argument in arguments:
                answers.append(self.function(argument))
        except BaseException:
            for answer in answers:
                if isinstance(answer, Coroutine):
                    answer.close()
            raise
        return answers


def _first_parameter(function: Callable[..., Any]) -> str:
    """Return the name of the first positional parameter; "" if there is none."""
    try:
        first = next(iter(signature(function).parameters.values()), None)
    except (TypeError, ValueError):
        return ""  # a built-in without a signature
    nameless = (Parameter.VAR_POSITIONAL, Parameter.KEYWORD_ONLY)
    return "" if first is None or first.kind in nameless else first.name


def _float_or_nan(value: object) -> float:
    """Return the value as a float; nan if it is not a number."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _await_all(answers: list[Any]) -> Steps[list[Any]]:
    """Return the answers; those that are awaitable are awaited together and replaced."""
    late = [at for at, answer in enumerate(answers) if isawaitable(answer)]
    if late:
        waited = yield Gather([cast("Awaitable[Any]", answers[at]) for at in late])
        for at, answer in zip(late, waited, strict=True):
            answers[at] = answer
    return answers
