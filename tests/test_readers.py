"""Broken files of every kind raise the errors of their reader, which name the file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from readers import READERS

WITH_TORCH = ["torch", "adapter"]
OTHERS = [name for name in READERS if name not in WITH_TORCH]


def case(names: list[str], n: int, *marks: Any) -> Any:
    if set(names) & set(WITH_TORCH):
        marks = (*marks, pytest.mark.torch, pytest.mark.engines)
    return pytest.param(names, n, marks=marks, id=f"{'+'.join(names)}-{n}")


@pytest.mark.skipif(os.name == "nt", reason="POSIX only: memory is limited")
@pytest.mark.parametrize(
    ("names", "n"),
    [
        case(OTHERS, 20, pytest.mark.programs),
        case(WITH_TORCH, 6),
        *(case([name], 3000, pytest.mark.slow, pytest.mark.timeout(1800)) for name in READERS),
    ],
)
def test_error_of_a_broken_file_names_the_file(names: list[str], n: int) -> None:
    """In a process of its own: libraries have ended it, or taken all memory."""
    script = Path(__file__).with_name("readers.py")
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(script), ",".join(names), str(n), "1"],
        capture_output=True,
        encoding="utf-8",
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count(" 0 wrong\n") == len(names)
