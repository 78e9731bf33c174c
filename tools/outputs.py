"""Run the commands and programs of documentation and example pages, and write their output.

python -m tools.outputs              rewrites the output on every page
python -m tools.outputs PAGE …       on these pages only

A block `console` has commands after "$ ", each followed by its output. They run in the repository's
root. The blocks `python` of a page are one program; a block `text` right below one is its output.
A block that begins with "# needs MODULE" runs where that module is installed, and a page that
begins with "<!-- needs MODULE -->" too.
All of them have looms of their own, and one kind of kernel: x86-64 machines write the same texts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "tutorials").glob("*.md")),
    *sorted((ROOT / "docs" / "cookbook").glob("*.md")),
    *sorted((ROOT / "docs" / "api").glob("*.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
ADDRESS = "http://127.0.0.1:8000"  # a program that names it gets a server
# OpenBLAS chooses a kernel by the processor, and kernels round differently.
KERNEL = {"OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "1", "WEFT_LOG": "error"}
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ (.*(?:\\\n.*)*)\n", re.MULTILINE)
_NEEDS = re.compile(r"# needs (.+)\n|<!-- needs (.+) -->")
_VARIES = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?= (?:s|tok/s|ms)\b)")
_MARK = "\x1e"  # between the outputs of two blocks


class Output(NamedTuple):
    """An output as a page shows it, and as it is now."""

    source: str  # the command or the program
    shown: str
    now: str
    start: int  # of `shown` in the page, in characters


class Place(NamedTuple):
    """Folders in which things run.

    Attributes:
        root: the working directory of commands.
        scratch: the working directory of programs, and the folder of looms.
        bin_folder: the folder of `python` and `weft`.
        model: the model that a server loads.
    """

    root: Path
    scratch: Path
    bin_folder: Path
    model: str = "tiny"

    def environment(self) -> dict[str, str]:
        path = f"{self.bin_folder}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, **KERNEL, "PATH": path, "WEFT_HOME": str(self.scratch)}


def scratch(folder: Path) -> Path:
    """Link the repository's folders that programs read into an empty folder; return the folder."""
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    return folder


def outputs(page: str, place: Place) -> list[Output]:
    """Run what a page shows, and return its outputs in order.

    Raises: RuntimeError with the error output if a command or the program fails.
    """
    if not _is_runnable(page, place):
        return []
    blocks = [block for block in _BLOCK.finditer(page) if _is_runnable(block[2], place)]
    results = list(_of_commands(page, blocks, place)) + list(_of_programs(page, blocks, place))
    return sorted(results, key=lambda output: output.start)


def _is_runnable(text: str, place: Place) -> bool:
    needs = _NEEDS.match(text)
    packages = place.bin_folder.parent.glob("lib/python*/site-packages/*")
    return needs is None or any(package.name == needs[needs.lastindex or 0] for package in packages)


def _of_commands(page: str, blocks: list[re.Match[str]], place: Place) -> Iterator[Output]:
    for block in blocks:
        if block[1] != "console":
            continue
        commands = list(_COMMAND.finditer(page, block.start(2), block.end(2)))
        ends = [command.start() for command in commands[1:]] + [block.end(2)]
        for command, end in zip(commands, ends, strict=True):
            now = _run(["bash", "-c", command[1]], place.root, place.environment())
            yield Output(command[1], page[command.end() : end], now, command.end())


def _of_programs(page: str, blocks: list[re.Match[str]], place: Place) -> Iterator[Output]:
    programs = [index for index, block in enumerate(blocks) if block[1] == "python"]
    if not programs:
        return
    program = f"\nprint({_MARK!r})\n".join(blocks[index][2] for index in programs)
    with served(place) if ADDRESS in program else nullcontext(ADDRESS) as address:
        command = [str(place.bin_folder / "python"), "-c", program.replace(ADDRESS, address)]
        now = _run(command, place.scratch, place.environment()).split(f"{_MARK}\n")
    for index, text in zip(programs, now, strict=True):
        below = blocks[index + 1] if index + 1 < len(blocks) else None
        if below is not None and below[1] == "text":
            if not page[blocks[index].end() : below.start()].strip():
                yield Output(blocks[index][2], below[2], text, below.start(2))


def _run(command: list[str], folder: Path, env: Mapping[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise RuntimeError(f"{command[-1]}\n{done.stdout}{done.stderr}")
    return "".join(f"{line.rstrip(' ')}\n" for line in done.stdout.split("\n")[:-1])


@contextmanager
def served(place: Place) -> Iterator[str]:
    """Run `weft serve` on a free port; yield its address."""
    command = [str(place.bin_folder / "weft"), "serve", place.model]
    command += ["--port", "0", "--no-browser"]
    env = {**place.environment(), "WEFT_LOG": "warning"}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines: list[str] = []
        for line in server.stderr:
            lines.append(line)
            if match := re.search(r" at (http://[\w.:]+)", line):
                break
        else:
            raise RuntimeError("".join(lines))
        try:
            yield match[1]
        finally:
            server.terminate()


def without_times(output: str) -> str:
    """Return an output with seconds and speeds replaced, for comparisons."""
    return _VARIES.sub("#", output)


def refresh(path: Path, place: Place) -> bool:
    """Rewrite the outputs of a page; return True if anything but times changed."""
    page = old = path.read_text(encoding="utf-8")
    for output in reversed(outputs(page, place)):
        if without_times(output.shown) != without_times(output.now):
            end = output.start + len(output.shown)
            page = page[: output.start] + output.now + page[end:]
    path.write_text(page, encoding="utf-8", newline="\n")
    return page != old


def main(arguments: list[str]) -> int:
    """Rewrite the pages; print the names of those that changed."""
    for path in map(Path, arguments or PAGES):
        with tempfile.TemporaryDirectory() as folder:
            place = Place(ROOT, scratch(Path(folder)), Path(sys.executable).parent)
            if refresh(path.resolve(), place):
                print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
