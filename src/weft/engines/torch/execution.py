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
    """Run a block outside of the caller's autocast and default device.

    KV of the autocast dtype would stay for other callers, and host tensors would be on the device.
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
    """Run a block on the device's default stream, without autocast.

    The stream waits for the caller's stream, which then waits for it. If the caller captures a CUDA
    graph, the block is captured.
    """
    with autocast_disabled(), on_default_stream(device):
        yield


@contextmanager
def on_default_stream(device: torch.device) -> Iterator[None]:
    """Do as `on_engine_stream`, for operations that autocast does not change."""
    if device.type != "cuda":
        yield
        return
    caller_stream, engine_stream = (
        torch.cuda.current_stream(device),
        torch.cuda.default_stream(device),
    )
    if caller_stream == engine_stream or torch.cuda.is_current_stream_capturing():
        yield
        return
    engine_stream.wait_stream(caller_stream)
    try:
        with torch.cuda.stream(engine_stream):
            yield
    finally:
        caller_stream.wait_stream(engine_stream)


def _use_one_thread() -> None:
    """Make a forked child compute with one OpenMP thread."""
    torch.set_num_threads(1)  # also for threads that it starts


if hasattr(os, "register_at_fork"):  # Windows has none
    os.register_at_fork(after_in_child=_use_one_thread)
