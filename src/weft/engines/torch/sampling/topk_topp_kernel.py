"""Cutoffs of top-k, top-p and min-p in each row of logits, as a value and an id, in Triton.

Shapes are known in advance, nothing is read back, and no [B, V] tensor is allocated. A logit's bits
are transformed so that they decrease as it increases. A cutoff is searched for in these bits from
the left, one digit a pass over the row:

    float32    │ 11 bits │ 11 bits │ 10 bits │

    bfloat16   │ 11 bits │ 5 bits │             float16: 8; the other bits are constant

    sums         one a digit, of the tokens whose leading bits equal the cutoff's

Every program of a pass first finds the cutoff's digit in the sums of the last pass. Reading them
again is faster than another launch. Top-k counts tokens. Top-p adds integer weights, whose sum does
not depend on the order.

Atomic additions at one address wait for each other, so irrelevant tokens are skipped. The largest
logits of groups of 64 bound top-k. For top-p, tokens are skipped that together weigh less than what
it drops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # logits of a program
_GROUP = tl.constexpr(64)
_DIGITS = {torch.float32: (11, 11, 10), torch.bfloat16: (11, 5), torch.float16: (11, 8)}
_FIRST = tl.constexpr(2048)  # sums of the first digit
# Record of a pass for the next one, int64: sums, then a few numbers.
_RECORD = tl.constexpr(2048 + 8)
_PREFIX, _BEFORE = tl.constexpr(2048), tl.constexpr(2049)  # known leading bits; sum before them
_EDGE, _N, _OF = tl.constexpr(2050), tl.constexpr(2051), tl.constexpr(2052)
_TOTAL = tl.constexpr(2053)
_UNIT = tl.constexpr(float(1 << 40))  # the weight of the largest logit
_BLOCK_HISTOGRAM = tl.constexpr(256)  # up to so many digits are counted in a program first
_NONE = tl.constexpr(float("-inf"))
_INFINITE = tl.constexpr(float("inf"))


class Cutoffs(NamedTuple):
    """Filters keep logits above `threshold`, and of those equal to it the ids up to `last`.

    Attributes:
        threshold: float32 [B], -inf if nothing is cut.
        last: int64 [B], V if all equal logits are kept.
    """

    threshold: Tensor
    last: Tensor


# Helpers of all passes. `b` is the sampler, the first axis of the grid.


@triton.jit
def _tile(logits_ptr, rows_ptr, allowed_ptr, stride, n_words, n_vocab, ids, HAS_MASK: tl.constexpr):
    """Load the logits of `ids` of this program's row: float32, -inf for forbidden tokens.

    NaN and infinite logits also become -inf; the sampling kernel reports such rows as broken.
    """
    b = tl.program_id(0).to(tl.int64)
    inside = ids < n_vocab
    y = tl.load(logits_ptr + tl.load(rows_ptr + b) * stride + ids, mask=inside, other=_NONE)
    y = y.to(tl.float32)
    if HAS_MASK:
        words = tl.load(allowed_ptr + b * n_words + (ids >> 5), mask=inside, other=0)
        y = tl.where(((words >> (ids & 31)) & 1) != 0, y, _NONE)
    return tl.where(y < _INFINITE, y, _NONE)


@triton.jit
def _falling(y, WIDTH: tl.constexpr):
    """Return the leading WIDTH bits of logits y, transformed to decrease as y increases: uint32."""
    bits = tl.where(y == 0, 0.0, y).to(tl.uint32, bitcast=True) >> (32 - WIDTH)  # -0 becomes 0
    return tl.where(y < 0, bits, bits ^ ((1 << (WIDTH - 1)) - 1))


@triton.jit
def _value(falling, WIDTH: tl.constexpr):
    """Return the logits with the bits `falling`; the inverse of `_falling`: float32."""
    bits = falling.to(tl.uint32)
    bits = tl.where(bits >= (1 << (WIDTH - 1)), bits, bits ^ ((1 << (WIDTH - 1)) - 1))
    return (bits << (32 - WIDTH)).to(tl.float32, bitcast=True)


@triton.jit
def _top(tops_ptr, n_tiles, TILES: tl.constexpr):
    """Return the largest logit of the row, 0 if all are -inf.

    tops_ptr: largest logit of each tile, [B, n_tiles].
    """
    tiles = tl.arange(0, TILES)
    b = tl.program_id(0).to(tl.int64)
    tops = tl.load(tops_ptr + b * n_tiles + tiles, mask=tiles < n_tiles, other=_NONE)
    top = tl.max(tops, 0)
    return tl.where(top > _NONE, top, 0.0)


@triton.jit
def _weight(y, top, scale):
    """Return the weights of logits y: int64 multiples of exp((y - top) * scale), 2**40 for top."""
    return (tl.exp((y - top) * scale) * _UNIT).to(tl.int64)


@triton.jit
def _scale(early_ptr):
    """Return 1 / temperature before the filters of the row: float32."""
    return (1.0 / tl.load(early_ptr + tl.program_id(0))).to(tl.float32)


@triton.jit
def _wanted_count(top_k_ptr, n_vocab):
    """Return the row's top-k; 0 if it is off or keeps all tokens."""
    k = tl.load(top_k_ptr + tl.program_id(0))
    return tl.where(k < n_vocab, k, 0)


# Helpers that find the digit of the last pass.


@triton.jit
def _reached(sums, before, wanted, otherwise, N: tl.constexpr):
    """Return the digit at which the running sum reaches `wanted`.

    Returns (digit, running sum before it, sum of this digit).

    sums: sum of each of the N digits, likeliest tokens first.
    before: running sum before the first digit.
    otherwise: digit to return if all sums together do not reach `wanted`.
    """
    digits = tl.arange(0, N)
    running = (before + tl.cumsum(sums, 0)).to(wanted.dtype)
    digit = tl.min(tl.where((running >= wanted) & (sums > 0), digits, N), 0)
    digit = tl.where(digit < N, digit, otherwise)
    before += tl.sum(tl.where(digits < digit, sums, 0), 0)
    return digit, before, tl.sum(tl.where(digits == digit, sums, 0), 0)


@triton.jit
def _kth(record, k, LAST: tl.constexpr, IS_FIRST: tl.constexpr):
    """Find the k-th likeliest token in the counts of a pass.

    Returns (leading bits of the token, number of likelier tokens, number with these bits).

    record: counts of a pass by digit, and what earlier passes determined.
    LAST: number of digits in the record.
    IS_FIRST: the record is of the first digit. Then only tokens likelier than a sufficient digit
    were counted. If they are too few, the result is that digit.
    """
    sums = tl.load(record + tl.arange(0, LAST))
    prefix, before = tl.load(record + _PREFIX), tl.load(record + _BEFORE)
    if IS_FIRST:
        return _reached(sums, before, k, prefix, LAST)
    digit, before, n = _reached(sums, before, k, 0, LAST)
    return prefix * LAST + digit, before, n


@triton.jit
def _wanted_mass(first, share, top, scale, WIDTH: tl.constexpr):
    """Return the mass that top-p must reach: `share` of the mass that top-k kept.

    first: record of top-p's first pass, with the result of top-k.
    """
    n, edge = tl.load(first + _N), tl.load(first + _EDGE)
    level = tl.where(n > 0, _weight(tl.where(n > 0, _value(edge, WIDTH), _NONE), top, scale), 0)
    return share * (tl.load(first + _TOTAL) + n * level).to(tl.float64)


@triton.jit
def _heaviest(record, first, wanted, N: tl.constexpr, IS_FIRST: tl.constexpr):
    """Return the leading bits of the token that reaches the wanted mass, and the mass before it.

    record: weights of the last pass by digit. first: record of top-p's first pass.

    If tokens likelier than top-k's cutoff do not reach it, the result exceeds all bits. If only
    rounding prevents it, the result is the last token with a weight.
    """
    sums = tl.load(record + tl.arange(0, N))
    prefix, before = tl.load(record + _PREFIX), tl.load(record + _BEFORE)
    last = tl.max(tl.where(sums > 0, tl.arange(0, N), 0), 0)
    if IS_FIRST:
        last = tl.where(tl.load(first + _N) > 0, N, last)
    digit, before, _ = _reached(sums, before, wanted, last, N)
    return prefix * N + digit, before


# The passes, one launch each.


@triton.jit
def find_tops_kernel(
    logits_ptr,
    rows_ptr,
    allowed_ptr,
    top_k_ptr,
    tops_ptr,
    work_ptr,
    stride,
    n_words,
    n_vocab,
    n_tiles,
    PASSES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_K: tl.constexpr,
):
    """Store the largest logit of each tile. For top-k, count the largest logits of groups by digit.

    The counts bound the first digit of the k-th token; see the module.
    """
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = tile * TILE + tl.arange(0, TILE // _GROUP) * _GROUP
    ids = groups[:, None] + tl.arange(0, _GROUP)[None, :]
    y = _tile(logits_ptr, rows_ptr, allowed_ptr, stride, n_words, n_vocab, ids, HAS_MASK)
    highest = tl.max(y, 1)
    tl.store(tops_ptr + b * n_tiles + tile, tl.max(highest, 0))
    if HAS_K:
        k = _wanted_count(top_k_ptr, n_vocab)
        digit = _falling(highest, WIDTH) >> (WIDTH - 11)
        one = tl.full([TILE // _GROUP], 1, tl.int64)
        place = work_ptr + b * (PASSES * _RECORD) + digit
        tl.atomic_add(place, one, mask=tl.where(highest > _NONE, k, 0) > 0, sem="relaxed")


@triton.jit
def count_first_kernel(
    logits_ptr,
    rows_ptr,
    allowed_ptr,
    top_k_ptr,
    work_ptr,
    stride,
    n_words,
    n_vocab,
    PASSES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Count tokens by their first digit, up to the digit that bounds the k-th token.

    The counts of `find_tops_kernel` give that digit. Tokens with it are not counted.
    """
    k = _wanted_count(top_k_ptr, n_vocab)
    if k == 0:
        return
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = work_ptr + b * (PASSES * _RECORD)
    sums = tl.load(groups + tl.arange(0, _FIRST))
    limit, _, _ = _reached(sums, tl.load(groups + _BEFORE), k, _FIRST, _FIRST)
    record = groups + _RECORD
    tl.store(record + _PREFIX, limit.to(tl.int64), mask=tile == 0)
    ids = tile * TILE + tl.arange(0, TILE)
    y = _tile(logits_ptr, rows_ptr, allowed_ptr, stride, n_words, n_vocab, ids, HAS_MASK)
    digit = _falling(y, WIDTH) >> (WIDTH - 11)
    one = tl.full([TILE], 1, tl.int64)
    tl.atomic_add(record + digit, one, mask=(digit < limit) & (y > _NONE), sem="relaxed")


@triton.jit
def _count(record, falling, prefix, wanted, LEFT: tl.constexpr, N: tl.constexpr):
    """Count tokens whose bits begin with `prefix`, by the next digit, in a record.

    falling: bits of the tokens. wanted: True for tokens to count. LEFT: bits after that digit.
    N: number of its values.
    """
    inside = wanted & (((falling >> LEFT) // N) == prefix.to(tl.uint32))
    digit = (falling >> LEFT) & (N - 1)
    if N <= _BLOCK_HISTOGRAM:
        counts = tl.histogram(digit.to(tl.int32), N, mask=inside)
        place = record + tl.arange(0, N)
        tl.atomic_add(place, counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    else:
        one = tl.full(falling.shape, 1, tl.int64)
        tl.atomic_add(record + digit, one, mask=inside, sem="relaxed")


@triton.jit
def count_next_kernel(
    logits_ptr,
    rows_ptr,
    allowed_ptr,
    top_k_ptr,
    work_ptr,
    stride,
    n_words,
    n_vocab,
    PASS: tl.constexpr,
    PASSES: tl.constexpr,
    WIDTH: tl.constexpr,
    LEFT: tl.constexpr,
    LAST: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Count tokens with the known leading bits of the k-th token, by the next digit."""
    k = _wanted_count(top_k_ptr, n_vocab)
    if k == 0:
        return
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record = work_ptr + (b * PASSES + PASS) * _RECORD
    prefix, before, _ = _kth(record - _RECORD, k, LAST, PASS == 2)
    tl.store(record + _PREFIX, prefix, mask=tile == 0)
    tl.store(record + _BEFORE, before, mask=tile == 0)
    if prefix >= (1 << (WIDTH - LEFT)) // N:  # the row has fewer tokens
        return
    ids = tile * TILE + tl.arange(0, TILE)
    y = _tile(logits_ptr, rows_ptr, allowed_ptr, stride, n_words, n_vocab, ids, HAS_MASK)
    _count(record, _falling(y, WIDTH), prefix, y > _NONE, LEFT, N)


@triton.jit
def _edge_of_count(record, k, WIDTH: tl.constexpr, N: tl.constexpr):
    """Return top-k's cutoff: (bits of the k-th token, equal tokens to keep, equal tokens).

    (1 << WIDTH, 0, 0) if top-k keeps all tokens. record: counts of the last pass.
    """
    edge, before, of = _kth(record, k, N, False)
    is_cut = (k > 0) & (edge < (1 << WIDTH))
    edge = tl.where(is_cut, edge, 1 << WIDTH)
    return edge, tl.where(is_cut, k - before, 0), tl.where(is_cut, of, 0)


@triton.jit
def weigh_first_kernel(
    logits_ptr,
    rows_ptr,
    allowed_ptr,
    top_k_ptr,
    top_p_ptr,
    early_ptr,
    tops_ptr,
    work_ptr,
    stride,
    n_words,
    n_vocab,
    n_tiles,
    PASS: tl.constexpr,
    PASSES: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_K: tl.constexpr,
):
    """Add weights by the first digit, of tokens likelier than top-k's cutoff; store that cutoff."""
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record = work_ptr + (b * PASSES + PASS) * _RECORD
    edge = tl.full([], 1 << WIDTH, tl.int64)
    if HAS_K:
        k = _wanted_count(top_k_ptr, n_vocab)
        edge, n, of = _edge_of_count(record - _RECORD, k, WIDTH, LAST)
        tl.store(record + _N, n, mask=tile == 0)
        tl.store(record + _OF, of, mask=tile == 0)
    tl.store(record + _EDGE, edge, mask=tile == 0)
    share = tl.load(top_p_ptr + b)
    if share == 1:
        return
    ids = tile * TILE + tl.arange(0, TILE)
    y = _tile(logits_ptr, rows_ptr, allowed_ptr, stride, n_words, n_vocab, ids, HAS_MASK)
    weights = _weight(y, _top(tops_ptr, n_tiles, TILES), _scale(early_ptr))
    falling = _falling(y, WIDTH)
    if HAS_K:
        weights = tl.where(falling.to(tl.int64) < edge, weights, 0)
    tl.atomic_add(record + _TOTAL, tl.sum(weights, 0), sem="relaxed")
    # Tokens with less weight are together at most half of what top-p drops.
    threshold = ((1 - share) * _UNIT / 2 / n_vocab).to(tl.int64)
    digit = falling >> (WIDTH - 11)
    tl.atomic_add(record + digit, weights, mask=weights > threshold, sem="relaxed")


@triton.jit
def weigh_next_kernel(
    logits_ptr,
    rows_ptr,
    allowed_ptr,
    top_p_ptr,
    early_ptr,
    tops_ptr,
    work_ptr,
    stride,
    n_words,
    n_vocab,
    n_tiles,
    PASS: tl.constexpr,
    FIRST: tl.constexpr,
    PASSES: tl.constexpr,
    WIDTH: tl.constexpr,
    LEFT: tl.constexpr,
    LAST: tl.constexpr,
    N: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Add the weights of tokens with the known leading bits of top-p's cutoff, by the next digit.

    The last digit counts tokens: those with equal bits have equal weights.
    """
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    share = tl.load(top_p_ptr + b)
    if share == 1:
        return
    record = work_ptr + (b * PASSES + PASS) * _RECORD
    first = work_ptr + (b * PASSES + FIRST) * _RECORD
    top, scale = _top(tops_ptr, n_tiles, TILES), _scale(early_ptr)
    wanted = _wanted_mass(first, share, top, scale, WIDTH)
    prefix, before = _heaviest(record - _RECORD, first, wanted, LAST, PASS == FIRST + 1)
    tl.store(record + _PREFIX, prefix, mask=tile == 0)
    tl.store(record + _BEFORE, before, mask=tile == 0)
    if prefix >= (1 << (WIDTH - LEFT)) // N:
        return
    ids = tile * TILE + tl.arange(0, TILE)
    y = _tile(logits_ptr, rows_ptr, allowed_ptr, stride, n_words, n_vocab, ids, HAS_MASK)
    falling = _falling(y, WIDTH)
    # Tokens that top-k dropped are behind the cutoff, where sums are not read.
    if LEFT == 0:
        _count(record, falling, prefix, y > _NONE, LEFT, N)
    else:
        weights = _weight(y, top, scale)
        inside = (((falling >> LEFT) // N) == prefix.to(tl.uint32)) & (weights > 0)
        tl.atomic_add(record + ((falling >> LEFT) & (N - 1)), weights, mask=inside, sem="relaxed")


@triton.jit
def _edge_of_mass(record, first, wanted, top, scale, WIDTH: tl.constexpr, N: tl.constexpr):
    """Return (bits of top-p's cutoff, number of equal tokens to keep, number of equal tokens)."""
    counts = tl.load(record + tl.arange(0, N))
    prefix, before = tl.load(record + _PREFIX), tl.load(record + _BEFORE)
    is_at_k = prefix >= (1 << WIDTH) // N
    bits = prefix * N + tl.arange(0, N)
    each = _weight(tl.where(counts > 0, _value(bits, WIDTH), _NONE), top, scale)
    sums = each * counts
    last = tl.max(tl.where(sums > 0, tl.arange(0, N), 0), 0)
    digit, before, _ = _reached(sums, before, wanted, last, N)
    edge = tl.where(is_at_k, tl.load(first + _EDGE), prefix * N + digit)
    of = tl.sum(tl.where(tl.arange(0, N) == digit, counts, 0), 0)
    usable = tl.where(is_at_k, tl.load(first + _N), of)  # 0: the row has no token at all
    level = _weight(tl.where(usable > 0, _value(edge, WIDTH), _NONE), top, scale)
    missing = tl.ceil((wanted - before.to(tl.float64)) / tl.maximum(level, 1).to(tl.float64))
    n = tl.minimum(tl.maximum(missing, 1.0).to(tl.int64), usable)
    return tl.where(usable > 0, edge, 1 << WIDTH), n, tl.where(is_at_k, tl.load(first + _OF), of)


@triton.jit
def count_level_kernel(
    logits_ptr,
    rows_ptr,
    allowed_ptr,
    top_k_ptr,
    top_p_ptr,
    early_ptr,
    tops_ptr,
    work_ptr,
    counts_ptr,
    stride,
    n_words,
    n_vocab,
    n_tiles,
    PASS: tl.constexpr,
    FIRST: tl.constexpr,
    PASSES: tl.constexpr,
    WIDTH: tl.constexpr,
    LAST: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_P: tl.constexpr,
):
    """Store the cutoff, and the number of equal tokens in each tile if some are dropped."""
    b, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record = work_ptr + (b * PASSES + PASS) * _RECORD
    if HAS_P:
        first = work_ptr + (b * PASSES + FIRST) * _RECORD
        edge, n, of = tl.load(first + _EDGE), tl.load(first + _N), tl.load(first + _OF)
        share = tl.load(top_p_ptr + b)
        if share < 1:
            top, scale = _top(tops_ptr, n_tiles, TILES), _scale(early_ptr)
            wanted = _wanted_mass(first, share, top, scale, WIDTH)
            edge, n, of = _edge_of_mass(record - _RECORD, first, wanted, top, scale, WIDTH, LAST)
    else:
        k = _wanted_count(top_k_ptr, n_vocab)
        edge, n, of = _edge_of_count(record - _RECORD, k, WIDTH, LAST)
    tl.store(record + _EDGE, edge, mask=tile == 0)
    tl.store(record + _N, n, mask=tile == 0)
    tl.store(record + _OF, of, mask=tile == 0)
    if n >= of:
        return
    ids = tile * TILE + tl.arange(0, TILE)
    y = _tile(logits_ptr, rows_ptr, allowed_ptr, stride, n_words, n_vocab, ids, HAS_MASK)
    is_level = (_falling(y, WIDTH) == edge.to(tl.uint32)) & (y > _NONE)
    tl.store(counts_ptr + b * n_tiles + tile, tl.sum(is_level.to(tl.int32), 0))


@triton.jit
def _floor(top, early, share):
    """Return the smallest logit that min-p keeps; -inf if it is off."""
    wide = top.to(tl.float64)
    threshold = tl.log(tl.where(share > 0, share, 1.0))
    about = (wide + threshold * early).to(tl.float32)
    bits = _falling(about, 32).to(tl.int64)
    floor = about
    for step in tl.static_range(3):  # rounding may have moved it either way
        tried = _value(bits + 1 - step, 32)
        enough = (tried.to(tl.float64) - wide) / early >= threshold
        if step == 0:
            floor = tl.where(enough, tried, _INFINITE)
        else:
            floor = tl.minimum(floor, tl.where(enough, tried, _INFINITE))
    floor = tl.where(floor < _INFINITE, floor, about)
    return tl.where(share > 0, floor, _NONE)


@triton.jit
def write_cutoffs_kernel(
    logits_ptr,
    rows_ptr,
    allowed_ptr,
    min_p_ptr,
    early_ptr,
    tops_ptr,
    work_ptr,
    counts_ptr,
    threshold_ptr,
    last_ptr,
    stride,
    n_words,
    n_vocab,
    n_tiles,
    PASS: tl.constexpr,
    PASSES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    HAS_EDGE: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
):
    """Write the cutoff of a row: find the last kept id; min-p's threshold replaces a lower one."""
    b = tl.program_id(0).to(tl.int64)
    threshold = tl.full([], _NONE, tl.float32)
    last = tl.full([], 0, tl.int64) + n_vocab
    if HAS_EDGE:
        record = work_ptr + (b * PASSES + PASS) * _RECORD
        edge, n = tl.load(record + _EDGE), tl.load(record + _N)
        if edge < (1 << WIDTH):
            threshold = _value(edge, WIDTH)
        if n < tl.load(record + _OF):
            tiles = tl.arange(0, TILES)
            counts = tl.load(counts_ptr + b * n_tiles + tiles, mask=tiles < n_tiles, other=0)
            counts = counts.to(tl.int64)
            tile, before, _ = _reached(counts, tl.full([], 0, tl.int64), n, 0, TILES)
            ids = tile * TILE + tl.arange(0, TILE)
            y = _tile(logits_ptr, rows_ptr, allowed_ptr, stride, n_words, n_vocab, ids, HAS_MASK)
            is_level = (_falling(y, WIDTH) == edge.to(tl.uint32)) & (y > _NONE)
            nth, _, _ = _reached(is_level.to(tl.int64), before, n, 0, TILE)
            last = tl.full([], 0, tl.int64) + tile * TILE + nth
    if HAS_FLOOR:
        top = _top(tops_ptr, n_tiles, TILES)
        floor = _floor(top, tl.load(early_ptr + b), tl.load(min_p_ptr + b))
        if floor > threshold:
            threshold = floor
            last = tl.full([], 0, tl.int64) + n_vocab
    tl.store(threshold_ptr + b, threshold)
    tl.store(last_ptr + b, last)


def find_cutoffs(
    logits: Tensor,
    rows: Tensor,
    early: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Cutoffs:
    """Find the cutoffs of top-k, then top-p, then min-p in each row; does not wait for the device.

    Args:
        logits: [R, V], float32, bfloat16 or float16, contiguous rows; not modified. Rows with NaN
            or +inf, or without a finite logit, get undefined cutoffs.
        rows: int64 [B], the row number of each sampler; they may repeat.
        early: float64 [B], temperatures before the filters.
        top_k: int64 [B], 0 is off; None: off in all rows. top_p, min_p: float64 [B], 1 and 0 are
            off.
        allowed: int32 [B, words], a bit a token, the lowest first; others count as -inf. None: all.
    """
    n_rows, device = len(rows), logits.device
    threshold = torch.empty(n_rows, dtype=torch.float32, device=device)
    last = torch.empty(n_rows, dtype=torch.int64, device=device)
    if not n_rows:
        return Cutoffs(threshold, last)
    if top_k is None and top_p is None and min_p is None:
        return Cutoffs(threshold.fill_(-torch.inf), last.fill_(logits.shape[1]))
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _Search(logits, rows, early, top_k, top_p, min_p, allowed).run(threshold, last)
    return Cutoffs(threshold, last)


class _Search:
    """The launches of one call of `find_cutoffs`, and the tensors that they share."""

    def __init__(
        self,
        logits: Tensor,
        rows: Tensor,
        early: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        min_p: Tensor | None,
        allowed: Tensor | None,
    ) -> None:
        self._digits = _DIGITS[logits.dtype]
        n_vocab = logits.shape[1]
        n_tiles = triton.cdiv(n_vocab, TILE)
        # Any tensor may replace an absent option, which is not read.
        options = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "allowed": allowed}
        self._present = {name for name, tensor in options.items() if tensor is not None}
        searches = len(self._present & {"top_k", "top_p"})
        self._passes = 2 + searches * len(self._digits) if searches else 0
        shape = (len(rows), self._passes * _RECORD.value)
        self._grid: tuple[int, ...] = (len(rows), n_tiles)
        self._values: dict[str, Any] = {
            f"{name}_ptr": rows if tensor is None else tensor for name, tensor in options.items()
        }
        self._values |= {
            "logits_ptr": logits,
            "rows_ptr": rows,
            "early_ptr": early,
            "tops_ptr": torch.empty(self._grid, dtype=torch.float32, device=rows.device),
            "work_ptr": torch.zeros(shape, dtype=torch.int64, device=rows.device)
            if searches
            else rows,
            "counts_ptr": torch.empty(self._grid, dtype=torch.int32, device=rows.device),
            "stride": logits.stride(0),
            "n_words": 0 if allowed is None else allowed.shape[1],
            "n_vocab": n_vocab,
            "n_tiles": n_tiles,
            "PASSES": self._passes,
            "WIDTH": sum(self._digits),
            "TILE": TILE,
            "TILES": triton.next_power_of_2(n_tiles),
            "HAS_MASK": allowed is not None,
            "HAS_K": top_k is not None,
            "HAS_P": top_p is not None,
            "HAS_EDGE": searches > 0,
            "HAS_FLOOR": min_p is not None,
        }

    def run(self, threshold: Tensor, last: Tensor) -> None:
        """Launch all passes; they write the cutoffs to `threshold` and `last`, as in `Cutoffs`."""
        self._launch(find_tops_kernel)
        number, first = 1, 0
        if "top_k" in self._present:
            self._launch(count_first_kernel)
            for digit in range(1, len(self._digits)):
                self._launch(count_next_kernel, PASS=number + digit, **self._sizes(digit))
            number += len(self._digits)
        if "top_p" in self._present:
            first = number
            self._launch(weigh_first_kernel, PASS=first, LAST=1 << self._digits[-1])
            for digit in range(1, len(self._digits)):
                self._launch(
                    weigh_next_kernel, PASS=first + digit, FIRST=first, **self._sizes(digit)
                )
            number += len(self._digits)
        if number > 1:
            sizes = {"PASS": number, "FIRST": first, "LAST": 1 << self._digits[-1]}
            self._launch(count_level_kernel, **sizes)
        self._grid = self._grid[:1]
        self._launch(write_cutoffs_kernel, PASS=number, threshold_ptr=threshold, last_ptr=last)

    def _sizes(self, digit: int) -> dict[str, int]:
        """Return the compile-time arguments of the pass for digit number `digit`, 1 or more."""
        return {
            "LEFT": sum(self._digits[digit + 1 :]),
            "LAST": 1 << self._digits[digit - 1],
            "N": 1 << self._digits[digit],
        }

    def _launch(self, kernel: Any, **more: Any) -> None:
        """Launch one kernel over all samplers. more: its arguments besides the shared ones."""
        values = self._values | more
        kernel[self._grid](**{name: values[name] for name in kernel.arg_names}, num_warps=8)
