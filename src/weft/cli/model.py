"""Load a model for a verb, with progress on stderr."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from ..errors import ConfigError, ModelLoadError
from ..viz.terminal import TerminalWriter

if TYPE_CHECKING:
    from ..lm.lm import LM

TINY = "tiny"
_PROGRESS_INTERVAL_S = 10.0  # between two plain lines of progress
_SLOW_S = 0.3  # a load that takes longer gets a bar
_LONG_S = 4.0  # a load that takes longer is worth a server
_log = logging.getLogger(__name__)


def load_model(model: str, engine: str = "auto", kv_budget: str = "auto") -> LM:
    """Load a model in this process; report downloads and slow loads on stderr.

    Args:
        model: the model as -m takes it.
        engine: name of the engine; "auto" selects one that can run the model.
        kv_budget: memory for KV, such as "4GiB"; "auto" leaves it to the engine.

    Raises: like `weft.load`.
    """
    from ..engines import engine_names
    from ..loading import load, parse_bytes

    parse_bytes(kv_budget)
    if engine not in (allowed := ("auto", *engine_names())):
        raise ConfigError(
            f"there is no engine {engine!r}; allowed are {', '.join(allowed)}",
            hint="weft doctor lists engines and the packages that they need",
        )
    with LoadProgress(TerminalWriter.for_stream(sys.stderr)) as progress:
        began = time.perf_counter()
        try:
            options = threads_of(model, engine)
            lm = load(
                model,
                engine=engine,
                kv_budget=kv_budget,
                engine_options=options,
                progress=progress,
            )
            seconds = time.perf_counter() - began
            _log.info("loaded %s on the %s engine in %.2f s", model, lm.info.name, seconds)
        except ConfigError as error:
            # The options were checked above, so the model's name is wrong.
            raise ModelLoadError(str(error), hint=error.hint) from error
    if seconds > _LONG_S and model != TINY:
        note = f"loaded in {seconds:.0f} s (keep it loaded: weft serve {shlex.quote(model)})"
        TerminalWriter.for_stream(sys.stderr).line((note, "dim"))
    return lm


def threads_of(model: str, engine: str) -> dict[str, int] | None:
    """Return the engine option for the number of threads; None leaves it to the engine.

    The embedded model uses one thread unless OPENBLAS_NUM_THREADS is set. Its matrices are too
    small to gain from more, and waiting for threads is slow when other programs use the cores.
    """
    is_small = model == TINY and engine in ("auto", "numpy")
    return {"threads": 1} if is_small and not os.environ.get("OPENBLAS_NUM_THREADS") else None


class LoadProgress:
    """A progress callback for `weft.load`, which reports downloads and slow loads.

    It draws bars on a terminal. Elsewhere it writes a line every 10 s of a download.
    """

    def __init__(self, out: TerminalWriter) -> None:
        self.out = out
        self._began = time.monotonic()
        self._last_line = 0.0
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[size]}"),
            console=out.console,
            transient=True,
            disable=not out.is_live,
        )

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, phase: str, done: int, total: int, note: str) -> None:
        if phase == "download":
            self._downloaded(done, total, note)
        elif self.out.is_live and (total == 1 or time.monotonic() - self._began > _SLOW_S):
            # With a single part the bar has no total and only shows activity.
            self._bar("loading", done, total if total > 1 or done else None, "")

    def _downloaded(self, done: int, total: int, note: str) -> None:
        """Report the progress of a download. done, total: bytes."""
        if not self.out.is_live:
            self._write_line(done, total, note)
            return
        if "downloading" not in self._tasks:
            self.out.line(f"downloading {note}")
        self._bar("downloading", done, total, f"{done / 1e6:.1f} of {total / 1e6:.1f} MB")

    def _bar(self, phase: str, done: int, total: int | None, size: str) -> None:
        """Draw a progress bar."""
        if phase not in self._tasks:
            self._bars.start()
            self._tasks[phase] = self._bars.add_task(phase, total=total, size=size)
        self._bars.update(self._tasks[phase], completed=done, total=total, size=size)

    def _write_line(self, done: int, total: int, note: str) -> None:
        """Write a line about a download, at most every 10 s."""
        now = time.monotonic()
        if done in (0, total) or now - self._last_line > _PROGRESS_INTERVAL_S:
            self._last_line = now
            self.out.line(f"downloading {note}: {100 * done // max(total, 1)} %")
