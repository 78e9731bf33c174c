"""What callers give: counts and other whole numbers, or the error that names what is allowed."""

from __future__ import annotations

import operator
from typing import Any

from .errors import ConfigError


def whole_number(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Return a whole number from `low` to `high`, both allowed, as an int; None: no bound.

    NumPy's integers are whole numbers, True and False are none. Raises: ConfigError.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not _is_within(number, low, high):
        given = _shown(number, value)
        raise ConfigError(f"{name} is {given}; allowed is a whole number{_range(low, high)}")
    return number


def _shown(number: int | None, value: Any) -> str:
    is_huge = number is not None and number.bit_length() > 256  # Python writes no huge ones
    return f"a number of {number.bit_length()} bits" if is_huge and number else f"{value!r:.80}"


def _is_within(number: int, low: int | None, high: int | None) -> bool:
    return (low is None or number >= low) and (high is None or number <= high)


def _range(low: int | None, high: int | None) -> str:
    if low is None:
        return "" if high is None else f" up to {high}"
    return f" from {low} on" if high is None else f" from {low} to {high}"
