"""Plain sums, differences and products."""

from __future__ import annotations

from random import Random

from .arithmetic import step
from .example import Example

SPOKEN = {"+": "plus", "-": "minus", "*": "times"}


def plain_sum(rng: Random) -> Example:
    """Return a sum in one of eight wordings; no result is below zero."""
    op = rng.choice("+-*")
    a, b = _operands(rng, op)
    if op == "-" and b > a:
        a, b = b, a
    result, word = step(a, op, b), SPOKEN[op]
    asks = (
        f"What is {a} {op} {b}?",
        f"What is {a}{op}{b}?",
        f"{a} {op} {b}",
        f"{a}{op}{b}",
        f"{a} {op} {b} =",
        f"How much is {a} {word} {b}?",
        f"Compute {a} {op} {b}.",
        f"What is {a} {word} {b}?",
    )
    return Example(rng.choice(asks), f"{a} {op} {b} = {result}.\nThe answer is {result}.", result)


def _operands(rng: Random, op: str) -> tuple[int, int]:
    if op == "*":
        return rng.randint(0, 99), rng.randint(0, 20)
    largest = 999 if rng.random() < 0.6 else 20
    return rng.randint(0, largest), rng.randint(0, largest)
