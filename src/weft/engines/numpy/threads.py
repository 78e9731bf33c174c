"""How many threads the BLAS behind NumPy may use, for the length of a forward."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController

from ...cores import usable_cores
from ...errors import ConfigError

_MOST = 8  # beyond, matrices of this engine's models are too small
_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_PAID_BACK = 20  # a trial may take a twentieth of the time
_APART = 8  # forwards between two trials, at least
_ENOUGH = 3  # trials before the choice moves on
_BUSY_S = 1.0  # how long there is no trial where the machine was busy at the beginning


class Account:
    """What trials have lost and forwards have not paid back yet, in seconds, for all sizes."""

    def __init__(self, owed_s: float = 0.0) -> None:
        self.owed_s = owed_s


class Choice:
    """A number of threads for forwards of about one size, found while they run.

    It begins with one thread, as more are far slower where the machine is busy with something else:
    they wait for each other. Now and then a forward is a trial with the next number up or down. The
    number moves on when trials were faster in the median; what a trial lost is paid back twenty
    times before the next one.
    """

    def __init__(self, most: int, account: Account) -> None:
        """most: the highest number; tried are the powers of two below, and itself."""
        self._account = account
        self.counts = sorted({min(2**power, most) for power in range(most.bit_length() + 1)})
        self.at = 0
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
        if self.at and is_slow:  # twice: somebody else came, and fewer cost little to try
            self._times = deque([times[-2], each], maxlen=5)
            self._ratios.clear()
            self._trial = self.at - 1
        elif len(times) < 2:
            return
        elif self._rest <= 0 and not self._account.owed_s:
            self._trial = self._next()

    def _next(self) -> int:
        """Return which number to try: the next one up and the next one down, in turn."""
        self._way = -self._way
        there = self.at + self._way
        return there if 0 <= there < len(self.counts) else self.at - self._way

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


class BlasThreads:
    """Limits the BLAS during a forward and gives its setting back afterwards.

    threads: a number, or "auto": found while running (see `Choice`), at most as many as the process
    may use; or as many as the environment says.
    """

    def __init__(self, threads: int | str) -> None:
        self.limit: int | None = None
        self._most = 0
        self._choices: dict[int, Choice] = {}  # by size of the forward, in powers of two
        if threads == "auto":
            if not any(os.environ.get(name) for name in _VARIABLES):
                self._most = min(_MOST, usable_cores())
            self._account = Account(_BUSY_S if _is_busy() else 0.0)
        elif isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1:
            self.limit = threads
        else:
            raise ConfigError(f'threads is {threads!r}; allowed are "auto" and numbers from 1 on')
        self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers

    @contextmanager
    def limited(self, n_tokens: int) -> Iterator[None]:
        """Limit the BLAS inside a block that runs so many tokens. Cost: about 10 µs."""
        if not self._most:
            with self._set(self.limit):
                yield
        elif n_tokens <= 1 or self._most == 1:  # vectors gain nothing
            with self._set(1):
                yield
        else:
            size = n_tokens.bit_length()
            choice = self._choices.setdefault(size, Choice(self._most, self._account))
            with self._set(choice.threads):
                began = time.perf_counter()
                yield
                choice.ran(time.perf_counter() - began, n_tokens)

    @contextmanager
    def _set(self, limit: int | None) -> Iterator[None]:
        if limit is None:
            yield
            return
        before = [(library, library.get_num_threads()) for library in self._libraries]
        changed = [(library, n) for library, n in before if n != limit]
        for library, _ in changed:
            library.set_num_threads(limit)
        try:
            yield
        finally:
            for library, n in changed:
                library.set_num_threads(n)


def _is_busy() -> bool:
    """Whether more wants to run on the machine than it has cores."""
    try:
        return os.getloadavg()[0] > (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return False
