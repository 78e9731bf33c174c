"""What rows draw by, as tensors on the logits' device: fixed for a chain, or overwritten each step.

Every shape is known before a draw begins: rows are sorted by how they are drawn when a chain is
first seen, and lists of tokens are padded. So a draw asks the device nothing, and what changes from
step to step (positions, counts, masks) is written over in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...._core.sampling.sampler import Sampler, SamplingArrays, check_ids
from ..upload import copy_to_device, upload
from .noise import keys_of

# The filters that there are tensors for. A row that asks for another one is drawn for on the host.
KNOWN_FILTERS = frozenset(("top_k", "typical_p", "top_p", "min_p"))
# Those that leave what lies above an edge, and where they are off.
EDGES = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
# Rows that ask for more of the likeliest than this have all of their tokens ranked.
_DEEPEST = 2048
_NO_ENTRY = -1
_ALIGNED = 4  # numbers: 16 bytes of any kind
# For so many steps keys are made at once.
_AHEAD = 64


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Rows of a block that are drawn for alike.

    rows: int64 [n]; None: all of the block. depth: how many of the likeliest are ranked.
    """

    rows: Tensor | None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Which rows of a step's logits some samplers draw from.

    rows: int64 [B], on the device. first: of the first, where the others follow it; None elsewhere.
    """

    rows: Tensor
    first: int | None

    @classmethod
    def at(cls, rows: NDArray[np.int64], device: torch.device) -> RowIndex:
        follow = bool((np.diff(rows) == 1).all())
        return cls(upload(rows, device), int(rows[0]) if follow else None)

    def of(self, logits: Tensor) -> Tensor:
        """Return these rows of logits [R, V]: [B, V]; a view where they are neighbours."""
        if self.first is None:
            return logits.index_select(0, self.rows)
        return logits[self.first : self.first + len(self.rows)]


@dataclass(slots=True)
class SamplingTensors:
    """Some rows of a chain, B of them.

    streams: int64 [B], the bits of uint64. early, late, filters: as `SamplingArrays`, float64 [B]
    and by name. repetition, presence, frequency: float32 [B].
    bias_ids, bias: int64 and float32 [B, P], padded with 0 for token 0; None where no row has any.
    cut: the filters that leave what lies above an edge, by name, [B]: those that any row asks for.
    typical: rows that ask for the one that does not, int64 [n]: all of their filters are left out
    of `cut`, as those of greedy rows are.
    is_greedy: int64 [B], 1 for rows that take the largest logit; greedy: the same rows. wide: rows
    whose filters, if any, need no order but of the value; nucleus: those among the wide, numbered
    there, that ask for top-p. ranked: the rest. lowest: whether a wide row asks for min-p.

    Overwritten each step: positions: int64 [B], of the tokens to be drawn; keys: int64 [B], of the
    streams there, for those who ask (`make_keys`); seen: int32 [2, B, H], ids and counts of tokens
    that penalties look at, count -1 where there is none; allowed: int32 [B, words], a bit a token,
    of constraints.
    """

    n_vocab: int
    streams: Tensor
    positions: Tensor
    early: Tensor
    late: Tensor
    is_greedy: Tensor
    filters: dict[str, Tensor]
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    bias_ids: Tensor | None
    bias: Tensor | None
    cut: dict[str, Tensor]
    typical: Tensor | None
    greedy: RankGroup | None
    wide: RankGroup | None
    nucleus: RankGroup | None
    lowest: bool
    ranked: tuple[RankGroup, ...]
    seen: Tensor | None = None
    allowed: Tensor | None = None
    keys: Tensor | None = None
    _now: NDArray[np.uint64] | None = None
    _first: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(1, dtype=np.uint64))
    _ahead: Tensor | None = None

    @classmethod
    def of(cls, samplers: Sequence[Sampler], n_vocab: int, device: torch.device) -> SamplingTensors:
        """Put the parameters of B samplers on a device.

        Raises: ConfigError for a biased token outside of the vocabulary.
        """
        arrays = SamplingArrays.of([sampler.params for sampler in samplers])
        check_ids(arrays.bias_ids, n_vocab, "logit_bias")
        deep = np.zeros(len(samplers), dtype=bool)  # ranked, and all of it
        top_k = arrays.filters["top_k"]
        near = (top_k > 0) & (top_k <= min(_DEEPEST, n_vocab))
        typical = arrays.asked.get("typical_p", deep) & ~arrays.greedy
        deep |= typical
        deep |= top_k > 0
        deep &= ~(near | arrays.greedy)
        near &= ~arrays.greedy
        wide = ~(near | deep | arrays.greedy)
        mass = arrays.filters["top_p"][wide] != 1
        depth = min(n_vocab, 1 << (int(top_k[near].max(initial=1)) - 1).bit_length())
        ranked = ((near, depth), (deep, n_vocab))
        made = ((_rank(rows, device, deepest), rows) for rows, deepest in ranked)
        bias_ids, bias = _padded_bias(arrays)
        streams = np.array([s.stream for s in samplers], np.uint64).view(np.int64)
        whole = _together([streams, np.zeros_like(streams), arrays.greedy], np.int64, device)
        names = sorted(KNOWN_FILTERS)
        filters = [arrays.filters[name] for name in names]
        parts = _together([arrays.early, arrays.late, *filters], np.float64, device)
        counts = [arrays.repetition, arrays.presence, arrays.frequency]
        repetition, presence, frequency = _together(counts, np.float32, device)
        return cls(
            n_vocab=n_vocab,
            streams=whole[0],
            positions=whole[1],
            early=parts[0],
            late=parts[1],
            is_greedy=whole[2],
            filters=dict(zip(names, parts[2:], strict=True)),
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            bias_ids=None if bias_ids is None else upload(bias_ids, device),
            bias=None if bias is None else upload(bias, device),
            cut={name: upload(values, device) for name, values in _cut(arrays).items()},
            typical=upload(np.flatnonzero(typical), device) if typical.any() else None,
            greedy=_rank(arrays.greedy, device),
            wide=_rank(wide, device),
            nucleus=_rank(mass, device) if mass.any() else None,
            lowest=bool(arrays.filters["min_p"][wide].any()),
            ranked=tuple(rank for rank, _ in made if rank is not None),
        )

    @property
    def is_edited(self) -> bool:
        """Whether tokens have other logits than the model's, beside those that are banned."""
        return self.bias is not None or self.seen is not None

    def place(self, positions: NDArray[np.uint64]) -> None:
        """Write where the tokens to be drawn will be: uint64 [B].

        While all rows go on by one the host sends nothing.
        """
        if self._now is not None and np.array_equal(positions, self._now + np.uint64(1)):
            self.positions += 1
        elif self._now is None or not np.array_equal(positions, self._now):
            copy_to_device(self.positions, positions.view(np.int64))
        self._now = positions.copy()

    def make_keys(self) -> Tensor:
        """Return the keys of the streams where the tokens to be drawn will be: int64 [B].

        They are made some steps ahead.
        """
        assert self._now is not None
        positions, device = self._now, self.streams.device
        steps = positions - self._first  # unsigned: a step back is a huge one
        step = int(steps[0])
        if step >= _AHEAD or self._ahead is None or not (steps == step).all():
            at = positions + np.arange(_AHEAD, dtype=np.uint64)[:, None]
            counters = upload(at.view(np.int64).reshape(-1), device)
            made = keys_of(self.streams.repeat(_AHEAD), counters)
            self._first, self._ahead, step = positions.copy(), made.view(_AHEAD, -1), 0
        self.keys = self._ahead[step]
        return self.keys

    def count(self, samplers: Sequence[Sampler]) -> None:
        """Write the tokens that penalties count, if any sampler has some.

        Raises: ConfigError for one outside of the vocabulary.
        """
        histories = [sampler.history for sampler in samplers]
        if all(history is None for history in histories):
            return
        longest = max([len(history) for history in histories if history is not None])
        held = 0 if self.seen is None else self.seen.shape[2]
        width = max(held, 1 << max(longest - 1, 0).bit_length())
        seen = np.zeros((2, len(samplers), width), dtype=np.int32)
        seen[1] = _NO_ENTRY
        for row, history in enumerate(histories):
            if history is not None and len(history):
                check_ids(history.ids, self.n_vocab, "penalties")
                # The first token again and again: what is written twice is the same.
                seen[0, row], seen[1, row] = history.ids[0], history.counts[0]
                seen[0, row, : len(history)] = history.ids
                seen[1, row, : len(history)] = history.counts
        self.seen = _kept(self.seen, seen, self.streams.device)

    def allow(self, bits: NDArray[np.int32]) -> None:
        """Write which tokens constraints allow: int32 [B, words]."""
        self.allowed = _kept(self.allowed, bits, self.streams.device)


def _together(
    arrays: Sequence[NDArray[Any]], dtype: type[np.generic], device: torch.device
) -> list[Tensor]:
    """Copy arrays of one length to a device as one. Each begins where Triton's kernels like it, as
    others are compiled for tensors that lie otherwise.
    """
    n = len(arrays[0])
    held = np.zeros((len(arrays), -(-n // _ALIGNED) * _ALIGNED), dtype)
    held[:, :n] = arrays
    return [row[:n] for row in upload(held, device)]


def _kept(held: Tensor | None, values: NDArray[Any], device: torch.device) -> Tensor:
    """Write into what is held, where the shape is the same."""
    if held is None or held.shape != values.shape:
        return upload(values, device)
    copy_to_device(held, values)
    return held


def _rank(wanted: NDArray[np.bool_], device: torch.device, depth: int = 0) -> RankGroup | None:
    rows = np.flatnonzero(wanted)
    if not len(rows):
        return None
    return RankGroup(None if len(rows) == len(wanted) else upload(rows, device), depth)


def _cut(arrays: SamplingArrays) -> dict[str, NDArray[Any]]:
    other = arrays.greedy | arrays.asked.get("typical_p", np.zeros_like(arrays.greedy))
    found = {name: np.where(other, off, arrays.filters[name]) for name, off in EDGES.items()}
    return {name: values for name, values in found.items() if (values != EDGES[name]).any()}


def _padded_bias(
    arrays: SamplingArrays,
) -> tuple[NDArray[np.int64] | None, NDArray[np.float32] | None]:
    if not len(arrays.bias):
        return None, None
    n_rows = len(arrays.greedy)
    n = np.bincount(arrays.bias_rows, minlength=n_rows)
    at = np.arange(len(arrays.bias)) - (np.cumsum(n) - n)[arrays.bias_rows]  # rows ascend
    ids = np.zeros((n_rows, int(n.max())), dtype=np.int64)
    values = np.zeros(ids.shape, dtype=np.float32)
    ids[arrays.bias_rows, at], values[arrays.bias_rows, at] = arrays.bias_ids, arrays.bias
    return ids, values
