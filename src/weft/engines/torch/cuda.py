"""What there is to know of a card: its memory, and whether Triton is for it."""

from __future__ import annotations

import torch


def free_bytes(device: torch.device) -> int:
    """Return what a card has left, with what PyTorch holds of it for nobody."""
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def is_for_triton(device: torch.device) -> bool:
    """Whether Triton's own documentation names such a card: of NVIDIA's, from 8.0 on."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
