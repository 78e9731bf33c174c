from __future__ import annotations

import numpy as np
import pytest

from weft._core.sampling.metrics import (
    group_of,
    group_peaks,
    has_ragged_groups,
    kth_floors,
    largest,
    members,
    n_groups,
    rank,
)

SIZES = [1, 3, 64, 65, 700, 4096, 4097, 4200, 20_000]


def rows(n_vocab: int) -> np.ndarray:
    """Two plain rows, one of few distinct values, one of holes, one of nothing but a hole."""
    rng = np.random.default_rng(n_vocab)
    values = rng.standard_normal((5, n_vocab)).astype(np.float32)
    values[2] = np.round(values[2]) * rng.choice([1.0, -0.0, 0.0], n_vocab)
    values[3, rng.random(n_vocab) < 0.5] = -np.inf
    values[4] = -np.inf
    return values


def in_order(row: np.ndarray) -> list[int]:
    return np.argsort(-row, kind="stable").tolist()


@pytest.mark.parametrize("n_vocab", SIZES)
def test_group_peaks_equal_a_scan_of_every_member(n_vocab: int) -> None:
    values = rows(n_vocab)
    peaks = group_peaks(values)
    assert peaks.shape == (5, n_groups(n_vocab))
    expected = np.full(peaks.shape, -np.inf, dtype=np.float32)
    for row in range(5):
        np.maximum.at(expected[row], group_of(np.arange(n_vocab)), values[row])
    assert np.array_equal(peaks, expected)
    ids = members(np.arange(n_groups(n_vocab)))
    assert sorted(ids[ids < n_vocab].tolist()) == list(range(n_vocab))


@pytest.mark.parametrize("n_vocab", [*SIZES, 2048, 8192, 8192 + 64])
def test_members_exceed_the_vocabulary_only_if_its_groups_are_ragged(n_vocab: int) -> None:
    ids = members(np.arange(n_groups(n_vocab)), n_vocab)
    assert sorted(ids[ids < n_vocab].tolist()) == list(range(n_vocab))
    assert has_ragged_groups(n_vocab) == bool((ids >= n_vocab).any())


@pytest.mark.parametrize("n_vocab", SIZES)
@pytest.mark.parametrize("floor", [-np.inf, -0.5, 0.0, 1.9, 99.0])
def test_rank_equals_a_stable_sort_of_values_above_the_floor(n_vocab: int, floor: float) -> None:
    values = rows(n_vocab)
    floors = np.full(5, floor, dtype=np.float32)
    floors[1] -= 1
    ranked = rank(values, group_peaks(values), floors)
    for row in range(5):
        expected = [i for i in in_order(values[row]) if values[row, i] >= max(floors[row], -1e38)]
        n = int(ranked.n[row])
        assert ranked.ids[row, :n].tolist() == expected
        assert np.array_equal(ranked.values[row, :n], values[row, expected])
        assert np.isneginf(ranked.values[row, n:]).all()


@pytest.mark.parametrize("n_vocab", SIZES)
def test_floor_is_reached_by_the_requested_number_of_values(n_vocab: int) -> None:
    values = rows(n_vocab)
    peaks = group_peaks(values)
    for wanted in ([3, 1, 2, 5, 64], [7] * 5, [1000] * 5, [1, 70, 1, 1, 1]):
        floors = kth_floors(peaks, np.array(wanted))
        reached = (values >= floors[:, None]).sum(axis=1)
        assert (reached >= np.minimum(wanted, n_vocab)).all()


@pytest.mark.parametrize("n_vocab", SIZES)
@pytest.mark.parametrize("n", [1, 2, 10, 600])
def test_largest_equals_a_stable_sort(n_vocab: int, n: int) -> None:
    values = rows(n_vocab)
    ids = largest(values, n)
    assert ids.dtype == np.int64
    for row in range(5):
        assert ids[row].tolist() == in_order(values[row])[:n]
