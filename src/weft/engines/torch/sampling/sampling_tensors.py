"""Sampling parameters of rows as tensors on the logits' device.

Shapes do not depend on values, so sampling never waits for the device. Lists of tokens are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...._core.sampling.sampler import Sampler, SamplingArrays, check_ids
from ..cuda import copy_to_device, to_device

# Rows with any other filter are sampled on the host.
KNOWN_FILTERS = frozenset(("top_k", "typical_p", "top_p", "min_p"))
# Filters with a cutoff (a value and an id), and the value that turns each off.
EDGES = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_NO_ENTRY = -1
_ALIGNED = 4  # numbers: 16 bytes or more of any dtype


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Numbers of the rows of a step's logits that samplers read.

    rows: int64 [B], on the device. first: number of the first row if the others follow it directly;
    else None.
    """

    rows: Tensor
    first: int | None

    @classmethod
    def from_array(cls, rows: NDArray[np.int64], device: torch.device) -> RowIndex:
        """Upload row numbers; a run of adjacent rows is detected."""
        is_range = bool((np.diff(rows) == 1).all())
        return cls(to_device(rows, device), int(rows[0]) if is_range else None)

    def of(self, logits: Tensor) -> Tensor:
        """Return these rows of logits [R, V]: [B, V]; a view if they are contiguous."""
        if self.first is None:
            return logits.index_select(0, self.rows)
        return logits[self.first : self.first + len(self.rows)]


@dataclass(slots=True)
class SamplingTensors:
    """Sampling parameters and state of B samplers of a chain, on a device.

    Parameters are fixed. Positions, counts and masks are overwritten in place at each step.
    """

    n_vocab: int
    # uint64 random streams as int64 bits: int64 [B].
    streams: Tensor
    # Positions of the tokens to sample: int64 [B]; overwritten each step.
    positions: Tensor
    # Temperatures before and after the filters: float64 [B]; see `SamplingArrays`.
    early: Tensor
    late: Tensor
    # 1 for greedy rows: int64 [B].
    is_greedy: Tensor
    # Filter values by name: float64 [B].
    filters: dict[str, Tensor]
    # Penalties: float32 [B].
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    # Biased token ids (int64) and biases (float32), [B, P], padded with 0 for token 0; None: none.
    bias_ids: Tensor | None
    bias: Tensor | None
    # Values [B] of the filters with a cutoff that a row uses, by name. They are off in greedy rows
    # and in rows with typical_p.
    cut: dict[str, Tensor]
    # Rows with typical_p, which has no cutoff: int64 [n]; None: none.
    typical: Tensor | None
    # Penalised token ids and their counts: int32 [2, B, H]; count -1 pads. Overwritten each step.
    penalised: Tensor | None = None
    # Tokens that constraints allow, a bit a token: int32 [B, words]; overwritten each step.
    allowed: Tensor | None = None
    _last_positions: NDArray[np.uint64] | None = None

    @classmethod
    def from_samplers(
        cls, samplers: Sequence[Sampler], n_vocab: int, device: torch.device
    ) -> SamplingTensors:
        """Copy the parameters of B samplers to a device.

        Raises: ConfigError for a biased token outside of the vocabulary.
        """
        arrays = SamplingArrays.from_params([sampler.params for sampler in samplers])
        check_ids(arrays.bias_ids, n_vocab, "logit_bias")
        no_rows = np.zeros(len(samplers), dtype=bool)
        typical = arrays.active.get("typical_p", no_rows) & ~arrays.greedy
        bias_ids, bias = _padded_bias(arrays)
        streams = np.array([s.stream for s in samplers], np.uint64).view(np.int64)
        integers = [streams, np.zeros_like(streams), arrays.greedy]
        streams_, positions, is_greedy = _upload_together(integers, np.int64, device)
        names = sorted(KNOWN_FILTERS)
        doubles = [
            arrays.temperature_before,
            arrays.temperature_after,
            *(arrays.filters[name] for name in names),
        ]
        early, late, *filters = _upload_together(doubles, np.float64, device)
        counts = [arrays.repetition, arrays.presence, arrays.frequency]
        repetition, presence, frequency = _upload_together(counts, np.float32, device)
        return cls(
            n_vocab=n_vocab,
            streams=streams_,
            positions=positions,
            early=early,
            late=late,
            is_greedy=is_greedy,
            filters=dict(zip(names, filters, strict=True)),
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            bias_ids=None if bias_ids is None else to_device(bias_ids, device),
            bias=None if bias is None else to_device(bias, device),
            cut={name: to_device(values, device) for name, values in _cut(arrays).items()},
            typical=to_device(np.flatnonzero(typical), device) if typical.any() else None,
        )

    @property
    def is_edited(self) -> bool:
        """True if biases or penalties change logits."""
        return self.bias is not None or self.penalised is not None

    def set_positions(self, positions: NDArray[np.uint64]) -> None:
        """Write the positions of the tokens to sample: uint64 [B].

        If all rows advance by one, the host copies nothing.
        """
        last = self._last_positions
        if last is not None and np.array_equal(positions, last + np.uint64(1)):
            self.positions += 1
        elif last is None or not np.array_equal(positions, last):
            copy_to_device(self.positions, positions.view(np.int64))
        self._last_positions = positions.copy()

    def set_counts(self, samplers: Sequence[Sampler]) -> None:
        """Write the token counts of penalties, if a sampler has any.

        Raises: ConfigError for a token outside of the vocabulary.
        """
        histories = [sampler.history for sampler in samplers]
        if all(history is None for history in histories):
            return
        longest = max([len(history) for history in histories if history is not None])
        old_width = 0 if self.penalised is None else self.penalised.shape[2]
        width = max(old_width, 1 << max(longest - 1, 0).bit_length())
        penalised = np.zeros((2, len(samplers), width), dtype=np.int32)
        penalised[1] = _NO_ENTRY
        for row, history in enumerate(histories):
            if history is not None and len(history):
                check_ids(history.ids, self.n_vocab, "penalties")
                # Pad with the first token: a second write stores the same value.
                penalised[0, row], penalised[1, row] = history.ids[0], history.counts[0]
                penalised[0, row, : len(history)] = history.ids
                penalised[1, row, : len(history)] = history.counts
        self.penalised = _overwrite(self.penalised, penalised, self.streams.device)

    def set_allowed(self, bits: NDArray[np.int32]) -> None:
        """Write the tokens that constraints allow: int32 [B, words]."""
        self.allowed = _overwrite(self.allowed, bits, self.streams.device)


def _upload_together(
    arrays: Sequence[NDArray[Any]], dtype: type[np.generic], device: torch.device
) -> list[Tensor]:
    """Copy arrays of equal length to a device in one transfer.

    Each starts at 16 bytes, because Triton compiles separate kernels for other alignments.
    """
    n = len(arrays[0])
    rows = np.zeros((len(arrays), -(-n // _ALIGNED) * _ALIGNED), dtype)
    rows[:, :n] = arrays
    return [row[:n] for row in to_device(rows, device)]


def _overwrite(tensor: Tensor | None, values: NDArray[Any], device: torch.device) -> Tensor:
    """Return a tensor with these values: the given one if its shape fits."""
    if tensor is None or tensor.shape != values.shape:
        return to_device(values, device)
    copy_to_device(tensor, values)
    return tensor


def _cut(arrays: SamplingArrays) -> dict[str, NDArray[Any]]:
    """Return the filters with a cutoff (top-k, top-p, min-p) that some sampler uses, by name."""
    is_off = arrays.greedy | arrays.active.get("typical_p", np.zeros_like(arrays.greedy))
    cuts = {name: np.where(is_off, off, arrays.filters[name]) for name, off in EDGES.items()}
    return {name: values for name, values in cuts.items() if (values != EDGES[name]).any()}


def _padded_bias(
    arrays: SamplingArrays,
) -> tuple[NDArray[np.int64] | None, NDArray[np.float32] | None]:
    """Return logit biases as padded ids and values, [B, n] each; None if there are none."""
    if not len(arrays.bias):
        return None, None
    n_rows = len(arrays.greedy)
    n = np.bincount(arrays.bias_rows, minlength=n_rows)
    at = np.arange(len(arrays.bias)) - (np.cumsum(n) - n)[arrays.bias_rows]  # rows ascend
    ids = np.zeros((n_rows, int(n.max())), dtype=np.int64)
    values = np.zeros(ids.shape, dtype=np.float32)
    ids[arrays.bias_rows, at], values[arrays.bias_rows, at] = arrays.bias_ids, arrays.bias
    return ids, values
