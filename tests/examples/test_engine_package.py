"""The example of an engine in a package of its own: loaded by entry point, and lawful."""

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
    metadata = tmp_path / "site" / "weft_ngram-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{name} = {target}" for name, target in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[weft.engines]", *lines, ""]))
    paths = [str(tmp_path / "site"), str(PACKAGE), str(ROOT / "src")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "WEFT_HOME": str(tmp_path / "home")}


def weft(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weft", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.programs
def test_command_runs_the_engine_by_name(installed: dict[str, str], tmp_path: Path) -> None:
    make = "import pathlib, sys, main; main.folder_with_corpus(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], env=installed, check=True)
    arguments = ("run", "The fox", "--raw", "--engine", "ngram", "-m", str(tmp_path), "-n", "2")
    done = weft(installed, *arguments, "--json", "--seed", "1", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    branches = json.loads(done.stdout)["branches"]
    assert [len(branch["token_ids"]) for branch in branches] == [8, 8]
    assert "ngram" in weft(installed, "doctor").stdout


def test_missing_corpus_is_reported_by_the_command(
    installed: dict[str, str], tmp_path: Path
) -> None:
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
def test_contract_tests_pass_on_the_engine(installed: dict[str, str], laws: str) -> None:
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
