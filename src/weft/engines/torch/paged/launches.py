"""What a launch does for what is launched after it. No number is another one for it.

    early   a kernel is launched while the one in front of it ends, and waits for that by itself
            (programmatic dependent launch)
    ahead   programs beside a kernel's own ask for a part of the weight that is multiplied next:
            the product finds it in the card's L2 cache

Between two products, and while few queries meet their keys, a card's memory has little to do; both
fill that time, from 9.0 on, where a caller says what is multiplied next. Neither has been timed on
a card, so both are off: `benchmarks/gpu_ways.py` times them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_FIRST = (9, 0)  # compute capability
_MOST_TOKENS = 128  # a product of more is bound by what it multiplies, not by what it reads
_LEAST_BYTES, _MOST_BYTES = 128, 1024  # that one thread asks for: a line of the cache, or some
_ASK = "cp.async.bulk.prefetch.L2.global [$1], {n_bytes}; mov.u32 $0, 0;"
NOT_SPECIALISED = ["n_own", "n_asked", "n_each", "row_bytes"]


class Ways(NamedTuple):
    """is_early: kernels are launched early.

    short, turn, merge: how many bytes of a weight are asked for ahead beside a norm or a gate,
    beside what is in front of attention, and beside what puts its parts together. by_row: the first
    bytes of all rows, so that every program of the product finds its first ones; else the first
    rows.
    """

    is_early: bool = False
    short: int = 0
    turn: int = 0
    merge: int = 0
    by_row: bool = True


class _Chosen:
    ways = Ways()


def use(ways: Ways) -> None:
    """Launch so from now on. Steps that were captured before go on as they are."""
    _Chosen.ways = ways


@triton.jit
def wait_for_the_last(IS_EARLY: tl.constexpr):
    """Wait until all that the kernel in front has written is there; then the next may be launched.

    In this order: so what was written by those before that is there without a wait.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def asked_at(number, n_asked, n_each, row_bytes, N_BYTES: tl.constexpr, N: tl.constexpr):
    """Where the pieces of a weight begin, in bytes, that the program of that number asks for."""
    piece = tl.minimum(number * N + tl.arange(0, N), n_asked - 1)
    return (piece // n_each).to(tl.int64) * row_bytes + piece % n_each * N_BYTES


@triton.jit
def ask_ahead(
    number, next_ptr, n_asked, n_each, row_bytes,
    ASK: tl.constexpr, N_BYTES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Ask for n_asked pieces of N_BYTES, n_each of them side by side in each row; N a program."""
    at = next_ptr.to(tl.int64) + asked_at(number, n_asked, n_each, row_bytes, N_BYTES, N)
    tl.inline_asm_elementwise(ASK, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)


def early(following: Tensor | None) -> dict[str, Any]:
    """Return what a kernel is launched with that calls `wait_for_the_last`.

    following: the weight that is multiplied next; who says it knows what is in front, too: kernels.
    """
    if following is not None and _Chosen.ways.is_early and _is_for(following.device):
        return {"IS_EARLY": True, "launch_pdl": True}
    return {"IS_EARLY": False}


class Ahead(NamedTuple):
    """n_programs: how many beside a kernel's own ask ahead. named: what it is launched with."""

    n_programs: int
    named: dict[str, Any]


def asked(
    beside: Literal["short", "turn", "merge"],
    following: Tensor | None,
    n_tokens: int,
    x: Tensor,
    n_warps: int,
) -> Ahead:
    """Return what is asked for beside a kernel.

    following: the weight [out, in] that is multiplied next, by n_tokens. x: any tensor of the
    kernel's. n_warps: of a program.
    """
    ways = _Chosen.ways
    n_bytes, pieces = getattr(ways, beside), None
    if following is not None and n_bytes and n_tokens <= _MOST_TOKENS and _is_for(following.device):
        pieces = pieces_of(following, n_bytes, by_row=ways.by_row)
    if following is None or pieces is None:
        nothing = {"n_asked": 0, "n_each": 1, "row_bytes": 0, "ASK": None, "ASK_BYTES": 0}
        return Ahead(0, {"next_ptr": x, **nothing, "ASKS": 0})
    named = {
        "next_ptr": following,
        "n_asked": pieces.n,
        "n_each": pieces.n_each,
        "row_bytes": pieces.row_bytes,
        "ASK": _ASK.format(n_bytes=pieces.n_bytes),
        "ASK_BYTES": pieces.n_bytes,
        "ASKS": 32 * n_warps,
    }
    return Ahead(triton.cdiv(pieces.n, 32 * n_warps), named)


class Pieces(NamedTuple):
    """n pieces of n_bytes, n_each of them side by side at the beginning of each row."""

    n: int
    n_each: int
    row_bytes: int
    n_bytes: int


def pieces_of(weight: Tensor, n_bytes: int, *, by_row: bool) -> Pieces | None:
    """Return about n_bytes of a weight [out, in]; None where it does not lie so that they can be
    asked for.
    """
    if weight.dim() != 2 or weight.data_ptr() % 16:
        return None
    if not weight.is_contiguous():
        weight, by_row = weight.t(), False
        if not weight.is_contiguous():
            return None
    n_bytes = min(n_bytes, weight.nbytes)
    if not by_row:
        n = n_bytes // _MOST_BYTES
        return Pieces(n, 1, _MOST_BYTES, _MOST_BYTES) if n else None
    row_bytes, share = weight.stride(0) * weight.itemsize, n_bytes // max(1, len(weight))
    if share < _LEAST_BYTES or row_bytes % 16:
        return None
    each = min(_MOST_BYTES, 1 << share.bit_length() - 1)
    return Pieces(len(weight) * (share // each), share // each, row_bytes, each)


@cache
def _is_for(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= _FIRST
