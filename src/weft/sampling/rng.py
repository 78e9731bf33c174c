"""Random numbers that depend on a stream and a position only, never on who draws beside.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") with the stream as key
and the position as counter.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
# Up to here plain ints beat fifty NumPy calls on tiny arrays.
_FEW = 8
# How many positions are made at once for streams that advance together.
_AHEAD = 16

_M = np.array(_MULTIPLIERS, dtype=np.uint64)[:, None]
_MASK = np.uint64(_LOW)
_SHIFT = np.uint64(32)
# The key grows by a constant each round; all rounds' sums at once, [rounds, 2, 1].
_ADDED = (
    np.arange(_ROUNDS, dtype=np.uint64)[:, None, None]
    * np.array(_KEY_STEPS, dtype=np.uint64)[None, :, None]
)


def philox(
    key: NDArray[np.uint64], counter: NDArray[np.uint64], *, high: NDArray[np.uint64] | None = None
) -> NDArray[np.uint32]:
    """Return the four words of Philox4x32-10 for every key and counter: uint32 [B, 4].

    high: the counter's upper 64 bits, [B]; zero when left out.
    """
    upper = np.zeros_like(counter) if high is None else high
    keys = (_halves(key) + _ADDED) & _MASK
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in; each pair is one array [2, B].
    low_word, next_word = _halves(counter)
    high_word, last_word = _halves(upper)
    multiplied = np.stack((low_word, high_word))
    mixed = np.stack((next_word, last_word))
    for round_keys in keys:
        product = multiplied * _M
        multiplied = (product[::-1] >> _SHIFT) ^ mixed ^ round_keys
        mixed = product[::-1] & _MASK
    words = np.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]), axis=1)
    return words.astype(np.uint32)


def uniform24(streams: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each stream and position: float64 [B], multiples of 2**-24."""
    if len(streams) <= _FEW:
        pairs = zip(streams.tolist(), positions.tolist(), strict=True)
        words = [_first_word(stream, position) for stream, position in pairs]
        return np.array([word >> 8 for word in words], dtype=np.float64) / 2**24
    first = philox(streams, positions)[:, 0]
    return (first >> np.uint32(8)).astype(np.float64) / 2**24


class Uniforms:
    """`uniform24` of fixed streams, made some positions ahead while they advance together."""

    __slots__ = ("_ahead", "_first", "_streams")

    def __init__(self, streams: Sequence[int]) -> None:
        self._streams = np.array(streams, dtype=np.uint64)
        self._first = np.zeros(0, dtype=np.uint64)
        self._ahead = np.zeros((0, len(streams)))

    def at(self, positions: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return `uniform24` of the streams at uint64 [B] positions; not to be written to."""
        n_ahead = len(self._ahead)
        together = False
        if n_ahead:
            # Unsigned: a step back wraps to a huge number, which is not ahead either.
            steps = positions - self._first
            step = int(steps[0])
            together = step <= n_ahead and bool((steps == step).all())
            if together and step < n_ahead:
                found: NDArray[np.float64] = self._ahead[step]
                return found
        return self._make(positions, _AHEAD if together else 1)

    def _make(self, positions: NDArray[np.uint64], n: int) -> NDArray[np.float64]:
        at = positions + np.arange(n, dtype=np.uint64)[:, None]
        numbers = uniform24(np.tile(self._streams, n), at.reshape(-1)).reshape(n, -1)
        self._first, self._ahead = positions.copy(), numbers
        first: NDArray[np.float64] = numbers[0]
        return first


def stream_of(seed: int, lineage: tuple[int, ...] = ()) -> int:
    """Return the 64-bit stream of a seed and a lineage.

    lineage: child index in the call, then (position, ordinal there) of every fork; all >= 0.
    """
    packed = struct.pack(f"<{1 + len(lineage)}Q", seed, *lineage)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"weft stream").digest()
    return int.from_bytes(digest, "little")


def fresh_seed() -> int:
    """Return a new seed from the system, below 2**53 so that JSON keeps it exactly."""
    return int.from_bytes(os.urandom(8), "little") >> 11


def _halves(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return np.stack((values & _MASK, values >> _SHIFT))


def _first_word(key: int, counter: int) -> int:
    """Return word 0 of Philox4x32-10, the upper counter half being zero."""
    key0, key1 = key & _LOW, key >> 32
    c0, c1, c2, c3 = counter & _LOW, counter >> 32, 0, 0
    m0, m1 = _MULTIPLIERS
    for _ in range(_ROUNDS):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ key0, p1 & _LOW, (p0 >> 32) ^ c3 ^ key1, p0 & _LOW
        key0, key1 = (key0 + _KEY_STEPS[0]) & _LOW, (key1 + _KEY_STEPS[1]) & _LOW
    return c0
