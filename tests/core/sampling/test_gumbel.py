from __future__ import annotations

import numpy as np
import pytest

from core.sampling import naive
from weft._core.sampling.metrics import GROUP_SIZE, group_of, members, n_groups
from weft._core.sampling.rng import group_noise, keys_of, member_noise, stream_of, token_noise

STREAMS = [stream_of(3, (i,)) for i in range(3)]


def at(*positions: int) -> np.ndarray:
    return np.array(positions, dtype=np.uint64)


def noise_of(streams: list[int], positions: np.ndarray, n_vocab: int) -> np.ndarray:
    """The noise of every token, computed one by one: [B, V]."""
    keys = keys_of(np.array(streams, dtype=np.uint64), positions)
    lanes, ids = np.divmod(np.arange(len(streams) * n_vocab), n_vocab)
    noise = token_noise(group_noise(keys, n_groups(n_vocab)), lanes, ids)
    return noise.reshape(len(streams), n_vocab)


@pytest.mark.parametrize("n_vocab", [1, 63, 65, 4096, 4500])
def test_noise_equals_the_naive_twin(n_vocab: int) -> None:
    noise = noise_of(STREAMS, at(0, 7, 2**40), n_vocab)
    ids = np.random.default_rng(0).choice(n_vocab, min(n_vocab, 150), replace=False).tolist()
    for row, (stream, position) in enumerate(zip(STREAMS, (0, 7, 2**40), strict=True)):
        expected = naive.noise(stream, position, ids)
        assert noise[row, ids].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n_vocab", [100, 3000, 9000])
def test_group_noise_is_the_maximum_of_its_members_in_bulk_or_one_by_one(n_vocab: int) -> None:
    noise = group_noise(keys_of(np.array(STREAMS, np.uint64), at(5, 5, 6)), n_groups(n_vocab))
    lanes, groups = np.divmod(np.arange(3 * n_groups(n_vocab)), n_groups(n_vocab))
    square = members(groups)
    of_members = member_noise(noise, lanes, groups, square)
    assert np.array_equal(of_members.max(axis=1), noise.largest[lanes, groups])
    assert np.array_equal(of_members.argmax(axis=1), noise.member[lanes, groups])
    assert (group_of(square) == groups[:, None]).all()
    single = token_noise(noise, np.repeat(lanes, GROUP_SIZE), square.ravel())
    assert np.array_equal(single.reshape(of_members.shape), of_members)
    some = members(groups, n_vocab)
    assert np.array_equal(member_noise(noise, lanes, groups, some), of_members[:, : some.shape[1]])


def test_noise_does_not_depend_on_the_vocabulary_or_on_other_streams() -> None:
    wide, narrow = noise_of(STREAMS, at(1, 2, 3), 9000), noise_of(STREAMS, at(1, 2, 3), 700)
    assert np.array_equal(wide[:, :700], narrow)
    assert np.array_equal(noise_of(STREAMS[1:2], at(2), 700)[0], narrow[1])


def test_noise_is_gumbel_distributed_and_independent_of_neighbours() -> None:
    """20,000 tokens in 16 bins of equal chance, chi-square over 50 at 15 degrees: odds 1 in 90,000.

    Correlation of 20,000 pairs over 0.035 by chance: 5 standard deviations, 1 in 1,700,000.
    """
    noise = noise_of(STREAMS[:1], at(9), 20_000)[0]
    bins = np.bincount((np.exp(-np.exp(-noise)) * 16).astype(int), minlength=16)
    assert ((bins - 1250) ** 2 / 1250).sum() < 50
    for other in (
        np.roll(noise, 1),
        np.roll(noise, 64),
        noise_of(STREAMS[:1], at(10), 20_000)[0],
        noise_of(STREAMS[1:2], at(9), 20_000)[0],
    ):
        assert abs(np.corrcoef(noise, other)[0, 1]) < 0.035


def test_number_of_groups_covers_the_vocabulary() -> None:
    for n_vocab in (1, 63, 64, 65, 2048, 4095, 4096, 4097, 4200, 128_256, 151_936):
        assert n_groups(n_vocab) == group_of(np.arange(n_vocab)).max() + 1
