"""Game of 24: its steps, its puzzles, their texts, and the check of an answer.

Numbers in play are a sorted tuple. A step takes two of them and puts back one, a whole number of at
most 200; the four formats follow the Tree of Thoughts paper. 100 puzzles never enter the corpus.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import combinations, combinations_with_replacement
from random import Random
from typing import NamedTuple

from .arithmetic import NotArithmetic, evaluate, numbers_in
from .example import Example

Numbers = tuple[int, ...]
N_HOLDOUT = 100
LARGEST = 200


class Move(NamedTuple):
    """One step: `left op right = result`, and all numbers left in play."""

    left: int
    op: str
    right: int
    result: int
    rest: Numbers

    def __str__(self) -> str:
        rest = " ".join(map(str, self.rest))
        return f"{self.left} {self.op} {self.right} = {self.result} (left: {rest})"


@cache
def moves(numbers: Numbers) -> tuple[Move, ...]:
    """Return every step from here, sorted."""
    steps = set()
    for i, j in combinations(range(len(numbers)), 2):
        low, high = sorted((numbers[i], numbers[j]))
        others = [n for k, n in enumerate(numbers) if k not in (i, j)]
        for left, op, right, result in _results(low, high):
            if result <= LARGEST:
                steps.add(Move(left, op, right, result, tuple(sorted([*others, result]))))
    return tuple(sorted(steps))


@cache
def can_reach(numbers: Numbers, target: int) -> bool:
    """Say whether some sequence of steps ends in the target; at most four levels deep."""
    if len(numbers) == 1:
        return numbers[0] == target
    return any(can_reach(move.rest, target) for move in moves(numbers))


@cache
def count_ways(numbers: Numbers, target: int) -> int:
    """Return how many sequences of steps end in the target."""
    if len(numbers) == 1:
        return int(numbers[0] == target)
    return sum(count_ways(move.rest, target) for move in moves(numbers))


@cache
def puzzles() -> tuple[Numbers, ...]:
    """Return the 4 numbers of 1 to 13 that can reach 24, all of them."""
    every = combinations_with_replacement(range(1, 14), 4)
    return tuple(numbers for numbers in every if can_reach(numbers, 24))


@cache
def holdout24() -> tuple[Numbers, ...]:
    """Return the 100 puzzles kept from training: evenly spaced from many ways to few."""
    order = sorted(puzzles(), key=lambda numbers: (-count_ways(numbers, 24), numbers))
    apart = len(order) / N_HOLDOUT
    return tuple(order[int(i * apart + apart / 2)] for i in range(N_HOLDOUT))


def ask(numbers: Sequence[int], target: int = 24) -> str:
    return f"Use {_spaced(numbers)} to make {target}."


def solves(text: str, numbers: Sequence[int], target: int = 24) -> bool:
    """Say whether the text ends in a right `Answer: expression = target` of these numbers only."""
    match = re.search(rf"Answer: (.+) = {target}\s*$", text)
    if not match:
        return False
    try:
        return numbers_in(match[1]) == sorted(numbers) and evaluate(match[1]) == target
    except NotArithmetic:
        return False


def make24(rng: Random) -> Example:
    """Return a puzzle and one full solution, a step a line."""
    numbers, target = _puzzle(rng)
    return Example(ask(_shuffled(rng, numbers), target), _solution(rng, numbers, target))


def value(rng: Random) -> Example:
    """Return numbers left in play, and whether the target is still in reach."""
    numbers, target = _puzzle(rng)
    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        if len(numbers) > 1:
            options = moves(numbers)
            if rng.random() < 0.5:
                options = _good(numbers, target) or options
            numbers = rng.choice(options).rest
    verdict = "sure" if can_reach(numbers, target) else "impossible"
    return Example(f"Can {_spaced(numbers)} make {target}?", verdict)


def propose(rng: Random) -> Example:
    """Return numbers in play, and any one step from them."""
    numbers, _ = _puzzle(rng)
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        if len(numbers) > 2:
            numbers = rng.choice(moves(numbers)).rest
    move = rng.choice(moves(numbers))
    return Example(f"Suggest a step from {_spaced(_shuffled(rng, numbers))}.", str(move))


def _results(low: int, high: int) -> list[tuple[int, str, int, int]]:
    results = [
        (low, "+", high, low + high),
        (low, "*", high, low * high),
        (high, "-", low, high - low),
    ]
    if low and high % low == 0:
        results.append((high, "/", low, high // low))
    return results


def _good(numbers: Numbers, target: int) -> tuple[Move, ...]:
    return tuple(move for move in moves(numbers) if can_reach(move.rest, target))


def _solution(rng: Random, numbers: Numbers, target: int) -> str:
    lines = []
    written = [(n, str(n)) for n in numbers]  # each number in play, and how it came about
    while len(numbers) > 1:
        move = rng.choice(_good(numbers, target))
        left, right = _take(written, move.left), _take(written, move.right)
        written.append((move.result, f"({left} {move.op} {right})"))
        lines.append(str(move))
        numbers = move.rest
    expression = written[0][1].removeprefix("(").removesuffix(")")
    return "\n".join([*lines, f"Answer: {expression} = {target}"])


def _take(written: list[tuple[int, str]], wanted: int) -> str:
    at = next(i for i, (n, _) in enumerate(written) if n == wanted)
    return written.pop(at)[1]


def _puzzle(rng: Random) -> tuple[Numbers, int]:
    """Return a training puzzle: half of them make 24, the others what random play gave."""
    if rng.random() < 0.5:
        return rng.choice(_training24()), 24
    while True:
        start = tuple(sorted(rng.randint(1, 13) for _ in range(rng.choice([3, 4, 4]))))
        numbers = start
        while len(numbers) > 1:
            numbers = rng.choice(moves(numbers)).rest
        target = numbers[0]
        if 1 <= target <= 100 and not (target == 24 and start in holdout24()):
            return start, target


@cache
def _training24() -> tuple[Numbers, ...]:
    holdout = set(holdout24())
    return tuple(numbers for numbers in puzzles() if numbers not in holdout)


def _shuffled(rng: Random, numbers: Numbers) -> list[int]:
    shown = list(numbers)
    rng.shuffle(shown)
    return shown


def _spaced(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
