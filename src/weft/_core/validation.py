"""What callers give: numbers, bools, functions, or the error that names what is allowed."""

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
    """Return a whole number from `low` to `high`, both allowed, as an int; None: no bound.

    NumPy's integers are whole numbers, True and False are none. Raises: ConfigError.
    """
    number = as_index(value)
    if number is None or not _is_within(number, low, high):
        given = _shown(number, value)
        raise ConfigError(f"{name} is {given}; allowed is a whole number{_range(low, high)}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Return a bool; 0, 1 and None are none. Raises: ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r:.80}; allowed is True or False")
    return value


def check_choice(name: str, value: Any, allowed: Collection[Any], why: str = "") -> None:
    """Raise ConfigError for a value that is not among the allowed ones; why: what to add to it."""
    if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
        shown = " and ".join(", ".join(map(repr, allowed)).rsplit(", ", 1))
        raise ConfigError(f"{name} is {value!r:.80}; allowed are {shown}{why}")


def check_unary(name: str, function: Callable[..., Any], what: str) -> None:
    """Raise ConfigError for a function that one argument cannot be handed to; what: that is.

    A function that does not tell what it takes, as some that are built in, is taken as it is.
    """
    try:
        told = signature(function, follow_wrapped=False)  # of what is called, not what that calls
    except (TypeError, ValueError):
        return
    try:
        told.bind(None)
    except TypeError as error:
        bare = [each.replace(annotation=Parameter.empty) for each in told.parameters.values()]
        takes = f"{Signature(bare)!s:.80}" if bare else "no argument"
        raise ConfigError(f"{name} takes {takes}; it has to take one argument, {what}") from error


def find_lone_surrogate(text: str) -> int | None:
    """Return where a text has half of a surrogate pair, which no encoding has; None for nowhere."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def lone_surrogate_message(name: str, text: str, at: int) -> str:
    """Return what is wrong with such a text."""
    return f"{name} has half a character at {at} ({text[at]!r}, a lone surrogate); give whole ones"


def as_index(value: Any) -> int | None:
    """Return a value that is a whole number as an int; None for any other, and for bools of all
    libraries: a tensor of one would say 1.
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
        found = float(value) if is_number else math.nan
    except OverflowError:
        found = math.inf
    is_low = found < low or (open_low and found == low)
    if is_low or found > high or not math.isfinite(found):
        allowed = "a finite number"
        if low > -math.inf:
            allowed += f" {'>' if open_low else '>='} {low:g}"
        if high < math.inf:
            allowed += f" and <= {high:g}"
        whole = value if isinstance(value, int) else None
        raise ConfigError(f"{name} is {_shown(whole, value)}; allowed is {allowed}")
    return found


def _shown(whole: int | None, value: Any) -> str:
    is_huge = whole is not None and whole.bit_length() > 256  # Python writes no huge ones
    return f"a number of {whole.bit_length()} bits" if is_huge and whole else f"{value!r:.80}"


def _is_within(number: int, low: int | None, high: int | None) -> bool:
    return (low is None or number >= low) and (high is None or number <= high)


def _range(low: int | None, high: int | None) -> str:
    if low is None:
        return "" if high is None else f" up to {high}"
    return f" from {low} on" if high is None else f" from {low} to {high}"


def warn_of_prompt(message: str) -> None:
    """Issue a PromptWarning whose location is the caller's line outside this package."""
    frame, level = currentframe(), 1
    while frame is not None and _is_own(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, PromptWarning, stacklevel=level)


def _is_own(module: str) -> bool:
    return module.partition(".")[0] == "weft"
