"""The GPU programs, at toy size on a CPU: all of them run, and failures are reported."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

pytestmark = [pytest.mark.torch, pytest.mark.kernels]
ROOT = Path(__file__).resolve().parents[2]


def check(tmp_path: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Run the check on a CPU; return its exit code, its report and what it printed."""
    out = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--dry", "--out", str(out), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(out.read_text()), done.stdout


def kinds(part_report: dict[str, Any]) -> set[str]:
    return {each["what"] for each in part_report["figures"]}


@pytest.mark.slow
def test_all_gpu_programs_run_at_toy_size(tmp_path: Path) -> None:
    code, report, printed = check(tmp_path)
    assert code == 0, printed
    parts = report["parts"]
    kernels = {"kernel", "copy", "tree", "prompt", "cut", "deep", "tiles", "host"}
    assert kinds(parts["kernels"]) == kernels
    assert kinds(parts["trees"]) == {"rates", "tree", "engine alone", "flat reads"}
    assert kinds(parts["laws"]) == {"truth"}
    assert kinds(parts["contract"]) == {"contract"}
    assert kinds(parts["draws"]) == {"draw"}
    assert kinds(parts["prefill"]) == {"rates", "prefill"}
    assert kinds(parts["callers"]) == {"sampled decode", "callers"}
    assert kinds(parts["experts"]) == {"copy", "experts", "router"}
    assert kinds(parts["transformers"]) == {"generate", "continuous batching"}
    assert not [each for part in parts.values() for each in part["figures"] if "error" in each]


@pytest.mark.slow
def test_failing_part_is_reported_and_the_others_run(tmp_path: Path) -> None:
    """The engine rejects an unknown option; the kernels take no options."""
    words = ("--option", "no_such_option", "1", "--parts", "kernels", "prefill")
    code, report, printed = check(tmp_path, *words)
    assert code == 1
    assert report["parts"]["kernels"]["failed"] == 0
    assert "no_such_option" in printed
    assert len(report["parts"]["kernels"]["figures"]) > 10


def test_python_without_requirements_is_reported_before_any_part(tmp_path: Path) -> None:
    bare = ["-I", "-S", str(ROOT / "benchmarks" / "gpu_check.py")]  # no site-packages
    done = subprocess.run(
        [sys.executable, *bare, "--dry", "--out", str(tmp_path / "report.json")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "has no torch, transformers, triton, numpy" in done.stderr
    assert "GPU_PYTHON=" in done.stderr
    assert not list(tmp_path.iterdir())


def program_of(name: str) -> Any:
    """A program of the benchmarks, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def report_of(tmp_path: Path, script: str, limit: float = 30.0) -> dict[str, Any]:
    """Return the report of a part that runs this; `notes` is its file, which it may write to."""
    file = tmp_path / "part.py"
    file.write_text(
        "import os, subprocess, sys, time\n"
        "notes = open(sys.argv[sys.argv.index('--json') + 1], 'a')\n" + script
    )
    program = program_of("gpu_check")
    options = type("Options", (), {"dry": True, "option": []})()
    part_report: dict[str, Any] = program.run(
        program.Part("part", [str(file)], limit), limit, options
    )
    return part_report


OF_MODEL = (
    f"sys.path[:0] = [{str(ROOT / 'src')!r}, {str(ROOT / 'benchmarks')!r}]\nimport gpu_model\n"
)


class Impatient(subprocess.Popen):  # type: ignore[type-arg]
    """A part whose time is over as soon as it has noted something, however slow the machine is."""

    is_over = False

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None or self.is_over:
            return super().wait(timeout)
        self.is_over = True
        assert isinstance(self.args, list)
        notes = Path(self.args[self.args.index("--json") + 1])
        while not (notes.exists() and notes.stat().st_size):
            assert self.poll() is None, "it has ended by itself"
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(self.args, timeout)


def has_ended(pid: int) -> bool:
    """Return True if a process has exited, or is a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state.rpartition(")")[2].split()[0] in "ZX"


def test_part_that_takes_too_long_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Impatient)
    script = 'notes.write(\'{"what": "first"}\\n\')\nnotes.flush()\ntime.sleep(600)\n'
    part_report = report_of(tmp_path, script, 1.0)
    assert part_report["figures"] == [{"what": "first"}]
    assert part_report["error"] == "ended after 1 s"
    assert part_report["failed"] == 1


def test_incomplete_result_of_a_killed_part_is_reported_as_broken(tmp_path: Path) -> None:
    half = 'notes.write(\'{"what": "first"}\\n{"what": "sec\')\n'
    part_report = report_of(tmp_path, half + "notes.flush()\nos.kill(os.getpid(), 9)\n")
    assert part_report["figures"] == [{"what": "first"}]
    assert part_report["broken"] == '{"what": "sec'
    assert part_report["error"] == "ended with -9"


def test_attempts_after_a_lost_card_run_in_another_process(
    tmp_path: Path,
) -> None:
    script = OF_MODEL + (
        "gpu_model.is_lost = lambda: True  # as after a wrong address\n"
        "record = gpu_model.Record(notes.name)\n"
        "record.add('card')\n"
        "for number in range(4):\n"
        "    record.attempt('try', lambda: {'is': 2 // (number % 2)}, number=number)\n"
    )
    part_report = report_of(tmp_path, script, 60.0)
    tries = [each for each in part_report["figures"] if each["what"] == "try"]
    assert [each["number"] for each in tries] == [0, 1, 2, 3]
    assert ["error" in each for each in tries] == [True, False, True, False]
    assert part_report["failed"] == 2
    assert "error" not in part_report


@pytest.mark.slow
def test_attempts_after_a_signal_run_in_another_process(
    tmp_path: Path,
) -> None:
    """A part that ends at its import, or after its last attempt, is not restarted forever."""
    script = OF_MODEL + (
        "record = gpu_model.Record(notes.name)\n"
        "record.add('card')\n"
        "for number in range(4):\n"
        "    job = lambda: {'is': number} if number % 2 else os.kill(os.getpid(), 11)\n"
        "    record.attempt('try', job, number=number)\n"
        "os.kill(os.getpid(), 11)\n"
    )
    part_report = report_of(tmp_path, script, 60.0)
    tries = [each for each in part_report["figures"] if each["what"] == "try"]
    assert [each["number"] for each in tries] == [0, 1, 2, 3]
    assert [each.get("error") for each in tries] == ["a process ended in it", None] * 2
    assert part_report["error"] == "ended with -11"
    assert part_report["failed"] == 3
    assert len(part_report["figures"]) <= 4 + 4


def test_nan_and_infinity_are_reported_as_json_strings(tmp_path: Path) -> None:
    part_report = report_of(tmp_path, 'notes.write(\'{"worst": NaN, "ms": [-Infinity]}\\n\')\n')
    assert part_report["figures"] == [{"worst": "NaN", "ms": ["-Infinity"]}]
    json.dumps(part_report, allow_nan=False)


@pytest.mark.parametrize("ends", ["", "time.sleep(600)\n"])
def test_processes_started_by_a_part_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """They are not waited for, and do not block the card for the parts that follow."""
    if ends:
        monkeypatch.setattr(subprocess, "Popen", Impatient)
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    script = f"notes.write('{{\"pid\": %d}}' % {child}.pid)\nnotes.flush()\n{ends}"
    part_report = report_of(tmp_path, script)
    assert part_report.get("error") == ("ended after 30 s" if ends else None)
    (figure,) = part_report["figures"]
    while not has_ended(figure["pid"]):
        time.sleep(0.01)
    assert has_ended(figure["pid"])


def test_report_that_cannot_be_written_raises_before_anything_runs(tmp_path: Path) -> None:
    out = str(tmp_path / "nowhere" / "report.json")
    command = [sys.executable, "benchmarks/gpu_check.py", "--dry", "--out", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode
    assert "FileNotFoundError" in done.stderr
