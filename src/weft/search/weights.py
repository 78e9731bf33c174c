"""Log weights of particles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random


def effective_size(log_weights: Sequence[float]) -> float:
    """Return (sum of weights)² / sum of squares; n when all are equal."""
    top = max(log_weights)
    weights = [math.exp(weight - top) for weight in log_weights]
    return math.fsum(weights) ** 2 / math.fsum(w * w for w in weights)


def log_mean_exp(log_weights: Sequence[float]) -> float:
    """Return the log of the mean of the weights; -inf when all are 0."""
    top = max(log_weights)
    if top == -math.inf:
        return -math.inf
    mean = math.fsum(math.exp(weight - top) for weight in log_weights) / len(log_weights)
    return top + math.log(mean)


def systematic(log_weights: Sequence[float], rng: Random) -> list[int]:
    """Return as many indices as weights: each within 1 of its share, from one random number."""
    top = max(log_weights)
    weights = [math.exp(weight - top) for weight in log_weights]
    step = math.fsum(weights) / len(weights)
    at, total, picked = rng.random() * step, 0.0, list[int]()
    for index, weight in enumerate(weights):
        total += weight
        while at < total and len(picked) < len(weights):
            picked.append(index)
            at += step
    return picked + [len(weights) - 1] * (len(weights) - len(picked))
