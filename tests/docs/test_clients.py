"""The comparison with genlm's suites reads what pytest writes; the page names differences."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.clients.__main__ import SIDES, differing, lines_of, read_report

SUITE = """
import pytest

class TestOne:
    @pytest.mark.parametrize("n", [1, 2])
    def test_n(self, n): assert n == 1

def test_left_out(): pytest.skip("no reason")

@pytest.fixture
def broken(): raise ValueError

def test_without_its_fixture(broken): pass
"""


@pytest.mark.programs
def test_report_is_read_with_the_names_that_pytest_accepts(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(SUITE, encoding="utf-8")
    report = tmp_path / "out.xml"
    options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
    command = [sys.executable, "-m", "pytest", *options]
    subprocess.run([*command, "tests"], cwd=tmp_path, check=False, capture_output=True)
    outcomes = read_report(report)
    file = "tests/test_some.py::"
    assert outcomes == {
        f"{file}TestOne::test_n[1]": "passed",
        f"{file}TestOne::test_n[2]": "failed",
        f"{file}test_left_out": "skipped",
        f"{file}test_without_its_fixture": "failed",
    }
    subprocess.run([*command, *outcomes], cwd=tmp_path, check=False, capture_output=True)
    assert read_report(report) == outcomes


def test_different_outcome_on_weft_is_reported_and_must_be_named() -> None:
    there, here = SIDES
    names = ["tests/test_hf_llm.py::test_caching", "tests/x.py::test_new[1]", "tests/x.py::test_ok"]
    outcomes = {
        there: dict.fromkeys(names, "passed"),
        here: {names[0]: "failed", names[2]: "passed"},
    }
    lines = lines_of("suite", differing(outcomes))
    assert lines == [
        f"suite: {names[0]}: passed there, failed on Weft; named in docs/genlm.md",
        f"suite: {names[1]}: passed there, - on Weft; NOT NAMED",
    ]
