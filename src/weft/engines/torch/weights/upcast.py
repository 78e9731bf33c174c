"""Products with 16-bit weights on CPUs without such products: blocks are upcast to float32.

PyTorch's own product works row by row there, and takes 2 to 8 times as long from four rows on. The
weights stay unchanged; one block at a time is upcast into the cache.

    by row      weight [out, in]   ├ block ┤ of outputs: computes its part of the result

    by column   weight [in, out]ᵀ  ├ block ┤ of inputs: adds to the full result
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Fewer rows than this are faster one by one, for a weight stored by row.
_FROM_ROWS = 4
# Of a float32 block, for each thread. Half of it and twice it are equal, or a tenth slower.
_BLOCK_BYTES = 1 << 21
_MIN_LINES, _ALIGN = 64, 16
_MEASURED = "AVX2"  # PyTorch's name of the processors that were measured


def is_upcast(dtype: torch.dtype) -> bool:
    """Return True if products with this dtype are faster upcast to float32 on this CPU."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return (
        is_half and torch.backends.cpu.get_cpu_capability() == _MEASURED and not has_products(dtype)
    )


def has_products(dtype: torch.dtype) -> bool:
    """Return True if oneDNN has products of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def upcast_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x times a 16-bit weight [out, in], upcast block by block: [..., out]. x: [..., in].

    The weight is stored by row or by column.
    """
    n_out, n_in = weight.shape
    is_by_row = weight.stride(1) == 1
    rows = x.reshape(-1, n_in)
    is_few = is_by_row and len(rows) < _FROM_ROWS
    if not len(rows) or is_few or (torch.is_grad_enabled() and x.requires_grad):
        return F.linear(x, weight, bias)
    wide = rows.float()
    out = _by_row(wide, weight) if is_by_row else _by_column(wide, weight)
    if bias is not None:
        out += bias
    return out.to(x.dtype).view(*x.shape[:-1], n_out)


def _by_row(wide: Tensor, weight: Tensor) -> Tensor:
    """Compute blocks of outputs, one for each thread at a time."""
    n_out, n_in = weight.shape
    n_threads = torch.get_num_threads()
    n_lines = min(_block_size(n_in), max(1, n_out // n_threads // _ALIGN) * _ALIGN)
    out = wide.new_empty(len(wide), n_out)
    block = wide.new_empty(n_threads * n_lines, n_in)
    end = n_out // len(block) * len(block) if n_threads > 1 else 0
    for start in range(0, end, len(block)):
        block.copy_(weight[start : start + len(block)])
        parts = block.view(n_threads, n_lines, n_in).transpose(1, 2)
        product = torch.bmm(wide.expand(n_threads, -1, -1), parts)
        into = out[:, start : start + len(block)]
        into.unflatten(1, (n_threads, n_lines)).copy_(product.transpose(0, 1))
    for start in range(end, n_out, len(block)):
        part = weight[start : start + len(block)]
        widened = block[: len(part)].copy_(part)
        torch.mm(wide, widened.t(), out=out[:, start : start + len(part)])
    return out


def _by_column(wide: Tensor, weight: Tensor) -> Tensor:
    """Compute blocks of inputs one after the other, and add their products."""
    out = wide.new_zeros(len(wide), len(weight))
    columns = weight.t()
    block = wide.new_empty(_block_size(len(weight)) * torch.get_num_threads(), len(weight))
    for start in range(0, len(columns), len(block)):
        part = columns[start : start + len(block)]
        widened = block[: len(part)].copy_(part)
        out.addmm_(wide[:, start : start + len(part)], widened)
    return out


def _block_size(length: int) -> int:
    """Return the number of rows (or columns) of a weight in a block; `length`: of each."""
    return max(_MIN_LINES, _BLOCK_BYTES // (4 * length) // _ALIGN * _ALIGN)
