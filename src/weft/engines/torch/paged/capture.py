"""How a step is captured, and played: as a CUDA graph on a card, run again elsewhere."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from weakref import WeakSet

import torch
from torch import Tensor

_RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
# PyTorch 2.13 and later end a failed capture's allocations by themselves.
_ENDS_ALLOCATIONS = _RELEASE >= (2, 13)
# Until 2.12 a card has one sign that something is captured, for all of its random numbers: while it
# stands no graph can be played, and a capture that fails leaves it.
_HAS_ONE_SIGN = _RELEASE < (2, 12)
# One capture at a time: that of another engine, or of another thread, may end this one. Nor may
# anybody empty PyTorch's cache meanwhile, or wait for the whole device.
capturing = threading.RLock()
_playing: AbstractContextManager[object] = capturing if _HAS_ONE_SIGN else nullcontext()

Run = Callable[[], Tensor]


class Replay(ABC):
    """A captured step. hidden: what it made last, [B, E]; valid until the next step is run."""

    hidden: Tensor

    @abstractmethod
    def play(self) -> None:
        """Run it over what its frame holds now."""


Record = Callable[[Run], Replay]


class _Eager(Replay):
    """Runs again what was to be captured, over the same tensors."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.hidden = run().clone()

    def play(self) -> None:
        self.hidden.copy_(self._run())


def replay_eagerly(run: Run) -> Replay:
    """Record without a card."""
    return _Eager(run)


class _Captured(Replay):
    def __init__(self, graph: torch.cuda.CUDAGraph, hidden: Tensor) -> None:
        self._graph, self.hidden = graph, hidden

    def play(self) -> None:
        with _playing:
            self._graph.replay()


class GraphRecorder:
    """Captures CUDA graphs that share one memory for what they make on the way.

    They may: each is played to its end before the next, and what it made is read before that.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One, as libraries hold room for each; of those with priority, which copies never are on.
        self._aside = torch.cuda.Stream(device, priority=-1)
        self._held: WeakSet[_Captured] = WeakSet()
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Replay:
        with capturing, torch.cuda.device(self._device):
            if not self._held:  # PyTorch takes a memory that has lost all its graphs for gone
                self._pool = torch.cuda.graph_pool_handle()
            try:
                replay = self._tried(run)
            except torch.OutOfMemoryError:
                # While it captures, PyTorch frees nothing of what it keeps for later.
                torch.cuda.empty_cache()
                replay = self._tried(run)
            self._held.add(replay)
            return replay

    def _tried(self, run: Run) -> _Captured:
        try:
            return self._recorded(run)
        except BaseException:
            # What ran aside may still read tensors that are given back now.
            with suppress(RuntimeError):
                self._aside.synchronize()
            self._mend()
            raise

    def _recorded(self, run: Run) -> _Captured:
        now, aside = torch.cuda.current_stream(), self._aside
        aside.wait_stream(now)
        with torch.cuda.stream(aside):  # kernels are compiled, and libraries make their rooms
            for _ in range(2):
                run()
        now.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Not by `torch.cuda.graph`, which has the whole device wait first. Other threads may go on
        # with the device while this one captures.
        with torch.cuda.stream(aside):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                hidden = run()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return _Captured(graph, hidden)

    def _mend(self) -> None:
        """Let PyTorch know that a capture has failed.

        Until 2.13 its allocator is not told: it then releases no memory any more, and `empty_cache`
        fails, for the whole process. Until 2.12 no graph is played and no random number drawn.
        """
        pool, self._pool = self._pool, torch.cuda.graph_pool_handle()
        if not _ENDS_ALLOCATIONS:
            index = torch.cuda.current_device()
            # Of a capture that had not begun, or has ended well, the first says so: other graphs
            # count on what the second gives up.
            with suppress(Exception):
                torch._C._cuda_endAllocateToPool(index, pool)
                torch._C._cuda_releasePool(index, pool)
        if _HAS_ONE_SIGN:  # a capture that ends well takes it away
            graph = torch.cuda.CUDAGraph()
            with suppress(RuntimeError), torch.cuda.stream(self._aside):
                graph.capture_begin(capture_error_mode="thread_local")
                torch.zeros(1, device=self._device)
                graph.capture_end()
