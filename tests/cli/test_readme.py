"""README: its program runs and type-checks, its commands and links exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forks

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def parts() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def program() -> str:
    """Return both parts; the second continues the first."""
    return "\n".join(parts())


def test_programs_have_12_and_8_lines() -> None:
    assert [len([line for line in part.splitlines() if line]) for part in parts()] == [12, 8]


@pytest.mark.fluent
def test_the_program_runs_and_saves_its_loom(command_environment, tmp_path: Path) -> None:
    done = forks.run(program(), cwd=tmp_path, env=command_environment())
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Use 4 9 10 13 to make 24." in done.stdout
    assert done.stdout.splitlines()[-2].startswith("prefilled ")
    assert done.stdout.splitlines()[-1] == "(2048,)"
    assert (tmp_path / "24.loom.json").stat().st_size > 0


@pytest.mark.programs
def test_the_program_type_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_cache: str
) -> None:
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    monkeypatch.chdir(ROOT)
    file = tmp_path / "first.py"
    file.write_text(program(), encoding="utf-8")
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", type_cache]
    out, _, code = api.run([*settings, "--follow-imports=silent", str(file)])
    assert code == 0, out


@pytest.mark.slow  # it fetches its checker
def test_the_program_type_checks_in_pyright(tmp_path: Path) -> None:
    pytest.importorskip("pyright", reason="pyright is not installed")
    file = tmp_path / "first.py"
    file.write_text(program(), encoding="utf-8")
    settings = {"extraPaths": [str(ROOT / "src")], "reportMissingModuleSource": "none"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    done = pyright("--project", str(tmp_path), str(file))
    assert done.returncode == 0, done.stdout + done.stderr


def pyright(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pyright; skip where it cannot start: its wheel fetches the checker at first use."""
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
    except subprocess.TimeoutExpired:
        pytest.skip("pyright does not start: fetching the checker takes more than 120 s")
    # 0: no complaint, 1: complaints. All else, and no summary, is pyright's own trouble.
    if done.returncode not in (0, 1) or not re.search(r"^\d+ errors?", done.stdout, re.MULTILINE):
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        pytest.skip(f"pyright does not start: {lines[-1]}")
    return done


def test_commands_of_the_readme_are_verbs(weft) -> None:
    shown = re.findall(r"^weft (\w+)", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown
    for verb in set(shown):
        assert weft(verb, "--help").exit_code == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_local_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            aim = (page.parent / target).resolve()
            assert aim.exists(), target
