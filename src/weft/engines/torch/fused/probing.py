"""Inputs on which modules are tried to find out what they compute, and the allowed error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZES = (0.1, 1.0, 10.0)  # standard deviations of the rows
# And one more, as large as the dtype allows, because some gates are clamped far out.
_LARGE = {torch.float32: 1e3, torch.bfloat16: 1e3, torch.float16: 30.0}
# Allowed error relative to the spread: a module may round twice more.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def rows_of_sizes(width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return random inputs of different magnitudes, on which a module is probed: [4, width]."""
    seeded = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, width, generator=seeded) * size for size in (*_SIZES, _LARGE[dtype])]
    return torch.cat(rows).to(device, dtype)


def is_near(result: Any, want: Tensor, dtype: torch.dtype) -> bool:
    """Return True if `result` equals `want` up to the rounding of `dtype`.

    It must be a tensor with the shape of `want` and this dtype. For results of `rows_of_sizes`.
    """
    if not isinstance(result, Tensor) or (result.shape, result.dtype) != (want.shape, dtype):
        return False
    error = (result.float() - want.float()).square().mean(-1).sqrt()
    spread = want.float().square().mean(-1).sqrt().clamp_min(1e-30)
    return bool((error <= _TOLERANCE[dtype] * spread).all())
