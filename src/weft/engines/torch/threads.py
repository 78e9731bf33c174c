"""How many of OpenMP's threads a forward on a CPU gets, on a machine that others use, too.

They wait for each other by spinning: where two share two cores with somebody else, each waits for
one that does not run, and a forward takes up to twenty times as long.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ...share import idle_cores, usable_cores
from ..threads import Account, Limit, ThreadChoice, is_said

try:
    from resource import RUSAGE_SELF, getrusage
except ImportError:  # Windows, which does not count
    getrusage = None  # type: ignore[assignment]

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_LOOKED_AT_S = 0.1  # of forwards, at least: a few cores are taken away as a process begins
# Cores taken away by the system, of a process that others leave alone: so often a second at most,
# and so often more for each of its threads.
_A_SECOND, _OF_A_THREAD = 50.0, 15.0
_SEVERAL = 6


def taken_cores() -> int:
    """Return how often the system took a core away from a thread of this process; 0 where it does
    not count.
    """
    return 0 if getrusage is None else getrusage(RUSAGE_SELF).ru_nivcsw


class Crowd:
    """Whether others want the cores that the last forwards ran on."""

    def __init__(self) -> None:
        self._last: deque[tuple[float, int, int]] = deque()
        self._seconds = 0.0

    def saw(self, seconds: float, n_taken: int, threads: int) -> None:
        """Learn of a forward: how long it took, how often a core was taken away, by how many
        threads.
        """
        self._last.append((seconds, n_taken, threads))
        self._seconds += seconds
        while self._seconds - self._last[0][0] >= _LOOKED_AT_S:
            self._seconds -= self._last.popleft()[0]

    def is_there(self) -> bool:
        """Whether cores were taken away more often than a process that is alone sees."""
        usual = sum(seconds * (_A_SECOND + _OF_A_THREAD * n) for seconds, _, n in self._last)
        return sum(n_taken for _, n_taken, _ in self._last) >= max(_SEVERAL, usual)


class Mkl:
    """MKL's own number of threads, for the thread that computes: it counts more than OpenMP's once
    somebody has called `torch.set_num_threads`.
    """

    def __init__(self) -> None:
        self._set: Callable[[int], int] | None = None
        if torch.backends.mkl.is_available():  # PyTorch has it within its own library
            places = Path(torch.__file__).parent.glob("lib/*torch_cpu.*")
            for place in places:
                try:  # NOTE: C's own; that in small letters is Fortran's, and takes a pointer
                    self._set = ctypes.CDLL(str(place)).MKL_Set_Num_Threads_Local
                except (OSError, AttributeError):  # a library of another kind
                    continue

    @contextmanager
    def to(self, n: int) -> Iterator[None]:
        """Have it compute with so many inside a block, and as before afterwards. Cost: 1 µs."""
        if self._set is None:
            yield
            return
        process, before = os.getpid(), self._set(n)
        try:
            yield
        finally:
            if os.getpid() == process:
                now = self._set(before)
                if now != n:  # somebody set it meanwhile
                    self._set(now)


class CpuThreads:
    """Limits OpenMP in the thread that computes, and gives its setting back.

    It begins with as many threads as PyTorch has, or the process may use, and tries fewer while
    others want the cores. What the environment says holds; what `torch.set_num_threads` says is the
    most.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        idle: Callable[[], int] = idle_cores,
        taken: Callable[[], int] = taken_cores,
    ) -> None:
        self._idle, self._taken = idle, taken
        self._crowd, self._account = Crowd(), Account()
        # By what is run, its size in powers of two, and how many threads PyTorch has.
        self._choices: dict[tuple[str, int, int], ThreadChoice] = {}
        self._last: ThreadChoice | None = None  # that ran
        is_free = device.type == "cpu" and not is_said(_VARIABLES)
        self._limit = Limit("openmp") if is_free else None
        self._mkl = Mkl()

    @property
    def can_limit(self) -> bool:
        """Whether `limited` may limit anything."""
        return self._limit is not None

    @contextmanager
    def limited(self, n: int, what: str = "") -> Iterator[None]:
        """Limit threads inside a block that runs so many tokens, or other things; 0 limits nothing.

        Products of float32 may differ in their last bits by the number. Cost: 10 µs.
        """
        own = 1 if self._limit is None else torch.get_num_threads()
        if self._limit is None or own == 1 or not n:
            yield
            return
        choice = self._last = self._choice((what, n.bit_length(), own))
        threads = choice.threads
        with self._limit.to(threads), self._mkl.to(threads):
            began, before = time.perf_counter(), self._taken()
            yield
            took = time.perf_counter() - began
            self._crowd.saw(took, self._taken() - before, threads)
            choice.ran(took, n)

    def _choice(self, size: tuple[str, int, int]) -> ThreadChoice:
        choice = self._choices.get(size)
        if choice is None:
            own = size[-1]
            # What is new begins with what was found for what ran last.
            first = own if self._last is None else self._last.counts[self._last.at]
            choice = self._choices[size] = ThreadChoice(
                min(own, usable_cores()),
                self._account,
                self._idle,
                first=first // 2 if self._crowd.is_there() else first,
                is_crowded=self._crowd.is_there,
            )
        return choice
