"""Numbers of the host on a device: nobody waits for them to be there."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device; nobody waits for it."""
    return _staged(values, device).to(device, non_blocking=True)


def copy_to_device(tensor: Tensor, values: NDArray[Any]) -> None:
    """Copy an array over a tensor; nobody waits for it."""
    tensor.copy_(_staged(values, tensor.device), non_blocking=True)


def _staged(values: NDArray[Any], device: torch.device) -> Tensor:
    # A copy: the caller's array may change before the device has read it. Pinned memory is given
    # back by PyTorch's own allocator, which knows when the device is done with it.
    host = torch.tensor(values, device="cpu")
    return host.pin_memory() if device.type == "cuda" else host
