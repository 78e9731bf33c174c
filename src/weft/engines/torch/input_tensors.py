"""What a steady step finds on the device: numbers made once, token ids that were drawn there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ...errors import ContextOverflow
from ..base import EngineInfo, FutureTokens, Row, row_tokens
from .cuda import to_device


class CachedTensor:
    """A list of whole numbers as a tensor, int64 [n]: made anew only where it is another one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: list[int] | None = None
        self._tensor = torch.empty(0, dtype=torch.int64, device=device)

    def of(self, numbers: list[int]) -> Tensor:
        """Return the tensor; not to be written to."""
        if numbers != self._numbers:
            self._numbers = numbers
            self._tensor = to_device(np.array(numbers, np.int64), self._device)
        return self._tensor


class IncrementingTensor:
    """Whole numbers as a tensor, int64 [n], all of which mostly go on by one from step to step.

    That is done in place, on the device. It is one tensor while they do: good for one step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: list[int] | None = None
        self._after: list[int] | None = None
        self._tensor = torch.empty(0, dtype=torch.int64, device=device)

    def at(self, numbers: list[int]) -> Tensor:
        """Return the tensor, with these numbers; not to be written to."""
        if numbers == self._numbers:
            return self._tensor
        if numbers == self._after:
            self._tensor += 1
        else:
            self._tensor = to_device(np.array(numbers, np.int64), self._device)
        self._numbers, self._after = numbers, [number + 1 for number in numbers]
        return self._tensor


@runtime_checkable
class DeviceTokens(Protocol):
    """Draws whose tokens are on the device: int64 [B], below 0 where nothing could be drawn."""

    ids: Tensor


class InputIds:
    """The token ids of each step, as a tensor: those that a step before has drawn stay there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers = CachedTensor(device)
        self._places = CachedTensor(device)

    def checked(self, rows: Sequence[Row], info: EngineInfo) -> list[Sequence[int] | FutureTokens]:
        """Return the rows' tokens; late ones stay late, if their draws are on the device.

        Raises: ContextOverflow, ConfigError, as `row_tokens`.
        """
        found: list[Sequence[int] | FutureTokens] = [row.tokens for row in rows]
        if FutureTokens not in set(map(type, found)) and _are_within(rows, found, info):
            return found
        found = []
        there = next(
            (row.tokens.draws for row in rows if isinstance(row.tokens, FutureTokens)), None
        )
        is_there = isinstance(there, DeviceTokens)  # asked once: a protocol is asked for slowly
        for row in rows:
            tokens = row.tokens
            if is_there and isinstance(tokens, FutureTokens) and tokens.draws is there:
                if row.position >= info.context_length:
                    raise ContextOverflow(
                        f"a path of {row.position + 1} tokens is longer than the context of"
                        f" {info.context_length}",
                        n_tokens=row.position + 1,
                        n_ctx=info.context_length,
                    )
                found.append(tokens)
            else:
                found.append(row_tokens(row, info))
        return found

    def packed(
        self, tokens: Sequence[Sequence[int] | FutureTokens], order: Sequence[int]
    ) -> Tensor:
        """Return the ids of the rows in this order, one after the other: int64 [T]."""
        in_order = [tokens[number] for number in order]
        if FutureTokens not in set(map(type, in_order)):
            return to_device(np.array(_flat(in_order), np.int64), self._device)
        known: list[int] = []
        places: list[int] = []
        numbers: list[int] = []
        late: FutureTokens | None = None
        for of_row in in_order:
            if isinstance(of_row, FutureTokens):
                places.append(len(known))
                numbers.append(of_row.number)
                known.append(0)
                late = of_row
            else:
                known += of_row
        assert late is not None
        assert isinstance(late.draws, DeviceTokens)  # as those of all of them, which are one
        drawn = late.draws.ids
        if numbers != list(range(len(drawn))):
            drawn = drawn[self._numbers.of(numbers)]
        drawn = drawn.clamp(min=0)  # the run ends where nothing was drawn
        if len(places) == len(known):
            return drawn
        ids = to_device(np.array(known, np.int64), self._device)
        ids[self._places.of(places)] = drawn
        return ids


def _are_within(rows: Sequence[Row], tokens: Sequence[Any], info: EngineInfo) -> bool:
    """Whether all rows' tokens are in the vocabulary, and end within the context: at once, as one
    after the other takes twice as long.
    """
    ids = _flat(tokens)
    ends = [row.position + len(of_row) for row, of_row in zip(rows, tokens, strict=True)]
    is_short = max(ends, default=0) <= info.context_length
    return is_short and 0 <= min(ids, default=0) <= max(ids, default=0) < info.n_vocab


def _flat(tokens: Sequence[Any]) -> list[int]:
    return list(chain.from_iterable(tokens))
