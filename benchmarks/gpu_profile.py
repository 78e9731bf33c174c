"""The time of a step on a card: its kernels, and the gaps between them.

Trees grow as in `gpu_tree`; PyTorch's profiler looks at some steps of the last level. Each figure
is a JSON line in the file of `--json`: milliseconds between steps, how long the card worked, and
its kernels by the time they took. With --traces a file for Chrome's viewer is written a tree.
"""

from __future__ import annotations

import argparse
import gzip
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_model import Record, Shape, llama, synchronise, trees
from gpu_tree import DRY, REAL, Ours, Sizes
from torch.profiler import ProfilerActivity, profile

_STEPS = 8
_MAX_KERNELS = 40


def _profile() -> profile:
    return profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])


class Looked:
    """Profiles some forwards of so many rows, once a few of them have been."""

    def __init__(self, ours: Ours, n_rows: int, after: int) -> None:
        self._n_rows, self._after, self._n = n_rows, after, 0
        self.profile = _profile()
        self._forward, self._engine = ours.engine.forward, ours.engine
        self._engine.forward = self._noted

    def _noted(self, rows: Sequence[Any]) -> Any:
        if len(rows) == self._n_rows:
            self._n += 1
            if self._n == self._after:
                self.profile.start()
            elif self._n == self._after + _STEPS:
                self.end()
        return self._forward(rows)

    def end(self) -> None:
        if self._n >= self._after:
            synchronise()
            self.profile.stop()
            self._n = -(1 << 30)
        self._engine.forward = self._forward


def kernels_of(events: Sequence[Any]) -> dict[str, Any]:
    """Return how long the card was busy, and each kernel's time and count, per step."""
    spans, took, counts = [], defaultdict[str, float](float), Counter[str]()
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = re.sub(r"\s+", " ", event.name)[:120]
            start, end = event.time_range.start, event.time_range.end
            spans.append((start, end))
            took[name] += end - start
            counts[name] += 1
    spans.sort()
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    ranked = sorted(took, key=took.__getitem__, reverse=True)[:_MAX_KERNELS]
    per_step = {
        name: [round(took[name] / _STEPS, 2), round(counts[name] / _STEPS, 2)] for name in ranked
    }
    span = (until - spans[0][0]) if spans else 0.0
    return {
        "busy_ms": busy / _STEPS / 1e3,
        "from_first_to_last_ms": span / _STEPS / 1e3,
        "n_kernels": sum(counts.values()) / _STEPS,
        "us_and_count": per_step,
    }


def looked_at(
    ours: Ours, shape: Shape, sizes: Sizes, trace: Path | None, *, late: bool
) -> dict[str, Any]:
    """late: look at the last steps of a level, not at those that come soon after its first."""
    n_steps = shape.lengths[-1] if shape.counts[0] == 1 < len(shape.counts) else 3 * sizes.last
    after = n_steps - _STEPS - 4 if late else sizes.last // 2
    looked = Looked(ours, shape.n_leaves, max(2, after))
    try:
        result = ours.grow(shape, sizes.last)
    finally:
        looked.end()
    if trace is not None:
        looked.profile.export_chrome_trace(str(trace))
        with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        trace.unlink()
    return {**result, **kernels_of(looked.profile.events() or [])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", required=True, help="the file that gets a JSON line a figure")
    parser.add_argument("--trees", nargs="+", help="by their names; all otherwise")
    parser.add_argument("--late", action="store_true", help="look at the last steps of each level")
    parser.add_argument("--traces", type=Path, help="a folder for traces")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on any machine")
    parser.add_argument("--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    options = parser.parse_args()
    record = Record(options.json)
    ours = Ours(llama(dry=options.dry), options=dict(options.option))
    sizes = DRY if options.dry else REAL
    with _profile():  # the profiler is to begin in this thread; it looks at the one that steps
        synchronise()
    for number, (name, shape) in enumerate(trees(dry=options.dry).items()):
        if options.trees is None or name in options.trees:
            trace = options.traces and options.traces / f"tree{number}.json"
            job = partial(looked_at, ours, shape, sizes, trace, late=options.late)
            record.attempt("profile", job, tree=name, late=options.late)
            ours.forget()
    ours.lm.close()


if __name__ == "__main__":
    main()
