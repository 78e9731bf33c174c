"""The one stream of a card that all of an engine's work goes by.

Steps run in the thread of whoever waits for them, and a thread may have a stream of its own as its
current one (`with torch.cuda.stream(…)`): what one launched there the next would not wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def in_lane(device: torch.device) -> Iterator[None]:
    """Launch what this block does on the device's default stream, after what its caller launched
    and before what it will.
    """
    if device.type != "cuda":
        yield
        return
    now, lane = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
    if now == lane:
        yield
        return
    lane.wait_stream(now)
    try:
        with torch.cuda.stream(lane):
            yield
    finally:
        now.wait_stream(lane)
