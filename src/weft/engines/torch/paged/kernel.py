"""Tree attention in Triton: work items over slots of a pool, then a merge row by row.

An item is a range of a slot list and a tile of the queries below it. A tile's rows are query tokens
times the query heads of one KV head. Keys are addressed by slot and masked by position. Prefixes,
tails and new tokens need no distinction.

    item   ├── n slots of the table, positions first … ──┤   attended by query rows m0 … m0 + BM

    part   for every (item, token, head): output and log-sum-exp over the keys of that item

    row    its parts are adjacent; the merge combines them into one output

Written for compute capability 9.0 and Triton's interpreter: inputs keep their dtypes, sums are
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_backend import AttentionSpec
from ..layout import Layout

# Rows of a tile. From 64 on sm_90 multiplies tiles by warp groups (wgmma). Tiles of 128 read the
# keys half as often, and their sums leave room for one program a processor.
NARROW, WIDE, BROAD = 16, 64, 128
TILES = BROAD, WIDE, NARROW
ITEM_FIELDS = 12
_FIELDS = tl.constexpr(ITEM_FIELDS)
_MANY_PROGRAMS = 1024  # of a launch
_WIDEST_OF_BROAD = 256  # dimensions of a head
_TILE_BYTES = 16384  # of keys in shared memory, for each stage
_MANY_PARTS = 24  # of a row
_INTERPRETED_ROWS = 256  # the interpreter runs programs one after the other
# Before Triton 3.7 a product's sum stays in its registers until the next block, which rescales it.
# ptxas then waits for every single wgmma.
_WAITS_ALWAYS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
# Barriers of a merge with parts along the second axis: 1 with Triton 3.6, 24 with 3.9. Along the
# first axis: 12 and none.
PARTS_AXIS = 1 if _WAITS_ALWAYS else 0
_HIDDEN = tl.constexpr(-1e30)
_LOG2E = tl.constexpr(1.4426950408889634)
_side_streams_of: dict[torch.device, list[torch.cuda.Stream]] = {}


@triton.jit
def attend_block(
    acc,
    top,
    total,
    q,
    position,
    low,
    high,
    slots_ptr,
    first,
    k_ptr,
    v_ptr,
    scale,
    softcap,
    window,
    SLOT_KEYS: tl.constexpr,
    SLOT_VALUES: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BN: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_OPEN: tl.constexpr,
    ENDS_PRODUCTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend a tile of queries to the keys low … high of an item; return acc, top and total.

    IS_OPEN: all queries see all of these keys, which are full blocks of BN.
    """
    d_key, d_value = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    # One multiplication scales the logits and converts them to powers of two.
    factor = _LOG2E if HAS_CAP else scale * _LOG2E
    for start in range(low, high, BN):
        number = start + tl.arange(0, BN)
        is_key = number < high
        if IS_OPEN:
            slot = tl.load(slots_ptr + number).to(tl.int64)
        else:
            slot = tl.load(slots_ptr + number, mask=is_key, other=0).to(tl.int64)
        key_at = k_ptr + (slot * SLOT_KEYS)[:, None] + d_key[None, :]
        if IS_OPEN and KEY_DIM == KEY_PAD:
            k = tl.load(key_at)
        else:
            k = tl.load(key_at, mask=is_key[:, None] & (d_key < KEY_DIM)[None, :], other=0.0)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if HAS_CAP:
            x = softcap * (1 - 2 / (tl.exp2(x * (2 * _LOG2E * scale / softcap)) + 1))  # tanh
        if not IS_OPEN:
            place = first + number
            visible = is_key[None, :] & (place[None, :] <= position[:, None])
            if HAS_WINDOW:
                visible = visible & (place[None, :] > position[:, None] - window)
            x = tl.where(visible, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1) * factor)
        base = higher if IS_OPEN else tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(x * factor - base[:, None])
        shrink = tl.exp2(top - base)
        value_at = v_ptr + (slot * SLOT_VALUES)[:, None] + d_value[None, :]
        if IS_OPEN and VALUE_DIM == VALUE_PAD:
            v = tl.load(value_at)
        else:
            v = tl.load(value_at, mask=is_key[:, None] & (d_value < VALUE_DIM)[None, :], other=0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        # Reading the sum here moves it out of the product's registers.
        if ENDS_PRODUCTS:
            acc += 0.0 * shrink[:, None]
        total = total * shrink + tl.sum(p, 1)
        top = higher
    return acc, top, total


@triton.jit(do_not_specialize=["window"])
def tree_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    position_ptr,
    first_part_ptr,
    item_ptr,
    part_ptr,
    lse_ptr,
    out_ptr,
    scale,
    softcap,
    window,
    q_token,
    q_head,
    N_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_SINGLE_PART: tl.constexpr,
    ENDS_PRODUCTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend one tile of queries to the keys of one item, for one KV head.

    Pointers: the tensors of `tree_attention`, `Work` and the results, in the order of its launch.
    scale, softcap, window: of `AttentionSpec`. q_token, q_head: strides of the queries.
    N_HEADS … BN, ENDS_PRODUCTS, PRECISION: see `tile_config`.
    IS_SINGLE_PART: each row has one part, so the kernel writes `out_ptr`. Otherwise it writes
    `part_ptr` and `lse_ptr`, and `merge_attn_states_kernel` follows.
    """
    N_KV: tl.constexpr = N_HEADS // GROUP
    # KV heads are the inner index: adjacent programs read adjacent parts of a slot.
    kv_head = tl.program_id(0) % N_KV
    item = item_ptr + tl.program_id(0) // N_KV * _FIELDS
    at, n, first = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    token0, n_rows, m0 = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    ordinal = tl.load(item + 6)
    at_before, n_before = tl.load(item + 8), tl.load(item + 9)

    m = m0 + tl.arange(0, BM)
    is_row = m < n_rows
    token = token0 + m // GROUP
    head = kv_head * GROUP + m % GROUP
    position = tl.load(position_ptr + token, mask=is_row, other=-1)
    d_key, d_value = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    q = tl.load(
        q_ptr + (token.to(tl.int64) * q_token + head * q_head)[:, None] + d_key[None, :],
        mask=is_row[:, None] & (d_key < KEY_DIM)[None, :],
        other=0.0,
    )

    end = tl.minimum(n, tl.max(position, 0) - first + 1)
    low = 0
    if HAS_WINDOW:
        oldest = tl.min(tl.where(is_row, position, 1 << 30), 0)
        low = tl.maximum(0, oldest - window + 1 - first)
    acc = tl.zeros([BM, VALUE_PAD], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    slots_ptr = table_ptr + at
    k_ptr += kv_head * KEY_DIM
    v_ptr += kv_head * VALUE_DIM
    if BM == 16 or GROUP > 16:  # other tiles have several tokens
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(0, oldest - window + 1 - first + n_before)
        # A loop without iterations also waits for its first keys. But ptxas waits for each product
        # of a warp group if its sum comes out of a branch.
        if BM > 16 or begin < n_before:
            acc, top, total = attend_block(
                acc, top, total, q, position, begin, n_before, table_ptr + at_before,
                first - n_before, k_ptr, v_ptr, scale, softcap, window, N_KV * KEY_DIM,
                N_KV * VALUE_DIM, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, BN, HAS_CAP, HAS_WINDOW,
                False, ENDS_PRODUCTS, PRECISION,
            )  # fmt: skip
    # Tiles of few rows wait for memory, and a second loop would wait for its first keys again.
    if BM >= 64:
        # Keys:  low ── some queries ── open ── all queries see them ── shut ── some queries ── end
        opens = 0
        if HAS_WINDOW:
            late = tl.maximum(low, tl.max(position, 0) - window + 1 - first)
            opens = low + tl.cdiv(late - low, BN) * BN
            until = tl.minimum(opens, end)
            acc, top, total = attend_block(
                acc, top, total, q, position, low, until, slots_ptr, first, k_ptr, v_ptr, scale,
                softcap, window, N_KV * KEY_DIM, N_KV * VALUE_DIM, KEY_DIM, VALUE_DIM, KEY_PAD,
                VALUE_PAD, BN, HAS_CAP, True, False, ENDS_PRODUCTS, PRECISION,
            )  # fmt: skip
        shuts = tl.minimum(end, tl.min(tl.where(is_row, position, 1 << 30), 0) - first + 1)
        shuts = opens + tl.maximum(shuts - opens, 0) // BN * BN
        acc, top, total = attend_block(
            acc, top, total, q, position, opens, shuts, slots_ptr, first, k_ptr, v_ptr, scale,
            softcap, window, N_KV * KEY_DIM, N_KV * VALUE_DIM, KEY_DIM, VALUE_DIM, KEY_PAD,
            VALUE_PAD, BN, HAS_CAP, HAS_WINDOW, True, ENDS_PRODUCTS, PRECISION,
        )  # fmt: skip
        low = shuts
    acc, top, total = attend_block(
        acc, top, total, q, position, low, end, slots_ptr, first, k_ptr, v_ptr, scale, softcap,
        window, N_KV * KEY_DIM, N_KV * VALUE_DIM, KEY_DIM, VALUE_DIM, KEY_PAD, VALUE_PAD, BN,
        HAS_CAP, HAS_WINDOW, False, ENDS_PRODUCTS, PRECISION,
    )  # fmt: skip

    has_keys = total > 0
    below = tl.where(has_keys, total, 1.0)
    inside = is_row[:, None] & (d_value < VALUE_DIM)[None, :]
    if IS_SINGLE_PART:
        row = token.to(tl.int64) * N_HEADS + head
        tl.store(
            out_ptr + row[:, None] * VALUE_DIM + d_value[None, :],
            (acc / below[:, None]).to(out_ptr.dtype.element_ty),
            mask=inside,
        )
    else:
        part = tl.load(first_part_ptr + token, mask=is_row, other=0).to(tl.int64) + ordinal
        row = part * N_HEADS + head
        tl.store(lse_ptr + row, tl.where(has_keys, top + tl.log2(below), _HIDDEN), mask=is_row)
        tl.store(
            part_ptr + row[:, None] * VALUE_DIM + d_value[None, :],
            acc / below[:, None],
            mask=inside,
        )


@triton.jit(do_not_specialize=["n_tokens"])
def merge_attn_states_kernel(
    part_ptr,
    lse_ptr,
    first_part_ptr,
    sink_ptr,
    out_ptr,
    n_tokens,
    N_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    BM: tl.constexpr,
    BP: tl.constexpr,
    AXIS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the parts of rows into one output, token by token and head by head.

    Several parts are read at once, because reading one after the other would wait for memory each
    time. AXIS: the axis of parts in a block, 0 or 1.
    """
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    is_row = m < n_tokens * N_HEADS
    token, head = m // N_HEADS, m % N_HEADS
    d = tl.arange(0, VALUE_PAD)
    first = tl.load(first_part_ptr + token, mask=is_row, other=0)
    end = tl.load(first_part_ptr + token + 1, mask=is_row, other=0)
    acc = tl.zeros([BM, VALUE_PAD], tl.float32)
    top = tl.full([BM], _HIDDEN, tl.float32)
    total = tl.zeros([BM], tl.float32)
    if HAS_SINKS:  # a key without a value
        top = tl.load(sink_ptr + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
        total += 1.0
    for start in range(0, tl.max(end - first, 0), BP):
        each = tl.expand_dims(start + tl.arange(0, BP), 1 - AXIS)
        number = tl.expand_dims(first, AXIS) + each
        is_part = number < tl.expand_dims(end, AXIS)
        row = number.to(tl.int64) * N_HEADS + tl.expand_dims(head, AXIS)
        lse = tl.load(lse_ptr + row, mask=is_part, other=_HIDDEN)
        values = tl.load(
            part_ptr + row[:, :, None] * VALUE_DIM + d[None, None, :],
            mask=is_part[:, :, None] & (d < VALUE_DIM)[None, None, :],
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(lse, AXIS))
        weight = tl.exp2(lse - tl.expand_dims(higher, AXIS))
        shrink = tl.exp2(top - higher)
        acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], AXIS)
        total = total * shrink + tl.sum(weight, AXIS)
        top = higher
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out_ptr + m.to(tl.int64)[:, None] * VALUE_DIM + d[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (d < VALUE_DIM)[None, :],
    )


def is_interpreted() -> bool:
    """Return True if kernels run in Triton's interpreter, on any device.

    The interpreter must be selected before Triton is imported, because Triton's own functions are
    compiled for it then.
    """
    return bool(triton.knobs.runtime.interpret) and not isinstance(tl.max, triton.JITFunction)


class Work(NamedTuple):
    """Work items of a step on the device, all int32.

    An item is ITEM_FIELDS numbers:

    - 0–2: start in the table, number of slots, position of the first slot
    - 3–5: first query token, query rows (tokens times heads of a group), the tile's first row
    - 6: number among the row's parts
    - 8–9: for an item of one token, start and number of slots directly before these

    The others are 0. An item of zeros has no rows.
    """

    # Slots of all lists, concatenated.
    table: Tensor
    # Items by tile class: [n, ITEM_FIELDS].
    narrow: Tensor
    wide: Tensor
    broad: Tensor
    # Index of each token's first part, and the total: [T + 1].
    first_part: Tensor
    # Positions of the packed tokens: [T].
    positions: Tensor
    n_parts: int
    # Every token has one part.
    is_single: bool = False
    # Cached output tensors of a captured step; padding tokens have no part, and must stay finite.
    outputs: dict[tuple[int, int, torch.dtype], Tensor] | None = None

    @property
    def by_tile(self) -> tuple[Tensor, Tensor, Tensor]:
        """The work items as three tensors, one for each tile size, in the order of TILES."""
        return self.broad, self.wide, self.narrow


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    work: Work,
    spec: AttentionSpec,
) -> Tensor:
    """Attend packed queries to the work items, one layer.

    query: [H, T, D]; keys, values: the layer's pool, [S, K, D] and [S, K, Dv], with the new tokens'
    slots. Returns [T, H, Dv] in the dtype of the query.
    """
    if query.stride(2) != 1:
        query = query.contiguous()
    n_heads, n_tokens, key_dim = query.shape
    n_kv, value_dim = values.shape[1:]
    is_single_part = work.is_single and spec.sinks is None
    if is_single_part:
        parts = lse = out = _output(query, work, n_heads, value_dim)
    else:
        parts = query.new_empty(work.n_parts, n_heads, value_dim, dtype=torch.float32)
        lse = query.new_empty(work.n_parts, n_heads, dtype=torch.float32)
        out = query.new_empty(n_tokens, n_heads, value_dim)

    def launch(items: Tensor, n_rows: int) -> None:
        n_programs, sizes = len(items) * n_kv, (n_heads, n_kv, key_dim, value_dim)
        tree_attention_kernel[(n_programs,)](
            query,
            keys,
            values,
            work.table,
            work.positions,
            work.first_part,
            items,
            parts,
            lse,
            out,
            spec.scale,
            spec.softcap or 1.0,
            spec.window or 0,
            query.stride(1),
            query.stride(0),
            **tile_config(*sizes, n_rows, keys.dtype.itemsize, n_programs=n_programs),
            HAS_CAP=spec.softcap is not None,
            HAS_WINDOW=spec.window is not None,
            IS_SINGLE_PART=is_single_part,
        )

    classes = [each for each in zip(work.by_tile, TILES, strict=True) if len(each[0])]
    with torch.cuda.device_of(query):  # Triton launches on the current device
        run_concurrently([partial(launch, *each) for each in classes], query)
        if not is_single_part:
            _merge(parts, lse, work, spec.sinks, out)
    return out


def _output(query: Tensor, work: Work, n_heads: int, value_dim: int) -> Tensor:
    """Return the output tensor for single parts; padding tokens keep their finite values."""
    shape = query.shape[1], n_heads, value_dim
    if work.outputs is None:
        return query.new_empty(shape)
    key = n_heads, value_dim, query.dtype
    output = work.outputs.get(key)
    if output is None:
        output = work.outputs[key] = query.new_zeros(shape)
    return output


def _merge(parts: Tensor, lse: Tensor, work: Work, sinks: Tensor | None, out: Tensor) -> None:
    """Merge the parts of each token into `out`. sinks: logits of attention sinks, [H], or None."""
    n_tokens, n_heads, value_dim = out.shape
    n_rows, n_parts = merge_block_sizes(n_tokens, work.n_parts)
    merge_attn_states_kernel[(triton.cdiv(n_tokens * n_heads, n_rows),)](
        parts,
        lse,
        work.first_part,
        lse if sinks is None else sinks,
        out,
        n_tokens,
        N_HEADS=n_heads,
        VALUE_DIM=value_dim,
        VALUE_PAD=block_size_for(value_dim),
        BM=n_rows,
        BP=n_parts,
        AXIS=PARTS_AXIS,
        HAS_SINKS=sinks is not None,
        num_warps=4,
    )


def run_concurrently(launches: Sequence[Callable[[], None]], on: Tensor) -> None:
    """Launch kernels on the device of a tensor; later launches wait for all of them.

    Outside of a capture they run one after the other: launching on several streams costs more time
    than it saves.
    """
    if len(launches) < 2 or not on.is_cuda or not torch.cuda.is_current_stream_capturing():
        for launch in launches:
            launch()
        return
    current = torch.cuda.current_stream(on.device)
    started = current.record_event()
    first, *others = launches
    side_streams = _side_streams(on.device, len(others))
    for stream, launch in zip(side_streams, others, strict=True):
        stream.wait_event(started)
        with torch.cuda.stream(stream):
            launch()
    first()
    for stream in side_streams:
        current.wait_stream(stream)


def _side_streams(device: torch.device, n: int) -> list[torch.cuda.Stream]:
    """Return n cached streams of a device, for concurrent launches."""
    streams = _side_streams_of.setdefault(device, [])
    while len(streams) < n:
        # Priority streams, as the recorder's. PyTorch shares the other ones, so launches of other
        # code on them would be captured, too.
        streams.append(torch.cuda.Stream(device, priority=-1))
    return streams[:n]


def merge_block_sizes(n_tokens: int, n_parts: int) -> tuple[int, int]:
    """Return (tokens per program, parts of each that it reads at once) for the merge kernel.

    n_parts: of all tokens. Larger numbers were slower: by a third with 18 parts of 10 leaves, by
    half with 4 of 512.
    """
    if is_interpreted():
        return _INTERPRETED_ROWS, 4
    return (4, 4) if n_parts <= _MANY_PARTS * n_tokens else (1, 16)


def tile_config(
    n_heads: int,
    n_kv: int,
    key_dim: int,
    value_dim: int,
    n_rows: int,
    n_bytes: int,
    *,
    n_programs: int = 0,
) -> dict[str, Any]:
    """Return the compile-time arguments of `tree_attention_kernel` for tiles of one size.

    Args:
        n_heads: number of query heads.
        n_kv: number of KV heads.
        key_dim: size of a key.
        value_dim: size of a value.
        n_rows: query rows of a tile, one of TILES.
        n_bytes: bytes of one element of the KV.
        n_programs: programs of the launch, which decide the pipeline's depth; 0 counts as few.
    """
    key_pad, value_pad = block_size_for(key_dim), block_size_for(value_dim)
    widest = max(key_pad, value_pad)
    n_keys = max(16, min(64, _TILE_BYTES // (widest * n_bytes)))
    is_large = widest > 128 or n_bytes > 2
    if n_rows == BROAD or (n_rows == WIDE and not is_large):
        n_stages = 5
    else:
        n_stages = 2 if n_programs > _MANY_PROGRAMS else 3
    return {
        "N_HEADS": n_heads,
        "GROUP": n_heads // n_kv,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_PAD": key_pad,
        "VALUE_PAD": value_pad,
        "BM": n_rows,
        "BN": n_keys,
        "ENDS_PRODUCTS": n_rows >= WIDE and _WAITS_ALWAYS,
        "PRECISION": "tf32x3",  # float32 products with nearly all bits
        # Enough for sums and products to fit registers. With 8 warps and blocks of 16 keys, Triton
        # 3.6 compiles a kernel that reads beyond its shared memory.
        "num_warps": 8 if n_rows > WIDE or (n_rows == WIDE and is_large and n_keys > 16) else 4,
        # Slots need as many stages as keys and values: with 3, a block is loaded when the last one
        # is done, with 5 two blocks earlier. If there are more programs than fit the GPU at once,
        # fewer stages leave room for more programs.
        "num_stages": n_stages,
    }


def has_broad(layout: Layout) -> bool:
    """Return True if tiles of BROAD rows fit into registers and shared memory in every layer."""
    shapes = [shape for shape, _ in layout.groups]
    widest = max([max(shape.key_dim, shape.value_dim) for shape in shapes], default=0)
    is_short = all(shape.key_dtype.itemsize == shape.value_dtype.itemsize == 2 for shape in shapes)
    return is_short and widest <= _WIDEST_OF_BROAD


def block_size_for(n: int) -> int:
    """Return the size of a Triton block that holds n numbers: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(n)))
