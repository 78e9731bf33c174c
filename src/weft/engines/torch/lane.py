"""Engines run as they are, whatever the thread that calls has set: a stream, an autocast, a default
device; and in a process that was forked.

Steps run in the thread of whoever waits for them, and a thread may have a stream of its own as its
current one (`with torch.cuda.stream(…)`): what one launched there the next would not wait for. So
all of an engine's work goes by one.

OpenMP's threads do not come along into a process that is forked, and what PyTorch shares out among
them there waits for ever. So such a process computes with one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def uncast() -> Iterator[None]:
    """Leave the autocast that a caller may be in: KV of its dtype would stay for others. And the
    default device that it may have set: what is made for the host would lie elsewhere.
    """
    with ExitStack() as stack:
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def in_lane(device: torch.device) -> Iterator[None]:
    """Launch what this block does on the device's default stream, after what its caller launched
    and before what it will, and in no autocast. Where the caller captures, it is captured.
    """
    with uncast(), on_default_stream(device):
        yield


@contextmanager
def on_default_stream(device: torch.device) -> Iterator[None]:
    """Launch what this block does there, as `in_lane`, where no autocast matters."""
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


def _use_one_thread() -> None:
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):  # Windows has none
    os.register_at_fork(after_in_child=_use_one_thread)
