"""Isolate an engine from its caller's CUDA stream, autocast and default device.

Steps run in the thread of the caller that waits for them. Each such thread may have its own current
CUDA stream, and work on one stream does not wait for another. So an engine uses one stream.

OpenMP's threads do not exist in a forked child, and PyTorch would wait for them forever. So a
forked child computes with one thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def autocast_disabled() -> Iterator[None]:
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
def on_engine_stream(device: torch.device) -> Iterator[None]:
    """Launch what this block does on the device's default stream, after what its caller launched
    and before what it will, and in no autocast. Where the caller captures, it is captured.
    """
    with autocast_disabled(), on_default_stream(device):
        yield


@contextmanager
def on_default_stream(device: torch.device) -> Iterator[None]:
    """Launch what this block does there, as `on_engine_stream`, where no autocast matters."""
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
    torch.set_num_threads(1)  # also for threads that it starts


if hasattr(os, "register_at_fork"):  # Windows has none
    os.register_at_fork(after_in_child=_use_one_thread)
