"""All that a card is to show, in one run of at most nine minutes: `make gpu-check`.

Laws, kernels and the benchmark, each in a process of its own, so that none takes another down; the
figures of all go into one JSON file, which is written anew after every part. It needs the
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
        told, n_begun = _ended(command, limit, options), 0
        while goes_on(told.get("code", 0)) and (left := limit - (time.monotonic() - began)) > 10:
            before, n_begun = n_begun, n_of_begun(notes)
            if n_begun == before:
                break
            told = _ended(command, left, options)
        told.pop("code", None)
        lines, broken = read_lines(notes)
        told["figures"] = [line for line in lines if "begins" not in line]
        if broken:
            told["broken"] = broken
            told.setdefault("error", "a figure is cut short")
    told["s"] = round(time.monotonic() - began, 1)
    told["failed"] = sum("error" in each for each in told["figures"]) + ("error" in told)
    return told


def _ended(command: list[str], limit: float, options: argparse.Namespace) -> dict[str, Any]:
    """Run a command, and end it and all that it has started; return what went wrong."""
    told: dict[str, Any] = {}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(options), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
        )  # fmt: skip
        try:
            code = process.wait(limit)
            if code:
                told |= {"error": f"ended with {code}", "code": code}
        except subprocess.TimeoutExpired:
            told["error"] = f"ended after {limit:.0f} s"
        finally:  # what a part leaves behind would hold the card while the others are timed
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:  # the driver holds it
                told["error"] = told.get("error", "") + "; it does not end"
        if told:
            said.seek(0)
            told["tail"] = said.read().decode(errors="replace")[-3000:]
    return told


def goes_on(code: int) -> bool:
    """Whether a process that ended so goes on in another one, after what it has noted: the card
    answered it no more, or a signal ended it. Not where it has begun nothing new.
    """
    return code == LOST or code < 0


def n_of_begun(notes: str | Path, **of: Any) -> int:
    """Return how many figures were begun, of those whose lines say that."""
    return sum("begins" in line and of.items() <= line.items() for line in read_lines(notes)[0])


def read_lines(notes: str | Path) -> tuple[list[dict[str, Any]], str]:
    """Return a part's notes, and the first line that somebody was ended in, if any.

    What is no number is text: JSON has none.
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
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "transformers", "numpy", "pytest"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


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
    """What card there is; asked in a process of its own, so that this one holds none of it."""
    asked = (
        "import json, torch; p = torch.cuda.get_device_properties(0); print(json.dumps({"
        "'name': p.name, 'bytes': p.total_memory, 'processors': p.multi_processor_count,"
        "'capability': torch.cuda.get_device_capability(0), 'cuda': torch.version.cuda}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", asked], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:  # the driver may hold it, so nobody waits for its end
        process.kill()
        return {"error": "it did not answer in 60 s"}
    if process.returncode:
        return {"error": errors.strip().splitlines()[-1:]}
    told: dict[str, Any] = json.loads(said.splitlines()[-1])
    return told


def summary(report: dict[str, Any]) -> str:
    """A line a part, and what of it failed."""
    lines = []
    for name, told in report["parts"].items():
        n = len(told["figures"])
        lines.append(f"{name}: {n} figures, {told['failed']} failed, {told['s']} s")
        wrong = [each for each in told["figures"] if "error" in each]
        if "error" in told:
            last = told.get("tail", "").strip().splitlines()[-1:]
            lines.append("  " + ": ".join([told["error"], *last])[:300])
        for each in wrong:
            named = [str(v) for k, v in each.items() if k in ("what", "case", "tree", "engine")]
            lines.append(f"  {' '.join(named)}: {each['error'][:160]}")
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
    _write(report, options.out)  # a place that cannot be written to is told now
    if not options.dry:
        report["card"] = _card()
    scale = options.seconds / TOTAL_S
    for number, part in enumerate(chosen):
        later = sum(each.seconds for each in chosen[number + 1 :]) * scale
        limit = max(until - time.monotonic() - later, 10.0)
        report["parts"][part.name] = run(part, limit, options)
        _write(report, options.out)
    print(summary(report))
    print(f"all figures are in {options.out}")
    if any(told["failed"] for told in report["parts"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
