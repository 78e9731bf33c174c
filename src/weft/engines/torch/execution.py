"""Engines run as they are, whatever the thread that calls has set: a stream, an autocast, a default
device; and in a process that was forked.

Steps run in the thread of whoever waits for them, and a thread may have a stream of its own as its
current one (`with torch.cuda.stream(…)`): what one launched there the next would not wait for. So
all of an engine's work goes by one.

OpenMP's threads do not come along into a process that is forked, and what PyTorch shares out among
them there waits for ever. So such a process computes with one.

A thread in which oneDNN once found no memory for code of its own never makes any again, however
much there is later: the error stays in a variable of that thread. So another goes on for it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

from ...errors import has_no_code

Value = TypeVar("Value")
_STACK = 16 << 20  # bytes that a thread may need at once


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


class _Here(threading.local):
    """What is known of a thread.

    is_spoilt: oneDNN makes no code in it any more. other: the thread that computes for it.
    """

    is_spoilt = False
    other: ThreadPoolExecutor | None = None


_here = _Here()


def run_in_worker(device: torch.device, work: Callable[[], Value]) -> Value:
    """Call `work`, which computes on a device: of a CPU's in another thread where this one is
    spoilt, if there is memory for one.
    """
    if device.type != "cpu":
        return work()
    if _here.is_spoilt and _here.other is None:
        _here.other = _started()
    other = _here.other
    try:
        if other is None:
            return work()
        has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def there() -> Value:
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                return work()

        return other.submit(there).result()
    except Exception as error:
        if has_no_code(error):
            _here.is_spoilt, _here.other = True, None
            if other is not None:
                other.shutdown(wait=False)
        raise


def _started() -> ThreadPoolExecutor | None:
    """Return a new thread; None where there is no memory for it and for those that OpenMP starts
    beside it, which ends the process where it cannot.
    """
    try:
        mmap.mmap(-1, (1 + torch.get_num_threads()) * _STACK).close()
        other = ThreadPoolExecutor(1, "weft-torch")
        other.submit(int).result()
    except (OSError, MemoryError, RuntimeError):
        return None
    return other


def _use_one_thread() -> None:
    torch.set_num_threads(1)  # of threads that it starts, too
    _here.other = None  # it did not come along


if hasattr(os, "register_at_fork"):  # Windows has none
    os.register_at_fork(after_in_child=_use_one_thread)
