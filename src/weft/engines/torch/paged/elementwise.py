"""Operations between the products of a layer, as one Triton kernel each.

A step of few tokens is a sequence of short kernels. Kernels between products read little, so their
number determines the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_backend import Activation, RotaryArgs, RotaryLayout
from .kernel import block_size_for, is_interpreted

_HEADS = 8  # of a program
_NUMBERS = 1024
_MIN_NUMBERS = 512  # of a norm's program: one warp
_INTERPRETED = 64  # factor for the interpreter, which runs programs one after the other


@triton.jit(do_not_specialize=["n_tokens"])
def rotary_angles_kernel(
    position_ptr,
    frequency_ptr,
    out_ptr,
    n_tokens,
    scaling,
    HALF: tl.constexpr,
    PAD: tl.constexpr,
    BT: tl.constexpr,
):
    """Write cosines of a token's position times each frequency, then the sines."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.arange(0, PAD)
    is_token = token < n_tokens
    inside = is_token[:, None] & (d < HALF)[None, :]
    position = tl.load(position_ptr + token, mask=is_token, other=0).to(tl.float32)
    frequency = tl.load(frequency_ptr + d, mask=d < HALF, other=0.0).to(tl.float32)
    angle = position[:, None] * frequency[None, :]
    at = token[:, None] * (2 * HALF) + d[None, :]
    kind = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, (tl.cos(angle) * scaling).to(kind), mask=inside)
    tl.store(out_ptr + at + HALF, (tl.sin(angle) * scaling).to(kind), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def rotary_and_store_kv_kernel(
    heads_ptr,
    angles_ptr,
    query_norm_ptr,
    key_norm_ptr,
    slot_ptr,
    query_ptr,
    k_ptr,
    v_ptr,
    n_rows,
    eps,
    N_QUERIES: tl.constexpr,
    N_KV: tl.constexpr,
    DIM: tl.constexpr,
    PAD: tl.constexpr,
    BM: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Apply norms and rotary embedding to queries and keys; store keys and values in the tokens'
    slots.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    is_row = row < n_rows
    token, head = row // (N_QUERIES + 2 * N_KV), row % (N_QUERIES + 2 * N_KV)
    is_query = is_row & (head < N_QUERIES)
    is_value = is_row & (head >= N_QUERIES + N_KV)
    is_key = is_row & (head >= N_QUERIES) & (head < N_QUERIES + N_KV)
    d = tl.arange(0, PAD)
    other = (d + DIM // 2) % DIM  # the other dimension of the pair
    inside = is_row[:, None] & (d < DIM)[None, :]
    at = row[:, None] * DIM
    x = tl.load(heads_ptr + at + d[None, :], mask=inside, other=0.0)
    turned = x.to(tl.float32)
    pair = tl.load(heads_ptr + at + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(turned * turned, 1) / DIM + eps)[:, None]
        q_norm = tl.load(query_norm_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        k_norm = tl.load(key_norm_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        turned = turned * scale * tl.where(is_query[:, None], q_norm, k_norm)
        q_pair = tl.load(query_norm_ptr + other, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        k_pair = tl.load(key_norm_ptr + other, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        pair = pair * scale * tl.where(is_query[:, None], q_pair, k_pair)
    place = token[:, None] * DIM + (d % (DIM // 2))[None, :]
    cos = tl.load(angles_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(angles_ptr + place + DIM // 2, mask=inside, other=0.0).to(tl.float32)
    sign = tl.where(d < DIM // 2, -1.0, 1.0)[None, :]
    turned = turned * cos + pair * sign * sin
    slot = tl.load(slot_ptr + token, mask=is_row, other=0)
    in_size = (d < DIM)[None, :]
    tl.store(
        query_ptr + (token * N_QUERIES + head)[:, None] * DIM + d[None, :],
        turned.to(query_ptr.dtype.element_ty),
        mask=is_query[:, None] & in_size,
    )
    tl.store(
        k_ptr + (slot * N_KV + head - N_QUERIES)[:, None] * DIM + d[None, :],
        turned.to(k_ptr.dtype.element_ty),
        mask=is_key[:, None] & in_size,
    )
    tl.store(
        v_ptr + (slot * N_KV + head - N_QUERIES - N_KV)[:, None] * DIM + d[None, :],
        x.to(v_ptr.dtype.element_ty),
        mask=is_value[:, None] & in_size,
    )


# Strides are specialised: kernels that do not know multiples of 16 load single numbers.
@triton.jit(do_not_specialize=["n_rows"])
def store_kv_kernel(
    key_ptr,
    value_ptr,
    slot_ptr,
    k_ptr,
    v_ptr,
    n_rows,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    N_KV: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAD: tl.constexpr,
    BM: tl.constexpr,
):
    """Store keys and values in the tokens' slots."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    is_row = row < n_rows
    token, head = row // N_KV, row % N_KV
    d = tl.arange(0, PAD)[None, :]
    to = tl.load(slot_ptr + token, mask=is_row, other=0) * N_KV + head
    is_key = is_row[:, None] & (d < KEY_DIM)
    key = key_ptr + (token * key_token_stride + head * key_head_stride)[:, None] + d
    tl.store(k_ptr + to[:, None] * KEY_DIM + d, tl.load(key, mask=is_key, other=0.0), mask=is_key)
    is_value = is_row[:, None] & (d < VALUE_DIM)
    value = value_ptr + (token * value_token_stride + head * value_head_stride)[:, None] + d
    values = tl.load(value, mask=is_value, other=0.0)
    tl.store(v_ptr + to[:, None] * VALUE_DIM + d, values, mask=is_value)


@triton.jit(do_not_specialize=["n_rows"])
def rotary_kernel(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    query_out_ptr,
    key_out_ptr,
    n_rows,
    query_head_stride,
    query_token_stride,
    key_head_stride,
    key_token_stride,
    cos_stride,
    N_QUERIES: tl.constexpr,
    N_KEYS: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    ARE_NEIGHBOURS: tl.constexpr,
    EVERY: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    BM: tl.constexpr,
):
    """Rotate the first dimensions of queries and keys. WIDTH: cosines of a token, for EVERY
    dimensions.
    """
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    token, head = row // (N_QUERIES + N_KEYS), row % (N_QUERIES + N_KEYS)
    d = tl.arange(0, PAD)
    in_size = (d < DIM)[None, :]
    is_query = ((row < n_rows) & (head < N_QUERIES))[:, None] & in_size
    is_key = ((row < n_rows) & (head >= N_QUERIES))[:, None] & in_size
    query = query_ptr + (token * query_token_stride + head * query_head_stride)[:, None]
    key = key_ptr + (token * key_token_stride + (head - N_QUERIES) * key_head_stride)[:, None]
    x = tl.load(query + d[None, :], mask=is_query, other=0.0).to(tl.float32)
    x += tl.load(key + d[None, :], mask=is_key, other=0.0).to(tl.float32)
    if ARE_NEIGHBOURS:
        even, odd = tl.split(tl.reshape(x, (BM, PAD // 2, 2)))
        pair = tl.reshape(tl.join(-odd, even), (BM, PAD))
    else:
        other = tl.where(d < ROTATED, (d + ROTATED // 2) % ROTATED, d)
        pair = tl.load(query + other[None, :], mask=is_query, other=0.0).to(tl.float32)
        pair += tl.load(key + other[None, :], mask=is_key, other=0.0).to(tl.float32)
        pair = tl.where(d < ROTATED // 2, -1.0, 1.0)[None, :] * pair
    place = (token * cos_stride)[:, None]
    if EVERY == 2:
        each = tl.arange(0, PAD // 2)
        has_angle = (row < n_rows)[:, None] & (each < ROTATED // 2)[None, :]
        cos = tl.load(cos_ptr + place + each[None, :], mask=has_angle, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + place + each[None, :], mask=has_angle, other=0.0).to(tl.float32)
        cos = tl.reshape(tl.join(cos, cos), (BM, PAD))
        sin = tl.reshape(tl.join(sin, sin), (BM, PAD))
    else:
        place += (d % WIDTH)[None, :]
        has_angle = (row < n_rows)[:, None] & (d < ROTATED)[None, :]
        cos = tl.load(cos_ptr + place, mask=has_angle, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + place, mask=has_angle, other=0.0).to(tl.float32)
    turned = x * cos + pair * sin
    query_out = query_out_ptr + ((token * N_QUERIES + head) * DIM)[:, None] + d[None, :]
    key_out = key_out_ptr + ((token * N_KEYS + head - N_QUERIES) * DIM)[:, None] + d[None, :]
    tl.store(query_out, turned.to(query_out_ptr.dtype.element_ty), mask=is_query)
    tl.store(key_out, turned.to(key_out_ptr.dtype.element_ty), mask=is_key)


@triton.jit(do_not_specialize=["n_rows", "n_inner"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    n_rows,
    n_inner,
    outer_stride,
    inner_stride,
    eps,
    shift,
    IS_CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    BM: tl.constexpr,
):
    """Compute the RMS norm of each row in float32; subtract the mean first if IS_CENTRED."""
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    d = tl.arange(0, PAD)
    inside = (row < n_rows)[:, None] & (d < WIDTH)[None, :]
    first = row // n_inner * outer_stride + row % n_inner * inner_stride
    if HAS_WEIGHT:  # loaded before the sums need x
        weight = tl.load(weight_ptr + d, mask=d < WIDTH, other=0.0)
    x = tl.load(x_ptr + first[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if IS_CENTRED:
        x = tl.where(inside, x - (tl.sum(x, 1) / WIDTH)[:, None], 0.0)
    out = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    if HAS_WEIGHT:
        out *= (weight.to(tl.float32) + shift)[None, :]
    at = row[:, None] * WIDTH + d[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activation_value(gate, ACTIVATION: tl.constexpr):
    """Return the activation of float32 numbers."""
    if ACTIVATION == "silu":
        share = 1 / (1 + tl.exp(tl.minimum(-gate, 80.0)))  # avoids infinity
    elif ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(gate * 0.7071067811865476)
    else:  # tanh GELU: (1 + tanh(z)) / 2 is the logistic function of 2 z
        z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        share = 1 / (1 + tl.exp(tl.minimum(-2 * z, 80.0)))
    return gate * share


@triton.jit
def gated_activation(
    gate,
    up,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,
    SHIFT: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Return activation(gate) * (up + SHIFT) of float32 numbers; see `GatedActivation`.

    LIMIT: `gate` is clamped to at most LIMIT first, `up` to -LIMIT … LIMIT; None: no clamp.
    SLOPE: the activation is activation(gate * SLOPE) / SLOPE.
    """
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if SLOPE == 1:
        value = activation_value(gate, ACTIVATION)
    else:
        value = activation_value(gate * SLOPE, ACTIVATION) / SLOPE
    return value * (up + SHIFT)


@triton.jit(do_not_specialize=["n_tokens"])
def act_and_mul_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    n_tokens,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    WIDTH: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """Write the activation of one row times another row."""
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BW + tl.arange(0, BW)
    inside = (token < n_tokens)[:, None] & (d < WIDTH)[None, :]
    gate_at = (token * gate_stride)[:, None] + d[None, :]
    up_at = (token * up_stride)[:, None] + d[None, :]
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + up_at, mask=inside, other=0.0).to(tl.float32)
    place = token[:, None] * WIDTH + d[None, :]
    out = activation_value(gate, ACTIVATION) * up
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


def rotary_angles(
    positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype
) -> Tensor:
    """Return the scaled cosines, then the sines, of positions times frequencies: [T, D].

    positions: int64 [T]. frequencies: [D / 2]. dtype: of the result.
    """
    n_tokens, half = len(positions), len(frequencies)
    out = torch.empty(n_tokens, 2 * half, dtype=dtype, device=positions.device)
    n_each = _INTERPRETED if is_interpreted() else 1
    with torch.cuda.device_of(positions):
        rotary_angles_kernel[(triton.cdiv(n_tokens, n_each),)](
            positions, frequencies, out, n_tokens, scaling,
            HALF=half, PAD=block_size_for(half), BT=n_each, num_warps=1,
        )  # fmt: skip
    return out


def rotary_and_store_kv(
    heads: Tensor,
    rotary: RotaryArgs,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Apply norms and rotary embedding to packed heads; store keys and values in a layer's pool.

    heads: [T, H + 2 K, D], contiguous. slots: int64 [T]. keys, values: [S, K, D].

    Returns the queries, [T, H, D].
    """
    n_tokens, n_heads, size = heads.shape
    query = heads.new_empty(n_tokens, rotary.n_queries, size)
    n_each = _HEADS * (_INTERPRETED if is_interpreted() else 1)
    with torch.cuda.device_of(heads):
        rotary_and_store_kv_kernel[(triton.cdiv(n_tokens * n_heads, n_each),)](
            heads,
            rotary.rotary_angles,
            heads if rotary.query_norm is None else rotary.query_norm,
            heads if rotary.key_norm is None else rotary.key_norm,
            slots,
            query,
            keys,
            values,
            n_tokens * n_heads,
            rotary.eps,
            N_QUERIES=rotary.n_queries,
            N_KV=keys.shape[1],
            DIM=size,
            PAD=block_size_for(size),
            BM=n_each,
            HAS_NORMS=rotary.query_norm is not None,
            num_warps=4,
        )
    return query


def store(key: Tensor, value: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store heads of packed tokens in a layer's pool.

    key, value: [K, T, D] and [K, T, Dv]. slots: int64 [T]. keys, values: [S, K, D], [S, K, Dv].
    """
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    n_kv, n_tokens, key_dim = key.shape
    n_rows, value_dim = n_tokens * n_kv, value.shape[2]
    n_each = _HEADS * (_INTERPRETED if is_interpreted() else 1)
    with torch.cuda.device_of(key):
        store_kv_kernel[(triton.cdiv(n_rows, n_each),)](
            key,
            value,
            slots,
            keys,
            values,
            n_rows,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            N_KV=n_kv,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            PAD=block_size_for(max(key_dim, value_dim)),
            BM=n_each,
            num_warps=4,
        )


def supports_rotary(heads: Sequence[Tensor], cos: Tensor, sin: Tensor, axis: int) -> bool:
    """Return True if `apply_rotary` supports these."""
    if cos.dim() != 3 or len(cos) != 1 or cos.stride(2) != 1:
        return False
    if (cos.shape, cos.stride(), cos.dtype) != (sin.shape, sin.stride(), sin.dtype):
        return False
    size = heads[0].shape[-1]
    return all(
        x.dim() == 4
        and len(x) == 1
        and x.stride(3) == 1
        and (x.shape[3 - axis], x.shape[3], x.dtype) == (cos.shape[1], size, heads[0].dtype)
        for x in heads
    )


def apply_rotary(
    heads: Sequence[Tensor], cos: Tensor, sin: Tensor, axis: int, pairs: RotaryLayout
) -> tuple[Tensor, ...]:
    """Apply rotary embedding to one or two tensors of heads; see `AttentionStep.apply_rotary`.

    The results are contiguous by token.
    """
    first, last, size = heads[0], heads[-1], heads[0].shape[-1]
    n_tokens = cos.shape[1]
    n_each = [x.shape[axis] for x in heads]
    outs = [
        x.new_empty(1, n_tokens, n_heads, size) for x, n_heads in zip(heads, n_each, strict=True)
    ]
    n_rows = n_tokens * sum(n_each)
    n_of_program = _HEADS * (_INTERPRETED if is_interpreted() else 1)
    with torch.cuda.device_of(first):
        rotary_kernel[(triton.cdiv(n_rows, n_of_program),)](
            first,
            last,
            cos,
            sin,
            outs[0],
            outs[-1],
            n_rows,
            first.stride(axis),
            first.stride(3 - axis),
            last.stride(axis),
            last.stride(3 - axis),
            cos.stride(1),
            N_QUERIES=n_each[0],
            N_KEYS=sum(n_each[1:]),
            DIM=size,
            ROTATED=pairs.n,
            ARE_NEIGHBOURS=pairs.are_neighbours,
            EVERY=pairs.every,
            WIDTH=cos.shape[2],
            PAD=block_size_for(size),
            BM=n_of_program,
            num_warps=4,
        )
    return tuple(out if axis == 2 else out.transpose(1, 2) for out in outs)


class RowLayout(NamedTuple):
    """Strides of the rows of a tensor [..., E], along at most two axes."""

    n: int  # number of rows
    n_inner: int  # rows along the inner axis; n / n_inner along the outer one
    outer_stride: int  # elements between rows that are adjacent on the outer axis
    inner_stride: int  # elements between rows that are adjacent on the inner axis

    @classmethod
    def from_tensor(cls, x: Tensor) -> RowLayout | None:
        """Return the layout; None for more axes, or rows that are not contiguous."""
        if x.stride(-1) != 1:
            return None
        axes = [axis for axis in zip(x.shape[:-1], x.stride(), strict=False) if axis[0] != 1]
        if len(axes) > 2:
            if not x.is_contiguous():
                return None
            axes = [(x.numel() // x.shape[-1], x.shape[-1])]
        (n_outer, outer), (n_inner, inner) = [(1, 0), (1, 0), *axes][-2:]
        return cls(n_outer * n_inner, n_inner, outer, inner)


def supports_rms_norm(x: Tensor, weight: Tensor | None) -> bool:
    """Return True if `rms_norm` supports these."""
    is_fit = weight is None or (weight.shape == x.shape[-1:] and weight.is_contiguous())
    return is_fit and RowLayout.from_tensor(x) is not None


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    shift: float = 0.0,
    *,
    is_centred: bool = False,
) -> Tensor:
    """Return the RMS norm of rows [..., E] with a `RowLayout`; see `AttentionStep.rms_norm`."""
    rows, width = RowLayout.from_tensor(x), x.shape[-1]
    assert rows is not None
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not rows.n:
        return out
    pad = block_size_for(width)
    n_each = _INTERPRETED if is_interpreted() else max(1, _MIN_NUMBERS // pad)
    with torch.cuda.device_of(x):
        rms_norm_kernel[(triton.cdiv(rows.n, n_each),)](
            x, x if weight is None else weight.contiguous(), out, *rows, eps, shift,
            IS_CENTRED=is_centred, HAS_WEIGHT=weight is not None,
            WIDTH=width, PAD=pad, BM=n_each, num_warps=max(1, min(16, n_each * pad // 512)),
        )  # fmt: skip
    return out


def supports_act_and_mul(gate: Tensor, up: Tensor) -> bool:
    """Return True if `act_and_mul` supports these."""
    is_packed = gate.dim() == 2 or (gate.dim() == 3 and len(gate) == 1)
    is_alike = (gate.shape, gate.dtype) == (up.shape, up.dtype)
    return is_packed and is_alike and gate.stride(-1) == up.stride(-1) == 1


def act_and_mul(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return activation(gate) * up of packed tokens [T, I] or [1, T, I], contiguous."""
    width = gate.shape[-1]
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    gates, ups = gate.view(-1, width), up.view(-1, width)
    n_tokens = len(gates)
    if not n_tokens:
        return out
    n_each = _INTERPRETED if is_interpreted() else 1
    with torch.cuda.device_of(gate):
        # Tokens are the first axis: CUDA allows 65,535 programs on the second axis.
        act_and_mul_kernel[(triton.cdiv(n_tokens, n_each), triton.cdiv(width, _NUMBERS))](
            gates, ups, out, n_tokens, gates.stride(0), ups.stride(0),
            ACTIVATION=activation, WIDTH=width, BT=n_each, BW=_NUMBERS, num_warps=4,
        )  # fmt: skip
    return out
