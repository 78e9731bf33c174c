"""OpenMP thread counts of forwards on a CPU that other processes also use.

OpenMP threads wait for each other by spinning. If two threads share two cores with another
process, one often waits for a preempted one. A forward then takes up to twenty times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..._core.system_resources import ThreadTimes, idle_cores, thread_times, usable_cores
from ..threads import AutoThreads, Limit, has_any_variable

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@contextmanager
def one_thread_if_busy(idle: Callable[[], int] = idle_cores) -> Iterator[None]:
    """Compute with one OpenMP thread inside a block if other processes use the cores now.

    Loading runs many short operations, most of them before thread counts can be measured.
    """
    is_free = not has_any_variable(_VARIABLES)
    if not is_free or idle() >= min(torch.get_num_threads(), usable_cores()):
        yield
        return
    with Limit("openmp").to(1):
        yield


class CpuThreads:
    """Limits OpenMP in the thread that computes, and restores its setting.

    See `AutoThreads`. Counts from the environment are kept. `torch.set_num_threads` sets the
    maximum.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        idle: Callable[[], int] = idle_cores,
        waits: Callable[[], dict[int, ThreadTimes]] = thread_times,
    ) -> None:
        self._auto = AutoThreads(idle=idle, waits=waits)
        is_free = device.type == "cpu" and not has_any_variable(_VARIABLES)
        self._limit = Limit("openmp") if is_free else None

    @property
    def can_limit(self) -> bool:
        """Return True if `limited` may limit anything."""
        return self._limit is not None

    def keep_all(self) -> None:
        """Stop limiting thread counts."""
        self._limit = None

    @contextmanager
    def limited(self, n: int, kind: str = "") -> Iterator[None]:
        """Limit threads inside a block that runs `n` tokens, or other units; 0 limits nothing.

        kind: kind of work; thread counts of kinds are tuned separately.

        float32 products may differ in their last bits between thread counts. Cost: 10 µs.
        """
        own = 1 if self._limit is None else torch.get_num_threads()
        if self._limit is None or own == 1 or not n:
            yield
            return
        with self._auto.measured(n, min(own, usable_cores()), kind) as threads:
            with self._limit.to(threads):
                yield
