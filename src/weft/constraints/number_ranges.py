"""Regular expressions of the JSON numbers in a range, exact for integers of any size."""

from __future__ import annotations

import math
from collections.abc import Iterator

_FRACTION = r"\.[0-9]+"
_NONZERO_FRACTION = r"\.[0-9]*[1-9][0-9]*"
_ZERO_FRACTION = r"\.0+"
_ANY_INTEGER = "-?(0|[1-9][0-9]*)"

Bound = tuple[int | float, bool]  # a number, and whether it is itself excluded


def integer_pattern(low: Bound | None, high: Bound | None) -> str | None:
    """Return a pattern of the integers between two bounds; None if there are none.

    low, high: pairs of a number and a flag: the number itself is excluded. None means no limit.
    """
    first = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
    last = None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
    if first is None and last is None:
        return _ANY_INTEGER
    return _alternatives(_integers(first, last))


def number_pattern(low: Bound | None, high: Bound | None) -> str | None:
    """Return a pattern of the numbers between two integer bounds; None if there are none.

    The numbers have no exponent.

    low, high: None means no limit.
    """
    options: list[str] = []
    if high is None or high[0] > 0 or (high[0] == 0 and not high[1]):
        inner = low if low is not None and low[0] >= 0 else (0, False)
        options += _magnitudes(inner, high)
    if low is None or low[0] < 0:
        inner = (-high[0], high[1]) if high is not None and high[0] < 0 else (0, True)
        outer = None if low is None else (-low[0], low[1])
        negative = _alternatives(_magnitudes(inner, outer))
        options += [f"-{negative}"] if negative is not None else []
    return _alternatives(options)


def _alternatives(options: Iterator[str] | list[str]) -> str | None:
    """Join patterns with "|"; None without patterns."""
    patterns = list(options)
    return f"({'|'.join(patterns)})" if patterns else None


def _magnitudes(low: Bound, high: Bound | None) -> list[str]:
    """Return patterns of the numbers between two bounds, of which the lower is 0 or more.

          low         low + 1                   high
    ───────┼─────────────┼────────────────────────┼──────
    low.0  │ low.5       │ any integer part, any   │ high.0
           │             │ fraction                │
    """
    first = int(low[0])
    last = None if high is None else int(high[0])
    if last is not None and (last < first or (last == first and (low[1] or (high and high[1])))):
        return []
    if last == first:
        return [f"{first}({_ZERO_FRACTION})?"]
    options = [f"{first}{_NONZERO_FRACTION if low[1] else f'({_FRACTION})?'}"]
    between = _alternatives(_integers(first + 1, None if last is None else last - 1))
    options += [f"{between}({_FRACTION})?"] if between is not None else []
    if high is not None and not high[1]:
        options.append(f"{last}({_ZERO_FRACTION})?")
    return options


def _integers(first: int | None, last: int | None) -> Iterator[str]:
    """Yield patterns of the integers from `first` to `last`; None means no limit."""
    if first is not None and last is not None and first > last:
        return
    if first is None or first < 0:
        nearest = 1 if last is None or last >= 0 else -last
        inner = _alternatives(_naturals(nearest, None if first is None else -first))
        if inner is not None:
            yield f"-{inner}"
    if last is None or last >= 0:
        yield from _naturals(max(first or 0, 0), last)


def _naturals(first: int, last: int | None) -> Iterator[str]:
    """Yield patterns of the natural numbers from `first` to `last`, by their number of digits.

    last: None means no limit.
    """
    if last is None:
        size = len(str(first))
        yield from _naturals(first, 10**size - 1)
        yield f"[1-9][0-9]{{{size},}}"
        return
    while first <= last:
        end = min(last, 10 ** len(str(first)) - 1)
        yield from _digits(str(first), str(end))
        first = end + 1


def _digits(first: str, last: str) -> Iterator[str]:
    """Yield patterns of the numbers from `first` to `last`, which have equally many digits."""
    size = len(first) - 1
    if first == last:
        yield first
    elif not size:
        yield _digit(int(first), int(last))
    elif first[0] == last[0]:
        yield from (first[0] + pattern for pattern in _digits(first[1:], last[1:]))
    else:
        low, high = int(first[0]), int(last[0])
        if first[1:].strip("0"):
            yield from (first[0] + pattern for pattern in _digits(first[1:], "9" * size))
            low += 1
        if last[1:].strip("9"):
            high -= 1
        if low <= high:
            yield f"{_digit(low, high)}[0-9]{{{size}}}"
        if last[1:].strip("9"):
            yield from (last[0] + pattern for pattern in _digits("0" * size, last[1:]))


def _digit(low: int, high: int) -> str:
    """Return a pattern of the digits from `low` to `high`."""
    return str(low) if low == high else f"[{low}-{high}]"
