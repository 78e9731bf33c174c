from __future__ import annotations

import numpy as np
import pytest

from weft.sampling.rng import Uniforms, fresh_seed, philox, stream_of, uniform24

ALL = 2**64 - 1


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_philox_gives_the_known_answers_of_its_authors() -> None:
    words = philox(
        u64(0, ALL, 0x299F31D0A4093822),
        u64(0, ALL, 0x85A308D3243F6A88),
        high=u64(0, ALL, 0x0370734413198A2E),
    )
    assert words.dtype == np.uint32
    assert [[f"{word:08x}" for word in row] for row in words.tolist()] == [
        ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"],
        ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ]


def test_few_and_many_streams_give_the_same_numbers() -> None:
    rng = np.random.default_rng(0)
    streams = rng.integers(0, ALL, 50, dtype=np.uint64, endpoint=True)
    positions = rng.integers(0, 2**40, 50, dtype=np.uint64)
    alone = [uniform24(streams[i : i + 1], positions[i : i + 1])[0] for i in range(50)]
    together = uniform24(streams, positions)
    assert together.tolist() == alone
    expected = (philox(streams, positions)[:, 0] >> np.uint32(8)) / 2**24
    assert together.tolist() == expected.tolist()


def test_numbers_are_24_bit_below_one_and_level() -> None:
    """20,000 numbers in 16 bins; chi-square over 50 at 15 degrees: odds 1 in 90,000."""
    numbers = uniform24(np.full(20_000, 9, dtype=np.uint64), np.arange(20_000, dtype=np.uint64))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert np.array_equal(numbers * 2**24, np.floor(numbers * 2**24))
    bins = np.bincount((numbers * 16).astype(int), minlength=16)
    assert ((bins - 1250) ** 2 / 1250).sum() < 50


@pytest.mark.parametrize("n", [1, 5, 40])
def test_numbers_made_ahead_equal_numbers_made_when_asked(n: int) -> None:
    streams = [stream_of(3, (i,)) for i in range(n)]
    ahead = Uniforms(streams)
    start = np.arange(n, dtype=np.uint64) * np.uint64(7)
    walk = [*range(40), 39, 41, 42, 3, 4, 1000, 1001, 0]
    for step in walk:
        at = start + np.uint64(step)
        assert np.array_equal(ahead.at(at), uniform24(u64(*streams), at))
    uneven = start + np.arange(n, dtype=np.uint64)
    assert np.array_equal(ahead.at(uneven), uniform24(u64(*streams), uneven))


def test_streams_differ_by_seed_and_by_lineage_and_stay_as_they_are() -> None:
    lineages = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (12, 3)]
    streams = {stream_of(seed, lineage) for seed in (0, 1, 2**64 - 1) for lineage in lineages}
    assert len(streams) == 3 * len(lineages)
    # Saved looms are reproduced by later versions: this value never changes.
    assert stream_of(1, (0,)) == 0xF9A03A0F3F6D6DC3
    assert all(0 <= stream < 2**64 for stream in streams)


def test_fresh_seeds_differ_and_survive_json() -> None:
    seeds = {fresh_seed() for _ in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**53 for seed in seeds)
