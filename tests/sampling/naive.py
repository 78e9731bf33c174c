"""The naive twin of the chain: one row at a time, in float64 and plain Python."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from weft.sampling.params import SamplingParams

GONE = -math.inf


def softmax(logits: Sequence[float]) -> list[float]:
    peak = max(logits)
    weights = [math.exp(x - peak) for x in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def entropy(logits: Sequence[float]) -> float:
    return -math.fsum(p * math.log(p) for p in softmax(logits) if p > 0)


def logprob(logits: Sequence[float], token_id: int) -> float:
    p = softmax(logits)[token_id]
    return math.log(p) if p > 0 else GONE


def by_likelihood(logits: Sequence[float]) -> list[int]:
    return sorted(range(len(logits)), key=lambda i: (-logits[i], i))


def keep(logits: Sequence[float], kept: set[int]) -> list[float]:
    return [x if i in kept else GONE for i, x in enumerate(logits)]


def smallest_set(order: list[int], p: Sequence[float], share: float) -> set[int]:
    kept: set[int] = set()
    mass = 0.0
    for i in order:
        if mass >= share:
            break
        kept.add(i)
        mass += p[i]
    return kept


def top_k(logits: Sequence[float], k: int) -> list[float]:
    return keep(logits, set(by_likelihood(logits)[: k or None]))


def top_p(logits: Sequence[float], share: float) -> list[float]:
    if share >= 1:
        return list(logits)
    return keep(logits, smallest_set(by_likelihood(logits), softmax(logits), share))


def typical(logits: Sequence[float], share: float) -> list[float]:
    if share >= 1:
        return list(logits)
    p = softmax(logits)
    h = entropy(logits)
    away = [abs(-math.log(x) - h) if x > 0 else math.inf for x in p]
    return keep(logits, smallest_set(sorted(range(len(p)), key=lambda i: (away[i], i)), p, share))


def min_p(logits: Sequence[float], share: float) -> list[float]:
    p = softmax(logits)
    return keep(logits, {i for i, x in enumerate(p) if x >= share * max(p)})


def penalise(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
) -> list[float]:
    out = list(logits)
    for i in {*prompt, *generated}:
        out[i] *= 1 / params.repetition_penalty if out[i] > 0 else params.repetition_penalty
    for i, count in Counter(generated).items():
        out[i] -= params.frequency_penalty * count + params.presence_penalty
    return out


def temper(logits: Sequence[float], temperature: float) -> list[float]:
    return [x / temperature for x in logits]


def draw(
    logits: Sequence[float],
    params: SamplingParams,
    u: float,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
) -> int:
    x = list(logits)
    for i, value in params.logit_bias:
        x[i] += value
    x = penalise(x, params, prompt, generated)
    if params.temperature == 0:
        return by_likelihood(x)[0]
    if params.temperature_first:
        x = temper(x, params.temperature)
    x = top_k(x, params.top_k)
    x = typical(x, params.typical_p)
    x = top_p(x, params.top_p)
    x = min_p(x, params.min_p)
    if not params.temperature_first:
        x = temper(x, params.temperature)
    total = 0.0
    p = softmax(x)
    for i, share in enumerate(p):
        total += share
        if total > u * math.fsum(p):
            return i
    raise AssertionError("u is below 1, so some prefix exceeds it")
