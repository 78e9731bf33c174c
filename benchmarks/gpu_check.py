"""All that a card is to show, in one run of at most nine minutes: `make gpu-check`.

Laws, kernels and the benchmark, each in a process of its own, so that none takes another down; the
results of all go into one JSON file, which is rewritten after every part. It needs the
repository and a Python with torch for CUDA and transformers; the contract needs pytest as well.
With --dry all of it runs at toy size on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


class Part(NamedTuple):
    """A program, and how many seconds it may take; what is left of one goes to those after it."""

    name: str
    command: list[str]
    seconds: float


# What an H200 with 16 cores of a host took, and a little more.
PARTS = [
    Part("kernels", ["gpu_kernels.py", "--parts", "attention"], 122),
    Part("trees", ["gpu_tree.py", "--parts", "trees"], 80),
    Part("laws", ["gpu_laws.py", "--parts", "truth"], 90),
    Part("contract", ["gpu_laws.py", "--parts", "contract"], 76),
    Part("experts", ["gpu_kernels.py", "--parts", "experts", "routers"], 36),
    Part("draws", ["gpu_kernels.py", "--parts", "draws"], 34),
    Part("prefill", ["gpu_tree.py", "--parts", "prefill"], 27),
    Part("callers", ["gpu_tree.py", "--parts", "callers"], 25),
    Part("transformers", ["gpu_tree.py", "--parts", "hf"], 48),
]
TOTAL_S = 538.0
LOST = 75  # of a part whose process the card answers no more, as after a wrong address


def run(part: Part, limit: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part for `limit` seconds at most; return what it noted, and how it ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes.jsonl"
        command = [sys.executable, str(HERE / part.command[0]), *part.command[1:]]
        command += ["--json", str(notes)]
        if part.name == "contract":
            command += ["--until", str(began + limit - 8)]
        if options.dry:
            command.append("--dry")
        if part.command[0] != "gpu_kernels.py":
            command += [word for pair in options.option for word in ("--option", *pair)]
        result, n_begun = _ended(command, limit, options), 0
        while (
            is_resumed(result.get("code", 0)) and (left := limit - (time.monotonic() - began)) > 10
        ):
            before, n_begun = n_begun, n_of_begun(notes)
            if n_begun == before:
                break
            result = _ended(command, left, options)
        result.pop("code", None)
        lines, broken = read_lines(notes)
        result["figures"] = [line for line in lines if "begins" not in line]
        if broken:
            result["broken"] = broken
            result.setdefault("error", "a figure is cut short")
    result["s"] = round(time.monotonic() - began, 1)
    result["failed"] = sum("error" in each for each in result["figures"]) + ("error" in result)
    return result


def _ended(command: list[str], limit: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run a command, and end it and all that it has started; return what went wrong."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryFile() as stderr_file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(options), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr_file,
        )  # fmt: skip
        try:
            code = process.wait(limit)
            if code:
                result |= {"error": f"ended with {code}", "code": code}
        except subprocess.TimeoutExpired:
            result["error"] = f"ended after {limit:.0f} s"
        finally:  # what a part leaves behind would hold the card while the others are timed
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:  # the driver holds it
                result["error"] = result.get("error", "") + "; it does not end"
        if result:
            stderr_file.seek(0)
            result["tail"] = stderr_file.read().decode(errors="replace")[-3000:]
    return result


def is_resumed(code: int) -> bool:
    """Return True if a process that ended with this code is resumed in another one, after the
    results it has written: the card was lost, or a signal ended it. A process that has started
    nothing new is not resumed.
    """
    return code == LOST or code < 0


def n_of_begun(notes: str | Path, **of: Any) -> int:
    """Return how many measurements were started, of those with these values."""
    return sum("begins" in line and of.items() <= line.items() for line in read_lines(notes)[0])


def read_lines(notes: str | Path) -> tuple[list[dict[str, Any]], str]:
    """Return a part's notes, and the first incomplete line, if any.

    NaN and infinities become text: JSON has none.
    """
    lines: list[dict[str, Any]] = []
    broken = ""
    path = Path(notes)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            lines.append(json.loads(line, parse_constant=str))
        except json.JSONDecodeError:
            broken = broken or line  # others may have gone on behind it
    return lines, broken


def _environment(options: argparse.Namespace) -> dict[str, str]:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    given.setdefault("PYTHONUNBUFFERED", "1")
    if options.dry:
        given |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return given


def _versions() -> dict[str, str]:
    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "transformers", "numpy", "pytest"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def missing() -> str:
    """Return what this Python lacks to run any part, and what to do; "" where nothing is."""
    needed = ("torch", "transformers", "triton", "numpy")
    lacks = [name for name in needed if importlib.util.find_spec(name) is None]
    if not lacks:
        return ""
    return (
        f"{sys.executable} has no {', '.join(lacks)}; name a Python that has torch for CUDA (with"
        " triton) and transformers: make gpu-check GPU_PYTHON=/path/to/python"
    )


def _card() -> dict[str, Any]:
    """Return the card's properties; read in another process, so that this one uses no card."""
    program = (
        "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps({"
        "'name': p.name, 'bytes': p.total_memory, 'processors': p.multi_processor_count,"
        "'capability': torch.cuda.get_device_capability(0), 'cuda': torch.version.cuda}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:  # the driver may block it, so its end is not awaited
        process.kill()
        return {"error": "it did not answer in 60 s"}
    if process.returncode:
        return {"error": errors.strip().splitlines()[-1:]}
    card: dict[str, Any] = json.loads(output.splitlines()[-1])
    return card


def summary(report: dict[str, Any]) -> str:
    """A line a part, and what of it failed."""
    lines = []
    for name, result in report["parts"].items():
        n = len(result["figures"])
        lines.append(f"{name}: {n} results {result['failed']} failed, {result['s']} s")
        wrong = [each for each in result["figures"] if "error" in each]
        if "error" in result:
            last = result.get("tail", "").strip().splitlines()[-1:]
            lines.append("  " + ": ".join([result["error"], *last])[:300])
        for failure in wrong:
            named = [str(v) for k, v in failure.items() if k in ("what", "case", "tree", "engine")]
            lines.append(f"  {' '.join(named)}: {failure['error'][:160]}")
    return "\n".join(lines)


def _write(report: dict[str, Any], out: str) -> None:
    Path(out).write_text(json.dumps(report, indent=1, allow_nan=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", default="gpu-check.json", help="the file that is written")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS])
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for all of it")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on a CPU")
    parser.add_argument(
        "--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"),
        help="of the torch engine",
    )  # fmt: skip
    options = parser.parse_args()
    if lacks := missing():
        parser.error(lacks)
    chosen = [part for part in PARTS if options.parts is None or part.name in options.parts]
    until = time.monotonic() + options.seconds
    report: dict[str, Any] = {
        "dry": options.dry,
        "card": {},
        "versions": _versions(),
        "options": dict(options.option),
        "parts": {},
    }
    _write(report, options.out)  # a path that cannot be written fails now
    if not options.dry:
        report["card"] = _card()
    scale = options.seconds / TOTAL_S
    for number, part in enumerate(chosen):
        later = sum(each.seconds for each in chosen[number + 1 :]) * scale
        limit = max(until - time.monotonic() - later, 10.0)
        report["parts"][part.name] = run(part, limit, options)
        _write(report, options.out)
    print(summary(report))
    print(f"all results are in {options.out}")
    if any(result["failed"] for result in report["parts"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
