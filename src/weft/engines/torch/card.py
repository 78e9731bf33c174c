"""What there is to know of a card: its one stream, its memory, and whether Triton is for it.

Steps run in the thread of whoever waits for them, and a thread may have a stream of its own as its
current one (`with torch.cuda.stream(…)`): what one launched there the next would not wait for. So
all of an engine's work goes by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def in_lane(device: torch.device) -> Iterator[None]:
    """Launch what this block does on the device's default stream, after what its caller launched
    and before what it will. Where the caller captures, it is captured.
    """
    if device.type != "cuda":
        yield
        return
    now, lane = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if now == lane or torch.cuda.is_current_stream_capturing():
        yield
        return
    lane.wait_stream(now)
    try:
        with torch.cuda.stream(lane):
            yield
    finally:
        now.wait_stream(lane)


def free_bytes(device: torch.device) -> int:
    """Return what a card has left, with what PyTorch holds of it for nobody."""
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + idle


def is_for_triton(device: torch.device) -> bool:
    """Whether Triton's own documentation names such a card: of NVIDIA's, from 8.0 on."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
