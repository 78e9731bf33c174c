from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from core.sampling import naive
from weft._core.sampling import filters
from weft._core.sampling.metrics import group_peaks
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.sampler import SamplingArrays

Twin = Callable[[list[float], Any], list[float]]
SHARES = [0.05, 0.3, 0.5, 0.9, 0.999]
FILTERS = [
    pytest.param("top_k", naive.top_k, [0, 1, 3, 17, 1000], id="top_k"),
    pytest.param("top_p", naive.top_p, SHARES, id="top_p"),
    pytest.param("min_p", naive.min_p, SHARES, id="min_p"),
    pytest.param("typical_p", naive.typical, SHARES, id="typical"),
    pytest.param("top_n_sigma", naive.top_n_sigma, [0.0, 0.1, 0.7, 2.0, 30.0], id="top_n_sigma"),
    # Which draws use XTC is decided before the filters, so any value but 0 means this one does.
    pytest.param(
        "xtc_probability",
        lambda logits, used: naive.xtc(logits, 0.1) if used else list(logits),
        [0.0, 1.0, 0.5, 0.0, 1.0],
        id="xtc",
    ),
]


def rows(n_vocab: int, *, tied: bool, holes: bool, scale: float = 2) -> np.ndarray:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((5, n_vocab)) * scale).astype(np.float32)
    if tied:
        logits = np.round(logits)
    if holes:
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[:, 0] = 1
    logits.flags.writeable = False
    return logits


def left(logits: np.ndarray, params: list[SamplingParams]) -> list[dict[int, float]]:
    """Return the kept ids of each row, in order, with their tempered logits."""
    arrays = SamplingArrays.from_params(params)
    total = filters.mass(logits, logits.max(axis=1), arrays.temperature_before)
    peaks, every = group_peaks(logits), np.arange(len(logits))
    kept_of_row: dict[int, dict[int, float]] = {}
    for part in filters.filter_logits(logits, peaks, arrays, every, total):
        for row, ids, heights, log_total in zip(*part, strict=True):
            kept = {int(i): float(h) for i, h in zip(ids, heights, strict=True) if np.isfinite(h)}
            assert log_total == pytest.approx(np.log(np.exp(list(kept.values())).sum()))
            kept_of_row[int(row)] = kept
    return [kept_of_row[row] for row in range(len(logits))]


def staying(logits: list[float]) -> set[int]:
    return {i for i, value in enumerate(logits) if value > naive.GONE}


@pytest.mark.parametrize(("name", "twin", "values"), FILTERS)
@pytest.mark.parametrize(("n_vocab", "scale"), [(1, 2), (2, 2), (33, 2), (600, 2), (9000, 0.3)])
@pytest.mark.parametrize("holes", [False, True])
def test_filter_equals_its_naive_twin(
    name: str, twin: Twin, values: list[Any], n_vocab: int, scale: float, holes: bool
) -> None:
    logits = rows(n_vocab, tied=False, holes=holes, scale=scale)
    got = left(logits, [SamplingParams(**{name: value}) for value in values])
    for row, value, kept in zip(logits.tolist(), values, got, strict=True):
        assert set(kept) == staying(twin(row, value))
        assert list(kept) == [i for i in naive.by_likelihood(row) if i in kept]


@pytest.mark.parametrize(("name", "twin", "values"), FILTERS[:3])
def test_ties_are_kept_in_order_of_lower_id(name: str, twin: Twin, values: list[Any]) -> None:
    logits = rows(60, tied=True, holes=True)
    # Off the round shares, so that no sum falls on one.
    values = values if name == "top_k" else [value * 0.9987 for value in values]
    got = left(logits, [SamplingParams(**{name: value}) for value in values])
    for row, value, kept in zip(logits.tolist(), values, got, strict=True):
        assert set(kept) == staying(twin(row, value))


def test_every_filter_has_a_naive_twin() -> None:
    assert {case.values[0] for case in FILTERS} == set(filters.CUTS), (
        "a filter needs a row of FILTERS"
    )


@pytest.mark.parametrize("pair", list(itertools.combinations(filters.CUTS, 2)), ids="-".join)
@pytest.mark.parametrize("n_vocab", [33, 600])
def test_two_filters_cut_in_order(pair: tuple[str, str], n_vocab: int) -> None:
    """The second sees what the first has left, and all of it: no floor may take that away."""
    cases = {case.values[0]: case.values[1:] for case in FILTERS}
    (first, values), (second, others) = (cases[name] for name in pair)
    logits = rows(n_vocab, tied=False, holes=False)
    for turn in range(len(values)):
        both = list(zip(values, others[turn:] + others[:turn], strict=True))
        params = [SamplingParams(**dict(zip(pair, each, strict=True))) for each in both]
        for row, (one, two), kept in zip(logits.tolist(), both, left(logits, params), strict=True):
            assert set(kept) == staying(second(first(row, one), two))


def test_filters_and_temperature_apply_in_their_order() -> None:
    logits = rows(5000, tied=False, holes=True)
    chained = dict(top_k=300, typical_p=0.9, top_p=0.8, min_p=0.02, temperature=1.7)
    options = [{**chained, "temperature_first": first} for first in (False, True)]
    options += [{"top_p": 0.9, "min_p": 0.01}, {"typical_p": 0.5, "top_p": 0.9}, {"top_k": 5000}]
    params = [SamplingParams(**each) for each in options]
    for row, p, kept in zip(logits.tolist(), params, left(logits, params), strict=True):
        x = naive.temper(row, p.temperature) if p.temperature_first else row
        x = naive.min_p(
            naive.top_p(naive.typical(naive.top_k(x, p.top_k), p.typical_p), p.top_p), p.min_p
        )
        assert set(kept) == staying(x)
        top = max(x)
        divisor = 1 if p.temperature_first else p.temperature
        for token, height in kept.items():
            assert height == pytest.approx((x[token] - top) / divisor, abs=1e-6)


@pytest.mark.parametrize(("name", "twin", "values"), FILTERS)
def test_filter_keeps_its_input_and_gives_a_row_the_same_result_alone(
    name: str, twin: Twin, values: list[Any]
) -> None:
    logits = rows(5000, tied=False, holes=True)
    params = [SamplingParams(**{name: value}) for value in values]
    together = left(logits, params)
    for row in range(5):
        assert left(logits[row : row + 1], params[row : row + 1]) == together[row : row + 1]


@pytest.mark.parametrize("n_vocab", [5, 700, 9000])
@pytest.mark.parametrize("scale", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("tied", [False, True])
def test_cutoff_of_flat_rows_keeps_the_tokens_that_ranking_keeps(
    n_vocab: int, scale: float, tied: bool
) -> None:
    """By value the same tokens stay as by rank; tied rows have few values, scale 0 has one."""
    rng = np.random.default_rng(1)
    options: list[dict[str, Any]] = [
        {"top_p": 0.1},
        {"top_p": 0.5, "temperature": 3.0, "temperature_first": True},
        {"top_p": 0.9, "min_p": 0.5},
        {"top_p": 0.999, "min_p": 1e-9},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"min_p": 0.9, "temperature": 0.5, "temperature_first": True},
        {"top_p": 0.7, "typical_p": 0.9},
        {"top_k": 20, "min_p": 0.1},
        {"top_p": 1e-9},
    ]
    params = [SamplingParams(**each) for each in options]
    logits = (rng.standard_normal((len(params), n_vocab)) * scale).astype(np.float32)
    logits = np.round(logits * 8) / 8 if tied else logits
    logits[:, 3] = -np.inf
    ranked = left(logits, params)
    arrays, every = SamplingArrays.from_params(params), np.arange(len(params))
    total = filters.mass(logits, logits.max(axis=1), arrays.temperature_before)
    filtered = []
    for part in filters.filter_or_cutoff(logits, group_peaks(logits), arrays, every, total):
        filtered += part.rows.tolist()
        if isinstance(part, filters.Cutoff):
            for row, cutoff, last in zip(*part, strict=True):
                values = logits[row]
                kept = (values > cutoff) | ((values == cutoff) & (np.arange(n_vocab) <= last))
                assert set(np.flatnonzero(kept).tolist()) == set(ranked[row]), options[row]
        else:
            for row, ids, heights in zip(part.rows, part.ids, part.heights, strict=True):
                assert set(ids[np.isfinite(heights)].tolist()) == set(ranked[row])
    assert sorted(filtered) == every.tolist()


@pytest.mark.parametrize("name", list(filters.CUTS))
def test_tightest_filter_keeps_one_token(name: str) -> None:
    tight = SamplingParams(**{name: 1e-9 if name in ("top_p", "typical_p") else 1})
    kept = left(rows(100, tied=False, holes=True), [tight] * 5)
    assert all(kept)


def test_top_p_keeps_the_smallest_set_that_reaches_its_mass() -> None:
    logits = np.log(np.array([[0.1, 0.4, 0.3, 0.2]] * 4, dtype=np.float32))
    kept = left(logits, [SamplingParams(top_p=p) for p in (0.39, 0.6, 0.75, 0.95)])
    assert [sorted(row) for row in kept] == [[1], [1, 2], [1, 2, 3], [0, 1, 2, 3]]


def test_penalties_equal_the_naive_twin() -> None:
    """Repetition applies to all tokens, presence and frequency to generated ones."""
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
