"""Experts of a mixture in Triton: four launches for all of them; the host waits for nothing.

A pair is a token and one of its experts. Pairs are sorted by expert, and a tile is some pairs of
one expert. So a step reads the weights of each expert with a tile:

    align      pairs → order, tiles

    multiply   a tile's hidden states by its expert's first weights, activated and gated

    multiply   the result by its expert's second weights, back in the order of the pairs

    sum        a token's pairs, each times its weight
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_backend import GatedActivation, MoEWeights
from .elementwise import gated_activation
from .kernel import NARROW, WIDE, block_size_for, is_interpreted

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PAIRS = 1024  # read at once
_COUNTED = 8192  # pairs times experts that a program compares at once
_NUMBERS = 512  # of a token, in a program of the sum
_FULL = 32  # pairs an expert from which tiles are WIDE
_MAX_PAIRS = 64  # pairs an expert from which a library's product is as fast
_MAX_EXPERTS = 1024


class _Tile(NamedTuple):
    """Block sizes of a program: rows, output dimensions, summed dimensions."""

    n_rows: int
    n_out: int
    n_in: int
    num_warps: int
    num_stages: int

    def within(self, n_out: int, n_in: int) -> _Tile:
        """Return the tile for a product with at most these dimensions."""
        return self._replace(
            n_out=min(self.n_out, block_size_for(n_out)),
            n_in=min(self.n_in, block_size_for(n_in)),
        )


# A step of few rows waits for weights, so programs are many and prefetch several blocks.
_FEW = _Tile(NARROW, 32, 128, num_warps=4, num_stages=4)
_MANY = _Tile(WIDE, 64, 64, num_warps=4, num_stages=4)
_OF_FLOAT32 = _Tile(NARROW, 32, 64, num_warps=4, num_stages=3)
_INTERPRETED = _Tile(NARROW, 256, 256, num_warps=4, num_stages=1)


@triton.jit(do_not_specialize=["n_pairs", "n_tiles"])
def moe_align_kernel(
    chosen_ptr,
    order_ptr,
    tile_ptr,
    n_pairs,
    n_tiles,
    N_EXPERTS: tl.constexpr,
    PAD: tl.constexpr,
    BM: tl.constexpr,
    BP: tl.constexpr,
    IS_CLOSE: tl.constexpr,
):
    """Write one expert's pairs, in order, after those of earlier experts; and its tiles.

    A tile is its expert, its first index in the order, and the index after its last.

    IS_CLOSE: tiles are adjacent, so the pairs of every expert are counted. Otherwise each expert
    has room for its maximum number of tiles. Unused tiles are marked. The program after the last
    expert only marks tiles.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, BP)
    if IS_CLOSE:
        lane = tl.arange(0, PAD)
        counts = tl.zeros([PAD], tl.int32)
        for first in range(0, n_pairs, BP):
            ids = tl.load(chosen_ptr + first + at, mask=first + at < n_pairs, other=-1)
            counts += tl.sum((ids.to(tl.int32)[:, None] == lane[None, :]).to(tl.int32), 0)
        is_before = lane < expert
        begin = tl.sum(tl.where(is_before, counts, 0), 0)
        end = begin + tl.sum(tl.where(lane == expert, counts, 0), 0)
        in_tiles = tl.where(is_before & (lane < N_EXPERTS), (counts + (BM - 1)) // BM, 0)
        tile = tl.sum(in_tiles, 0)
        after = tile + (end - begin + (BM - 1)) // BM  # the next expert's tiles start here
    else:
        n_before, n_own = tl.zeros([BP], tl.int32), tl.zeros([BP], tl.int32)
        for first in range(0, n_pairs, BP):
            ids = tl.load(chosen_ptr + first + at, mask=first + at < n_pairs, other=-1)
            ids = ids.to(tl.int32)
            n_before += ((ids >= 0) & (ids < expert) & (ids < N_EXPERTS)).to(tl.int32)
            n_own += (ids == expert).to(tl.int32)
        begin = tl.sum(n_before, 0)
        end = begin + tl.sum(n_own, 0)
        # The room up to the next expert's is this expert's number of tiles, or one more.
        tile = begin // BM + expert
        after = end // BM + expert + 1
    if expert == N_EXPERTS:
        for first in range(tile, n_tiles, BP):
            tl.store(tile_ptr + (first + at) * 3, -1, mask=first + at < n_tiles)
    else:
        for first in range(0, after - tile, BP):
            place = begin + (first + at) * BM
            is_room = tile + first + at < after
            tile_at = tile_ptr + (tile + first + at) * 3
            tl.store(tile_at, tl.where(place < end, expert, -1), mask=is_room)
            tl.store(tile_at + 1, place, mask=is_room)
            tl.store(tile_at + 2, tl.minimum(place + BM, end), mask=is_room)
        place = begin
        for first in range(0, n_pairs, BP):
            pair = first + at
            ids = tl.load(chosen_ptr + pair, mask=pair < n_pairs, other=-1).to(tl.int32)
            is_own = (ids == expert).to(tl.int32)
            tl.store(order_ptr + place + tl.cumsum(is_own, 0) - 1, pair, mask=is_own == 1)
            place += tl.sum(is_own, 0)


@triton.jit
def fused_moe_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    order_ptr,
    tile_ptr,
    out_ptr,
    x_stride,
    expert_stride,
    out_stride,
    in_stride,
    bias_stride,
    N_IN: tl.constexpr,
    N_OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
    ARE_NEIGHBOURS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiply the rows of a tile by its expert's weights; write BN outputs of each row.

    x_ptr: input rows. weight_ptr, bias_ptr: of all experts. order_ptr: pairs sorted by expert.
    tile_ptr: expert, first and end index in the order, of each tile.
    out_stride, in_stride: strides of a weight's output and input axis.
    IS_FIRST: input rows are tokens, and output rows are in the sorted order of the pairs. Else
    input rows are in the sorted order, and output rows are pairs.
    ACTIVATION: "" for no gate. With a gate, a weight has 2 N_OUT outputs; for the other parameters
    see `GatedActivation`.
    """
    N_PRODUCT: tl.constexpr = 2 * N_OUT if ARE_NEIGHBOURS else N_OUT  # columns of one product
    WIDTH: tl.constexpr = 2 * BN if ARE_NEIGHBOURS else BN
    HAS_TWO: tl.constexpr = (ACTIVATION != "") and not ARE_NEIGHBOURS
    expert = tl.load(tile_ptr + tl.program_id(0) * 3)
    if expert >= 0:
        first = tl.load(tile_ptr + tl.program_id(0) * 3 + 1)
        end = tl.load(tile_ptr + tl.program_id(0) * 3 + 2)
        place = first + tl.arange(0, BM)
        is_row = place < end
        pair = tl.load(order_ptr + place, mask=is_row, other=0)
        if IS_FIRST:
            row, out_row = (pair // TOP_K).to(tl.int64), place.to(tl.int64)
        else:
            row, out_row = place.to(tl.int64), pair.to(tl.int64)
        n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        k = tl.arange(0, BK)
        x_at = x_ptr + (row * x_stride)[:, None] + k[None, :]
        own_ptr = weight_ptr + expert.to(tl.int64) * expert_stride
        weight_at = own_ptr + k[:, None] * in_stride + n[None, :] * out_stride
        acc = tl.zeros([BM, WIDTH], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        is_out = (n < N_PRODUCT)[None, :]
        for start in range(0, N_IN, BK):
            is_in = k < N_IN - start
            x = tl.load(x_at, mask=is_row[:, None] & is_in[None, :], other=0.0)
            weight = tl.load(weight_at, mask=is_in[:, None] & is_out, other=0.0)
            acc = tl.dot(x, weight, acc, input_precision=PRECISION)
            if HAS_TWO:
                weight = tl.load(
                    weight_at + N_OUT * out_stride, mask=is_in[:, None] & is_out, other=0.0
                )
                up = tl.dot(x, weight, up, input_precision=PRECISION)
            x_at += BK
            weight_at += BK * in_stride
        if HAS_BIAS:
            bias_at = bias_ptr + expert * bias_stride + n
            acc += tl.load(bias_at, mask=n < N_PRODUCT, other=0.0).to(tl.float32)[None, :]
            if HAS_TWO:
                up += tl.load(bias_at + N_OUT, mask=n < N_OUT, other=0.0).to(tl.float32)[None, :]
        if ARE_NEIGHBOURS:
            acc, up = tl.split(tl.reshape(acc, [BM, BN, 2]))
        if ACTIVATION != "":
            acc = gated_activation(acc, up, ACTIVATION, SLOPE, SHIFT, LIMIT)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        inside = is_row[:, None] & (n < N_OUT)[None, :]
        out_at = out_ptr + (out_row * N_OUT)[:, None] + n[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def moe_sum_kernel(
    x_ptr,
    chosen_ptr,
    share_ptr,
    out_ptr,
    N_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    BW: tl.constexpr,
):
    """Write the weighted sum of a token's pairs; pairs without an expert are left out."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BW + tl.arange(0, BW)
    j = tl.arange(0, PAD)
    pair = token * TOP_K + j
    expert = tl.load(chosen_ptr + pair, mask=j < TOP_K, other=-1)
    is_there = (expert >= 0) & (expert < N_EXPERTS)
    share = tl.load(share_ptr + pair, mask=is_there, other=0.0).to(tl.float32)
    inside = is_there[:, None] & (d < WIDTH)[None, :]
    x = tl.load(x_ptr + pair[:, None] * WIDTH + d[None, :], mask=inside, other=0.0)
    total = tl.sum(x.to(tl.float32) * share[:, None], 0)
    tl.store(out_ptr + token * WIDTH + d, total.to(out_ptr.dtype.element_ty), mask=d < WIDTH)


def supports_fused_experts(x: Tensor, chosen: Tensor, shares: Tensor, experts: MoEWeights) -> bool:
    """Return True if `fused_experts` supports these, and is faster than the module."""
    up, down = experts.up, experts.down
    n_experts, n_between = len(down), down.shape[2]
    is_packed = x.dim() == 2 and x.stride(1) == 1 and x.dtype in _DTYPES
    is_chosen = chosen.shape == shares.shape == (len(x), chosen.shape[-1])
    n_up = n_between if experts.gate is None else 2 * n_between
    return (
        is_packed
        and is_chosen
        and n_experts <= _MAX_EXPERTS
        and (up.dtype, down.dtype) == (x.dtype, x.dtype)
        and down.shape[1] == x.shape[1] == up.shape[2]
        and (experts.between is not None or up.shape == (n_experts, n_up, x.shape[1]))
        and all(w.stride(i) * w.shape[i] < 2**31 for w in (up, down) for i in (1, 2))
        and not (experts.is_grouped and _is_for_library(x, chosen.numel(), n_experts))
    )


def _is_for_library(x: Tensor, n_pairs: int, n_experts: int) -> bool:
    """Return True if the grouped matrix product of Transformers' module is faster.

    That holds for bfloat16 and many rows per expert, on GPUs where the product does not copy the
    row counts to the host.
    n_pairs: number of pairs of a token and an expert.
    """
    if n_pairs < _MAX_PAIRS * n_experts or x.dtype != torch.bfloat16 or not x.is_cuda:
        return False
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def fused_experts(x: Tensor, chosen: Tensor, shares: Tensor, experts: MoEWeights) -> Tensor:
    """Return the experts' weighted outputs; see `AttentionStep.fused_experts`."""
    n_tokens, width = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not chosen.numel():
        return out.zero_()
    chosen, shares = chosen.contiguous(), shares.contiguous()
    n_pairs, top_k = chosen.numel(), chosen.shape[1]
    n_experts = len(experts.down)
    tile = _tile_for(x.dtype, n_pairs, n_experts)
    n_tiles = min(n_pairs, n_experts + n_pairs // tile.n_rows)
    order = torch.empty(n_pairs, dtype=torch.int32, device=x.device)
    tiles = torch.empty(n_tiles, 3, dtype=torch.int32, device=x.device)
    # With few pairs most experts have none, and idle programs cost more than counting.
    is_close, pad = n_tiles == n_pairs, block_size_for(n_experts)
    with torch.cuda.device_of(x):
        moe_align_kernel[(n_experts + 1,)](
            chosen, order, tiles, n_pairs, n_tiles,
            N_EXPERTS=n_experts, PAD=pad, BM=tile.n_rows,
            BP=max(16, _COUNTED // pad) if is_close and not is_interpreted() else _PAIRS,
            IS_CLOSE=is_close, num_warps=8,
        )  # fmt: skip
        pairs = _GroupedPairs(order, tiles, top_k, tile)
        between = pairs.multiply(x, experts.up, experts.up_bias, experts.gate)
        if experts.between is not None:
            between = experts.between(between).contiguous()
        outputs = pairs.multiply(between, experts.down, experts.down_bias, None, is_first=False)
        n_each = 2048 if is_interpreted() else _NUMBERS
        moe_sum_kernel[(n_tokens, triton.cdiv(width, n_each))](
            outputs, chosen, shares, out,
            N_EXPERTS=n_experts, TOP_K=top_k, WIDTH=width, PAD=triton.next_power_of_2(top_k),
            BW=n_each, num_warps=4,
        )  # fmt: skip
    return out


class _GroupedPairs(NamedTuple):
    """The pairs (a token and one of its experts) of one call, sorted by expert.

    order: pair numbers, sorted. tiles: expert, first and end index in the order, of each tile.
    top_k: experts per token. tile: block sizes of the products.
    """

    order: Tensor
    tiles: Tensor
    top_k: int
    tile: _Tile

    def multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gate: GatedActivation | None,
        *,
        is_first: bool = True,
    ) -> Tensor:
        """Multiply the row of each pair by its expert's weight; return [pairs, out].

        Args:
            x: rows of tokens if `is_first`, else rows of pairs, sorted by expert.
            weight: of all experts, [X, out, in].
            bias: [X, out], or None.
            gate: applied to the products, which halves `out`; None for no gate.
            is_first: results are sorted by expert; else in the order of the pairs.
        """
        n_out = weight.shape[1] // (1 if gate is None else 2)
        # Pairs without an expert are never written, and only `between` reads them.
        out = x.new_empty(len(self.order), n_out)
        tile = self.tile.within(n_out, weight.shape[2])
        # Tiles are the first axis: adjacent programs of one expert read its weights once.
        fused_moe_kernel[(len(self.tiles), triton.cdiv(n_out, tile.n_out))](
            x, weight, x if bias is None else bias, self.order, self.tiles, out,
            x.stride(0), *weight.stride(), 0 if bias is None else bias.stride(0),
            N_IN=weight.shape[2], N_OUT=n_out, TOP_K=self.top_k, **_constants(gate),
            HAS_BIAS=bias is not None, IS_FIRST=is_first, PRECISION="tf32x3",
            BM=tile.n_rows, BN=tile.n_out, BK=tile.n_in,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
        return out


def _constants(gate: GatedActivation | None) -> dict[str, Any]:
    """Return a gate's compile-time arguments for `fused_moe_kernel`."""
    activation, limit, slope, shift, are_neighbours = gate or ("", None, 1.0, 0.0, False)
    return {
        "ACTIVATION": activation, "SLOPE": slope, "SHIFT": shift, "LIMIT": limit,
        "ARE_NEIGHBOURS": are_neighbours,
    }  # fmt: skip


def _tile_for(dtype: torch.dtype, n_pairs: int, n_experts: int) -> _Tile:
    """Return the block sizes for products of this dtype and number of pairs per expert."""
    if is_interpreted():
        return _INTERPRETED
    if dtype == torch.float32:
        return _OF_FLOAT32
    return _MANY if n_pairs >= _FULL * n_experts else _FEW
