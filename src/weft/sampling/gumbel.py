"""Gumbel-max: the token drawn is the one whose tempered logit and own noise together are largest.

Noise is a function of a stream, a position and a token id. So logits that differ by rounding, as
the same row's do in batches of other shapes, give the same token but where two are level to that
rounding; and a token that a filter drops changes nothing unless it would have won.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .filters import Left
from .order import MEMBERS, group_of, member_of, members
from .rng import splitmix

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = NDArray[np.int64]
U64 = NDArray[np.uint64]

# Of a key's numbers, groups have the first, by group; tokens have those from here, by id.
_TOKENS = np.uint64(1 << 32)
_MEMBER = np.uint64(MEMBERS - 1)


class GroupNoise(NamedTuple):
    """The largest noise of every group of tokens, and whose it is: float64 and int64 [B, groups].

    The member may be one that the vocabulary does not have. keys: uint64 [B], see `rng.keys_of`.
    """

    keys: U64
    largest: Doubles
    member: Ids


def group_noise(keys: U64, n: int) -> GroupNoise:
    """Return the noise of the first n groups for each key.

    The tokens of a group arrive at exponential times. The earliest time of a group is drawn first,
    then whose it is; every other member comes a fresh exponential later (what is exponential has no
    memory). Noise, -log of the time, is standard Gumbel: a token's own is known without its
    neighbours', and none exceeds its group's. Times have 23 bits, which float32 holds with the half
    that keeps them off zero.
    """
    words = splitmix(keys[:, None], np.arange(n, dtype=np.uint64))
    return GroupNoise(keys, -np.log(_times(words) / MEMBERS), (words & _MEMBER).astype(np.int64))


def token_noise(noise: GroupNoise, lanes: Ids, ids: Ids) -> Doubles:
    """Return the noise of token ids[i] under key number lanes[i]: float64 [n]."""
    groups = group_of(ids)
    first = noise.largest[lanes, groups]
    later = _later(noise.keys[lanes], ids, first)
    return np.where(noise.member[lanes, groups] == member_of(ids), first, later)


def member_noise(noise: GroupNoise, lanes: Ids, groups: Ids, ids: Ids) -> Doubles:
    """Return the noise of the `ids` [n, M], the first members of groups[i], under key lanes[i]."""
    first = noise.largest[lanes, groups]
    out = _later(noise.keys[lanes][:, None], ids, first[:, None])
    member = noise.member[lanes, groups]
    there = np.flatnonzero(member < ids.shape[1])
    out[there, member[there]] = first[there]
    return out


def _later(keys: U64, ids: Ids, first: Doubles) -> Doubles:
    """Return the noise of tokens that come a fresh exponential after the first of their group."""
    times = _times(splitmix(keys, ids.astype(np.uint64) + _TOKENS))
    noise: Doubles = -np.log(np.exp(-first) + times)
    return noise


def _times(words: U64) -> Doubles:
    """Return standard exponential times from the upper 23 bits of each word."""
    upper = (words >> np.uint64(41)).astype(np.float64)
    times: Doubles = -np.log(1 - (upper + 0.5) / 2**23)
    return times


class Contest(NamedTuple):
    """Who draws from which row: sampler lanes[i] from row at[i] of what is at hand; int64 [n]."""

    at: Ids
    lanes: Ids
    groups: GroupNoise  # of all samplers

    def among(self, who: Ids) -> Contest:
        """Return the contest of some of them."""
        return self._replace(at=self.at[who], lanes=self.lanes[who])

    def over(self, rows: Ids, n_rows: int) -> tuple[Ids, Contest]:
        """Return those who draw from some of the rows, and their contest over these alone."""
        number = np.full(n_rows, -1)
        number[rows] = np.arange(len(rows))
        at = number[self.at]
        who = np.flatnonzero(at >= 0)
        return who, self._replace(at=at[who], lanes=self.lanes[who])


def best_of_left(left: Left, contest: Contest) -> Ids:
    """Return for each that draws the place, in `left`, of the token that wins: int64 [n]."""
    ids, heights = left.ids[contest.at], left.heights[contest.at]
    lanes, every = contest.lanes, np.arange(len(contest.at))
    bounds = heights + contest.groups.largest[lanes[:, None], group_of(ids)]

    def scores(who: Ids, places: Ids) -> Doubles:
        noise = token_noise(contest.groups, lanes[who], ids[who, places])
        summed: Doubles = heights[who, places] + noise
        return summed

    won: Ids = bounds.argmax(axis=1)
    best = scores(every, won)
    open_ones = bounds > best[:, None]
    open_ones[every, won] = False
    who, places = np.nonzero(open_ones)
    if len(who):
        _improve(won, best, who, places, scores(who, places))
    return won


def best_of_all(logits: Floats, peaks: Floats, temperature: Doubles, contest: Contest) -> Ids:
    """Return for each that draws the token id that wins among all of its row: int64 [n].

    logits: float32 [R, V]; peaks: `group_peaks` of them. temperature: float64 [R].
    """
    at, lanes, every = contest.at, contest.lanes, np.arange(len(contest.at))
    top = peaks.max(axis=1).astype(np.float64)
    heights = (peaks - top[:, None]) / temperature[:, None]
    bounds = heights[at] + contest.groups.largest[lanes]
    n_vocab = logits.shape[1]

    def look(who: Ids, groups: Ids) -> tuple[Ids, Doubles]:
        """Return the members of groups, and their heights."""
        ids, rows = members(groups, n_vocab), at[who]
        found = logits[rows[:, None], np.minimum(ids, n_vocab - 1)]
        below = (found - top[rows][:, None]) / temperature[rows][:, None]
        if n_vocab % MEMBERS**2:
            below[ids >= n_vocab] = -np.inf
        return ids, below

    first = bounds.argmax(axis=1)
    ids, scores = look(every, first)
    scores += member_noise(contest.groups, lanes, first, ids)
    member = scores.argmax(axis=1)
    won: Ids = ids[every, member]
    best = scores[every, member]
    open_ones = bounds > best[:, None]
    open_ones[every, first] = False
    who, groups = np.nonzero(open_ones)
    if len(who):
        ids, below = look(who, groups)
        reach = below + contest.groups.largest[lanes[who], groups][:, None]
        group, member = np.nonzero(reach > best[who][:, None])
        who, ids = who[group], ids[group, member]
        noise = token_noise(contest.groups, lanes[who], ids)
        _improve(won, best, who, ids, below[group, member] + noise)
    return won


def _improve(won: Ids, best: Doubles, who: Ids, choices: Ids, scores: Doubles) -> None:
    """Let who[i] have choices[i] where scores[i] beats its best and all its others."""
    better = np.flatnonzero(scores > best[who])
    # The last of several written to one place is what stays.
    better = better[np.argsort(scores[better], kind="stable")]
    won[who[better]] = choices[better]
