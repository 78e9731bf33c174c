"""Streams of random numbers that depend on seed, lineage, position and number only.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") makes a key of a stream
and a position, SplitMix64 the numbers of that key: both give any number without those before it, so
nobody's numbers depend on who draws beside.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
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


def philox(key: U64, counter: U64, high: U64 | None = None) -> NDArray[np.uint32]:
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


def keys_of(streams: U64, positions: U64) -> U64:
    """Return a 64-bit key for each stream and position: words 0 and 1 of `philox`, 0 the lower."""
    if len(streams) <= _FEW:
        pairs = zip(streams.tolist(), positions.tolist(), strict=True)
        return np.array([_key(stream, position) for stream, position in pairs], dtype=np.uint64)
    words = philox(streams, positions)[:, :2].astype(np.uint64)
    return words[:, 0] | words[:, 1] << _SHIFT


class StreamKeys:
    """`keys_of` fixed streams, made some positions ahead while they advance together."""

    __slots__ = ("_ahead", "_first", "_streams")

    def __init__(self, streams: Sequence[int]) -> None:
        self._streams = np.array(streams, dtype=np.uint64)
        self._first = np.zeros(0, dtype=np.uint64)
        self._ahead = np.zeros((0, len(streams)), dtype=np.uint64)

    def at(self, positions: U64) -> U64:
        """Return `keys_of` the streams at uint64 [B] positions; not to be written to."""
        n_ahead = len(self._ahead)
        together = False
        if n_ahead:
            # Unsigned: a step back wraps to a huge number, which is not ahead either.
            steps = positions - self._first
            step = int(steps[0])
            together = step <= n_ahead and bool((steps == step).all())
            if together and step < n_ahead:
                found: U64 = self._ahead[step]
                return found
        n = _AHEAD if together else 1
        at = positions + np.arange(n, dtype=np.uint64)[:, None]
        made = keys_of(np.tile(self._streams, n), at.reshape(-1)).reshape(n, -1)
        self._first, self._ahead = positions.copy(), made
        first: U64 = made[0]
        return first


def splitmix(key: U64, counter: U64) -> U64:
    """Return output number `counter` of SplitMix64 started at `key`: uint64, shapes broadcast.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators"; output 0 is its first.
    """
    out = (counter + np.uint64(1)) * _GOLDEN + key
    out ^= out >> np.uint64(30)
    out *= np.uint64(0xBF58476D1CE4E5B9)
    out ^= out >> np.uint64(27)
    out *= np.uint64(0x94D049BB133111EB)
    out ^= out >> np.uint64(31)
    return out


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


def _halves(values: U64) -> U64:
    return np.stack((values & _MASK, values >> _SHIFT))


def _key(stream: int, position: int) -> int:
    """Return what `keys_of` gives for one pair, in plain ints."""
    key0, key1 = stream & _LOW, stream >> 32
    c0, c1, c2, c3 = position & _LOW, position >> 32, 0, 0
    m0, m1 = _MULTIPLIERS
    for _ in range(_ROUNDS):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ key0, p1 & _LOW, (p0 >> 32) ^ c3 ^ key1, p0 & _LOW
        key0, key1 = (key0 + _KEY_STEPS[0]) & _LOW, (key1 + _KEY_STEPS[1]) & _LOW
    return c0 | c1 << 32
