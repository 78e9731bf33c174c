"""How many threads a model call gets, on a machine that others use, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...share import idle_cores

_CALM = 16  # looks in a row that find a core idle before it is used
_LATE = 2  # calls in a row that did not get their cores before one is given up
_SHARE = 0.75  # of a core for each thread: below, something else had it
_LONG_S = 0.002  # a shorter call says nothing


class ThreadCount:
    """A number of threads up to `most`: as many as get a core each.

    llama.cpp's threads wait for each other by spinning: one that has to share its core keeps all
    the others waiting, and calls take up to twenty times as long (docs/log.md).
    """

    def __init__(self, most: int, idle: Callable[[], int] = idle_cores) -> None:
        self.most = most
        self.now = most
        self._idle = idle
        self._n_calm = 0
        self._n_late = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See how much of the cores a call gets. Cost: microseconds."""
        self._grow()
        began, cpu = time.perf_counter(), time.process_time()
        yield
        self.saw(time.perf_counter() - began, time.process_time() - cpu)

    def saw(self, wall_s: float, cpu_s: float) -> None:
        """Learn of a call: how long it took, and how much time on cores it had."""
        if self.now == 1 or wall_s < _LONG_S:
            return
        if cpu_s >= _SHARE * self.now * wall_s:
            self._n_late = 0
            return
        self._n_late += 1
        if self._n_late >= _LATE:
            self.now, self._n_late = max(1, min(self.now - 1, int(cpu_s / wall_s))), 0

    def _grow(self) -> None:
        """Take one more where cores have been idle for some time."""
        if self.now == self.most:
            return
        self._n_calm = self._n_calm + 1 if self._idle() > 1 else 0
        if self._n_calm >= _CALM:
            self.now, self._n_calm = self.now + 1, 0
