"""The base package imports only its own dependencies; the default tests add the extra `test`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OTHERS = (
    "torch transformers mlx mlx_lm peft llama_cpp vllm triton torchao accelerate "
    "psycopg ray "
    "nbclient ipykernel IPython schemathesis openai playwright PIL llm lm_eval"
).split()
COLLECT = f"""
import sys, pytest
sys.modules.update(dict.fromkeys({OTHERS}))
sys.exit(pytest.main(["-p", "pytest_timeout", "-p", "no:cacheprovider", "-q", "--collect-only"]))
"""


@pytest.mark.programs
def test_all_tests_are_collected_without_the_other_extras() -> None:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", COLLECT]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr


@pytest.mark.parametrize(
    "package",
    ["service/server", "service/client", "cli", "service/api", "service/store", "loom", "search"],
)
def test_imports_of_base_packages_are_base_dependencies(package: str) -> None:
    """`pip install .` alone must be enough for `weft serve`, as for every other verb."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {_distribution(each) for each in project["dependencies"]}
    known = packages_distributions()
    missing = {
        name: sorted(files)
        for name, files in _third_party_imports(ROOT / "src" / "weft" / package).items()
        if not declared & {_distribution(each) for each in known.get(name, [name])}
    }
    assert missing == {}


# Packages that a declared dependency re-exports: FastAPI is built on Starlette.
_THROUGH = {"starlette": "fastapi", "pydantic_core": "pydantic", "click": "typer"}
_OPTIONAL = {"psycopg", "IPython"}


def _third_party_imports(folder: Path) -> dict[str, set[str]]:
    """Return top-level package names that the files import, each with the files."""
    imports: dict[str, set[str]] = {}
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in names:
                root = name.partition(".")[0]
                root = _THROUGH.get(root, root)
                if root not in sys.stdlib_module_names and root not in _OPTIONAL | {"weft"}:
                    imports.setdefault(root, set()).add(str(file.relative_to(folder)))
    return imports


def _distribution(requirement: str) -> str:
    """Return the normalized name of a requirement."""
    name = requirement.partition(">")[0].partition("[")[0].partition(";")[0].strip()
    return name.lower().replace("_", "-")
