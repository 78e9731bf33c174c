"""From the scheduler's plain lists to the arrays that sampling works on, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .chain import Chain, DrawBatch, DrawResult, Sampler


def draw_batch(chain: Chain, first_row: int, positions: Sequence[int]) -> DrawBatch:
    """Draw sampler i of `chain` from logits row first_row + i, for a token at positions[i]."""
    n = len(positions)
    rows = np.arange(first_row, first_row + n, dtype=np.int64)
    return DrawBatch(rows, chain, np.array(positions, dtype=np.uint64))


def draw_at(chain: Chain, rows: Sequence[int], positions: Sequence[int]) -> DrawBatch:
    """Draw sampler i of `chain` from logits row rows[i], for positions[i]; tell `kept`."""
    at = np.array(positions, dtype=np.uint64)
    return DrawBatch(np.array(rows, dtype=np.int64), chain, at, kept=True)


def draw_rows(
    logits: Sequence[NDArray[np.float32]],
    samplers: Sequence[Sampler],
    positions: Sequence[int],
    *,
    kept: bool = False,
) -> DrawResult:
    """Draw once a sampler, sampler i from logits[i]; equal row objects are looked at once."""
    numbers: dict[int, int] = {}
    rows = np.array([numbers.setdefault(id(row), len(numbers)) for row in logits], dtype=np.int64)
    distinct = {id(row): row for row in logits}
    stacked = np.stack([distinct[key] for key in numbers])
    return Chain(samplers).draw(stacked, rows, np.array(positions, dtype=np.uint64), kept=kept)
