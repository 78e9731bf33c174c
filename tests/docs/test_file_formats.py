"""The page about file formats names the fields that Weft writes, and its example can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import weft

PAGE = (Path(__file__).parents[2] / "docs" / "file-formats.md").read_text(encoding="utf-8")


def fields(section: str) -> set[str]:
    """Return the names in the first column of a section's tables."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    block = re.search(r"^```json\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert block is not None
    data: dict[str, Any] = json.loads(block[1])
    return data


def test_saving_the_opened_example_writes_its_fields(
    example: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "example.loom.json"
    file.write_text(json.dumps(example), encoding="utf-8")
    with weft.load("tiny") as lm:
        loom = weft.Loom.open(file, lm)
        assert loom.dropped == ()
        loom.save(file)
    written = json.loads(file.read_text("utf-8"))
    full, shortened = written["nodes"][1].pop("params"), example["nodes"][1].pop("params")
    assert shortened.items() <= full.items()
    assert written == example


def test_every_written_field_is_on_the_page(example: dict[str, Any], tmp_path: Path) -> None:
    with weft.load("tiny") as lm:
        loom = weft.Loom(lm, "Once")
        loom.grow(n=1, max_tokens=1, constraint=weft.constraints.Regex("a+"), seed=1)
        loom.save(tmp_path / "once.loom.json", kv=True)
    written = json.loads((tmp_path / "once.loom.json").read_text("utf-8"))
    expected = set(written["nodes"][1]) | set(written) - {"model", "prompt"}
    expected |= {f"{part}.{name}" for part in ("model", "prompt") for name in written[part]}
    only_some_looms_have = {"title", "adapter", "model.adapter"}
    assert fields("Loom files") == expected | only_some_looms_have
    with safe_open(tmp_path / "once.kv.safetensors", "numpy") as file:
        assert fields("KV files") == set(file.metadata())
