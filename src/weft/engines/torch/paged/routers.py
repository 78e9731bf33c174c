"""Routing of a mixture in Triton: one launch instead of eight to twenty."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kv_backend import RouterSpec
from .kernel import block_size_for

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_EXPERTS = 1024


@triton.jit
def first_argmax(scores, is_free, lane, END: tl.constexpr):
    """Return the first index of the largest score among those where `is_free` is true (Triton)."""
    best = tl.max(tl.where(is_free, scores, -float("inf")), 0)
    return tl.min(tl.where(is_free & (scores == best), lane, END), 0)


@triton.jit
def select_groups(scores, N: tl.constexpr, N_KEPT: tl.constexpr, BY_TWO: tl.constexpr):
    """Return a mask of the scores whose expert groups may be selected (Triton)."""
    SIZE: tl.constexpr = scores.shape[0] // N
    by_group = tl.reshape(scores, [N, SIZE])
    best = tl.max(by_group, 1)
    if BY_TWO:
        at = tl.arange(0, SIZE)[None, :]
        first = tl.min(tl.where(by_group == best[:, None], at, SIZE), 1)
        best += tl.max(tl.where(at == first[:, None], -float("inf"), by_group), 1)
    group = tl.arange(0, N)
    is_kept = group < 0
    for _ in range(N_KEPT):
        is_kept |= group == first_argmax(best, ~is_kept, group, N)
    return tl.reshape(tl.broadcast_to(is_kept[:, None], [N, SIZE]), [N * SIZE])


@triton.jit
def topk_routing_kernel(
    logit_ptr,
    bias_ptr,
    chosen_ptr,
    share_ptr,
    logit_stride,
    N_EXPERTS: tl.constexpr,
    PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    FUNCTION: tl.constexpr,
    IS_NORMED: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    N_GROUPS: tl.constexpr,
    N_KEPT: tl.constexpr,
    BY_TWO: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Select one token's experts and compute their weights; see `RouterSpec`. N_GROUPS: 0: no
    groups.

    NaN counts as the largest score, as in PyTorch, and gives NaN weights.
    """
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PAD)
    is_there = lane < N_EXPERTS
    logit_at = logit_ptr + token * logit_stride
    logits = tl.load(logit_at + lane, mask=is_there, other=-float("inf")).to(tl.float32)
    highest = tl.max(logits, 0)
    if FUNCTION == "softmax":
        weights = tl.exp(logits - highest)
        weights = weights / tl.sum(weights, 0)
    else:
        exponent = tl.minimum(-logits, 80.0, propagate_nan=tl.PropagateNan.ALL)
        weights = 1 / (1 + tl.exp(exponent))
    scores = logits if BY_LOGITS else weights
    if HAS_BIAS:
        scores += tl.load(bias_ptr + lane, mask=is_there, other=0.0).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("inf"))
    is_free = is_there
    if N_GROUPS > 0:
        scores = tl.where(select_groups(scores, N_GROUPS, N_KEPT, BY_TWO), scores, -float("inf"))
    place = tl.arange(0, K_PAD)
    chosen = tl.zeros([K_PAD], tl.int32)
    share = tl.zeros([K_PAD], tl.float32)
    # Normalised weights use the selected logits: probabilities among all may underflow.
    OF_CHOSEN: tl.constexpr = IS_NORMED and FUNCTION == "softmax"
    values = tl.where(weights == weights, logits, weights) if OF_CHOSEN else weights
    for j in range(TOP_K):
        expert = first_argmax(scores, is_free, lane, N_EXPERTS - 1)
        is_free &= lane != expert
        own = tl.sum(tl.where(lane == expert, values, 0.0), 0)
        chosen = tl.where(place == j, expert, chosen)
        share = tl.where(place == j, own, share)
    is_chosen = place < TOP_K
    if OF_CHOSEN:
        highest = tl.max(tl.where(is_chosen, share, -float("inf")), 0)
        share = tl.where(is_chosen, tl.exp(share - highest), 0.0)
    if IS_NORMED:
        share = share / tl.maximum(tl.sum(share, 0), 1e-20, propagate_nan=tl.PropagateNan.ALL)
    at = token * TOP_K + place
    tl.store(chosen_ptr + at, chosen.to(tl.int64), mask=is_chosen)
    tl.store(share_ptr + at, (share * SCALE).to(share_ptr.dtype.element_ty), mask=is_chosen)


def supports_routing(logits: Tensor, bias: Tensor | None, router: RouterSpec) -> bool:
    """Return True if `select_experts` supports these."""
    n_experts = logits.shape[-1]
    groups = router.groups
    return (
        logits.dim() == 2
        and logits.stride(1) == 1
        and logits.dtype in _DTYPES
        and router.top_k <= n_experts <= _MAX_EXPERTS
        and (bias is None or (bias.shape == (n_experts,) and bias.is_contiguous()))
        and (groups is None or _are_even(n_experts, groups.n))
    )


def _are_even(n_experts: int, n_groups: int) -> bool:
    """Return True if experts fill a power of two, and groups have two or more of them."""
    is_power = n_experts & (n_experts - 1) == 0 and n_groups & (n_groups - 1) == 0
    return is_power and n_experts == block_size_for(n_experts) and 2 * n_groups <= n_experts


def select_experts(
    logits: Tensor, bias: Tensor | None, router: RouterSpec
) -> tuple[Tensor, Tensor]:
    """Return selected experts and their weights; see `AttentionStep.select_experts`."""
    n_tokens, n_experts = logits.shape
    numbers = torch.empty(n_tokens, router.top_k, dtype=torch.int64, device=logits.device)
    shares = torch.empty_like(numbers, dtype=router.dtype)
    if not n_tokens:
        return numbers, shares
    n_groups, n_kept, by = router.groups or (0, 0, "one")
    pad = block_size_for(n_experts)
    with torch.cuda.device_of(logits):
        topk_routing_kernel[(n_tokens,)](
            logits, logits if bias is None else bias, numbers, shares, logits.stride(0),
            N_EXPERTS=n_experts, PAD=pad,
            TOP_K=router.top_k, K_PAD=triton.next_power_of_2(router.top_k),
            FUNCTION=router.function, IS_NORMED=router.is_normed, BY_LOGITS=router.by_logits,
            HAS_BIAS=bias is not None, N_GROUPS=n_groups, N_KEPT=n_kept, BY_TWO=by == "two",
            SCALE=router.scale, num_warps=1 if pad <= 256 else 4,
        )  # fmt: skip
    return numbers, shares
