"""Launches that need nothing of each other, one beside the other where a step is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def run_concurrently(launches: Sequence[Callable[[], None]], on: Tensor) -> None:
    """Make launches on the device of a tensor; all of them have ended for what is launched later.

    Where they are not captured, they are made one after the other: to launch on several streams
    takes longer than it saves.
    """
    if len(launches) < 2 or not on.is_cuda or not torch.cuda.is_current_stream_capturing():
        for launch in launches:
            launch()
        return
    now = torch.cuda.current_stream(on.device)
    begun = now.record_event()
    first, *others = launches
    beside = _beside(on.device, len(others))
    for stream, launch in zip(beside, others, strict=True):
        stream.wait_event(begun)
        with torch.cuda.stream(stream):
            launch()
    first()
    for stream in beside:
        now.wait_stream(stream)


def _beside(device: torch.device, n: int) -> list[torch.cuda.Stream]:
    held = _streams.setdefault(device, [])
    while len(held) < n:
        # Of those with priority, as the recorder's is: PyTorch hands out the others in turn, and
        # what somebody else launches on a stream that is captured would be captured with it.
        held.append(torch.cuda.Stream(device, priority=-1))
    return held[:n]
