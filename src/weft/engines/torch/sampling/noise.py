"""`sampling.rng` in torch: the same keys, numbers and noise, on the device where the logits are.

uint64 numbers are int64 tensors of the same bits: sums and products wrap alike, and a shift to the
right drops the copies of the sign. Nothing here waits for a device, and every shape follows from
shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...._core.sampling.metrics import MEMBERS

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_TOKENS = 1 << 32


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def philox(key: Tensor, counter: Tensor) -> Tensor:
    """Return the four words of Philox4x32-10 for every key and counter: int64 [4, B], 32 bits each.

    key, counter: int64 [B]; the counter's upper 64 bits are zero.
    """
    halves = torch.stack((key & _LOW, _right(key, 32)))
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in; each pair is one tensor [2, B].
    multiplied = torch.stack((counter & _LOW, torch.zeros_like(counter)))
    mixed = torch.stack((_right(counter, 32), torch.zeros_like(counter)))
    factors = _pair(_MULTIPLIERS, key.device)
    added = _pair(_KEY_STEPS, key.device)
    for _ in range(_ROUNDS):
        product = (multiplied * factors).flip(0)
        multiplied = _right(product, 32) ^ mixed ^ halves
        mixed = product & _LOW
        halves = (halves + added) & _LOW
    return torch.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]))


def keys_of(streams: Tensor, positions: Tensor) -> Tensor:
    """Return `rng.keys_of` for int64 [B] streams and positions: int64 [B]."""
    words = philox(streams, positions)
    return words[0] | words[1] << 32


def splitmix(key: Tensor, counter: Tensor) -> Tensor:
    """Return output number `counter` of SplitMix64 started at `key`: int64, shapes broadcast."""
    out = (counter + 1) * _GOLDEN + key
    out = (out ^ _right(out, 30)) * _MIX_1
    out = (out ^ _right(out, 27)) * _MIX_2
    return out ^ _right(out, 31)


class NoiseOfGroups(NamedTuple):
    """`rng.GroupNoise` in torch: keys int64 [B], largest float64 [B, G], member int64 [B, G]."""

    keys: Tensor
    largest: Tensor
    member: Tensor

    def of(self, ids: Tensor) -> Tensor:
        """Return the noise of each row's tokens: float64 [B, C] for int64 ids [B, C]."""
        groups = ids >> 12 << 6 | ids & 63
        first = self.largest.gather(1, groups)
        later = -torch.log(torch.exp(-first) + _times(splitmix(self.keys[:, None], ids + _TOKENS)))
        return torch.where(self.member.gather(1, groups) == (ids >> 6 & 63), first, later)

    def take(self, rows: Tensor) -> NoiseOfGroups:
        """Return that of some rows: int64 [n]."""
        return NoiseOfGroups(*(values.index_select(0, rows) for values in self))


def group_noise(keys: Tensor, n: int) -> NoiseOfGroups:
    """Return the noise of the first n groups of ids for int64 [B] keys."""
    words = splitmix(keys[:, None], torch.arange(n, device=keys.device))
    return NoiseOfGroups(keys, -torch.log(_times(words) / MEMBERS), words & (MEMBERS - 1))


def _times(words: Tensor) -> Tensor:
    """Return standard exponential times from the upper 23 bits of each word: float64."""
    return -torch.log(1 - (_right(words, 41).double() + 0.5) / 2**23)


def _pair(values: tuple[int, int], device: torch.device) -> Tensor:
    """Return two constants as int64 [2, 1], made on the device."""
    made = torch.full((2, 1), values[0], dtype=torch.int64, device=device)
    made[1] = values[1]
    return made


def _right(bits: Tensor, n: int) -> Tensor:
    """Shift right, filling up with zeros."""
    return bits >> n & ((1 << (64 - n)) - 1)
