"""Run the published suites of genlm's packages over genlm-backend and over Weft, side by side.

Ends with 1 where a test ends otherwise on Weft and docs/genlm.md does not name it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from .hub import make_hub

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "genlm.md"
SUITES = ("genlm-backend", "genlm-bytes", "genlm-control")
SIDES = {"genlm-backend": (), "weft": ("-p", "tools.clients.plugin")}
Outcomes = dict[str, str]  # test → passed, failed, skipped


def main() -> int:
    """Run what the command line asks for and print the counts."""
    parser = argparse.ArgumentParser(prog="tools.clients", description=__doc__)
    parser.add_argument("--suite", nargs="*", choices=SUITES, default=SUITES)
    parser.add_argument("pytest_args", nargs="*", help="after --, for pytest")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_hub(folder / "home")
        runs = {
            suite: Run(folder, suite, tuple(args.pytest_args)).compared() for suite in args.suite
        }
    for suite, (outcomes, _) in runs.items():
        print_counts(suite, outcomes)
    different = [line for suite, (_, lines) in runs.items() for line in lines_of(suite, lines)]
    print("\n".join(different) if different else "no test ends otherwise on Weft")
    return int(any(line.endswith("NOT NAMED") for line in different))


class Run:
    """One package's suite, unpacked from its source distribution."""

    def __init__(self, folder: Path, package: str, pytest_args: tuple[str, ...]) -> None:
        self.home = folder / "home"
        self.suite = fetch(folder / package, package)
        self.pytest_args = pytest_args

    def compared(self) -> tuple[dict[str, Outcomes], dict[str, tuple[str, str]]]:
        """Return the outcomes of both sides, and those tests that end otherwise on Weft.

        A test that does is run once more on both: some draw at random.
        """
        outcomes_of = self.outcomes(("tests", *self.pytest_args))
        repeated = self.outcomes(tuple(differing(outcomes_of))) if differing(outcomes_of) else {}
        for side, outcomes in repeated.items():
            outcomes_of[side].update(outcomes)
        return outcomes_of, differing(outcomes_of)

    def outcomes(self, arguments: tuple[str, ...]) -> dict[str, Outcomes]:
        """Run pytest on both sides at the same time."""
        reports = {side: self.suite / f"{side}.xml" for side in SIDES}
        running = [self.start(side, report, arguments) for side, report in reports.items()]
        for process in running:
            process.wait()
        return {side: read_report(report) for side, report in reports.items()}

    def start(self, side: str, report: Path, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Start pytest on one side."""
        environment = {
            **os.environ,
            "HF_HOME": str(self.home),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TOKENIZERS_PARALLELISM": "false",
        }
        options = ("-q", "-W", "ignore", "-p", "no:cacheprovider", "-o", "junit_family=xunit1")
        with (self.suite / f"{side}.txt").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "pytest", *SIDES[side], *options, f"--junitxml={report}"]
                + list(arguments),
                cwd=self.suite,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )


def fetch(folder: Path, package: str) -> Path:
    """Return the unpacked source distribution of the version that is installed."""
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    wanted = [f"{package}=={version(package)}", "--no-binary", package, "--dest", str(folder)]
    subprocess.run(download + wanted, check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def read_report(report: Path) -> Outcomes:
    """Return how each test of a JUnit file ended."""
    outcomes: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("file") or case.get("classname", "").replace(".", "/") + ".py"
        module = file.removesuffix(".py").replace("/", ".")
        inner = case.get("classname", "").removeprefix(module).strip(".").replace(".", "::")
        name = "::".join(part for part in (file, inner, case.get("name", "")) if part)
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            outcomes[name] = "failed"
        else:
            outcomes.setdefault(name, "skipped" if "skipped" in kinds else "passed")
    return outcomes


def differing(outcomes_of: dict[str, Outcomes]) -> dict[str, tuple[str, str]]:
    """Return the tests that do not end as in the original: (there, on Weft)."""
    there, here = (outcomes_of[side] for side in SIDES)
    pairs = {name: (there.get(name, "-"), here.get(name, "-")) for name in {**there, **here}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def print_counts(suite: str, outcomes_of: dict[str, Outcomes]) -> None:
    """Print a suite's line for each side."""
    for side, outcomes in outcomes_of.items():
        counts = Counter(outcomes.values())
        numbers = ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
        print(f"{suite} {version(suite)} on {side}: {numbers}")


def lines_of(suite: str, different: dict[str, tuple[str, str]]) -> list[str]:
    """Return a line a differing test, and whether the page names it."""
    page = PAGE.read_text(encoding="utf-8")
    lines = []
    for name, (there, here) in sorted(different.items()):
        short = re.sub(r"\[.*", "", name.rpartition("/")[2])
        named = "named in docs/genlm.md" if f"`{short}`" in page else "NOT NAMED"
        lines.append(f"{suite}: {name}: {there} there, {here} on Weft; {named}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
