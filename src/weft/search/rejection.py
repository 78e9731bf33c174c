"""Adaptive weighted rejection sampling: draw a token, check it, and draw another if it is rejected.

The method is that of Lipkin et al. 2025, "Fast controlled generation from language models with
adaptive weighted rejection sampling". It checks a few likely tokens instead of the full vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

_FIRST = 64  # tokens that are sorted before all others are
_EXACT = 1e-6  # the remaining probability is summed up once it has shrunk by this factor


class AllowedDraw(NamedTuple):
    """One drawn token.

    Attributes:
        token: its id; None if the check rejects every token with a probability above 0.
        log_mass: log of an unbiased estimate of the probability of all allowed tokens, in nats.
    """

    token: int | None
    log_mass: float


def draw_allowed(
    probs: Doubles, is_allowed: Callable[[int], bool], rng: np.random.Generator
) -> AllowedDraw:
    """Draw one of the allowed tokens in proportion to its probability.

    Rejected tokens are not drawn again. Let Q(j) be the probability of all tokens without the first
    j rejected ones. Draws continue until two are accepted; the first is the result. With m rejected
    tokens the estimate is 1 / (1/Q(0) + ... + 1/Q(m)). It is the probability that the very first
    draw was accepted, given the rejected tokens. So its mean is the probability of all allowed
    tokens. It is independent of the accepted token.

    Args:
        probs: probability of each token, [V]. Their sum is 1.
        is_allowed: the check of a token.
        rng: the random numbers.
    """
    left = probs.copy()
    mass = exact = 1.0
    inverse = 1.0  # the sum of 1/Q
    accepted: list[int] = []
    while len(accepted) < 2:
        for token in _without_replacement(left, rng):
            if token in accepted or is_allowed(token):
                accepted.append(token)
                break
            mass -= left[token]
            left[token] = 0.0
            if mass < _EXACT * exact:
                mass = exact = float(left.sum())
            if mass <= 0.0:
                return AllowedDraw(None, -math.inf)
            inverse += 1 / mass
        else:
            return AllowedDraw(None, -math.inf)
    return AllowedDraw(accepted[0], -math.log(inverse))


def likeliest_allowed(probs: Doubles, is_allowed: Callable[[int], bool]) -> AllowedDraw:
    """Return the likeliest allowed token; its `log_mass` is 0, or -inf if no token is allowed."""
    token = next((token for token in _ascending(-probs, probs) if is_allowed(token)), None)
    return AllowedDraw(token, -math.inf if token is None else 0.0)


def _without_replacement(probs: Doubles, rng: np.random.Generator) -> Iterator[int]:
    """Yield tokens in the order of draws without replacement; `probs` may change meanwhile.

    Of independent exponential times with rates `probs`, the first belongs to each token as often as
    its probability says. So does the next among the others.
    """
    with np.errstate(divide="ignore"):
        times = rng.standard_exponential(len(probs)) / probs
    return _ascending(times, probs.copy())


def _ascending(keys: Doubles, probs: Doubles) -> Iterator[int]:
    """Yield the tokens with a probability above 0, smallest key first."""
    n_first = min(_FIRST, len(keys))
    first = np.argpartition(keys, n_first - 1)[:n_first]
    for token in first[np.argsort(keys[first], kind="stable")].tolist():
        if probs[token] > 0:
            yield token
    if n_first < len(keys):
        for token in np.argsort(keys, kind="stable")[n_first:].tolist():
            if probs[token] > 0:
                yield token
