"""Probabilities of the tokens that a draw selects from."""

from __future__ import annotations

import numpy as np
import pytest

from core.sampling import naive
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.sampler import probabilities


def expected(logits: np.ndarray, params: SamplingParams) -> list[float]:
    x = [float(value) for value in logits]
    for token, bias in params.logit_bias:
        x[token] += bias
    if params.temperature == 0:
        best = naive.by_likelihood(x)[0]
        return [float(at == best) for at in range(len(x))]
    if params.temperature_first:
        x = naive.temper(x, params.temperature)
    x = naive.top_k(x, params.top_k)
    x = naive.typical(x, params.typical_p)
    x = naive.top_p(x, params.top_p)
    x = naive.min_p(x, params.min_p)
    if not params.temperature_first:
        x = naive.temper(x, params.temperature)
    return naive.softmax(x)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.3},
        {"temperature": 2.0, "top_k": 3},
        {"top_p": 0.7},
        {"top_p": 0.7, "temperature": 1.7, "temperature_first": True},
        {"min_p": 0.2, "typical_p": 0.9},
        {"logit_bias": {3: -np.inf, 5: 4.0}, "top_k": 4},
    ],
)
def test_probabilities_equal_the_naive_chain(given: dict) -> None:
    logits = (np.random.default_rng(3).standard_normal(40) * 2).astype(np.float32)
    params = SamplingParams(**given)
    result = probabilities(logits, params)
    assert result == pytest.approx(expected(logits, params), abs=1e-6)
    assert result.sum() == pytest.approx(1)
