"""How many threads the BLAS behind NumPy may use, for the length of a forward."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import ThreadpoolController

from ...errors import ConfigError

# A step multiplies small matrices: a second thread helps (not with one row), more wait for each
# other. On a machine that is busy with something else their waiting makes a step 100 times slower.
_MOST = 2
_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class BlasThreads:
    """Limits the BLAS during a forward and gives its setting back afterwards.

    threads: a number, or "auto": at most two, or as many as the environment says.
    """

    def __init__(self, threads: int | str) -> None:
        if threads == "auto":
            chosen = any(os.environ.get(name) for name in _VARIABLES)
            self.limit = None if chosen else min(_MOST, os.cpu_count() or 1)
        elif isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1:
            self.limit = threads
        else:
            raise ConfigError(f'threads is {threads!r}; allowed are "auto" and numbers from 1 on')
        self._controller = ThreadpoolController().select(user_api="blas")

    @contextmanager
    def limited(self, n_tokens: int) -> Iterator[None]:
        """Limit the BLAS inside a block that runs so many tokens. Cost: about 10 µs."""
        limit = 1 if n_tokens == 1 else self.limit
        if limit is None:
            yield
            return
        with self._controller.limit(limits=limit):
            yield
