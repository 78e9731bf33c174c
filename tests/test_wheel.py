"""The wheel and the source archive, and the wheel in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive, built as `make dist` builds them."""
    pytest.importorskip("build", reason="build is not installed")
    folder = tmp_path_factory.mktemp("dist")
    _checked([sys.executable, "-m", "build", "--outdir", str(folder)], cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`installed("-m", "weft")`: Python of an empty environment with the wheel, away from here."""
    home = tmp_path_factory.mktemp("empty")
    venv.create(home / "venv", with_pip=True)
    scripts = home / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python = str(scripts / "python")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**clean, "PYTHONIOENCODING": "utf-8", "HF_HUB_OFFLINE": "1"}
    (wheel,) = dist.glob("*.whl")
    _checked([python, "-m", "pip", "install", "--quiet", str(wheel)], cwd=home, env=environment)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(scripts / "weft"), *arguments[1:]] if arguments[0] == "weft" else None
        return _checked(command or [python, *arguments], cwd=home, env=environment)

    return run


def test_wheel_has_types_model_and_licences(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.name.startswith("weft_lm-")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in ("py.typed", "data/tiny/model.safetensors", "data/tiny/tokenizer.json"):
        assert f"weft/{name}" in names
    for name in ("LICENSE", "NOTICE"):
        assert any(one.endswith(f".dist-info/licenses/{name}") for one in names)
    tops = {one.partition("/")[0] for one in names}
    assert len(tops) == 2, tops  # only the package and its .dist-info


def test_source_archive_has_what_builds_and_tests_need(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = ("Makefile", "README.md", "mkdocs.yml", "docs/README.md", "tools/pages.py")
    assert set(wanted) <= names
    assert "tests/test_wheel.py" in names


def test_base_package_with_dependencies_is_below_170_mb(installed: Run) -> None:
    """Files as the wheels have them: without the installer's own, and what Python compiles.

    161 MB by docs/install.md; others' releases grow by themselves.
    """
    code = """
import sysconfig
from pathlib import Path
place = Path(sysconfig.get_paths()["purelib"])
others = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
print(sum(file.stat().st_size for file in place.rglob("*") if file.is_file()
    and file.parent.name != "__pycache__"
    and not file.relative_to(place).parts[0].startswith(others)))
"""
    assert int(installed("-c", code).stdout) < 170e6


def test_demo_runs_from_the_wheel(installed: Run) -> None:
    done = installed("weft", "demo")
    assert "✗ checked: wrong" in done.stdout  # greedy decoding
    assert "✓ checked: right" in done.stdout


def test_command_runs_as_a_module(installed: Run) -> None:
    assert "weft demo" in installed("-m", "weft").stdout
    assert installed("-m", "weft", "run", "What is 37 + 58?", "-n", "1", "--json").stdout


def test_serve_from_the_wheel_answers_requests(installed: Run) -> None:
    code = """
import subprocess, sys, urllib.request
command = [sys.executable, "-m", "weft", "serve", "--port", "0", "--no-browser"]
server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
url = next(line.split(" at ")[1].strip() for line in server.stderr if " at http" in line)
print([urllib.request.urlopen(url + path).status for path in ("/", "/v1/models", "/docs")])
server.terminate()
server.communicate()
"""
    assert installed("-c", code).stdout.split("\n")[0] == "[200, 200, 200]"


def test_only_the_base_package_is_there(installed: Run) -> None:
    where = "import weft, importlib.util as u; print(weft.__file__, u.find_spec('torch'))"
    file, torch = installed("-c", where).stdout.split()
    assert torch == "None"
    assert not Path(file).is_relative_to(ROOT)


def _checked(
    command: list[str], *, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, encoding="utf-8", timeout=600, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done
