"""Kernels that find a step's slots and copy its inputs into the buffers of a CUDA graph.

Each is one kernel, because they are launched one by one before every replay.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 256  # of a program


@triton.jit(do_not_specialize=["n_tokens", "n_on"])
def find_slots_kernel(
    position_ptr, base_ptr, table_ptr, slot_ptr, n_tokens, n_on, BT: tl.constexpr
):  # fmt: skip
    """Increase positions by n_on, in place, and look up their slots."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    is_token = token < n_tokens
    position = tl.load(position_ptr + token, mask=is_token, other=0) + n_on
    base = tl.load(base_ptr + token, mask=is_token, other=0)
    slot = tl.load(table_ptr + base + position, mask=is_token, other=0)
    tl.store(position_ptr + token, position, mask=is_token)
    tl.store(slot_ptr + token, slot, mask=is_token)


@triton.jit(do_not_specialize=["n_tokens"])
def copy_inputs_kernel(
    id_ptr,
    slot_ptr,
    position_ptr,
    to_id_ptr,
    to_slot_ptr,
    to_position32_ptr,
    to_position64_ptr,
    n_tokens,
    BT: tl.constexpr,
):
    """Copy a step's token ids, slots (as int64) and positions (as int32 and as int64)."""
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    is_token = token < n_tokens
    ids = tl.load(id_ptr + token, mask=is_token, other=0)
    slot = tl.load(slot_ptr + token, mask=is_token, other=0)
    position = tl.load(position_ptr + token, mask=is_token, other=0)
    tl.store(to_id_ptr + token, ids, mask=is_token)
    tl.store(to_slot_ptr + token, slot.to(tl.int64), mask=is_token)
    tl.store(to_position32_ptr + token, position, mask=is_token)
    tl.store(to_position64_ptr + token, position.to(tl.int64), mask=is_token)


def advance_slots(positions: Tensor, n_on: int, bases: Tensor, table: Tensor) -> Tensor:
    """Advance the positions of packed tokens in place, and return the slots of the new positions.

    Args:
        positions: int32 [T], changed in place.
        n_on: added to each position.
        bases: int32 [T]; the slot of a token is table[base + position].
        table: int32.

    Returns:
        int32 [T].
    """
    slots = torch.empty_like(positions)
    n_tokens = len(positions)
    with torch.cuda.device_of(positions):
        find_slots_kernel[(triton.cdiv(n_tokens, _TOKENS),)](
            positions, bases, table, slots, n_tokens, n_on, BT=_TOKENS, num_warps=2
        )
    return slots


def copy_inputs(
    ids: Tensor, slots: Tensor, positions: Tensor, into: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    """Copy T tokens to the beginning of other tensors.

    Args:
        ids: int64 [T]; slots, positions: int32 [T].
        into: ids and slots, int64; positions, int32 and int64.
    """
    n_tokens = len(ids)
    with torch.cuda.device_of(ids):
        copy_inputs_kernel[(triton.cdiv(n_tokens, _TOKENS),)](
            ids, slots, positions, *into, n_tokens, BT=_TOKENS, num_warps=2
        )
