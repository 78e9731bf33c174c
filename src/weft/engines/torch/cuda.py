"""Devices: free memory, support for Triton, and copies from the host that nothing waits for."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU in bytes, with memory that PyTorch caches unused."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def is_for_triton(device: torch.device) -> bool:
    """Return True for NVIDIA GPUs of compute capability 8.0 or higher, which Triton documents."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a device without waiting; the array may change after the return."""
    return _to_host_tensor(values, device).to(device, non_blocking=True)


def copy_to_device(tensor: Tensor, values: NDArray[Any]) -> None:
    """Overwrite a tensor with an array without waiting; the array may change after the return."""
    tensor.copy_(_to_host_tensor(values, tensor.device), non_blocking=True)


def _to_host_tensor(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to a host tensor, pinned if `device` is a GPU, for an asynchronous upload."""
    # PyTorch's allocator reuses pinned memory only after the device has read it.
    host = torch.tensor(values, device="cpu")
    return host.pin_memory() if device.type == "cuda" else host
