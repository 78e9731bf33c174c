"""Checks of arguments: numbers, bools, choices, functions. Errors name the allowed values."""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Collection
from inspect import Parameter, Signature, currentframe, signature
from numbers import Real
from typing import Any

from ..errors import ConfigError, PromptWarning


def check_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return an integer from `low` to `high`, both allowed, as an int; None: no bound.

    NumPy integers are accepted, True and False are not. Raises: ConfigError.
    """
    number = as_index(value)
    if number is None or not _is_within(number, low, high):
        given = _shown(number, value)
        raise ConfigError(f"{name} is {given}; allowed is an integer{_range(low, high)}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Return a bool; 0, 1 and None are not accepted. Raises: ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r:.80}; allowed is True or False")
    return value


def check_choice(name: str, value: Any, allowed: Collection[Any], why: str = "") -> None:
    """Raise ConfigError if a value is not among the allowed ones; `why` is appended to the
    message.
    """
    if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
        listed = " and ".join(", ".join(map(repr, allowed)).rsplit(", ", 1))
        raise ConfigError(f"{name} is {value!r:.80}; allowed are {listed}{why}")


def check_unary(name: str, function: Callable[..., Any], what: str) -> None:
    """Raise ConfigError if a function cannot be called with one argument; `what` describes it.

    Functions without a signature, such as some built-in ones, are accepted.
    """
    try:
        sig = signature(function, follow_wrapped=False)  # of the wrapper, which is what is called
    except (TypeError, ValueError):
        return
    try:
        sig.bind(None)
    except TypeError as error:
        bare = [each.replace(annotation=Parameter.empty) for each in sig.parameters.values()]
        takes = f"{Signature(bare)!s:.80}" if bare else "no argument"
        raise ConfigError(f"{name} takes {takes}; it has to take one argument, {what}") from error


def find_lone_surrogate(text: str) -> int | None:
    """Return the index of a lone surrogate, which no encoding can write; None if there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def lone_surrogate_message(name: str, text: str, at: int) -> str:
    """Return the error message for a text with a lone surrogate at index `at`."""
    return f"{name} has half a character at {at} ({text[at]!r}, a lone surrogate); repair the text"


def as_index(value: Any) -> int | None:
    """Return an integer value as an int; None for other values.

    Bools of all libraries give None, although a bool tensor converts to 1.
    """
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return None


def check_number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
) -> float:
    """Return a finite number from `low` to `high`, both allowed, as a float; no texts, no bools.

    open_low: `low` itself is not allowed. Raises: ConfigError.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        result = float(value) if is_number else math.nan
    except OverflowError:
        result = math.inf
    is_low = result < low or (open_low and result == low)
    if is_low or result > high or not math.isfinite(result):
        allowed = "a finite number"
        if low > -math.inf:
            allowed += f" {'>' if open_low else '>='} {low:g}"
        if high < math.inf:
            allowed += f" and <= {high:g}"
        integer = value if isinstance(value, int) else None
        raise ConfigError(f"{name} is {_shown(integer, value)}; allowed is {allowed}")
    return result


def _shown(integer: int | None, value: Any) -> str:
    """Return a rejected number for the message."""
    # Python raises ValueError when it formats a huge integer.
    if integer is not None and integer.bit_length() > 256:
        return f"a number of {integer.bit_length()} bits"
    return f"{value!r:.80}"


def _is_within(number: int, low: int | None, high: int | None) -> bool:
    """Return True if a number is within the bounds."""
    return (low is None or number >= low) and (high is None or number <= high)


def _range(low: int | None, high: int | None) -> str:
    """Return the bounds as text for the message, such as " from 1 to 8"."""
    if low is None:
        return "" if high is None else f" up to {high}"
    return f" from {low} on" if high is None else f" from {low} to {high}"


def warn_of_prompt(message: str) -> None:
    """Issue a PromptWarning located at the caller's line outside this package."""
    frame, level = currentframe(), 1
    while frame is not None and _is_own(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, PromptWarning, stacklevel=level)


def _is_own(module: str) -> bool:
    """Return True for a module of this package."""
    return module.partition(".")[0] == "weft"
