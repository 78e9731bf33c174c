from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sampling import naive
from weft.sampling import filters
from weft.sampling.params import SamplingParams

Twin = Callable[[list[float], Any], list[float]]
SHARES = np.array([0.05, 0.3, 0.5, 0.9, 0.999])
FILTERS = [
    pytest.param(filters.top_k, naive.top_k, np.array([0, 1, 3, 17, 1000]), id="top_k"),
    pytest.param(filters.top_p, naive.top_p, SHARES, id="top_p"),
    pytest.param(filters.min_p, naive.min_p, SHARES, id="min_p"),
    pytest.param(filters.typical, naive.typical, SHARES, id="typical"),
]


def rows(n_vocab: int, *, tied: bool, holes: bool, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((5, n_vocab)) * 2).astype(np.float32)
    if tied:
        logits = np.round(logits)
    if holes:
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[:, 0] = 1
    return logits


@pytest.mark.parametrize(("function", "twin", "values"), FILTERS)
@pytest.mark.parametrize("n_vocab", [1, 2, 33, 600])
@pytest.mark.parametrize("holes", [False, True])
def test_filter_equals_its_naive_twin(
    function: Callable[..., np.ndarray],
    twin: Twin,
    values: np.ndarray,
    n_vocab: int,
    holes: bool,
) -> None:
    logits = rows(n_vocab, tied=False, holes=holes)
    kept = function(logits, values)
    assert kept.dtype == np.float32
    for row, value, got in zip(logits.tolist(), values.tolist(), kept.tolist(), strict=True):
        assert got == twin(row, value)


@pytest.mark.parametrize(("function", "twin", "values"), FILTERS[:3])
def test_ties_go_to_the_lower_id(
    function: Callable[..., np.ndarray], twin: Twin, values: np.ndarray
) -> None:
    logits = rows(60, tied=True, holes=True)
    # Off the round shares, so that float32 and float64 sums agree on which side they fall.
    values = values if values.dtype == np.int64 else values * 0.9987
    for row, value, got in zip(
        logits.tolist(), values.tolist(), function(logits, values).tolist(), strict=True
    ):
        assert got == twin(row, value)


@pytest.mark.parametrize(("function", "twin", "values"), FILTERS)
def test_filter_leaves_its_input_and_a_row_is_the_same_alone(
    function: Callable[..., np.ndarray], twin: Twin, values: np.ndarray
) -> None:
    logits = rows(5000, tied=False, holes=True)
    logits.flags.writeable = False
    together = function(logits, values)
    for row in range(5):
        alone = function(logits[row : row + 1], values[row : row + 1])
        assert np.array_equal(together[row], alone[0])


@pytest.mark.parametrize(("function", "twin", "values"), FILTERS)
def test_at_least_the_likeliest_or_most_typical_token_stays(
    function: Callable[..., np.ndarray], twin: Twin, values: np.ndarray
) -> None:
    tight = np.ones(5, dtype=np.int64) if values.dtype == np.int64 else np.full(5, 1e-9)
    kept = function(rows(100, tied=False, holes=True), tight)
    assert (np.isfinite(kept).sum(axis=1) >= 1).all()


def test_top_p_keeps_the_smallest_set_that_reaches_its_share() -> None:
    logits = np.log(np.array([[0.1, 0.4, 0.3, 0.2]], dtype=np.float32))
    kept = [np.isfinite(filters.top_p(logits, np.array([p]))[0]) for p in (0.39, 0.6, 0.75, 0.95)]
    assert [np.flatnonzero(row).tolist() for row in kept] == [[1], [1, 2], [1, 2, 3], [0, 1, 2, 3]]


def test_penalties_follow_the_rule() -> None:
    """Repetition on all seen tokens, presence and frequency on generated ones."""
    logits = np.array(
        [[2.0, -2.0, 2.0, -2.0, 1.0], [1.0, 1.0, 1.0, 1.0, -np.inf]], dtype=np.float32
    )
    out = filters.penalties(
        logits,
        np.array([0, 0, 0, 0, 1, 1]),
        np.array([0, 1, 2, 3, 0, 4]),
        np.array([0, 0, 1, 3, 2, 1]),
        np.array([2.0, 1.0], dtype=np.float32),
        np.array([0.5, 0.0], dtype=np.float32),
        np.array([0.25, 0.125], dtype=np.float32),
    )
    assert out.tolist() == [
        [1.0, -4.0, 1.0 - 0.75, -4.0 - 0.5 - 0.75, 1.0],
        [0.75, 1.0, 1.0, 1.0, -np.inf],
    ]
    params = SamplingParams(repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25)
    assert naive.penalise(logits[0].tolist(), params, [0, 1], [2, 3, 3, 3]) == out[0].tolist()


def test_bias_adds_and_an_infinite_one_forces_or_forbids() -> None:
    logits = np.array([[1.0, 2.0, 3.0]], dtype=np.float32)
    ids = np.array([0, 1, 2])
    out = filters.bias(logits, np.zeros(3, dtype=np.int64), ids, np.array([np.inf, 0.5, -np.inf]))
    assert out[0, 1] == 2.5
    assert out[0, 2] == -np.inf
    assert np.isfinite(out[0, 0])
    assert out.argmax() == 0
    assert logits.tolist() == [[1.0, 2.0, 3.0]]
