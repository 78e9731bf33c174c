"""The KV of one token: number and size of KV heads in each layer, and tensors of that shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class LayerShape(NamedTuple):
    """KV of one token in one layer: number of KV heads, sizes and dtypes of a key and a value."""

    n_heads: int
    key_dim: int
    value_dim: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        """Bytes of one token's keys and values in the layer."""
        keys = self.key_dim * self.key_dtype.itemsize
        return self.n_heads * (keys + self.value_dim * self.value_dtype.itemsize)


@dataclass(frozen=True, slots=True)
class Layout:
    """Shapes of all layers. Layers of equal shape share one K and one V tensor, layer axis first.

    groups: (shape, layers) in order of appearance; most models have one group.
    """

    groups: tuple[tuple[LayerShape, tuple[int, ...]], ...]
    device: torch.device

    @staticmethod
    def from_shapes(layers: list[LayerShape], device: torch.device) -> Layout:
        """Group layers of equal shape. layers: shape of each layer."""
        groups: dict[LayerShape, list[int]] = {}
        for layer, shape in enumerate(layers):
            groups.setdefault(shape, []).append(layer)
        return Layout(tuple((shape, tuple(members)) for shape, members in groups.items()), device)

    @property
    def n_layers(self) -> int:
        """Number of layers with KV."""
        return sum(len(layers) for _, layers in self.groups)

    @property
    def dtype(self) -> str:
        """Name of the KV dtype, as files contain it."""
        return str(self.groups[-1][0].value_dtype).removeprefix("torch.")

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        return sum(shape.n_bytes * len(layers) for shape, layers in self.groups)

    def empty(self, *slots: int) -> Slots:
        """Allocate uninitialised KV with these slot axes between the layer and head axes.

        In memory, the slots of one head are contiguous.
        """
        *front, n_slots = slots
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for shape, layers in self.groups:
            rows = (len(layers), *front, shape.n_heads, n_slots)
            for tensors, dim, dtype in (
                (keys, shape.key_dim, shape.key_dtype),
                (values, shape.value_dim, shape.value_dtype),
            ):
                by_head = torch.empty(*rows, dim, dtype=dtype, device=self.device)
                tensors.append(by_head.transpose(-3, -2))
        return Slots(keys, values)

    def zeros(self, *slots: int) -> Slots:
        """Allocate as `empty` does, filled with zeros."""
        fresh = self.empty(*slots)
        for tensor in (*fresh.keys, *fresh.values):
            tensor.zero_()
        return fresh

    def gather(self, keys: list[Tensor], values: list[Tensor], start: int, stop: int) -> Slots:
        """Copy the tokens start … stop - 1 of all layers into new slots.

        keys, values: one tensor [K, T, D] per layer.
        """

        def stacked(tensors: list[Tensor], layers: tuple[int, ...]) -> Tensor:
            return torch.stack([tensors[i][:, start:stop] for i in layers]).transpose(1, 2)

        return Slots(
            [stacked(keys, layers) for _, layers in self.groups],
            [stacked(values, layers) for _, layers in self.groups],
        )

    def per_layer(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return one view per layer, in layer order, without the layer axis.

        tensors: one per group, layer axis first.
        """
        views: list[Tensor] = [tensors[0]] * self.n_layers
        for (_, layers), tensor in zip(self.groups, tensors, strict=True):
            for layer, view in zip(layers, tensor.unbind(0), strict=True):
                views[layer] = view
        return views


class Slots(NamedTuple):
    """One K and one V tensor a layer group: [G, …slot axes…, K, D].

    NOTE: memory is in the order [G, …, K, S, D]. Attention reads each head's keys separately, and
    contiguous keys make it 1.1 to 1.3 times as fast for a prompt of thousands of tokens.
    """

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def copy_from(
        self, other: Slots, into: tuple[slice | int, ...], of: tuple[slice | int | Tensor, ...]
    ) -> None:
        """Copy slots of `other` into this object: `self[:, *into] = other[:, *of]`, for all layers.

        into, of: indices of the slot axes.
        """
        for target, source in zip(
            (*self.keys, *self.values), (*other.keys, *other.values), strict=True
        ):
            target[(slice(None), *into)] = source[(slice(None), *of)]

    def copy(self, *of: slice | int) -> Slots:
        """Return a contiguous copy of `self[:, *of]`, whose last index is a slice."""
        index = (slice(None), *of)

        def copied(tensor: Tensor) -> Tensor:
            by_head = tensor[index].transpose(-3, -2)
            return by_head.clone(memory_format=torch.contiguous_format).transpose(-3, -2)

        return Slots([copied(t) for t in self.keys], [copied(t) for t in self.values])
