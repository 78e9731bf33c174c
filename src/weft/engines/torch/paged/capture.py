"""How a step is captured, and played: as a CUDA graph on a card, run again elsewhere."""

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
# PyTorch 2.13 and later end a failed capture's allocations by themselves; from 2.14 on they also
# give its memory back.
_ENDS_ALLOCATIONS, _GIVES_BACK = _RELEASE >= (2, 13), _RELEASE >= (2, 14)
# Until 2.12 a card has one sign that something is captured, for all of its random numbers: while it
# stands no graph can be played, and a capture that fails leaves it.
_HAS_ONE_SIGN = _RELEASE < (2, 12)
# One capture at a time: that of another engine, or of another thread, may end this one. Nor may
# anybody empty PyTorch's cache meanwhile, or wait for the whole device.
capturing = threading.RLock()
_playing: AbstractContextManager[object] = capturing if _HAS_ONE_SIGN else nullcontext()

Runnable = Callable[[], Tensor]
Made = TypeVar("Made")


class CapturedStep(ABC):
    """A captured step. hidden: what it made last, [B, E]; valid until the next step is run."""

    hidden: Tensor

    @abstractmethod
    def replay(self) -> None:
        """Run it over what its frame holds now."""

    @abstractmethod
    def release(self) -> None:
        """Have its memory go to nobody before it was played to the end."""


Recorder = Callable[[Runnable], CapturedStep]


class _EagerStep(CapturedStep):
    """Runs again what was to be captured, over the same tensors."""

    def __init__(self, run: Runnable) -> None:
        self._run = run
        self.hidden = run().clone()

    def replay(self) -> None:
        self.hidden.copy_(self._run())

    def release(self) -> None:
        pass


def replay_without_graph(run: Runnable) -> CapturedStep:
    """Record without a card."""
    return _EagerStep(run)


class _Streams(NamedTuple):
    """Where a card's captures begin, and where what they capture runs.

    When a graph goes, PyTorch 2.12 to 2.14 give back what cuBLAS works in on the stream that its
    capture began on, and all other graphs of that stream still write there. So captures begin on
    one that nothing is multiplied on. A pair a card: PyTorch has 32 streams, and hands them out in
    turn.
    """

    root: torch.cuda.Stream
    aside: torch.cuda.Stream

    @classmethod
    def for_device(cls, device: torch.device) -> _Streams:
        index = torch.cuda.current_device() if device.index is None else device.index
        with capturing:
            if index not in _streams:
                # With priority, which copies to and from the host never have.
                _streams[index] = cls(*(torch.cuda.Stream(index, priority=-1) for _ in cls._fields))
            return _streams[index]


_streams: dict[int, _Streams] = {}


class _CudaGraphStep(CapturedStep):
    def __init__(self, graph: torch.cuda.CUDAGraph, hidden: Tensor, aside: torch.cuda.Stream):
        self._graph, self.hidden, self._aside = graph, hidden, aside

    def replay(self) -> None:
        with _playing:
            self._graph.captured()

    def release(self) -> None:
        # Its memory is that of the stream it was captured on. Where segments expand, PyTorch may
        # unmap it after waiting for that stream alone.
        with capturing:
            self._aside.wait_stream(torch.cuda.default_stream(self._aside.device))


def retry_with_free_memory(attempt: Callable[[bool], Made]) -> Made:
    """Return attempt(False), or attempt(True) where that finds no memory: by then nothing is held
    by its error, which knows the failed attempt's tensors.
    """
    with suppress(torch.OutOfMemoryError):
        return attempt(False)
    return attempt(True)


class GraphRecorder:
    """Captures CUDA graphs that share one memory for what they make on the way.

    They may: each is played to its end before the next, and what it made is read before that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._root, self._aside = _Streams.for_device(device)
        self._held: WeakSet[_CudaGraphStep] = WeakSet()
        self._pool = torch.cuda.graph_pool_handle()
        self._has_failed_to_end = False

    def __call__(self, run: Runnable) -> CapturedStep:
        with capturing, torch.cuda.device(self._device):
            if not self._held:  # PyTorch takes a memory that has lost all its graphs for gone
                self._pool = torch.cuda.graph_pool_handle()
            captured = retry_with_free_memory(lambda is_tight: self._tried(run, is_tight=is_tight))
            self._held.add(captured)
            return captured

    def _tried(self, run: Runnable, *, is_tight: bool) -> _CudaGraphStep:
        try:
            self._warm(run)
            if is_tight:  # while it captures, PyTorch frees nothing of what it keeps for later
                torch.cuda.empty_cache()
            return self._recorded(run)
        except BaseException:
            # What ran aside may still read tensors that are given back now.
            with suppress(RuntimeError):
                self._root.synchronize()
                self._aside.synchronize()
            self._mend()
            raise

    def _warm(self, run: Runnable) -> None:
        """Have kernels compiled, and libraries make their rooms."""
        now = torch.cuda.current_stream()
        self._aside.wait_stream(now)
        with torch.cuda.stream(self._aside):
            for _ in range(2):
                run()
        now.wait_stream(self._aside)

    def _recorded(self, run: Runnable) -> _CudaGraphStep:
        graph = torch.cuda.CUDAGraph()
        # Not by `torch.cuda.graph`, which has the whole device wait first. Other threads may go on
        # with the device while this one captures.
        with torch.cuda.stream(self._root):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                hidden = self._run_aside(run)
            except BaseException:
                with suppress(RuntimeError):
                    self._end(graph)
                raise
            self._end(graph)
        return _CudaGraphStep(graph, hidden, self._aside)

    def _run_aside(self, run: Runnable) -> Tensor:
        """Run what is captured on the other stream, which takes part from here to there."""
        self._aside.wait_stream(self._root)
        try:
            with torch.cuda.stream(self._aside):
                return run()
        finally:
            self._root.wait_stream(self._aside)

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except BaseException:
            self._has_failed_to_end = True
            raise

    def _mend(self) -> None:
        """Let PyTorch know that a capture has failed.

        Until 2.13 its allocator is not told: it then releases no memory any more, and `empty_cache`
        fails, for the whole process; 2.13 itself keeps that capture's memory. Until 2.12 no graph
        is played and no random number drawn.
        """
        pool, self._pool = self._pool, torch.cuda.graph_pool_handle()
        index = torch.cuda.current_device()
        has_failed_to_end, self._has_failed_to_end = self._has_failed_to_end, False
        if not _ENDS_ALLOCATIONS:
            # Of a capture that had not begun, or has ended well, the first says so: other graphs
            # count on what the second gives up.
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)
        elif has_failed_to_end and not _GIVES_BACK:
            with suppress(Exception):
                torch._C._cuda_releasePool(index, pool)
        if _HAS_ONE_SIGN:  # a capture that ends well takes it away
            graph = torch.cuda.CUDAGraph()
            with suppress(RuntimeError), torch.cuda.stream(self._root):
                graph.capture_begin(capture_error_mode="thread_local")
                torch.zeros(1, device=self._device)
                graph.capture_end()
