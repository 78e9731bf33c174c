"""Input tensors that are reused between steps, to avoid host-to-device copies."""

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
    """An int64 [n] tensor of a list of numbers, copied to the device only if the list changes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: list[int] | None = None
        self._tensor = torch.empty(0, dtype=torch.int64, device=device)

    def of(self, numbers: list[int]) -> Tensor:
        """Return the tensor of these numbers; read-only."""
        if numbers != self._numbers:
            self._numbers = numbers
            self._tensor = to_device(np.array(numbers, np.int64), self._device)
        return self._tensor


class IncrementingTensor:
    """An int64 [n] tensor of numbers that mostly all increase by one from step to step.

    They are incremented in place on the device, so the tensor is valid for one step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers: list[int] | None = None
        self._next: list[int] | None = None
        self._tensor = torch.empty(0, dtype=torch.int64, device=device)

    def at(self, numbers: list[int]) -> Tensor:
        """Return the tensor of these numbers; read-only, valid until the next call."""
        if numbers == self._numbers:
            return self._tensor
        if numbers == self._next:
            self._tensor += 1
        else:
            self._tensor = to_device(np.array(numbers, np.int64), self._device)
        self._numbers, self._next = numbers, [number + 1 for number in numbers]
        return self._tensor


@runtime_checkable
class DeviceTokens(Protocol):
    """Sampled tokens on the device: int64 [B]; below 0 if nothing could be sampled."""

    ids: Tensor


class InputIds:
    """The token ids of each step as a tensor. Ids that the last step sampled stay on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._numbers = CachedTensor(device)
        self._places = CachedTensor(device)

    def checked(self, rows: Sequence[Row], info: EngineInfo) -> list[Sequence[int] | FutureTokens]:
        """Return the tokens of each row, after checking ids and lengths.

        `FutureTokens` whose ids are on the device are returned unchanged. For others the host
        waits.
        Raises: ContextOverflow, ConfigError, as `row_tokens`.
        """
        checked: list[Sequence[int] | FutureTokens] = [row.tokens for row in rows]
        if FutureTokens not in set(map(type, checked)) and _are_within(rows, checked, info):
            return checked
        checked = []
        draws = next(
            (row.tokens.draws for row in rows if isinstance(row.tokens, FutureTokens)), None
        )
        is_on_device = isinstance(draws, DeviceTokens)  # checked once: protocol checks are slow
        for row in rows:
            tokens = row.tokens
            if is_on_device and isinstance(tokens, FutureTokens) and tokens.draws is draws:
                if row.position >= info.context_length:
                    raise ContextOverflow(
                        f"a path of {row.position + 1} tokens is longer than the context of"
                        f" {info.context_length}",
                        n_tokens=row.position + 1,
                        n_ctx=info.context_length,
                    )
                checked.append(tokens)
            else:
                checked.append(row_tokens(row, info))
        return checked

    def packed(
        self, tokens: Sequence[Sequence[int] | FutureTokens], order: Sequence[int]
    ) -> Tensor:
        """Return the ids of all rows, concatenated: int64 [T].

        tokens: of each row, from `checked`. order: row numbers in packed order.
        """
        in_order = [tokens[number] for number in order]
        if FutureTokens not in set(map(type, in_order)):
            return to_device(np.array(_flatten(in_order), np.int64), self._device)
        host_ids: list[int] = []
        places: list[int] = []  # of future tokens
        numbers: list[int] = []  # of future tokens among the sampled ones
        future: FutureTokens | None = None
        for row in in_order:
            if isinstance(row, FutureTokens):
                places.append(len(host_ids))
                numbers.append(row.number)
                host_ids.append(0)
                future = row
            else:
                host_ids += row
        assert future is not None
        assert isinstance(future.draws, DeviceTokens)  # all rows have the same `draws`
        sampled = future.draws.ids
        if numbers != list(range(len(sampled))):
            sampled = sampled[self._numbers.of(numbers)]
        sampled = sampled.clamp(min=0)  # a run without a sampled token ends; any id will do
        if len(places) == len(host_ids):
            return sampled
        ids = to_device(np.array(host_ids, np.int64), self._device)
        ids[self._places.of(places)] = sampled
        return ids


def _are_within(rows: Sequence[Row], tokens: Sequence[Any], info: EngineInfo) -> bool:
    """Return True if all tokens are in the vocabulary, and all rows end within the context.

    One check of all rows takes half as long as a check of each.
    """
    ids = _flatten(tokens)
    ends = [row.position + len(ids) for row, ids in zip(rows, tokens, strict=True)]
    is_short = max(ends, default=0) <= info.context_length
    return is_short and 0 <= min(ids, default=0) <= max(ids, default=0) < info.n_vocab


def _flatten(tokens: Sequence[Any]) -> list[int]:
    """Concatenate the token ids of all rows."""
    return list(chain.from_iterable(tokens))
