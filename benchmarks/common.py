"""Shared by the benchmarks: a table, one JSON line, medians, and the machine of a run."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import weft

ROOT = Path(__file__).resolve().parent.parent
Row = Mapping[str, object]


def reach_recipe() -> None:
    """Make `import recipe` find the training recipe, from any working directory."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))


def table(rows: Sequence[Row]) -> str:
    """Return rows as an aligned table; the first row's keys are the heading."""
    heads = list(rows[0])
    cells = [heads, *([_shown(row.get(head, "")) for head in heads] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(heads))]
    lines = [
        "  ".join(
            _padded(cell, width, i)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def report(name: str, rows: Sequence[Row], **more: Any) -> None:
    """Print the table and the JSON line of a benchmark."""
    print(table(rows))
    rounded = [{key: _rounded(value) for key, value in row.items()} for row in rows]
    line = {"benchmark": name, **more, "rows": rounded, "regime": regime()}
    print(json.dumps(line, ensure_ascii=False, default=str))


def regime() -> dict[str, object]:
    """Return the conditions of a run: machine, versions, threads and load."""
    threads = {key: value for key, value in os.environ.items() if key.endswith("_NUM_THREADS")}
    return {
        "weft": weft.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "threads": threads,
    }


def median(values: Sequence[float]) -> float:
    """Return the median; NaN of nothing."""
    return statistics.median(values) if values else float("nan")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def _padded(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column == 0 else cell.rjust(width)
