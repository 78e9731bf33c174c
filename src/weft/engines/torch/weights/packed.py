"""Linear layers whose weights lie as oneDNN reads them, or are widened as they are met."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .upcast import is_widened, multiplies, widened_product

# oneDNN packs for so many rows; what it makes for one is slower even at one.
_ROWS = 32
# On many processors a oneDNN product of one or two rows takes 1 to 1.5 times as long as one of four
# rows; three rows do not. Filled rows are also bit-equal to rows of larger products.
_FEW_ROWS, _FILLED_ROWS = 2, 4
_WORTH_FILLING = 1.15  # filling may cost this much of the unfilled product's time
_TIMED_ROUNDS = 4
_fills: dict[tuple[torch.dtype, int], bool] = {}  # (dtype, rows): timed once a process
_PACKED = torch.float32, torch.bfloat16  # oneDNN's float16 has not been measured
# Root-mean-square error of a packed product, relative to its spread.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight; beside it the weight as it lay, or not.

    Without it, `weight` is a copy made each time it is asked for, which refuses to be written to,
    and what is loaded into the layer is packed anew. With it, what is written there counts. A
    weight that is widened is no copy of that.
    """

    def __init__(self, layer: nn.Linear | Conv1D, *, keep: bool, few: int = 0) -> None:
        """few: rows below which the weight as it lay is faster, where that is kept."""
        nn.Module.__init__(self)
        weight = layer.weight
        self.out_features, self.in_features = self._turned(weight).shape
        self._few_numbers = few * self.in_features
        if keep:  # in the order of the layer's own: others count on it
            self._parameters["weight"] = weight
        self._parameters["bias"] = layer.bias
        self._pack(weight.detach())
        self._mark = version_of(weight)
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:
        """The weight [out, in]."""
        kept = self._parameters.get("weight")
        if kept is not None:
            return kept
        with torch.inference_mode():
            return self._turned(self._packed.to_dense()).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)

    def is_few(self, x: Tensor) -> bool:
        """Whether rows [..., in] are so few that they meet the weight as it lay."""
        return x.numel() < self._few_numbers

    def product(self, x: Tensor) -> Tensor:
        """x: [..., in]. Returns [..., out]."""
        kept = self._parameters.get("weight")
        if kept is not None:
            if self.is_few(x) or torch.is_grad_enabled():  # packed products have no gradient
                return F.linear(x, self._turned(kept), self._parameters["bias"])
            if version_of(kept) != self._mark:
                self._pack(kept.detach())
                self._mark = version_of(kept)
        return product(x, self._packed, self._parameters["bias"])

    def repack_on_use(self) -> None:
        """Pack anew what is kept: somebody wrote there as PyTorch does not count."""
        self._mark = (0, -1)

    def _pack(self, weight: Tensor) -> None:
        turned = self._turned(weight)
        is_kept = "weight" in self._parameters
        self._packed = turned if is_kept and is_widened(weight.dtype) else packed(turned)

    @staticmethod
    def _turned(weight: Tensor) -> Tensor:
        """Return the layer's own form of a weight as [out, in], and back."""
        return weight

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if "weight" not in self._parameters:
            destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if "weight" not in self._parameters and prefix + "weight" in state_dict:
            state_dict = dict(state_dict)
            self._pack(state_dict.pop(prefix + "weight").detach().to(self._packed.dtype))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedLinear:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        memo[id(self._packed)] = self._packed  # nobody writes there: copies may share it
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


class PackedConv1D(PackedLinear):
    """The same for GPT-2's kind of linear layer, whose weight is [in, out]."""

    @staticmethod
    def _turned(weight: Tensor) -> Tensor:
        return weight.t()


def pack_layer(layer: nn.Linear | Conv1D, *, keep: bool, few: int) -> PackedLinear:
    """Return a layer packed; see `PackedLinear`."""
    kind = PackedLinear if isinstance(layer, nn.Linear) else PackedConv1D
    return kind(layer, keep=keep, few=few)


def packed(weight: Tensor) -> Tensor:
    """Return a weight [out, in] as oneDNN reads it; what of PyTorch looks into it fails.

    One that is widened is by row.
    """
    if is_widened(weight.dtype):
        return weight.contiguous()
    # NOTE: the operations that PyTorch's own compiler freezes linear layers with have private
    # names; `can_pack` asks whether they are there and right before any layer counts on them.
    made: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
    return made


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [..., in]; weight: packed, or one that is widened. Returns [..., out]."""
    if not weight.is_mkldnn:
        return widened_product(x, weight, bias)
    n_rows = x.numel() // x.shape[-1]
    if 0 < n_rows <= _FEW_ROWS and _fills.get((x.dtype, n_rows), True):
        return _filled_product(x, n_rows, weight, bias)
    return _product(x, weight, bias)


def time_filling(layer: PackedLinear) -> None:
    """Time products of one row and two, as they are and filled to four; later products use the
    faster way. Runs once a process and dtype.
    """
    weight = layer._packed
    if not weight.is_mkldnn:
        return
    for n_rows in range(1, _FEW_ROWS + 1):
        if (weight.dtype, n_rows) not in _fills:
            _fills[weight.dtype, n_rows] = _is_worth_filling(weight, n_rows, layer.in_features)


def _is_worth_filling(weight: Tensor, n_rows: int, width: int) -> bool:
    x = torch.ones(n_rows, width, dtype=weight.dtype)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(_TIMED_ROUNDS):
        for is_filled in seconds:
            began = time.perf_counter()
            if is_filled:
                _filled_product(x, n_rows, weight, None)
            else:
                _product(x, weight, None)
            seconds[is_filled].append(time.perf_counter() - began)
    return min(seconds[True]) <= _WORTH_FILLING * min(seconds[False])


def _filled_product(x: Tensor, n_rows: int, weight: Tensor, bias: Tensor | None) -> Tensor:
    filled = F.pad(x.reshape(n_rows, -1), (0, 0, 0, _FILLED_ROWS - n_rows))
    return _product(filled, weight, bias)[:n_rows].view(*x.shape[:-1], -1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return made


def version_of(weight: Tensor) -> tuple[int, int]:
    """Return what is another value once PyTorch has written to a weight, or it lies elsewhere."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def can_pack(weight: Tensor) -> bool:
    """Whether products with a weight are there when it is packed, and right."""
    if weight.device.type != "cpu" or weight.dtype not in TOLERANCE:
        return False
    is_packed = weight.dtype in _PACKED and multiplies(weight.dtype)
    if not is_packed and not is_widened(weight.dtype):
        return False
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(n, weight.shape[1], generator=generator) for n in (_FEW_ROWS, 6))
    return all(_is_right(rows.to(weight.dtype), weight.detach()) for rows in made)


def _is_right(x: Tensor, weight: Tensor) -> bool:
    try:
        got = product(x, packed(weight), None).float()
    except Exception:
        return False
    want = F.linear(x, weight).float()
    error = (got - want).square().mean().sqrt()
    return bool(error <= TOLERANCE[weight.dtype] * want.square().mean().sqrt().clamp_min(1e-30))
