"""How many threads a library computes with: what serves forwards best, found while they run."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from threadpoolctl import ThreadpoolController

from ..errors import ConfigError
from ..share import idle_cores, usable_cores

_MOST = 8  # of a BLAS; beyond, matrices of the NumPy engine's models are too small
_OF_A_BLAS = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_PAID_BACK = 20  # a trial may take a twentieth of the time
_APART = 8  # forwards between two trials, at least
_ENOUGH = 3  # trials before the choice moves on


def is_said(names: Iterable[str]) -> bool:
    """Whether the environment says how many threads there are to be, by one of these names."""
    return any(os.environ.get(name) for name in names)


class Account:
    """What trials have lost and forwards have not paid back yet, in seconds, for all sizes."""

    def __init__(self) -> None:
        self.owed_s = 0.0


class ThreadChoice:
    """A number of threads for forwards of about one size, found while they run.

    More are far slower where the machine is busy with something else: they wait for each other. Now
    and then a forward is a trial with the next number up or down, up only where so many cores are
    idle. The number moves on when trials were faster in the median; what a trial lost is paid back
    twenty times before the next one.
    """

    def __init__(
        self,
        most: int,
        account: Account,
        idle: Callable[[], int],
        *,
        first: int = 1,
        is_crowded: Callable[[], bool] = lambda: True,
    ) -> None:
        """most: the highest number; tried are the powers of two below, and itself. first: where to
        begin: with the largest of them that is no more. is_crowded: whether others may want the
        cores, so that fewer are worth a trial.
        """
        self._account = account
        self._idle = idle
        self._is_crowded = is_crowded
        self.counts = sorted({min(2**power, most) for power in range(most.bit_length() + 1)})
        self.at = max(i for i, n in enumerate(self.counts) if n <= max(first, 1))
        self._way = -1
        self._trial: int | None = None
        self._times: deque[float] = deque(maxlen=5)  # a token, with the present number
        self._ratios: dict[int, deque[float]] = {}  # of trials to that
        self._rest = 0  # forwards before the next trial

    @property
    def threads(self) -> int:
        """Return the number for the next forward."""
        return self.counts[self.at if self._trial is None else self._trial]

    def ran(self, seconds: float, n_tokens: int) -> None:
        """Learn how long a forward with `threads` took, and choose for the next one."""
        each = seconds / n_tokens
        if self._trial is not None:
            self._judge(self._trial, each, n_tokens)
            return
        times = self._times
        is_slow = len(times) >= 2 and min(times[-1], each) > 2 * statistics.median(times)
        times.append(each)
        self._rest -= 1
        self._account.owed_s = max(self._account.owed_s - seconds, 0.0)
        if (
            self.at and is_slow and self._is_crowded()
        ):  # twice: somebody else came, and fewer cost little to try
            self._times = deque([times[-2], each], maxlen=5)
            self._ratios.clear()
            self._trial = self.at - 1
        elif len(times) < 2:
            return
        elif self._rest <= 0 and not self._account.owed_s:
            self._trial = self._next()

    def _next(self) -> int | None:
        """Return which number to try: the next one up and the next one down, in turn; None: none.

        More than there are idle cores is not tried, but where trials have begun well: the library's
        own threads spin for a while after each, and count as somebody else's.
        """
        self._way = -self._way
        for there in (self.at + self._way, self.at - self._way):
            if 0 <= there < len(self.counts) and self._is_worth(there):
                return there
        self._rest = _APART
        return None

    def _is_worth(self, trial: int) -> bool:
        if trial < self.at:
            return self._is_crowded()
        return self._began_well(trial) or self.counts[trial] <= self._idle()

    def _began_well(self, trial: int) -> bool:
        """Whether a number was faster so far, and a few trials more may prove it."""
        ratios = self._ratios.get(trial, ())
        return 0 < len(ratios) < _ENOUGH and statistics.median(ratios) < 0.95

    def _judge(self, trial: int, each: float, n_tokens: int) -> None:
        self._trial = None
        usual = statistics.median(self._times)
        ratios = self._ratios.setdefault(trial, deque(maxlen=5))
        ratios.append(each / usual)
        ratio = statistics.median(ratios)
        if (len(ratios) >= _ENOUGH and ratio < 0.95) or ratio < 0.5:
            self.at = trial
            self._times.clear()
            self._ratios.clear()
            self._rest = 0
        else:
            self._rest = 2 if len(ratios) < _ENOUGH else _APART
            self._account.owed_s += _PAID_BACK * max(each - usual, 0.0) * n_tokens


class Limit:
    """Has libraries compute with so many threads inside a block, and with their own afterwards.

    libraries: `threadpoolctl`'s. OpenMP's is that of the calling thread, a BLAS' the process's.
    """

    def __init__(self, user_api: str) -> None:
        self.libraries: list[Any] = ThreadpoolController().select(user_api=user_api).lib_controllers

    @contextmanager
    def to(self, n: int) -> Iterator[None]:
        """Cost: some µs."""
        before = [(library, library.get_num_threads()) for library in self.libraries]
        changed = [(library, own) for library, own in before if own != n]
        process = os.getpid()
        try:
            for library, _ in changed:
                library.set_num_threads(n)
            yield
        finally:
            # A child that was forked inside has threads of its own to see to; and whoever set
            # another number meanwhile meant it.
            for library, own in changed if os.getpid() == process else ():
                if library.get_num_threads() == n:
                    library.set_num_threads(own)


class BlasThreads:
    """Limits the BLAS during a forward and gives its setting back afterwards.

    threads: a number, or "auto": found while running (see `ThreadChoice`), at most as many as the
    process may use; or as many as the environment says.
    """

    def __init__(self, threads: int | str) -> None:
        self.fixed: int | None = None
        self._most = 0
        self._choices: dict[int, ThreadChoice] = {}  # by size of the forward, in powers of two
        if threads == "auto":
            if not is_said(_OF_A_BLAS):
                self._most = min(_MOST, usable_cores())
            self._account = Account()
        elif isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1:
            self.fixed = threads
        else:
            raise ConfigError(f'threads is {threads!r}; allowed are "auto" and numbers from 1 on')
        self._limit = Limit("blas")

    @property
    def max_threads(self) -> int:
        """Threads that a forward can have."""
        own = (library.get_num_threads() for library in self._limit.libraries)
        return self.fixed or self._most or max(own, default=1)

    @contextmanager
    def limited(self, n_tokens: int) -> Iterator[None]:
        """Limit the BLAS inside a block that runs so many tokens. Cost: about 10 µs."""
        if not self._most:
            with nullcontext() if self.fixed is None else self._limit.to(self.fixed):
                yield
        elif n_tokens <= 1 or self._most == 1:  # vectors gain nothing
            with self._limit.to(1):
                yield
        else:
            size = n_tokens.bit_length()
            choice = self._choices.setdefault(
                size, ThreadChoice(self._most, self._account, idle_cores)
            )
            with self._limit.to(choice.threads):
                began = time.perf_counter()
                yield
                choice.ran(time.perf_counter() - began, n_tokens)
