"""Linear layers of one input: one product, where their weights lie together.

A product of few rows is bound by the weights that it reads, and one of few columns (keys, values)
leaves most of a card idle while it does. `laid` puts weights together; here they are met so.
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
    """Linear layers of one input."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        first = layers[0]
        self._packed = first if isinstance(first, PackedLinear) else None
        self._held = [layer._parameters for layer in layers]  # `layer.weight` takes ten times it
        self._marks = list(map(_mark_of, self._held))
        self._whole = self._of_all("weight")
        self._bias = self._of_all("bias")
        if self._bias is None and any(held.get("bias") is not None for held in self._held):
            self._whole = None

    def _of_all(self, name: str) -> Tensor | None:
        """Return all their weights or biases as one, if they lie so."""
        found = [tensor for held in self._held if (tensor := held.get(name)) is not None]
        return as_merged(found) if len(found) == len(self._held) else None

    def each(self, x: Tensor) -> Sequence[Tensor]:
        """x: [..., in]. Returns what each layer makes of it, [..., out]."""
        whole = self._whole_for(x)
        if whole is None:
            return [apply_linear(x, layer) for layer in self._layers]
        made = F.linear(x, whole, self._bias)
        return made.split([layer.out_features for layer in self._layers], -1)

    def of(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out of all], side by side."""
        whole = self._whole_for(x)
        if whole is None:
            return torch.cat([apply_linear(x, layer) for layer in self._layers], -1)
        return F.linear(x, whole, self._bias)

    def _whole_for(self, x: Tensor) -> Tensor | None:
        """Return all their weights, if they are one; not where others were put in one's place."""
        if self._packed is not None and not self._packed.is_few(x):
            return None
        return self._whole if list(map(_mark_of, self._held)) == self._marks else None


def _mark_of(held: dict[str, Any]) -> tuple[Any, ...]:
    """Return what is another value once a layer's weight or bias lies elsewhere, or otherwise."""
    weight, bias = held.get("weight"), held.get("bias")
    if weight is None:
        return (None,)
    at_bias = None if bias is None else bias.data_ptr()
    return weight.data_ptr(), weight.stride(), at_bias


def as_merged(weights: Sequence[Tensor]) -> Tensor | None:
    """Return weights [out, in] that lie together as one, by column or by row, or biases [out]: see
    `laid`.
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
    held = first.untyped_storage()
    if held.nbytes() < (first.storage_offset() + n * width) * first.element_size():
        return None
    if any(weight.untyped_storage().data_ptr() != held.data_ptr() for weight in weights):
        return None
    return first.as_strided((n, *first.shape[1:]), strides)


def apply_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return what a linear layer makes of x: [T, out]."""
    if isinstance(layer, PackedLinear):
        return layer.product(x)
    return F.linear(x, layer.weight, layer.bias)


def fuse_siblings(model: nn.Module) -> int:
    """Let layers of our copy, whose modules have seats, be one product in a step where their
    weights lie together; return how many are.
    """
    n = 0
    for layers in _adjacent_layers(model):
        product = _MergedProduct(layers)
        for number, layer in enumerate(layers):
            layer.__dict__[_PLACE] = _Place(product, number)
            layer.__class__ = _Sibling
            n += 1
    return n


class _Sibling(nn.Linear):
    """A layer whose product is made with that of its siblings, if they are given the same."""

    def forward(self, x: Tensor) -> Tensor:
        step = current_step(self)
        if step is None or not step.has_fused_ops:
            return super().forward(x)
        place: _Place = self.__dict__[_PLACE]
        return place.product.of(place.number, x)


class _MergedProduct:
    """What siblings make of one input: the first that is asked for it makes it for all."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._given: Callable[[], Tensor | None] = lambda: None
        self._parts: dict[int, Tensor] = {}

    # Later than the layers: a copy's are not whole when it is made.

    @cached_property
    def _siblings(self) -> MergedLinear:
        return MergedLinear(self._layers)

    @cached_property
    def _hooks(self) -> list[dict[int, Any]]:
        return hook_dicts(self._layers)

    def of(self, number: int, x: Tensor) -> Tensor:
        """Return what one layer makes of x, [..., out]."""
        if any(self._hooks) and not keep_inputs(self._hooks):
            return apply_linear(x, self._layers[number])
        if self._given() is not x:
            self._parts = dict(enumerate(self._siblings.each(x)))
            self._given = weakref.ref(x)
        part = self._parts.pop(number, None)
        return apply_linear(x, self._layers[number]) if part is None else part

    def __deepcopy__(self, memo: dict[int, Any]) -> _MergedProduct:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__init__(copy.deepcopy(self._layers, memo))  # type: ignore[misc]
        return twin


class _Place(NamedTuple):
    """Which of the layers of a product one is."""

    product: _MergedProduct
    number: int


def _adjacent_layers(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield the layers, in order, that share a piece of memory which holds nothing else."""
    found: dict[int, list[nn.Linear]] = defaultdict(list)
    for module in model.modules():
        weight = module._parameters.get("weight")
        if type(module) is nn.Linear and type(weight) is nn.Parameter and not weight.is_meta:
            found[weight.untyped_storage().data_ptr()].append(module)
    for layers in found.values():
        layers.sort(key=lambda layer: layer.weight.data_ptr())
        kinds = {(each.in_features, each.weight.dtype, each.bias is None) for each in layers}
        if (
            len(layers) > 1
            and len(kinds) == 1
            and as_merged([each.weight for each in layers]) is not None
        ):
            yield layers
