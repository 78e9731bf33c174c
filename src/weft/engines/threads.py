"""Thread counts of CPU libraries: chosen per forward size, lowered on a busy machine."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from threadpoolctl import ThreadpoolController

from .._core.system_resources import ThreadTimes, idle_cores, thread_times, usable_cores
from ..errors import ConfigError

_MAX_BLAS_THREADS = 8  # matrices of the NumPy engine's models are too small for more
_BLAS_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_PAYBACK = 20  # a trial may cost a twentieth of the time
_TRIAL_INTERVAL = 8  # forwards between two trials, at least
_MIN_TRIALS = 3  # before the choice changes
_CROWDED_SHARE = 0.7  # share of a core per thread; below it, other processes use the cores
_MIN_DEMAND = 0.3  # of a window; a thread that wants a core for less is not judged
_WINDOW_S = 0.1  # of forwards that a share is measured over


def has_any_variable(names: Iterable[str]) -> bool:
    """Return True if one of these environment variables is set."""
    return any(os.environ.get(name) for name in names)


class CoreShare:
    """The share of a core that each thread receives: time on a core / (that + time waiting).

    If the system does not report waiting times, the share is the process's CPU time over wall time
    per compute thread. A thread that spins then counts as one that has a core.
    """

    def __init__(self, waits: Callable[[], dict[int, ThreadTimes]] = thread_times) -> None:
        self._read = waits
        self._before = waits()
        self._share = 1.0
        self._wall_s = self._cpu_s = self._wanted_s = 0.0

    @property
    def is_crowded(self) -> bool:
        """True if some thread's share is so small that other processes must use the cores."""
        return self._share < _CROWDED_SHARE

    def add(self, wall_s: float, cpu_s: float, threads: int) -> None:
        """Record a forward: its wall time, the process's CPU time, its thread count.

        Cost: every 0.1 s of forwards, 10 µs for each thread of the process; else 1 µs.
        """
        self._wall_s += wall_s
        self._cpu_s += cpu_s
        self._wanted_s += wall_s * threads
        if self._wall_s < _WINDOW_S:
            return
        now = self._read()
        shares = list(self._shares(now)) if now else [self._cpu_s / self._wanted_s]
        self._share = min(shares, default=1.0)
        self._before = now
        self._wall_s = self._cpu_s = self._wanted_s = 0.0

    def _shares(self, now: dict[int, ThreadTimes]) -> Iterator[float]:
        """Yield the share of each thread that needed a core since the last window."""
        for number, times in now.items():
            before = self._before.get(number, ThreadTimes(0.0, 0.0))
            wanted_s = times.wanted_s - before.wanted_s
            if wanted_s > _MIN_DEMAND * self._wall_s:
                yield (times.running_s - before.running_s) / wanted_s


class TrialLoss:
    """Seconds lost in slow trials that later forwards must make up for, shared by all
    `ThreadTuner`s.

    While `owed_s` is above 0, no trial starts.
    """

    def __init__(self) -> None:
        self.owed_s = 0.0


class ThreadTuner:
    """The thread count for forwards of about one size, chosen from measured times.

    On a busy machine more threads are far slower, because they wait for each other. Some forwards
    are trials of the next higher or lower count; a higher count needs enough idle cores. The
    choice changes if the median of the trials is faster. Trials cost at most 1/20 of the time.
    """

    def __init__(
        self,
        max_threads: int,
        account: TrialLoss,
        idle: Callable[[], int],
        *,
        first: int = 1,
        is_crowded: Callable[[], bool] = lambda: True,
    ) -> None:
        """Candidates are `max_threads` and the powers of two below it.

        Args:
            max_threads: the largest candidate.
            account: time lost in trials, shared by all tuners of an engine.
            idle: returns the number of idle cores.
            first: start with the largest candidate that is not above it.
            is_crowded: returns True if other processes use the cores, so fewer threads may help.
        """
        self._loss = account
        self._idle = idle
        self._is_crowded = is_crowded
        powers = range(max_threads.bit_length() + 1)
        self.counts = sorted({min(2**power, max_threads) for power in powers})
        self.index = max(i for i, n in enumerate(self.counts) if n <= max(first, 1))
        self._direction = -1
        self._trial: int | None = None
        self._token_times: deque[float] = deque(maxlen=5)  # with the present count
        self._ratios: dict[int, deque[float]] = {}  # of trials to those
        self._forwards_to_trial = 0

    @property
    def threads(self) -> int:
        """Thread count of the next forward."""
        return self.counts[self.index if self._trial is None else self._trial]

    def add(self, seconds: float, n_tokens: int) -> None:
        """Record the time of a forward with `threads`; choose the count of the next one."""
        token_time = seconds / n_tokens
        if self._trial is not None:
            self._judge(self._trial, token_time, n_tokens)
            return
        times = self._token_times
        is_slow = len(times) >= 2 and min(times[-1], token_time) > 2 * statistics.median(times)
        times.append(token_time)
        self._forwards_to_trial -= 1
        self._loss.owed_s = max(self._loss.owed_s - seconds, 0.0)
        if is_slow and self.index and self._is_crowded():
            # Twice in a row: another process has started, and a trial of fewer costs little.
            self._token_times = deque([times[-2], token_time], maxlen=5)
            self._ratios.clear()
            self._trial = self.index - 1
        elif self._forwards_to_trial <= 0 and not self._loss.owed_s:
            if len(times) >= 2:
                self._trial = self._next_trial()
            elif self.index and self._is_crowded():
                self._trial = self.index - 1

    def _next_trial(self) -> int | None:
        """Return the index in `counts` of the next trial, or None.

        Trials alternate between the next higher and the next lower count; a count that is not
        worth a trial is skipped. If neither is, the next trial is postponed.
        """
        self._direction = -self._direction
        for index in (self.index + self._direction, self.index - self._direction):
            if 0 <= index < len(self.counts) and self._is_worth_trial(index):
                return index
        self._forwards_to_trial = _TRIAL_INTERVAL
        return None

    def _is_worth_trial(self, index: int) -> bool:
        """Return True if the count at `index` may be faster than the current one.

        Fewer threads are worth a trial if the machine is busy. More threads are if enough cores are
        idle, or if earlier trials were faster.
        """
        if index < self.index:
            return self._is_crowded()
        # After a trial the library's own threads may still spin; they count as busy cores.
        return self._was_faster(index) or self.counts[index] <= self._idle()

    def _was_faster(self, index: int) -> bool:
        """Return True if a count was faster so far, but in too few trials."""
        ratios = self._ratios.get(index, ())
        return 0 < len(ratios) < _MIN_TRIALS and statistics.median(ratios) < 0.95

    def _judge(self, trial: int, token_time: float, n_tokens: int) -> None:
        """Choose the trial's count if it was faster, else add the lost time to the `TrialLoss`.

        Args:
            trial: index in `counts`.
            token_time: seconds per token of the trial.
            n_tokens: tokens of the trial.
        """
        self._trial = None
        usual = statistics.median(self._token_times)
        ratios = self._ratios.setdefault(trial, deque(maxlen=5))
        ratios.append(token_time / usual)
        ratio = statistics.median(ratios)
        if (len(ratios) >= _MIN_TRIALS and ratio < 0.95) or ratio < 0.5:
            self.index = trial
            self._token_times.clear()
            self._ratios.clear()
            self._forwards_to_trial = 0
        else:
            self._forwards_to_trial = 2 if len(ratios) < _MIN_TRIALS else _TRIAL_INTERVAL
            self._loss.owed_s += _PAYBACK * max(token_time - usual, 0.0) * n_tokens


class AutoThreads:
    """Thread counts of an engine that starts with all cores: a `ThreadTuner` per kind and size.

    The first forward uses at most as many threads as there are idle cores. Trials of fewer threads
    run while a thread of the process has a core for less than 70 % of the time that it needs one.
    """

    def __init__(
        self,
        *,
        idle: Callable[[], int] = idle_cores,
        waits: Callable[[], dict[int, ThreadTimes]] = thread_times,
    ) -> None:
        self._idle = idle
        self.share, self._loss = CoreShare(waits), TrialLoss()
        self._choices: dict[tuple[str, int, int], ThreadTuner] = {}
        self._last: ThreadTuner | None = None

    @contextmanager
    def measured(self, n: int, max_threads: int, kind: str = "") -> Iterator[int]:
        """Yield the thread count for a block that computes `n` tokens, and time the block.

        The caller sets the count. A block that raises is not counted. Cost: 5 µs.
        kind: kind of work; kinds are tuned separately.
        """
        choice = self._last = self.choice(n, max_threads, kind)
        threads = choice.threads
        start, cpu_start = time.perf_counter(), time.process_time()
        yield threads
        wall_s = time.perf_counter() - start
        self.share.add(wall_s, time.process_time() - cpu_start, threads)
        choice.add(wall_s, n)

    def choice(self, n: int, max_threads: int, kind: str = "") -> ThreadTuner:
        """Return the tuner for blocks of a kind and size; sizes between powers of two share one."""
        key = kind, n.bit_length(), max_threads
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = ThreadTuner(
                max_threads,
                self._loss,
                self._idle,
                first=self._first(max_threads),
                is_crowded=lambda: self.share.is_crowded,
            )
        return choice

    def _first(self, max_threads: int) -> int:
        """Return the initial thread count of a new tuner.

        It is the count of the last tuner, half of it on a busy machine; the number of idle cores
        for the first tuner.
        """
        if self._last is None:
            return min(max_threads, self._idle())
        threads = self._last.counts[self._last.index]
        return threads // 2 if self.share.is_crowded else threads


class Limit:
    """Sets the thread counts of OpenMP or BLAS libraries inside a block and restores them
    afterwards.

    Args:
        user_api: "openmp" or "blas", as in `threadpoolctl`. OpenMP's count belongs to the calling
            thread, a BLAS's to the process.
    """

    def __init__(self, user_api: str) -> None:
        self.libraries: list[Any] = ThreadpoolController().select(user_api=user_api).lib_controllers

    @contextmanager
    def to(self, n: int) -> Iterator[None]:
        """Limit the libraries to `n` threads inside a block. Cost: some µs."""
        before = [(library, library.get_num_threads()) for library in self.libraries]
        changed = [(library, own) for library, own in before if own != n]
        process = os.getpid()
        try:
            for library, _ in changed:
                library.set_num_threads(n)
            yield
        finally:
            # A forked child has thread pools of its own. A count that the caller has set inside
            # the block stays.
            for library, own in changed if os.getpid() == process else ():
                if library.get_num_threads() == n:
                    library.set_num_threads(own)


class BlasThreads:
    """Sets the thread count of NumPy's BLAS for each forward: `with blas_threads.limited(n_tokens):
    …`

    Args:
        threads: a fixed count, or "auto". "auto" keeps a count from environment variables; without
            one,
            a `ThreadTuner` chooses, starting with one thread.

    Raises:
        ConfigError: `threads` is neither.
    """

    def __init__(self, threads: int | str) -> None:
        self.fixed: int | None = None
        self._max_threads = 0
        self._choices: dict[int, ThreadTuner] = {}  # by size of the forward, in powers of two
        if threads == "auto":
            if not has_any_variable(_BLAS_VARIABLES):
                self._max_threads = min(_MAX_BLAS_THREADS, usable_cores())
            self._loss = TrialLoss()
        elif isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1:
            self.fixed = threads
        else:
            raise ConfigError(f'threads is {threads!r}; allowed are "auto" and numbers from 1 on')
        self._limit = Limit("blas")

    @property
    def max_threads(self) -> int:
        """Maximum number of threads of a forward."""
        own = (library.get_num_threads() for library in self._limit.libraries)
        return self.fixed or self._max_threads or max(own, default=1)

    @contextmanager
    def limited(self, n_tokens: int) -> Iterator[None]:
        """Limit the BLAS inside a block that runs a forward of `n_tokens` tokens.

        The block is also timed, to tune the thread count, unless the count is fixed.
        Cost: about 10 µs.
        """
        if not self._max_threads:
            with nullcontext() if self.fixed is None else self._limit.to(self.fixed):
                yield
        elif n_tokens <= 1 or self._max_threads == 1:  # vectors gain nothing
            with self._limit.to(1):
                yield
        else:
            size = n_tokens.bit_length()
            choice = self._choices.setdefault(
                size, ThreadTuner(self._max_threads, self._loss, idle_cores)
            )
            with self._limit.to(choice.threads):
                start = time.perf_counter()
                yield
                choice.add(time.perf_counter() - start, n_tokens)
