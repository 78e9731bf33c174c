"""Linear layers of one input: one product, where their weights lie together.

A product of few rows is bound by the weights that it reads, and one of few columns (keys, values)
leaves most of a card idle while it does. `laid` puts weights together; here they are met so.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..hook import step_of
from ..weights.packed import PackedLinear

# Projections of one input, by the names that most models give them.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PLACE = "weft_sibling"


class Siblings:
    """Linear layers of one input."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        first = layers[0]
        self._packed = first if isinstance(first, PackedLinear) else None
        self._held = [layer._parameters for layer in layers]  # `layer.weight` takes ten times it
        weights = [weight for held in self._held if (weight := held.get("weight")) is not None]
        self._has_biases = first.bias is not None
        self._whole = whole_of(weights) if len(weights) == len(layers) else None
        self._places = [weight.data_ptr() for weight in weights]
        biases = [bias for held in self._held if (bias := held.get("bias")) is not None]
        self._bias = whole_of(biases) if len(biases) == len(layers) else None
        self._bias_places = [bias.data_ptr() for bias in biases]

    def each(self, x: Tensor) -> Sequence[Tensor]:
        """x: [T, in]. Returns what each layer makes of it, [T, out]."""
        if self._whole is None or self._is_packed_for(x):
            return [of_linear(x, layer) for layer in self._layers]
        return self.of(x).split([layer.out_features for layer in self._layers], -1)

    def of(self, x: Tensor) -> Tensor:
        """x: [T, in]. Returns [T, out of all], side by side."""
        if self._is_packed_for(x):
            return torch.cat([of_linear(x, layer) for layer in self._layers], -1)
        # What was never side by side, or where others were put in their place, is met apart.
        weights: list[Any] = [held["weight"] for held in self._held]
        bias = self._bias_now() if self._has_biases else None
        if self._whole is not None and [weight.data_ptr() for weight in weights] == self._places:
            return F.linear(x, self._whole, bias)
        out = torch.cat([F.linear(x, weight) for weight in weights], -1)
        return out if bias is None else out.add_(bias)

    def _bias_now(self) -> Tensor:
        biases: list[Any] = [held["bias"] for held in self._held]
        if self._bias is not None and [bias.data_ptr() for bias in biases] == self._bias_places:
            return self._bias
        return torch.cat(biases)

    def _is_packed_for(self, x: Tensor) -> bool:
        return self._packed is not None and not self._packed.is_few(x)


def whole_of(weights: Sequence[Tensor]) -> Tensor | None:
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


def of_linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """Return what a linear layer makes of x: [T, out]."""
    if isinstance(layer, PackedLinear):
        return layer.product(x)
    return F.linear(x, layer.weight, layer.bias)


def fuse_siblings(model: nn.Module) -> int:
    """Let layers of our copy, whose modules have seats, be one product in a step where their
    weights lie together; return how many are.
    """
    n = 0
    for layers in _lying_together(model):
        product = _OneProduct(layers)
        for number, layer in enumerate(layers):
            layer.__dict__[_PLACE] = _Place(product, number)
            layer.__class__ = _Sibling
            n += 1
    return n


class _Sibling(nn.Linear):
    """A layer whose product is made with that of its siblings, if they are given the same."""

    def forward(self, x: Tensor) -> Tensor:
        step = step_of(self)
        if step is None or not step.turns:
            return super().forward(x)
        place: _Place = self.__dict__[_PLACE]
        return place.product.of(place.number, x)


class _OneProduct:
    """What siblings make of one input: the first that is asked for it makes it for all."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = layers
        self._siblings: Siblings | None = None
        self._given: Callable[[], Tensor | None] = lambda: None
        self._parts: dict[int, Tensor] = {}

    def of(self, number: int, x: Tensor) -> Tensor:
        """Return what one layer makes of x, [..., out]."""
        if self._given() is not x:
            if self._siblings is None:
                self._siblings = Siblings(self._layers)
            self._parts = dict(enumerate(self._siblings.each(x)))
            self._given = weakref.ref(x)
        part = self._parts.pop(number, None)
        return of_linear(x, self._layers[number]) if part is None else part

    def __deepcopy__(self, memo: dict[int, Any]) -> _OneProduct:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__init__(copy.deepcopy(self._layers, memo))  # type: ignore[misc]
        return twin


class _Place(NamedTuple):
    """Which of the layers of a product one is."""

    product: _OneProduct
    number: int


def _lying_together(model: nn.Module) -> Iterator[list[nn.Linear]]:
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
            and whole_of([each.weight for each in layers]) is not None
        ):
            yield layers
