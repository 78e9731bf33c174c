"""The programs for a card, at toy size on a CPU: all of them run, and what fails is told."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

pytestmark = pytest.mark.torch
ROOT = Path(__file__).resolve().parents[2]


def check(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Run the check on a CPU; return its exit code, its report and what it printed."""
    out = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--dry", "--out", str(out), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(out.read_text()), done.stdout


def what(told: dict[str, Any]) -> set[str]:
    return {each["what"] for each in told["figures"]}


@pytest.mark.slow
def test_all_that_a_card_is_to_show_runs_at_toy_size(tmp_path: Path) -> None:
    code, report, printed = check(tmp_path)
    assert code == 0, printed
    parts = report["parts"]
    assert what(parts["kernels"]) == {"kernel", "copy", "tree"}
    assert what(parts["trees"]) == {"rates", "tree", "engine alone", "flat reads"}
    assert what(parts["laws"]) == {"truth", "contract"}
    assert what(parts["prefill"]) == {"rates", "prefill"}
    assert what(parts["callers"]) == {"sampled decode", "callers"}
    assert what(parts["transformers"]) == {"generate", "continuous batching"}
    assert not [each for told in parts.values() for each in told["figures"] if "error" in each]


def test_a_part_that_fails_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    """The engine refuses an option that it does not know; kernels know of no options."""
    words = ("--option", "no_such_option", "1", "--parts", "kernels", "prefill")
    code, report, printed = check(tmp_path, *words)
    assert code == 1
    assert report["parts"]["kernels"]["failed"] == 0
    assert "no_such_option" in printed
    assert len(report["parts"]["kernels"]["figures"]) > 10


def test_a_part_that_takes_too_long_leaves_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.spec_from_file_location("gpu_check", ROOT / "benchmarks/gpu_check.py")
    assert found is not None
    assert found.loader is not None
    program = importlib.util.module_from_spec(found)
    found.loader.exec_module(program)
    script = tmp_path / "slow.py"
    script.write_text(
        "import sys, time\n"
        "open(sys.argv[sys.argv.index('--json') + 1], 'w').write('{\"what\": \"first\"}\\n')\n"
        "time.sleep(60)\n"
    )
    options = type("Options", (), {"dry": True, "option": []})()
    told = program.run(program.Part("slow", [str(script)], 1.0), 1.0, options)
    assert told["figures"] == [{"what": "first"}]
    assert told["error"] == "ended after 1 s"
    assert told["failed"] == 1
