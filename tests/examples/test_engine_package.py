"""The example of an engine in a package of its own: found by its entry point, and lawful."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "examples" / "engine"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """An environment where the package is installed: on the path, with its metadata."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text("utf-8"))["project"]
    points = project["entry-points"]["weft.engines"]
    told = tmp_path / "site" / "weft_ngram-0.1.0.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{name} = {target}" for name, target in points.items()]
    (told / "entry_points.txt").write_text("\n".join(["[weft.engines]", *lines, ""]))
    paths = [str(tmp_path / "site"), str(PACKAGE), str(ROOT / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "WEFT_HOME": str(tmp_path / "home")}


def weft(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.programs
def test_the_command_runs_it_by_name(installed: dict[str, str], tmp_path: Path) -> None:
    make = "import pathlib, sys, main; main.folder_with_corpus(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], env=installed, check=True)
    asked = ("run", "The fox", "--raw", "--engine", "ngram", "-m", str(tmp_path), "-n", "2")
    done = weft(installed, *asked, "--json", "--seed", "1", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    branches = json.loads(done.stdout)["branches"]
    assert [len(branch["token_ids"]) for branch in branches] == [8, 8]
    assert "ngram" in weft(installed, "doctor").stdout


def test_what_it_cannot_do_is_said(installed: dict[str, str], tmp_path: Path) -> None:
    done = weft(installed, "run", "hi", "--engine", "ngram", "-m", "tiny")
    assert done.returncode == 3
    assert "corpus.txt does not exist" in done.stderr
    assert "corpus.txt" in done.stderr


@pytest.mark.programs
@pytest.mark.parametrize(
    "laws",
    ["test_protocol.py", pytest.param("", marks=pytest.mark.slow)],
    ids=["protocol", "all"],
)
def test_the_laws_hold_on_it(installed: dict[str, str], laws: str) -> None:
    tests = str(ROOT / "tests" / "contract" / laws)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
        + ["--engine", "laws:CountedEngine"],
        env=installed,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
