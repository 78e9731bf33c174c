"""Random numbers by seed, lineage, position and token id, and the Gumbel-max draw.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") derives a key from a
stream and a position. SplitMix64 gives the numbers of that key. Both compute any number directly,
so a draw does not depend on others in the batch.

The draw is Gumbel-max: the token with the largest sum of tempered logit and own noise wins.

Noise depends on stream, position and token id only. Logits that differ by rounding give the same
token, unless two sums are that close. A token that a filter drops changes nothing unless it would
have won.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from os import urandom
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .filters import Cutoff, Filtered
from .metrics import GROUP_SIZE, group_of, has_ragged_groups, member_of, members

U64 = NDArray[np.uint64]

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# For so few keys, Python ints are faster than fifty NumPy calls on tiny arrays.
_MAX_SCALAR = 8
# Positions computed ahead for streams that advance together, while the arrays are so small that the
# overhead of NumPy calls dominates.
_AHEAD, _AHEAD_NUMBERS = 16, 1 << 15

_M = np.array(_MULTIPLIERS, dtype=np.uint64)[:, None]
_MASK = np.uint64(_LOW)
_SHIFT = np.uint64(32)
# Each round adds a constant to the key; the sums of all rounds, [rounds, 2, 1].
_ADDED = (
    np.arange(_ROUNDS, dtype=np.uint64)[:, None, None]
    * np.array(_KEY_STEPS, dtype=np.uint64)[None, :, None]
)


def philox(key: U64, counter: U64, high: U64 | None = None) -> NDArray[np.uint32]:
    """Return the four words of Philox4x32-10 for every key and counter: uint32 [B, 4].

    Args:
        key: uint64 [B].
        counter: uint64 [B], the lower 64 bits of the 128-bit counter.
        high: uint64 [B], its upper 64 bits. None means zero.
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
    if len(streams) <= _MAX_SCALAR:
        pairs = zip(streams.tolist(), positions.tolist(), strict=True)
        return np.array([_key(stream, position) for stream, position in pairs], dtype=np.uint64)
    words = philox(streams, positions)[:, :2].astype(np.uint64)
    return words[:, 0] | words[:, 1] << _SHIFT


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
    """Return the 64-bit random stream of a seed and a lineage.

    lineage: numbers that distinguish continuations of one seed, all >= 0. They are the child's
    index in its call, then for every fork its position and its number among the forks there.
    """
    packed = struct.pack(f"<{1 + len(lineage)}Q", seed, *lineage)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"weft stream").digest()
    return int.from_bytes(digest, "little")


def fresh_seed() -> int:
    """Return a random seed below 2**53, which JSON stores exactly."""
    return int.from_bytes(urandom(8), "little") >> 11


def _halves(values: U64) -> U64:
    return np.stack((values & _MASK, values >> _SHIFT))


def _key(stream: int, position: int) -> int:
    """Return the key of one stream and position as a Python int; see `keys_of`."""
    key0, key1 = stream & _LOW, stream >> 32
    c0, c1, c2, c3 = position & _LOW, position >> 32, 0, 0
    m0, m1 = _MULTIPLIERS
    for _ in range(_ROUNDS):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ key0, p1 & _LOW, (p0 >> 32) ^ c3 ^ key1, p0 & _LOW
        key0, key1 = (key0 + _KEY_STEPS[0]) & _LOW, (key1 + _KEY_STEPS[1]) & _LOW
    return c0 | c1 << 32


Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]


# Groups use a key's first numbers, by group; tokens use those from here, by id.
_TOKENS = np.uint64(1 << 32)
# The number of a key that decides whether XTC drops tokens; ids are smaller than 2**32.
_XTC = np.array([1 << 33], dtype=np.uint64)
_MEMBER = np.uint64(GROUP_SIZE - 1)
# A row with more open groups than this after the first scan gets a second short one.
_MAX_OPEN_GROUPS = 24
# Lower bound of a token's noise: two times of at most -log(2**-24) each, the first of the group.
_MIN_NOISE = -math.log(25 * math.log(2))


class GroupNoise(NamedTuple):
    """The largest noise of each group of tokens, and the member that has it: [B, groups].

    Groups are those of `metrics`: columns of squares of ids.

    keys: uint64 [B], see `rng.keys_of`.

    largest: float64.

    member: int64; may be a member that the vocabulary does not have.
    """

    keys: U64
    largest: Doubles
    member: Ids


def group_noise(keys: U64, n: int) -> GroupNoise:
    """Return the noise of the first n groups for each key.

    Tokens of a group arrive at exponential times. The earliest time of a group is drawn first, then
    the member that has it. Each other member comes a fresh exponential later, as exponential times
    have no memory. Noise, -log of the time, is standard Gumbel. So one token's noise can be
    computed without the others, and none exceeds its group's. Times have 23 bits, which float32
    represents exactly.
    """
    words = splitmix(keys[:, None], np.arange(n, dtype=np.uint64))
    return GroupNoise(keys, -np.log(_times(words) / GROUP_SIZE), (words & _MEMBER).astype(np.int64))


def xtc_numbers(keys: U64) -> Doubles:
    """Return a uniform number between 0 and 1 for each key, independent of its noise: float64."""
    numbers: Doubles = ((splitmix(keys, _XTC) >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
    return numbers


class StreamNoise:
    """`group_noise` of fixed streams, computed some positions ahead while they advance together."""

    __slots__ = ("_ahead", "_first", "_n", "_streams")

    def __init__(self, streams: Sequence[int]) -> None:
        self._streams = np.array(streams, dtype=np.uint64)
        self._first = np.zeros(0, dtype=np.uint64)
        self._n = 0
        self._ahead: list[GroupNoise] = []

    def at(self, positions: U64, n: int) -> GroupNoise:
        """Return `group_noise` of the first `n` groups at one position per stream; read-only.

        positions: uint64 [B].
        """
        together = False
        if self._ahead and n == self._n:
            # Unsigned: a step back wraps to a huge number, which is not ahead either.
            steps = positions - self._first
            step = int(steps[0])
            together = step <= len(self._ahead) and bool((steps == step).all())
            if together and step < len(self._ahead):
                return self._ahead[step]
        self._first, self._n = positions.copy(), n
        self._ahead = self._make(positions, n, _AHEAD if together else 1)
        return self._ahead[0]

    def _make(self, positions: U64, n: int, n_steps: int) -> list[GroupNoise]:
        n_streams = len(positions)
        n_steps = max(1, min(n_steps, _AHEAD_NUMBERS // (n * n_streams)))
        at = positions + np.arange(n_steps, dtype=np.uint64)[:, None]
        noise = group_noise(keys_of(np.tile(self._streams, n_steps), at.reshape(-1)), n)
        steps = [slice(i, i + n_streams) for i in range(0, n_steps * n_streams, n_streams)]
        return [GroupNoise(noise.keys[s], noise.largest[s], noise.member[s]) for s in steps]


def token_noise(noise: GroupNoise, samplers: Ids, ids: Ids) -> Doubles:
    """Return the noise of one token per entry: float64 [n].

    Args:
        noise: the groups' noise, by sampler.
        samplers: int64 [n], the sampler (key) of each entry.
        ids: int64 [n], its token.
    """
    groups = group_of(ids)
    first = noise.largest[samplers, groups]
    later = _later(noise.keys[samplers], ids, first)
    return np.where(noise.member[samplers, groups] == member_of(ids), first, later)


def member_noise(noise: GroupNoise, samplers: Ids, groups: Ids, ids: Ids) -> Doubles:
    """Return the noise of all tokens of some groups: float64 [n, M].

    Args:
        noise: the groups' noise, by sampler.
        samplers: int64 [n], the sampler (key) of each row of the result.
        groups: int64 [n], its group.
        ids: int64 [n, M], the first M tokens of that group.
    """
    first = noise.largest[samplers, groups]
    out = _later(noise.keys[samplers][:, None], ids, first[:, None])
    member = noise.member[samplers, groups]
    present = np.flatnonzero(member < ids.shape[1])
    out[present, member[present]] = first[present]
    return out


def first_arrival(noise: GroupNoise, samplers: Ids) -> Ids:
    """Return the id of the token with the largest noise of each group: int64 [n, groups].

    The id may be outside the vocabulary.

    samplers: int64 [n], the rows of `noise` to use.
    """
    groups = np.arange(noise.member.shape[1])
    tokens: Ids = ((groups >> 6 << 12) + (groups & 63)) + noise.member[samplers] * GROUP_SIZE
    return tokens


def _later(keys: U64, ids: Ids, first: Doubles) -> Doubles:
    """Return the noise of tokens that are not the first of their group (see `group_noise`).

    Args:
        keys: uint64, the key of each token.
        ids: int64, the tokens.
        first: float64, the noise of the first token of each one's group.
    """
    times = _times(splitmix(keys, ids.astype(np.uint64) + _TOKENS))
    noise: Doubles = -np.log(np.exp(-first) + times)
    return noise


def _times(words: U64) -> Doubles:
    """Return standard exponential times from the upper 23 bits of each word."""
    upper = (words >> np.uint64(41)).astype(np.float64)
    times: Doubles = -np.log(1 - (upper + 0.5) / 2**23)
    return times


class GumbelDraw(NamedTuple):
    """A draw of n tokens: sampler samplers[i] draws from logits row at[i].

    at, samplers: int64 [n].

    groups: the noise of the groups, with one row per sampler.
    """

    at: Ids
    samplers: Ids
    groups: GroupNoise  # of all samplers

    def select(self, which: Ids) -> GumbelDraw:
        """Return the draw of some of the samplers. which: indices of entries of this draw."""
        return self._replace(at=self.at[which], samplers=self.samplers[which])

    def on_rows(self, rows: Ids, n_rows: int) -> tuple[Ids, GumbelDraw]:
        """Return the part of the draw that uses some of the rows, with the rows renumbered from 0.

        Args:
            rows: int64, these rows.
            n_rows: the number of all rows.

        Returns: the indices of the entries that draw from these rows, and their draw.
        """
        number = np.full(n_rows, -1)
        number[rows] = np.arange(len(rows))
        at = number[self.at]
        which = np.flatnonzero(at >= 0)
        return which, self._replace(at=at[which], samplers=self.samplers[which])


def argmax_filtered(filtered: Filtered, draw: GumbelDraw) -> Ids:
    """Return for each sampler the column in `filtered` of the winning token: int64 [n]."""
    ids, heights = filtered.ids[draw.at], filtered.heights[draw.at]
    samplers, every = draw.samplers, np.arange(len(draw.at))
    bounds = heights + draw.groups.largest[samplers[:, None], group_of(ids)]

    def scores(which: Ids, places: Ids) -> Doubles:
        noise = token_noise(draw.groups, samplers[which], ids[which, places])
        summed: Doubles = heights[which, places] + noise
        return summed

    won: Ids = bounds.argmax(axis=1)
    best = scores(every, won)
    open_ones = bounds > best[:, None]
    open_ones[every, won] = False
    which, places = np.nonzero(open_ones)
    if len(which):
        _improve(won, best, which, places, scores(which, places))
    return won


def argmax_all(
    logits: Floats,
    peaks: Floats,
    temperature: Doubles,
    draw: GumbelDraw,
    *,
    cutoff: Cutoff | None = None,
) -> Ids:
    """Return for each sampler the winning token id of its full row: int64 [n].

    Args:
        logits: float32 [R, V].
        peaks: `group_peaks` of them.
        temperature: float64 [R].
        draw: the samplers and their rows.
        cutoff: the cutoff of each of the R rows; tokens that it drops cannot win. None drops none.
    """
    at, samplers, every = draw.at, draw.samplers, np.arange(len(draw.at))
    top = peaks.max(axis=1).astype(np.float64)
    heights = (peaks - top[:, None]) / temperature[:, None]
    bounds = heights[at] + draw.groups.largest[samplers]
    if cutoff is not None:
        bounds[peaks[at] < cutoff.min_logit[at][:, None]] = -np.inf
    n_vocab = logits.shape[1]
    ragged = has_ragged_groups(n_vocab)

    def heights_of(which: Ids, ids: Ids, *, ragged: bool = ragged) -> Doubles:
        """Return the heights of tokens: float64 [n, M]; -inf for tokens that cannot be drawn.

        A height is the logit minus the row's largest, divided by the temperature.

        Args:
            which: int64 [n], indices of samplers.
            ids: int64 [n, M], tokens in the row of each of them.
            ragged: some ids may be outside the vocabulary.
        """
        rows = at[which]
        inside = np.minimum(ids, n_vocab - 1) if ragged else ids
        values = logits[rows[:, None], inside]
        below: Doubles = (values - top[rows][:, None]) / temperature[rows][:, None]
        if ragged:
            below[ids >= n_vocab] = -np.inf
        if cutoff is not None:
            min_logit, max_id = cutoff.min_logit[rows][:, None], cutoff.max_id[rows][:, None]
            below[(values < min_logit) | ((values == min_logit) & (ids > max_id))] = -np.inf
        return below

    won: Ids = np.zeros_like(at)
    best = np.full(len(at), _MIN_NOISE)
    open_ones = bounds > _MIN_NOISE
    some = np.count_nonzero(open_ones) > _MAX_OPEN_GROUPS
    many = np.flatnonzero(open_ones.sum(axis=1) > _MAX_OPEN_GROUPS) if some else every[:0]
    if len(many):
        # The first arrivals of all groups are few, and likely to contain a good token.
        ids = first_arrival(draw.groups, samplers[many])
        scores = heights_of(many, ids, ragged=True) + draw.groups.largest[samplers[many]]
        which, group = np.arange(len(many)), scores.argmax(axis=1)
        _improve(won, best, many, ids[which, group], scores[which, group])
        open_ones[many] &= bounds[many] > best[many][:, None]
    which, groups = np.nonzero(open_ones)
    ids = members(groups, n_vocab)
    below = heights_of(which, ids)
    reach = below + draw.groups.largest[samplers[which], groups][:, None]
    group, member = np.nonzero(reach > best[which][:, None])
    which, ids = which[group], ids[group, member]
    noise = token_noise(draw.groups, samplers[which], ids)
    _improve(won, best, which, ids, below[group, member] + noise)
    return won


def _improve(won: Ids, best: Doubles, which: Ids, choices: Ids, scores: Doubles) -> None:
    """Replace the best tokens of samplers by tokens with higher scores, in place.

    Args:
        won: int64, the best token so far of each sampler.
        best: float64, its score.
        which: the samplers with a new token.
        choices, scores: that token and its score.
    """
    better = np.flatnonzero(scores > best[which])
    # The last of several written to one place is what stays.
    better = better[np.argsort(scores[better], kind="stable")]
    won[which[better]] = choices[better]
    best[which[better]] = scores[better]
