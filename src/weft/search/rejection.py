"""Draw a token that passes a check, without checking the full vocabulary.

`draw_allowed` is adaptive weighted rejection sampling (Lipkin et al. 2025, "Fast controlled
generation from language models with adaptive weighted rejection sampling"): draw a token, check it,
and draw another one if it is rejected. `likeliest_allowed` is the same for greedy decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]

_N_SORTED_FIRST = 64  # the other tokens are sorted only if all of these are rejected
# Subtraction loses precision: once the probability left has shrunk by this factor, sum it.
_SUM_BELOW = 1e-6


class AllowedDraw(NamedTuple):
    """The result of `draw_allowed` and `likeliest_allowed`.

    Attributes:
        token: id of an allowed token; None if the check rejects all tokens of probability above 0.
        log_mass: log, in nats, of an estimate of the summed probability of all allowed tokens;
            -inf if there is none. It is the weight of the draw for `smc`. `likeliest_allowed`
            estimates nothing and returns 0.
    """

    token: int | None
    log_mass: float


def draw_allowed(
    probs: Doubles, is_allowed: Callable[[int], bool], rng: np.random.Generator
) -> AllowedDraw:
    """Draw one of the allowed tokens in proportion to its probability.

    Use it if a check is too slow to run on all V tokens: it checks a few likely ones.

    Draws continue until a second one is accepted; the first is the result. Rejected tokens are not
    drawn again. Let Q(j) be the summed probability of all tokens without the first j rejected ones.
    With m rejected tokens, `log_mass` is the log of 1 / (1/Q(0) + ... + 1/Q(m)). The mean of this
    estimate is the summed probability of all allowed tokens, and it is independent of the result.

    Args:
        probs: probability of each token, [V]; the sum is 1.
        is_allowed: token id → True if the token may be drawn; called once per token at most.
        rng: source of the random numbers.

    Cost: one check per rejected token and at most two more; O(V) of NumPy work.
    """
    left = probs.copy()
    mass = last_sum = 1.0
    inverse = 1.0  # the sum of 1/Q
    accepted: list[int] = []
    while len(accepted) < 2:
        for token in _without_replacement(left, rng):
            if token in accepted or is_allowed(token):
                accepted.append(token)
                break
            mass -= left[token]
            left[token] = 0.0
            if mass < _SUM_BELOW * last_sum:
                mass = last_sum = float(left.sum())
            if mass <= 0.0:
                return AllowedDraw(None, -math.inf)
            inverse += 1 / mass
        else:
            return AllowedDraw(None, -math.inf)
    return AllowedDraw(accepted[0], -math.log(inverse))


def likeliest_allowed(probs: Doubles, is_allowed: Callable[[int], bool]) -> AllowedDraw:
    """Return the likeliest allowed token, for greedy decoding; it checks tokens in that order.

    Args:
        probs: probability of each token, [V].
        is_allowed: token id → True if the token may be returned.

    Returns: an `AllowedDraw` with `log_mass` 0, or -inf if no token is allowed.
    """
    token = next((token for token in _ascending(-probs, probs) if is_allowed(token)), None)
    return AllowedDraw(token, -math.inf if token is None else 0.0)


def _without_replacement(probs: Doubles, rng: np.random.Generator) -> Iterator[int]:
    """Yield token ids in the order of draws without replacement.

    Each token gets a random time, exponential with its probability as the rate. The order of these
    times is the order of the draws. Later changes of `probs` have no effect on it.
    """
    with np.errstate(divide="ignore"):
        times = rng.standard_exponential(len(probs)) / probs
    return _ascending(times, probs.copy())


def _ascending(keys: Doubles, probs: Doubles) -> Iterator[int]:
    """Yield the ids of tokens with a probability above 0, smallest key first."""
    n_first = min(_N_SORTED_FIRST, len(keys))
    first = np.argpartition(keys, n_first - 1)[:n_first]
    for token in first[np.argsort(keys[first], kind="stable")].tolist():
        if probs[token] > 0:
            yield token
    if n_first < len(keys):
        for token in np.argsort(keys, kind="stable")[n_first:].tolist():
            if probs[token] > 0:
                yield token
