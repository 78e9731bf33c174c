"""Linear layers with one input as one product, if their weights are adjacent in memory.

A product of few rows is bound by reading weights. One with few columns (keys, values) leaves most
of a GPU idle. `weight_layout` makes the weights adjacent.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention_hook import current_step
from ..module_hooks import hook_dicts, keep_inputs
from ..weights.packed import PackedLinear

# Projections of one input, by the names that most models give them.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PLACE = "weft_sibling"


class MergedLinear:
    """Linear layers with a common input, computed as one product if possible.

    That is possible if their weights are adjacent in memory; otherwise they run one by one.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        first = layers[0]
        self._packed = first if isinstance(first, PackedLinear) else None
        # `layer.weight` is ten times as slow.
        self._parameters_of = [layer._parameters for layer in layers]
        self._keys = list(map(_storage_key, self._parameters_of))
        self._merged = self._merged_tensor("weight")
        self._bias = self._merged_tensor("bias")
        if self._bias is None and any(p.get("bias") is not None for p in self._parameters_of):
            self._merged = None

    def _merged_tensor(self, name: str) -> Tensor | None:
        """Return the weights or biases of all layers as one tensor; None if they are not adjacent.

        name: "weight" or "bias".
        """
        tensors = [t for p in self._parameters_of if (t := p.get(name)) is not None]
        return as_merged(tensors) if len(tensors) == len(self._parameters_of) else None

    def split_outputs(self, x: Tensor) -> Sequence[Tensor]:
        """Return each layer's output, [..., out]. x: [..., in]."""
        merged = self._merged_for(x)
        if merged is None:
            return [apply_linear(x, layer) for layer in self._layers]
        result = F.linear(x, merged, self._bias)
        return result.split([layer.out_features for layer in self._layers], -1)

    def forward(self, x: Tensor) -> Tensor:
        """Return all outputs, concatenated: [..., sum of out]. x: [..., in]."""
        merged = self._merged_for(x)
        if merged is None:
            return torch.cat([apply_linear(x, layer) for layer in self._layers], -1)
        return F.linear(x, merged, self._bias)

    def _merged_for(self, x: Tensor) -> Tensor | None:
        """Return the merged weight, or None if it does not apply to x or a weight was replaced."""
        if self._packed is not None and not self._packed.is_few(x):
            return None
        return self._merged if list(map(_storage_key, self._parameters_of)) == self._keys else None


def _storage_key(storage: dict[str, Any]) -> tuple[Any, ...]:
    """Return a value that changes when a layer's weight or bias moves or changes its strides.

    storage: the layer's `_parameters`.
    """
    weight, bias = storage.get("weight"), storage.get("bias")
    if weight is None:
        return (None,)
    at_bias = None if bias is None else bias.data_ptr()
    return weight.data_ptr(), weight.stride(), at_bias


def as_merged(weights: Sequence[Tensor]) -> Tensor | None:
    """Return adjacent weights [out, in], by row or by column, or biases [out], as one tensor.

    None if they are not adjacent.
    """
    first = weights[0].data
    n, width = sum(len(weight) for weight in weights), first[0].numel()
    strides: tuple[int, ...] = (1,)
    if first.dim() > 1:
        strides = (1, n) if first.stride() == (1, n) else (width, 1)
    at = first.data_ptr()
    for weight in weights:
        if weight.stride() != strides or weight.data_ptr() != at:
            return None
        at += len(weight) * strides[0] * weight.element_size()
    storage = first.untyped_storage()
    if storage.nbytes() < (first.storage_offset() + n * width) * first.element_size():
        return None
    if any(weight.untyped_storage().data_ptr() != storage.data_ptr() for weight in weights):
        return None
    return first.as_strided((n, *first.shape[1:]), strides)


def apply_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return one linear layer's output for x: [T, out], also if the layer is packed or merged.

    A merged layer's own forward would compute its siblings, too.
    """
    if isinstance(layer, PackedLinear):
        return layer.product(x)
    return F.linear(x, layer.weight, layer.bias)


def fuse_siblings(model: nn.Module) -> int:
    """Make adjacent layers of the engine's copy one product in a step; return their number."""
    n = 0
    for layers in _adjacent_layers(model):
        product = _MergedProduct(layers)
        for number, layer in enumerate(layers):
            layer.__dict__[_PLACE] = _SiblingNumber(product, number)
            layer.__class__ = _Sibling
            n += 1
    return n


class _Sibling(nn.Linear):
    """A layer whose product is computed with those of its siblings if they have the same input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return this layer's output; in a step, from the product with its siblings."""
        step = current_step(self)
        if step is None or not step.has_fused_ops:
            return super().forward(x)
        place: _SiblingNumber = self.__dict__[_PLACE]
        return place.product.output(place.number, x)


class _MergedProduct:
    """Computes sibling layers in one product; `output` returns one layer's part.

    The first call with an input computes the parts of all siblings. Their calls with the same
    tensor object take these parts.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._input: Callable[[], Tensor | None] = lambda: None
        self._parts: dict[int, Tensor] = {}

    # Computed at the first use: a copy's weights are not adjacent when it is created.

    @cached_property
    def _siblings(self) -> MergedLinear:
        """The layers as one product, if their weights are adjacent."""
        return MergedLinear(self._layers)

    @cached_property
    def _hooks(self) -> list[dict[int, Any]]:
        """Forward hooks of the layers."""
        return hook_dicts(self._layers)

    def output(self, number: int, x: Tensor) -> Tensor:
        """Return the output of layer `number` for x, [..., out]."""
        if any(self._hooks) and not keep_inputs(self._hooks):
            return apply_linear(x, self._layers[number])
        if self._input() is not x:
            self._parts = dict(enumerate(self._siblings.split_outputs(x)))
            self._input = weakref.ref(x)
        part = self._parts.pop(number, None)
        return apply_linear(x, self._layers[number]) if part is None else part

    def __deepcopy__(self, memo: dict[int, Any]) -> _MergedProduct:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__init__(copy.deepcopy(self._layers, memo))  # type: ignore[misc]
        return twin


class _SiblingNumber(NamedTuple):
    """A layer's merged product, and its number among the layers of the product."""

    product: _MergedProduct
    number: int


def _adjacent_layers(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield the linear layers of each storage, by address.

    Only storages in which all of them are adjacent and have one input size and dtype.
    """
    by_storage: dict[int, list[nn.Linear]] = defaultdict(list)
    for module in model.modules():
        weight = module._parameters.get("weight")
        if type(module) is nn.Linear and type(weight) is nn.Parameter and not weight.is_meta:
            by_storage[weight.untyped_storage().data_ptr()].append(module)
    for layers in by_storage.values():
        layers.sort(key=lambda layer: layer.weight.data_ptr())
        kinds = {(each.in_features, each.weight.dtype, each.bias is None) for each in layers}
        if (
            len(layers) > 1
            and len(kinds) == 1
            and as_merged([each.weight for each in layers]) is not None
        ):
            yield layers
