"""Packed token ids of any size; the bytes identify their own encoding."""

from __future__ import annotations

import random

import pytest

from weft.service.store.rows import pack_ids, unpack_ids


@pytest.mark.parametrize("bits", [1, 31, 32, 63, 64, 520])
def test_pack_ids_round_trip_for_any_size(bits: int) -> None:
    rng = random.Random(bits)
    for n in range(1, 40):
        ids = [rng.getrandbits(rng.randint(1, bits)) for _ in range(n)]
        assert unpack_ids(pack_ids(ids), n) == ids
    assert unpack_ids(pack_ids([]), 0) == []
