"""Loading a model for a verb, with progress on stderr."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn

from ..errors import ConfigError, EngineUnavailable, ModelLoadError
from .out import Out

if TYPE_CHECKING:
    from ..lm import LM

TINY = "tiny"
_QUIET_S = 10.0  # between two plain lines of progress


def load_model(model: str, engine: str = "auto", kv_budget: str = "auto") -> LM:
    """Load a model, telling of downloads and slow loads on stderr. Raises: as `weft.load`."""
    if model == TINY and engine in ("auto", "numpy"):
        # NOTE: before numpy is imported. The products of the embedded model are too small to gain
        # from threads, and wait for them badly when other programs keep the cores busy.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ..engines import engine_names
    from ..loading import load, parse_bytes

    parse_bytes(kv_budget)
    if engine not in (known := ("auto", *engine_names())):
        raise EngineUnavailable(f"there is no engine {engine!r}; allowed are {', '.join(known)}")
    with LoadProgress(Out.of(sys.stderr)) as progress:
        try:
            return load(model, engine=engine, kv_budget=kv_budget, progress=progress)
        except ConfigError as error:
            # What is left to be wrong is the model's name: there is no such model here.
            raise ModelLoadError(str(error), hint=error.hint) from error


class LoadProgress:
    """Bars on a terminal, a line now and then elsewhere; takes what `load` reports."""

    def __init__(self, out: Out) -> None:
        self.out = out
        self._told = 0.0
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            console=out.console,
            transient=True,
            disable=not out.is_live,
        )

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, phase: str, done: int, total: int, note: str) -> None:
        if phase != "download":
            return
        if not self.out.is_live:
            self._tell(done, total, note)
            return
        if phase not in self._tasks:
            self.out.line(f"downloading {note}")
            self._bars.start()
            self._tasks[phase] = self._bars.add_task(phase, total=total)
        self._bars.update(self._tasks[phase], completed=done, total=total)

    def _tell(self, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        if done in (0, total) or now - self._told > _QUIET_S:
            self._told = now
            self.out.line(f"downloading {note}: {100 * done // max(total, 1)} %")
