"""Capture and replay of a step: a CUDA graph on a GPU, a repeated call elsewhere."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

_RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
# From PyTorch 2.13 on a failed capture's allocations end; from 2.14 on its memory is released, too.
_ENDS_ALLOCATIONS, _RELEASES_MEMORY = _RELEASE >= (2, 13), _RELEASE >= (2, 14)
# Until 2.12 a flag of the GPU's random generator marks a capture. While it is set, no graph can be
# replayed. A failed capture leaves it set.
_HAS_GLOBAL_FLAG = _RELEASE < (2, 12)
# One capture at a time: one of another engine or thread may end this one. Emptying PyTorch's cache
# or waiting for the device would end it, too.
capturing = threading.RLock()
_playing: AbstractContextManager[object] = capturing if _HAS_GLOBAL_FLAG else nullcontext()

Runnable = Callable[[], Tensor]
Result = TypeVar("Result")


class CapturedStep(ABC):
    """A captured step.

    hidden: hidden states of the last replay, [T, E], with padding; the next replay overwrites them.
    """

    hidden: Tensor

    @abstractmethod
    def replay(self) -> None:
        """Run the step over the present contents of its buffers."""

    @abstractmethod
    def release(self) -> None:
        """Keep its memory from being reused before the last replay has ended."""


Recorder = Callable[[Runnable], CapturedStep]


class _EagerStep(CapturedStep):
    """A `CapturedStep` without a CUDA graph: a replay calls `run` again over the same tensors."""

    def __init__(self, run: Runnable) -> None:
        self._run = run
        self.hidden = run().clone()

    def replay(self) -> None:
        """Call the recorded function again."""
        self.hidden.copy_(self._run())

    def release(self) -> None:
        """Do nothing: the step has no memory of its own."""


def replay_without_graph(run: Runnable) -> CapturedStep:
    """Record a call without a GPU: each replay calls `run` again."""
    return _EagerStep(run)


class _Streams(NamedTuple):
    """The stream on which captures begin, and the one on which they run.

    When a graph is freed, PyTorch 2.12 to 2.14 free cuBLAS workspaces of the stream that began its
    capture. Other graphs of that stream still use them. So captures begin on a stream
    without products. One pair a GPU, because PyTorch has only 32 streams.
    """

    root: torch.cuda.Stream
    capture_stream: torch.cuda.Stream

    @classmethod
    def for_device(cls, device: torch.device) -> _Streams:
        """Return the pair of streams of a GPU, created at the first call."""
        index = torch.cuda.current_device() if device.index is None else device.index
        with capturing:
            if index not in _streams:
                # Priority streams are never used for copies to and from the host.
                _streams[index] = cls(*(torch.cuda.Stream(index, priority=-1) for _ in cls._fields))
            return _streams[index]


_streams: dict[int, _Streams] = {}


class _CudaGraphStep(CapturedStep):
    """A `CapturedStep` that launches a CUDA graph."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, hidden: Tensor, capture_stream: torch.cuda.Stream
    ):
        self._graph, self.hidden, self._capture_stream = graph, hidden, capture_stream

    def replay(self) -> None:
        """Launch the graph."""
        with _playing:
            self._graph.captured()

    def release(self) -> None:
        """Keep the graph's memory until the last replay has ended."""
        # The graph's memory belongs to its capture stream. With expandable segments, PyTorch may
        # unmap it after waiting only for that stream.
        with capturing:
            self._capture_stream.wait_stream(torch.cuda.default_stream(self._capture_stream.device))


def retry_with_free_memory(attempt: Callable[[bool], Result]) -> Result:
    """Call `attempt(False)`; if memory runs out, call `attempt(True)`, which must free memory
    first.

    Returns the result of the call. The error, which references the failed attempt's tensors, is
    released before the second attempt.
    """
    with suppress(torch.OutOfMemoryError):
        return attempt(False)
    return attempt(True)


class GraphRecorder:
    """Captures steps as CUDA graphs that share one memory pool for intermediate results.

    `recorder(run)` calls `run`, and returns a `CapturedStep` that replays it. Sharing is safe: each
    replay ends before the next, and its result is read before that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._root, self._capture_stream = _Streams.for_device(device)
        self._graphs: WeakSet[_CudaGraphStep] = WeakSet()
        self._pool = torch.cuda.graph_pool_handle()
        self._has_failed_to_end = False

    def __call__(self, run: Runnable) -> CapturedStep:
        with capturing, torch.cuda.device(self._device):
            if not self._graphs:  # PyTorch frees a pool that has lost all its graphs
                self._pool = torch.cuda.graph_pool_handle()
            captured = retry_with_free_memory(
                lambda is_tight: self._warm_and_capture(run, is_tight=is_tight)
            )
            self._graphs.add(captured)
            return captured

    def _warm_and_capture(self, run: Runnable, *, is_tight: bool) -> _CudaGraphStep:
        """Run a call twice to warm up, then capture it; restore PyTorch's state if that fails.

        The graph is not replayed, so the result has no valid values yet.

        is_tight: release PyTorch's cached memory first.
        """
        try:
            self._warm(run)
            if is_tight:  # PyTorch does not free cached memory during a capture
                torch.cuda.empty_cache()
            return self._capture(run)
        except BaseException:
            # Kernels on the capture stream may still read tensors that are freed now.
            with suppress(RuntimeError):
                self._root.synchronize()
                self._capture_stream.synchronize()
            self._restore()
            raise

    def _warm(self, run: Runnable) -> None:
        """Compile kernels, and let libraries allocate their workspaces."""
        current = torch.cuda.current_stream()
        self._capture_stream.wait_stream(current)
        with torch.cuda.stream(self._capture_stream):
            for _ in range(2):
                run()
        current.wait_stream(self._capture_stream)

    def _capture(self, run: Runnable) -> _CudaGraphStep:
        """Capture one call into a CUDA graph, without waiting for the device."""
        graph = torch.cuda.CUDAGraph()
        # Not with `torch.cuda.graph`, which waits for the device first. Other threads may use the
        # device during the capture.
        with torch.cuda.stream(self._root):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                hidden = self._run_on_capture_stream(run)
            except BaseException:
                with suppress(RuntimeError):
                    self._end_capture(graph)
                raise
            self._end_capture(graph)
        return _CudaGraphStep(graph, hidden, self._capture_stream)

    def _run_on_capture_stream(self, run: Runnable) -> Tensor:
        """Run the captured call on the capture stream, which joins the capture from here on."""
        self._capture_stream.wait_stream(self._root)
        try:
            with torch.cuda.stream(self._capture_stream):
                return run()
        finally:
            self._root.wait_stream(self._capture_stream)

    def _end_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the capture. Raise an error after recording the failure for `_restore`."""
        try:
            graph.capture_end()
        except BaseException:
            self._has_failed_to_end = True
            raise

    def _restore(self) -> None:
        """Restore PyTorch's state after a failed capture.

        Until 2.13 its allocator does not notice the failure: it releases no memory any more, and
        `empty_cache` fails in the process. 2.13 itself keeps that capture's memory. Until 2.12 no
        graph can be replayed, and no random number drawn.
        """
        pool, self._pool = self._pool, torch.cuda.graph_pool_handle()
        index = torch.cuda.current_device()
        has_failed_to_end, self._has_failed_to_end = self._has_failed_to_end, False
        if not _ENDS_ALLOCATIONS:
            # If the capture never started, or has ended, the first call raises. The second must not
            # run then, because other graphs use that pool.
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)
        elif has_failed_to_end and not _RELEASES_MEMORY:
            with suppress(Exception):
                torch._C._cuda_releasePool(index, pool)
        if _HAS_GLOBAL_FLAG:  # a successful capture clears the flag
            graph = torch.cuda.CUDAGraph()
            with suppress(RuntimeError), torch.cuda.stream(self._root):
                graph.capture_begin(capture_error_mode="thread_local")
                torch.zeros(1, device=self._device)
                graph.capture_end()
