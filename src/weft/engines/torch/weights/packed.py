"""Linear layers whose weights are packed for oneDNN, or used in place."""

from __future__ import annotations

import copy
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .unpacked import is_unpacked, unpacked_product
from .upcast import has_products

# oneDNN packs for a row count; the layout for one row is slower even for one row.
_ROWS = 32
# On many processors a oneDNN product of one or two rows takes 1 to 1.5 times as long as one of four
# rows; three rows do not. Padded rows are also bit-equal to rows of larger products.
_FEW_ROWS, _PADDED_ROWS = 2, 4
_MAX_PADDING_COST = 1.05  # padding may cost this much of the unpadded time
_TIMED_ROUNDS = 6
_pads: dict[tuple[torch.dtype, int], bool] = {}  # (dtype, rows): timed once a process
_PACKED = torch.float32, torch.bfloat16  # oneDNN's float16 has not been measured
# Root-mean-square error of a packed product, relative to its spread.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight, and with or without the original one.

    A layer with the original weight packs it again after in-place writes. Without the original,
    `weight` is a copy created on access and rejects writes. Weights that are loaded into the layer
    are packed. A weight that is not packed on this CPU is used in place.
    """

    def __init__(self, layer: nn.Linear | Conv1D, *, keep: bool, few: int = 0) -> None:
        """Pack the weight of a layer.

        Args:
            layer: the layer to replace.
            keep: keep the original weight, too.
            few: products of fewer rows use the original weight, which is faster then; needs `keep`.
        """
        nn.Module.__init__(self)
        weight = layer.weight
        self.out_features, self.in_features = self._transposed(weight).shape
        self._few_numbers = few * self.in_features
        if keep:  # first, as in the original layer: state dicts keep this order
            self._parameters["weight"] = weight
        self._parameters["bias"] = layer.bias
        self._pack(weight.detach())
        self._packed_version = version_of(weight)
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:
        """The weight [out, in]."""
        weight = self._parameters.get("weight")
        if weight is not None:
            return weight
        with torch.inference_mode():
            return self._transposed(self._packed.to_dense()).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, [..., out]. x: [..., in]."""
        return self.product(x)

    def is_few(self, x: Tensor) -> bool:
        """Return True if rows x [..., in] are too few for a packed product to be faster.

        `product` then uses the original weight.
        """
        return x.numel() < self._few_numbers

    def product(self, x: Tensor) -> Tensor:
        """Return the layer's output, [..., out]. x: [..., in]."""
        weight = self._parameters.get("weight")
        if weight is not None:
            if self.is_few(x) or torch.is_grad_enabled():  # packed products have no gradient
                return F.linear(x, self._transposed(weight), self._parameters["bias"])
            if version_of(weight) != self._packed_version:
                self._pack(weight.detach())
                self._packed_version = version_of(weight)
        return product(x, self._packed, self._parameters["bias"])

    def repack_on_use(self) -> None:
        """Repack the kept weight at the next product: it may have changed without PyTorch counting
        it.
        """
        self._packed_version = (0, -1)

    def _pack(self, weight: Tensor) -> None:
        """Store a packed copy of the weight [out, in]."""
        matrix = self._transposed(weight)
        is_kept = "weight" in self._parameters
        self._packed = matrix if is_kept and is_unpacked(weight.dtype) else packed(matrix)

    @staticmethod
    def _transposed(weight: Tensor) -> Tensor:
        """Convert a weight between the layer's own layout and [out, in]; here they are equal."""
        return weight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Add the weight in its original layout to a state dict."""
        if "weight" not in self._parameters:
            destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Pack the weight in a state dict."""
        if "weight" not in self._parameters and prefix + "weight" in state_dict:
            state_dict = dict(state_dict)
            self._pack(state_dict.pop(prefix + "weight").detach().to(self._packed.dtype))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self._packed)] = self._packed  # read-only, so copies share it
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class PackedConv1D(PackedLinear):
    """`PackedLinear` for GPT-2's kind of linear layer, whose weight is [in, out]."""

    @staticmethod
    def _transposed(weight: Tensor) -> Tensor:
        """Transpose the weight: GPT-2's layers store [in, out]."""
        return weight.t()


def pack_layer(layer: nn.Linear | Conv1D, *, keep: bool, few: int) -> PackedLinear:
    """Return a packed copy of a layer; see `PackedLinear`."""
    kind = PackedLinear if isinstance(layer, nn.Linear) else PackedConv1D
    return kind(layer, keep=keep, few=few)


def packed(weight: Tensor) -> Tensor:
    """Return a weight [out, in] packed for oneDNN; one that stays unpacked becomes contiguous.

    Most PyTorch operations fail on a packed weight.
    """
    if is_unpacked(weight.dtype):
        return weight.contiguous()
    # NOTE: these operations of PyTorch's compiler have private names; `can_pack` checks that they
    # exist and are correct before any layer uses them.
    reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
    return reordered


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x times a packed or unpacked weight, [..., out]. x: [..., in]."""
    if not weight.is_mkldnn:
        return unpacked_product(x, weight, bias)
    n_rows = x.numel() // x.shape[-1]
    if 0 < n_rows <= _FEW_ROWS and _pads.get((x.dtype, n_rows), True):
        return _padded_product(x, n_rows, weight, bias)
    return _product(x, weight, bias)


def time_padding(layers: Sequence[PackedLinear]) -> None:
    """Choose whether products of one or two rows are padded to four, by timing them on `layers`.

    Pass one layer of each shape: small weights gain less from padding than large ones. Runs once
    per process and dtype; later products use the faster form.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for layer in layers:
        if layer._packed.is_mkldnn:
            by_dtype[layer._packed.dtype].append(layer._packed)
    for dtype, weights in by_dtype.items():
        for n_rows in range(1, _FEW_ROWS + 1):
            if (dtype, n_rows) not in _pads:
                _pads[dtype, n_rows] = _is_padding_faster(weights, n_rows)


def _is_padding_faster(weights: Sequence[Tensor], n_rows: int) -> bool:
    """Time products of `n_rows` rows with each weight; return True if padding to four is faster."""
    total = {True: 0.0, False: 0.0}
    for weight in weights:
        x = torch.ones(n_rows, weight.shape[1], dtype=weight.dtype)
        best = dict.fromkeys(total, math.inf)
        for _ in range(_TIMED_ROUNDS):
            for is_padded in best:
                began = time.perf_counter()
                if is_padded:
                    _padded_product(x, n_rows, weight, None)
                else:
                    _product(x, weight, None)
                best[is_padded] = min(best[is_padded], time.perf_counter() - began)
        for is_padded, seconds in best.items():
            total[is_padded] += seconds
    return total[True] <= _MAX_PADDING_COST * total[False]


def _padded_product(x: Tensor, n_rows: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a product whose rows are padded with zeros to four."""
    rows = F.pad(x.reshape(n_rows, -1), (0, 0, 0, _PADDED_ROWS - n_rows))
    return _product(rows, weight, bias)[:n_rows].view(*x.shape[:-1], -1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x @ weightᵀ + bias with a packed or unpacked weight."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def version_of(weight: Tensor) -> tuple[int, int]:
    """Return a value that changes when PyTorch writes to a weight, or it moves."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def can_pack(weight: Tensor) -> bool:
    """Return True if packed products with a weight exist and are correct."""
    if weight.device.type != "cpu" or weight.dtype not in TOLERANCE:
        return False
    is_packed = weight.dtype in _PACKED and has_products(weight.dtype)
    if not is_packed and not is_unpacked(weight.dtype):
        return False
    generator = torch.Generator().manual_seed(0)
    samples = (torch.randn(n, weight.shape[1], generator=generator) for n in (_FEW_ROWS, 6))
    return all(_is_correct(rows.to(weight.dtype), weight.detach()) for rows in samples)


def _is_correct(x: Tensor, weight: Tensor) -> bool:
    """Return True if the packed product equals PyTorch's ordinary one up to rounding."""
    try:
        got = product(x, packed(weight), None).float()
    except Exception:
        return False
    want = F.linear(x, weight).float()
    error = (got - want).square().mean().sqrt()
    return bool(error <= TOLERANCE[weight.dtype] * want.square().mean().sqrt().clamp_min(1e-30))
