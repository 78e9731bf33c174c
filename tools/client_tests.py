"""Run the tests of client libraries, each family of them in an environment of its own.

    python -m tools.client_tests [FAMILY ...] [-- PYTEST_ARGS]

A family is a folder of tests/clients with a requirements.txt, a package.json or both. The
environments in .venv-families are rebuilt when those files change. A run of a family updates its
rows of the client table in docs/tested-clients.md.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / "tests" / "clients"
PAGE = ROOT / "docs" / "tested-clients.md"
BASE = ["pytest==9.1.1", "pytest-timeout==2.4.0"]
HEAD = ["| client | version | passes | fails |", "| --- | --- | --- | --- |"]
BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"

Rows = dict[str, str]  # line of the table by client


def main() -> int:
    own, pytest_args = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", nargs="*", help="folders of tests/clients; default: all")
    parser.add_argument("--venvs", type=Path, default=ROOT / ".venv-families")
    options = parser.parse_args(own)
    known = families()
    if unknown := set(options.family) - set(known):
        parser.error(f"unknown family {', '.join(unknown)}; there are {', '.join(known)}")
    failed = [
        family
        for family in options.family or known
        if not run(family, options.venvs.absolute(), pytest_args)
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def families() -> list[str]:
    """Return the names of all families."""
    files = [*CLIENTS.glob("*/requirements.txt"), *CLIENTS.glob("*/package.json")]
    return sorted({file.parent.name for file in files})


def run(family: str, venvs: Path, pytest_args: Sequence[str]) -> bool:
    """Run the tests of a family; write its rows unless `pytest_args` select some of the tests."""
    python = prepare(family, venvs / family)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        environment = {key: os.environ[key] for key in os.environ if key != "PYTHONPATH"}
        environment |= {"WEFT_PYTHON": sys.executable, "WEFT_CLIENT_REPORT": str(report)}
        command: list[str | Path] = [
            python,
            "-m",
            "pytest",
            "-c",
            CLIENTS / "pytest.ini",
            "--confcutdir",
            CLIENTS,
        ]
        # With CLIENTS as rootdir the tests of a family would be modules of a package of its name.
        command += ["--rootdir", ROOT, CLIENTS / family, *pytest_args]
        passed = subprocess.run(command, env=environment, cwd=ROOT).returncode == 0
        if not pytest_args and report.exists():
            outcomes = json.loads(report.read_text(encoding="utf-8"))
            write_rows(family, outcomes)
    return passed


def prepare(family: str, folder: Path) -> str:
    """Install what a family needs, unless that has been done; return its interpreter."""
    python = folder / "bin" / "python"
    requirements, package = (CLIENTS / family / n for n in ("requirements.txt", "package.json"))
    files = [file for file in (requirements, package) if file.exists()]
    digest = hashlib.sha256("\n".join([*BASE, *(f.read_text("utf-8") for f in files)]).encode())
    stamp = folder / "requirements.sha256"
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return str(python)
    print(f"installing {family}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    wanted = ["-r", str(requirements)] if requirements.exists() else []
    subprocess.run([python, "-m", "pip", "install", "--quiet", *BASE, *wanted], check=True)
    if package.exists():
        shutil.rmtree(package.parent / "node_modules", ignore_errors=True)
        npm = ["npm", "install", "--no-package-lock", "--no-fund", "--no-audit", "--silent"]
        subprocess.run(npm, cwd=package.parent, check=True)
    stamp.write_text(digest.hexdigest())
    return str(python)


def pins(family: str) -> dict[str, str]:
    """Return the pinned version of each package that a family names."""
    versions: dict[str, str] = {}
    requirements, package = (CLIENTS / family / n for n in ("requirements.txt", "package.json"))
    if requirements.exists():
        text = requirements.read_text(encoding="utf-8")
        versions.update(re.findall(r"^([\w.-]+)(?:\[[^]]*\])?==(\S+)", text, re.MULTILINE))
    if package.exists():
        for name, version in json.loads(package.read_text("utf-8"))["dependencies"].items():
            versions[name] = versions[f"{name} (npm)"] = version
    return versions


def covered(family: str) -> dict[str, set[str]]:
    """Return the features of each client that tests are marked with, read without importing."""
    features: dict[str, set[str]] = defaultdict(set)
    for file in sorted((CLIENTS / family).glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.client":
                client, feature = (ast.literal_eval(argument) for argument in node.args)
                features[client].add(feature)
    return features


def rows_of(family: str, outcomes: Iterable[Sequence[str]]) -> Rows:
    """Return the rows of a family. outcomes: client, feature and pytest's outcome of each test."""
    results: dict[str, dict[str, bool]] = defaultdict(dict)
    for client, feature, outcome in outcomes:
        results[client][feature] = results[client].get(feature, True) and outcome == "passed"
    versions = pins(family)
    rows = {}
    for client, passes in results.items():
        good, bad = (sorted(f for f in passes if passes[f] is kind) for kind in (True, False))
        rows[client] = f"| {client} | {versions[client]} | {', '.join(good)} | {', '.join(bad)} |"
    return rows


def read_rows() -> Rows:
    """Return the rows of the page."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index(BEGIN) : text.index(END)]
    lines = [line for line in table.splitlines() if line.startswith("| ") and line not in HEAD]
    return {line.split("|")[1].strip(): line for line in lines}


def write_rows(family: str, outcomes: Iterable[Sequence[str]]) -> None:
    """Replace the rows of a family in the page; drop rows that no family has a test for."""
    clients = {client for name in families() for client in covered(name)}
    rows = {client: line for client, line in read_rows().items() if client in clients}
    rows |= rows_of(family, outcomes)
    table = "\n".join([*HEAD, *(rows[client] for client in sorted(rows, key=str.lower))])
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{after}", encoding="utf-8")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


if __name__ == "__main__":
    raise SystemExit(main())
