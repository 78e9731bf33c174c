"""Independent kernel launches on several CUDA streams while a graph is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_streams: dict[torch.device, list[torch.cuda.Stream]] = {}


def run_concurrently(launches: Sequence[Callable[[], None]], on: Tensor) -> None:
    """Launch kernels on the device of a tensor; later launches wait for all of them.

    Outside of a capture they run one after the other: launching on several streams costs more time
    than it saves.
    """
    if len(launches) < 2 or not on.is_cuda or not torch.cuda.is_current_stream_capturing():
        for launch in launches:
            launch()
        return
    current = torch.cuda.current_stream(on.device)
    started = current.record_event()
    first, *others = launches
    side_streams = _side_streams(on.device, len(others))
    for stream, launch in zip(side_streams, others, strict=True):
        stream.wait_event(started)
        with torch.cuda.stream(stream):
            launch()
    first()
    for stream in side_streams:
        current.wait_stream(stream)


def _side_streams(device: torch.device, n: int) -> list[torch.cuda.Stream]:
    streams = _streams.setdefault(device, [])
    while len(streams) < n:
        # Priority streams, as the recorder's. PyTorch shares the other ones, so launches of other
        # code on them would be captured, too.
        streams.append(torch.cuda.Stream(device, priority=-1))
    return streams[:n]
