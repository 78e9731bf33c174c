"""The shape of one slot: which layers have KV heads of which size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LayerShape(NamedTuple):
    """KV of one token in one layer."""

    n_heads: int
    key_dim: int
    value_dim: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        keys = self.key_dim * self.key_dtype.itemsize
        return self.n_heads * (keys + self.value_dim * self.value_dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Layout:
    """Layers of equal shape share one K and one V tensor with the layer as first axis.

    groups: (shape, layers) in order of appearance; most models have one.
    """

    groups: tuple[tuple[LayerShape, tuple[int, ...]], ...]
    device: torch.device

    @staticmethod
    def of(layers: list[LayerShape], device: torch.device) -> Layout:
        groups: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(layers):
            groups.setdefault(shape, []).append(layer)
        return Layout(tuple((shape, tuple(members)) for shape, members in groups.items()), device)

    @property
    def n_layers(self) -> int:
        return sum(len(layers) for _, layers in self.groups)

    @property
    def dtype(self) -> str:
        """The name of what KV is kept in, as it is written into files."""
        return str(self.groups[-1][0].value_dtype).removeprefix("torch.")

    @property
    def slot_bytes(self) -> int:
        return sum(shape.n_bytes * len(layers) for shape, layers in self.groups)

    def empty(self, *slots: int) -> Slots:
        """Allocate uninitialised KV with the given slot axes between layer and head axes."""
        keys, values = [], []
        for shape, layers in self.groups:
            front = (len(layers), *slots, shape.n_heads)
            keys.append(
                torch.empty(*front, shape.key_dim, dtype=shape.key_dtype, device=self.device)
            )
            values.append(
                torch.empty(*front, shape.value_dim, dtype=shape.value_dtype, device=self.device)
            )
        return Slots(keys, values)

    def zeros(self, *slots: int) -> Slots:
        """Allocate as `empty` does, all zero."""
        fresh = self.empty(*slots)
        for tensor in (*fresh.keys, *fresh.values):
            tensor.zero_()
        return fresh

    def gather(self, keys: list[Tensor], values: list[Tensor], start: int, stop: int) -> Slots:
        """Stack tokens start..stop of per-layer [K, T, D] tensors into slots of their own."""
        return Slots(
            [
                torch.stack([keys[i][:, start:stop].transpose(0, 1) for i in layers])
                for _, layers in self.groups
            ],
            [
                torch.stack([values[i][:, start:stop].transpose(0, 1) for i in layers])
                for _, layers in self.groups
            ],
        )

    def per_layer(self, tensors: list[Tensor]) -> list[Tensor]:
        """Views of one tensor a group, in layer order, without the layer axis."""
        views: list[Tensor] = [tensors[0]] * self.n_layers
        for (_, layers), tensor in zip(self.groups, tensors, strict=True):
            for layer, view in zip(layers, tensor.unbind(0), strict=True):
                views[layer] = view
        return views


class Slots(NamedTuple):
    """One K and one V tensor a layer group: [G, …slot axes…, K, D]."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def copy_from(
        self, other: Slots, into: tuple[slice | int, ...], of: tuple[slice | int | Tensor, ...]
    ) -> None:
        """Copy `other[:, *of]` to `self[:, *into]`, all layers."""
        for target, source in zip(
            (*self.keys, *self.values), (*other.keys, *other.values), strict=True
        ):
            target[(slice(None), *into)] = source[(slice(None), *of)]

    def copy(self, *of: slice | int) -> Slots:
        """A compact copy of `self[:, *of]`."""
        index = (slice(None), *of)
        return Slots([t[index].clone() for t in self.keys], [t[index].clone() for t in self.values])
