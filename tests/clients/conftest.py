"""Fixtures of the client tests: a `weft serve` process, started by another interpreter.

Weft is not installed in the environments of these tests. `tools/client_tests.py` sets:

- `WEFT_PYTHON`: the interpreter that runs the server.
- `WEFT_CLIENT_REPORT`: the file for the outcomes in the client table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
Serve = Callable[..., AbstractContextManager["Server"]]


@dataclass(frozen=True)
class Server:
    """A running server: `url` has no path, `v1` ends with /v1, `model` is a model's id."""

    url: str
    model: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Start `weft serve ARGUMENTS` in a `with` block, for tests that need options of their own."""

    @contextmanager
    def start(*arguments: str) -> Iterator[Server]:
        home = tmp_path_factory.mktemp("weft")
        environment = {**os.environ, "WEFT_HOME": str(home), "PYTHONPATH": str(ROOT / "src")}
        python = os.environ.get("WEFT_PYTHON", sys.executable)
        command = [python, "-m", "weft", "serve", *arguments, "--port", "0", "--no-browser"]
        with (
            (home / "log").open("w+") as log,
            subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
        ):
            try:
                url = _wait(process, home / "log")
                yield Server(url, _get(f"{url}/v1/models")["data"][0]["id"])
            finally:
                process.terminate()

    return start


@pytest.fixture(scope="session")
def server(serve: Serve) -> Iterator[Server]:
    """A server of $WEFT_TEST_MODEL, else of SmolLM2 if `make models` fetched it, else of `tiny`."""
    models = Path(os.environ.get("WEFT_TEST_MODELS") or Path.home() / ".cache/weft/models")
    smollm2 = models / "SmolLM2-135M-Instruct.Q4_1.gguf"
    default = str(smollm2) if smollm2.exists() else "tiny"
    with serve(os.environ.get("WEFT_TEST_MODEL", default)) as running:
        yield running


@pytest.fixture
def run_page(serve: Serve) -> Callable[[str], None]:
    """Run the Python of a page of docs/ against a server of the model that the page names."""

    def run(name: str) -> None:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        with serve("tiny") as running:
            text = text.replace("http://127.0.0.1:8000", running.url)
            blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
            assert blocks
            names: dict[str, Any] = {}
            for block in blocks:
                exec(block, names)

    return run


def _wait(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address once a model is loaded."""
    while process.poll() is None:
        if address := re.search(r"http://[\d.]+:\d+", log.read_text()):
            try:
                _get(f"{address[0]}/readyz")
                return address[0]
            except urllib.error.URLError:
                pass
        time.sleep(0.05)
    raise RuntimeError(f"weft serve exited with {process.returncode}:\n{log.read_text()}")


def _get(url: str) -> Any:
    with urllib.request.urlopen(url) as reply:
        return json.load(reply)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_OUTCOMES] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call" or report.outcome != "passed":
        for mark in item.iter_markers("client"):
            item.config.stash[_OUTCOMES].append([*mark.args, report.outcome])
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    if path := os.environ.get("WEFT_CLIENT_REPORT"):
        Path(path).write_text(json.dumps(session.config.stash[_OUTCOMES]))


_OUTCOMES = pytest.StashKey[list[list[str]]]()
