"""Reductions over rows of logits with PyTorch's CPU kernels, for sampling on the host."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...._core.sampling.metrics import GROUP_SIZE, Moments, moments_from_sums
from ...._core.sampling.sampler import Reductions

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# From so many logits on PyTorch is faster than NumPy, in spite of the cost of its calls.
MANY_LOGITS = 1 << 18
_SQUARE = GROUP_SIZE * GROUP_SIZE


class TorchReductions(Reductions):
    """Reduces as many rows at a time as there are threads, so that each thread has one in its
    cache.

    A single row is left to NumPy if threads would share it, because sums would change their order.
    """

    def group_peaks(self, logits: Floats) -> Floats:
        """Return the largest logit of each group of ids; see `Reductions.group_peaks`."""
        n_rows, n_vocab = logits.shape
        n_full = n_vocab // _SQUARE * _SQUARE
        if not n_full or not logits.flags.writeable:  # torch rejects read-only arrays
            return super().group_peaks(logits)
        squares = torch.from_numpy(logits)[:, :n_full].view(n_rows, -1, GROUP_SIZE, GROUP_SIZE)
        peaks: Floats = squares.amax(2).view(n_rows, -1).numpy()
        if n_full == n_vocab:
            return peaks
        return np.concatenate((peaks, super().group_peaks(logits[:, n_full:])), axis=1)

    def moments(self, logits: Floats, peak: Floats) -> Moments:
        """Return the sums for log-probabilities and entropies; see `Reductions.moments`."""
        parts = _row_batches(logits)
        if parts is None:
            return super().moments(logits, peak)
        rows, tops = torch.from_numpy(logits), torch.from_numpy(peak)[:, None]
        below, weights = torch.empty(2, _n_rows(parts), logits.shape[1])
        total, mean = torch.empty(2, len(rows))
        for part in parts:
            torch.sub(rows[part], tops[part], out=below)
            torch.exp(below, out=weights)
            torch.sum(weights, 1, out=total[part])
            torch.sum(below.mul_(weights), 1, out=mean[part])
        moments = moments_from_sums(peak, total.numpy(), mean.numpy())
        if len(holed := np.flatnonzero(np.isnan(moments.entropies))):  # -inf times 0
            repaired_rows = super().moments(logits[holed], peak[holed])
            for values, repaired in zip(moments, repaired_rows, strict=True):
                values[holed] = repaired
        return moments

    def mass(self, logits: Floats, largest: Floats, temperature: Doubles) -> Doubles:
        """Return the total weight of each row at a temperature; see `Reductions.mass`."""
        parts = _row_batches(logits)
        if parts is None:
            return super().mass(logits, largest, temperature)
        rows, tops = torch.from_numpy(logits), torch.from_numpy(largest)[:, None]
        heats = torch.from_numpy(temperature.astype(np.float32))[:, None]
        below, total = torch.empty(_n_rows(parts), logits.shape[1]), torch.empty(len(rows))
        for part in parts:
            torch.sub(rows[part], tops[part], out=below)
            torch.sum(below.div_(heats[part]).exp_(), 1, out=total[part])
        return total.double().numpy()


def _row_batches(logits: Floats) -> list[slice] | None:
    """Return slices of the row axis, with one row per thread in each; None: NumPy reduces the rows.

    If there are fewer rows than threads, the only slice has all rows. The last two may overlap.
    """
    n_rows, n_threads = len(logits), torch.get_num_threads()
    if not logits.flags.writeable or (n_rows == 1 and n_threads > 1):
        return None
    n = min(n_rows, n_threads)
    starts = [*range(0, n_rows - n, n), n_rows - n]  # the last ones may be read twice
    return [slice(start, start + n) for start in starts]


def _n_rows(parts: list[slice]) -> int:
    """Return the number of rows in the slices."""
    return int(parts[0].stop)
