"""Sampling in Triton: one kernel over tiles of a row's logits, one over the row's tiles.

A tile is a square of ids, 64 members of each of 64 groups (`sampling.metrics`):

    tile   moments of the raw logits · the leading token, by noise in float32

    row    moments of all its tiles · the winner among the leading tokens, in float64

Logits are read once, in the model's own dtype, and nothing of their size is written. The winner is
the reference's. Two tokens of one tile may change places if their scores are equal to float32's
rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...._core.sampling.metrics import GROUP_SIZE
from ...._core.sampling.sampler import BROKEN, NOTHING
from . import filters
from .sampling_tensors import RowIndex, SamplingTensors
from .topk_topp_kernel import Cutoffs, find_cutoffs

_SQUARE = tl.constexpr(GROUP_SIZE * GROUP_SIZE)
_SIDE = tl.constexpr(GROUP_SIZE)
# Multiply by powers of two: float32 division is approximate on a GPU.
_A_SIDE, _A_TIME = tl.constexpr(1 / GROUP_SIZE), tl.constexpr(2.0**-23)
_NOTHING, _BROKEN = tl.constexpr(NOTHING), tl.constexpr(BROKEN)
_NO_TOKEN = tl.constexpr(1 << 30)


@triton.jit
def key_of(stream, position):
    """Return the random key of one uint64 stream and position; Triton version of `rng.keys_of`."""
    k0, k1 = stream & 0xFFFFFFFF, stream >> 32
    c0, c1 = position & 0xFFFFFFFF, position >> 32
    c2, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (p1 >> 32) ^ c1 ^ k0, (p0 >> 32) ^ c3 ^ k1
        c1, c3 = p1 & 0xFFFFFFFF, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0 | (c1 << 32)


@triton.jit
def splitmix(key, counter):
    """Return SplitMix64 random numbers for a key and counters, uint64; as `rng.splitmix`."""
    out = (counter + 1) * 0x9E3779B97F4A7C15 + key
    out = (out ^ (out >> 30)) * 0xBF58476D1CE4E5B9
    out = (out ^ (out >> 27)) * 0x94D049BB133111EB
    return out ^ (out >> 31)


@triton.jit
def times_of(words, dtype: tl.constexpr):
    """Return standard exponential times from the upper 23 bits of uint64 words, as `rng` does."""
    return -tl.log(1 - ((words >> 41).to(dtype) + 0.5) * _A_TIME)


@triton.jit
def noise_of(key, ids):
    """Return `rng.token_noise` of ids under one key: float64."""
    group = splitmix(key, (ids // _SQUARE * _SIDE + ids % _SIDE).to(tl.uint64))
    time = times_of(group, tl.float64) * _A_SIDE
    later = times_of(splitmix(key, ids.to(tl.uint64) + 4294967296), tl.float64)
    is_first = (group % _SIDE).to(tl.int64) == ids // _SIDE % _SIDE
    return -tl.log(tl.where(is_first, time, time + later))


@triton.jit
def sample_tile_kernel(
    raw_ptr,
    left_ptr,
    row_ptr,
    left_row_ptr,
    allowed_ptr,
    threshold_ptr,
    last_ptr,
    stream_ptr,
    drawn_at_ptr,
    greedy_ptr,
    early_ptr,
    late_ptr,
    moment_ptr,
    best_ptr,
    raw_stride,
    left_stride,
    n_words,
    N_VOCAB: tl.constexpr,
    N_TILES: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    HAS_KEPT: tl.constexpr,
):
    """Reduce one tile of a sampler's row: moments of the logits, and the leading token.

    Inputs are the tensors of `SampleArgs`. Outputs per sampler and tile: moment_ptr (maximum and
    sums of the raw logits, and of those left) and best_ptr (the leading token).

    HAS_LEFT: edited logits are given. HAS_MASK, HAS_EDGE: allowed tokens, cutoffs are given.
    HAS_KEPT: also sum the probability of the tokens left.
    """
    sampler, tile = (tl.program_id(0) // N_TILES).to(tl.int64), tl.program_id(0) % N_TILES
    member, group = tl.arange(0, _SIDE)[:, None], tl.arange(0, _SIDE)[None, :]
    ids = tile * _SQUARE + member * _SIDE + group
    inside = ids < N_VOCAB
    raw_at = raw_ptr + tl.load(row_ptr + sampler) * raw_stride + ids
    raw = tl.load(raw_at, mask=inside, other=float("-inf")).to(tl.float32)
    is_number = raw < float("inf")
    has_others = tl.min((is_number | ~inside).to(tl.int32)) == 0
    raw = tl.where(is_number, raw, float("-inf"))
    peak = tl.max(raw)
    below = raw - tl.where(peak > float("-inf"), peak, 0.0)
    weights = tl.exp(below)
    out = moment_ptr + sampler * 5 * N_TILES + tile
    # An infinite peak marks the row as broken; its other values are ignored.
    tl.store(out, tl.where(has_others, float("inf"), peak))
    tl.store(out + N_TILES, tl.where(has_others, 0.0, tl.sum(weights)))
    tl.store(out + 2 * N_TILES, tl.sum(tl.where(weights > 0, below, 0.0) * weights))

    left, left_at = raw, raw_at
    if HAS_LEFT:
        left_at = left_ptr + tl.load(left_row_ptr + sampler) * left_stride + ids
        left = tl.load(left_at, mask=inside, other=float("-inf")).to(tl.float32)
        left = tl.where(left < float("inf"), left, float("-inf"))
    if HAS_MASK:
        word = tl.load(allowed_ptr + sampler * n_words + ids // 32, mask=inside, other=0)
        left = tl.where((word >> (ids % 32)) & 1 != 0, left, float("-inf"))
    if HAS_EDGE:
        threshold, last = tl.load(threshold_ptr + sampler), tl.load(last_ptr + sampler)
        is_kept = (left > threshold) | ((left == threshold) & (ids <= last))
        left = tl.where(is_kept, left, float("-inf"))
    top = tl.max(left)
    tl.store(out + 3 * N_TILES, top)
    top = tl.where(top > float("-inf"), top, 0.0)

    early, late = tl.load(early_ptr + sampler), tl.load(late_ptr + sampler)
    stream = tl.load(stream_ptr + sampler).to(tl.uint64, bitcast=True)
    key = key_of(stream, tl.load(drawn_at_ptr + sampler).to(tl.uint64, bitcast=True))
    heights = (left - top) * (1 / (early * late)).to(tl.float32)
    if HAS_KEPT:
        tl.store(out + 4 * N_TILES, tl.sum(tl.exp(heights)))
    # Tokens arrive at rate exp(height), and the first one wins: largest height plus noise.
    arrival = tl.where(left == top, 0.0, float("inf"))
    if tl.load(greedy_ptr + sampler) == 0:
        words = splitmix(key, (tile * _SIDE + group).to(tl.uint64))
        first = times_of(words, tl.float32) * _A_SIDE
        later = times_of(splitmix(key, ids.to(tl.uint64) + 4294967296), tl.float32)
        is_first = (words % _SIDE).to(tl.int32) == member
        arrival = tl.where(is_first, first, first + later) * tl.exp(-heights)
    soonest = tl.min(arrival)
    winner = tl.min(tl.where(arrival == soonest, ids, _NO_TOKEN))
    tl.store(best_ptr + sampler * N_TILES + tile, tl.where(soonest < float("inf"), winner, -1))


@triton.jit(do_not_specialize=["n_samplers"])
def reduce_row_kernel(
    raw_ptr,
    left_ptr,
    row_ptr,
    left_row_ptr,
    stream_ptr,
    drawn_at_ptr,
    greedy_ptr,
    early_ptr,
    late_ptr,
    moment_ptr,
    best_ptr,
    out_ptr,
    raw_stride,
    left_stride,
    n_samplers,
    N_TILES: tl.constexpr,
    PAD: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_KEPT: tl.constexpr,
):
    """Combine a sampler's tiles into one token, its log-probability and the row's entropy.

    Inputs are the outputs of `sample_tile_kernel` and the tensors of `SampleArgs`. out_ptr: see
    `draw_tokens`.
    """
    sampler = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, PAD)
    inside = tile < N_TILES
    at = moment_ptr + sampler * 5 * N_TILES + tile
    peaks = tl.load(at, mask=inside, other=float("-inf"))
    totals = tl.load(at + N_TILES, mask=inside, other=0.0).to(tl.float64)
    means = tl.load(at + 2 * N_TILES, mask=inside, other=0.0).to(tl.float64)
    peak = tl.max(peaks)
    is_broken = (peak == float("inf")) | (peak == float("-inf"))
    peak = tl.where(is_broken, 0.0, peak)
    away = tl.where(totals > 0, peaks - peak, 0.0).to(tl.float64)
    shares = tl.exp(away)
    total = tl.maximum(tl.sum(totals * shares), 1e-300)
    log_total = tl.log(total)
    mean = tl.sum((means + away * totals) * shares) / total
    entropy = tl.where(is_broken, 0.0, tl.maximum(log_total - mean, 0.0))

    early, late = tl.load(early_ptr + sampler), tl.load(late_ptr + sampler)
    stream = tl.load(stream_ptr + sampler).to(tl.uint64, bitcast=True)
    key = key_of(stream, tl.load(drawn_at_ptr + sampler).to(tl.uint64, bitcast=True))
    is_greedy = tl.load(greedy_ptr + sampler) != 0
    tops = tl.load(at + 3 * N_TILES, mask=inside, other=float("-inf"))
    top = tl.max(tops)
    is_dead = top == float("-inf")
    top = tl.where(is_dead, 0.0, top)
    best = tl.load(best_ptr + sampler * N_TILES + tile, mask=inside, other=-1)
    raw_row = raw_ptr + tl.load(row_ptr + sampler) * raw_stride
    left_row = raw_row
    if HAS_LEFT:
        left_row = left_ptr + tl.load(left_row_ptr + sampler) * left_stride
    left = tl.load(left_row + best, mask=best >= 0, other=float("-inf")).to(tl.float64)
    height = (left - top) / early / late
    noise = tl.where(is_greedy, 0.0, noise_of(key, tl.maximum(best, 0)))
    score = height + noise
    won = tl.min(tl.where(score == tl.max(score), best, _NO_TOKEN))
    is_drawn = (won >= 0) & (won < _NO_TOKEN) & ~is_broken & ~is_dead
    raw = tl.load(raw_row + won, mask=is_drawn, other=0.0).to(tl.float64)
    logprob = tl.where(is_drawn, raw - peak - log_total, 0.0)

    out = out_ptr + sampler
    token = tl.where(is_broken, _BROKEN, tl.where(is_drawn, won, _NOTHING))
    tl.store(out, token.to(tl.int64))
    tl.store(out + n_samplers, bits_of(logprob))
    tl.store(out + 2 * n_samplers, bits_of(entropy))
    if HAS_KEPT:
        weights = tl.load(at + 4 * N_TILES, mask=inside, other=0.0).to(tl.float64)
        depth = tl.where(weights > 0, (tops.to(tl.float64) - top) / early / late, 0.0)
        log_left = tl.log(tl.maximum(tl.sum(weights * tl.exp(depth)), 1e-300))
        share = tl.sum(tl.where(best == won, height, 0.0)) - log_left
        tl.store(out + 3 * n_samplers, bits_of(tl.where(is_greedy | ~is_drawn, 0.0, share)))


@triton.jit
def bits_of(value):
    """Return the bits of a value as float32, in an int64."""
    return value.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)


class SampleArgs(NamedTuple):
    """Inputs of B samplers."""

    # Logits of any float dtype: [R, V].
    raw: Tensor
    # Row number of each sampler: int64 [B].
    rows: Tensor
    # Random streams and positions, and 1 for greedy samplers: int64 [B].
    streams: Tensor
    positions: Tensor
    greedy: Tensor
    # Temperatures before and after the filters: float64 [B]; see `SamplingTensors`.
    early: Tensor
    late: Tensor
    # Edited logits, -inf for dropped tokens: [L, V]; None: the raw ones.
    left: Tensor | None = None
    # Row number in `left` of each sampler: int64 [B].
    left_rows: Tensor | None = None
    # Allowed tokens, a bit a token: int32 [B, words].
    allowed: Tensor | None = None
    # Cutoffs of the filters among allowed and edited logits.
    edges: Cutoffs | None = None

    @classmethod
    def from_tensors(cls, logits: Tensor, index: RowIndex, tensors: SamplingTensors) -> SampleArgs:
        """Collect the inputs of the samplers of `tensors`. logits: [R, V]."""
        by = (
            tensors.streams,
            tensors.positions,
            tensors.is_greedy,
            tensors.early,
            tensors.late,
        )
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        left, rows, allowed = logits, index.rows, tensors.allowed
        is_edited = tensors.is_edited or tensors.typical is not None
        if is_edited:
            left, allowed = filters.edited(index.of(logits).float(), tensors), None
            rows = torch.arange(len(left), device=left.device)
        if tensors.typical is not None:
            left = filters.drop_by_filters(left, tensors)
        edges = None
        if tensors.cut:
            edges = find_cutoffs(left, rows, tensors.early, allowed=allowed, **tensors.cut)
        if not is_edited:
            return cls(logits, index.rows, *by, allowed=allowed, edges=edges)
        return cls(logits, index.rows, *by, left=left, left_rows=rows, edges=edges)


def draw_tokens(args: SampleArgs, *, kept: bool = False) -> Tensor:
    """Sample one token a sampler in two launches, without waiting.

    Returns int64 [3, B]: ids, and the float32 bits of logprobs and entropies; with `kept`, a fourth
    row `DrawResult.kept`. Samplers without any token left get NOTHING, those with logits that are
    not numbers BROKEN; their other values are undefined.
    """
    raw, n = args.raw, len(args.rows)
    n_tiles = triton.cdiv(raw.shape[1], GROUP_SIZE * GROUP_SIZE)
    out = torch.empty((4 if kept else 3, n), dtype=torch.int64, device=raw.device)
    if not n:
        return out
    moments = torch.empty((n, 5, n_tiles), dtype=torch.float32, device=raw.device)
    best = torch.empty((n, n_tiles), dtype=torch.int32, device=raw.device)
    left = raw if args.left is None else args.left
    left_rows = args.rows if args.left_rows is None else args.left_rows
    by = (args.streams, args.positions, args.greedy, args.early, args.late)
    has_left = args.left is not None
    with torch.cuda.device_of(raw):
        sample_tile_kernel[(n * n_tiles,)](
            raw,
            left,
            args.rows,
            left_rows,
            best if args.allowed is None else args.allowed,
            *((moments, args.rows) if args.edges is None else args.edges),
            *by,
            moments,
            best,
            raw.stride(0),
            left.stride(0),
            0 if args.allowed is None else args.allowed.shape[1],
            N_VOCAB=raw.shape[1],
            N_TILES=n_tiles,
            HAS_LEFT=has_left,
            HAS_MASK=args.allowed is not None,
            HAS_EDGE=args.edges is not None,
            HAS_KEPT=kept,
            num_warps=8,
        )
        reduce_row_kernel[(n,)](
            raw,
            left,
            args.rows,
            left_rows,
            *by,
            moments,
            best,
            out,
            raw.stride(0),
            left.stride(0),
            n,
            N_TILES=n_tiles,
            PAD=int(triton.next_power_of_2(n_tiles)),
            HAS_LEFT=has_left,
            HAS_KEPT=kept,
            num_warps=1,
        )
    return out
