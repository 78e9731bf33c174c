"""The passes over whole rows that a draw on the host makes, by PyTorch's kernels on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...sampling.metrics import MEMBERS, Moments, summed_up
from ...sampling.passes import Passes

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

# From so many logits on they beat NumPy's; before, calling them costs more than it saves.
MANY_LOGITS = 1 << 18
_SQUARE = MEMBERS * MEMBERS


class TorchPasses(Passes):
    """Reads rows one by one, while they are in the cache, so companions change no bit."""

    def group_peaks(self, logits: Floats) -> Floats:
        n_rows, n_vocab = logits.shape
        whole = n_vocab // _SQUARE * _SQUARE
        if not whole or not logits.flags.writeable:  # torch takes no array that it must not write
            return super().group_peaks(logits)
        squares = torch.from_numpy(logits)[:, :whole].view(n_rows, -1, MEMBERS, MEMBERS)
        peaks: Floats = squares.amax(2).view(n_rows, -1).numpy()
        if whole == n_vocab:
            return peaks
        return np.concatenate((peaks, super().group_peaks(logits[:, whole:])), axis=1)

    def moments(self, logits: Floats, peak: Floats) -> Moments:
        if not logits.flags.writeable:
            return super().moments(logits, peak)
        rows, tops = torch.from_numpy(logits), torch.from_numpy(peak)
        below, weights = torch.empty_like(rows[0]), torch.empty_like(rows[0])
        total, mean = torch.empty_like(tops), torch.empty_like(tops)
        for row, top, total_of, mean_of in zip(rows, tops, total, mean, strict=True):
            torch.sub(row, top, out=below)
            torch.exp(below, out=weights)
            torch.sum(weights, 0, out=total_of)
            torch.dot(below, weights, out=mean_of)
            if mean_of.isnan():  # -inf times 0
                torch.nansum(below.mul_(weights), 0, out=mean_of)
        return summed_up(peak, total.numpy(), mean.numpy())

    def mass(self, logits: Floats, largest: Floats, temperature: Doubles) -> Doubles:
        if not logits.flags.writeable:
            return super().mass(logits, largest, temperature)
        rows, tops = torch.from_numpy(logits), torch.from_numpy(largest)
        heats = torch.from_numpy(temperature.astype(np.float32))
        below, total = torch.empty_like(rows[0]), torch.empty_like(tops)
        for row, top, heat, total_of in zip(rows, tops, heats, total, strict=True):
            torch.sub(row, top, out=below)
            torch.sum(below.div_(heat).exp_(), 0, out=total_of)
        return total.double().numpy()
