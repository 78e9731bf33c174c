"""The passes over whole rows of logits that a draw makes; all else of it looks at few tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .filters import mass
from .metrics import Moments, Scratch, group_peaks, moments

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# Logits that are gone over together: rows of large vocabularies come a few at a time.
_IN_CACHE = 1 << 17


class Passes:
    """They by NumPy. An engine whose library has faster ones on the host brings a subclass.

    Logits are float32 [B, V] and are not modified. A row gives the same bits whatever its
    companions. One thread at a time.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    def group_peaks(self, logits: Floats) -> Floats:
        """Return the largest value of every group, NaN where there is one: float32 [B, groups]."""
        return group_peaks(logits)

    def moments(self, logits: Floats, peak: Floats) -> Moments:
        """Return `metrics.moments`. peak: float32 [B], the largest logits, finite."""
        step = max(1, _IN_CACHE // logits.shape[1])
        if len(logits) <= step:
            return moments(logits, self._scratch, peak)
        starts = range(0, len(logits), step)
        parts = [moments(logits[i : i + step], self._scratch, peak[i : i + step]) for i in starts]
        return Moments(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def mass(self, logits: Floats, largest: Floats, temperature: Doubles) -> Doubles:
        """Return `filters.mass`: float64 [B]."""
        return mass(logits, largest, temperature)
