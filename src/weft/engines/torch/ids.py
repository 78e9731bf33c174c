"""The token ids of a step, packed on the device: the host's, and those a step before has drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..base import EngineInfo, LateTokens, Row, row_tokens
from .draws import TorchDraws
from .seats import upload

_UNSEEN = (0,)


def known_tokens(row: Row, info: EngineInfo) -> Sequence[int]:
    """Return the ids that a row runs, as `row_tokens` does; one that is on the device stands as 0.

    Raises: see `row_tokens`.
    """
    late = row.tokens
    if isinstance(late, LateTokens) and isinstance(late.draws, TorchDraws):
        if row.position < info.n_positions:
            return _UNSEEN
    return row_tokens(row, info)


class PackedIds:
    """Packs ids on one device. Indices are kept from step to step: a steady one uploads nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: list[int] = []  # of draws, by late row as packed
        self._places: list[int] = []  # of late rows among the packed ids
        self._indices: tuple[Tensor, Tensor] | None = None

    def of(
        self, rows: Sequence[Row], order: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return the ids of the rows in this order: int64 [1, T]. tokens: `known_tokens`, by row.

        Ids that no token was drawn for are below zero there, and 0 here.
        """
        draws: TorchDraws | None = None
        numbers: list[int] = []
        places: list[int] = []
        at = 0
        for i in order:
            late = rows[i].tokens
            if isinstance(late, LateTokens) and isinstance(late.draws, TorchDraws):
                draws = late.draws
                numbers.append(late.number)
                places.append(at)
            at += len(tokens[i])
        if draws is None:
            return self._upload([token for i in order for token in tokens[i]])[None]
        if self._indices is None or numbers != self._numbers or places != self._places:
            self._numbers, self._places = numbers, places
            self._indices = self._upload(numbers), self._upload(places)
        found = draws.ids.index_select(0, self._indices[0]).clamp(min=0)
        if len(places) == at:
            return found[None]
        ids = self._upload([token for i in order for token in tokens[i]])
        return ids.index_copy_(0, self._indices[1], found)[None]

    def _upload(self, numbers: list[int]) -> Tensor:
        return upload(np.array(numbers, np.int64), self._device)
