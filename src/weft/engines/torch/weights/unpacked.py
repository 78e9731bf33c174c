"""Products with weights in their own layout, on CPUs where packing them for oneDNN does not pay."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .upcast import is_upcast, upcast_product

# PyTorch's name of processors on which oneDNN's float32 product of one row takes 1.3 to 1.9 times
# as long as the plain one.
_PLAIN = "AVX2"
# Up to so many rows, weight @ xᵀ is faster than x @ weightᵀ: up to twice as fast for four rows.
_MAX_TRANSPOSED_ROWS = 64


def is_unpacked(dtype: torch.dtype) -> bool:
    """Return True if weights with this dtype are used in place on this CPU instead of packed."""
    is_plain = dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == _PLAIN
    return is_plain or is_upcast(dtype)


def unpacked_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x times a weight [out, in] in its own layout: [..., out]. x: [..., in]."""
    if weight.dtype != torch.float32:
        return upcast_product(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if not 1 < len(rows) <= _MAX_TRANSPOSED_ROWS:
        return F.linear(x, weight, bias)
    out = torch.mm(weight, rows.t()).t().contiguous()
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], len(weight))
