"""Memory that loading gives back: mapped pages of weights, and weights that were packed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402

from weft.engines.torch.weights.memory import MappedFiles, release_heap  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(sys.platform != "linux", reason="pages are released on Linux only"),
]


def resident_kb(file: Path) -> int:
    """Return how much of a mapped file is resident in this process."""
    text = Path("/proc/self/smaps").read_text("ascii", errors="replace")
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.M)
    return sum(
        int(match[1])
        for part in parts
        if str(file) in part and (match := re.search(r"^Rss:\s+(\d+) kB", part, re.M))
    )


def test_release_gives_back_the_pages_of_a_mapped_weight_and_keeps_its_numbers(
    tmp_path: Path,
) -> None:
    file = tmp_path / "model.safetensors"
    weights = {name: torch.randn(512, 1024) for name in ("a", "b")}
    save_file(weights, file)
    mapped = load_file(file)
    files = MappedFiles()
    assert float(mapped["a"].sum() + mapped["b"].sum())  # every page is read
    before = resident_kb(file)
    files.release(mapped["a"])
    assert before - resident_kb(file) >= 1900  # of 2,048
    assert torch.equal(mapped["a"], weights["a"])
    assert torch.equal(mapped["b"], weights["b"])


def test_release_leaves_a_weight_outside_of_files_as_it_is() -> None:
    weight = torch.randn(512, 1024)
    copy = weight.clone()
    MappedFiles().release(weight)
    release_heap()
    assert torch.equal(weight, copy)
