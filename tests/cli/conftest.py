"""Fixtures that run the command, in this process or in a new one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from typer import testing
from typer.testing import CliRunner, Result

import forks
import warm
from weft import Loom
from weft.service.store import Library, StoredLoom

SOURCE = Path(__file__).parents[2] / "src"
Weft = Callable[..., Result]
# Unset, so that tests do not use a server that runs on this machine.
SERVER = ("WEFT_HOST", "WEFT_PORT", "WEFT_API_KEY")
MARK = "=====8<=====\r\n"
# So hot that tokens are all but equally likely: of this seed no branch of four ends by itself.
ENDLESS = ("--temp", "100", "--max-tokens", "1500", "--seed", "6")
# Runs command lines, given as JSON, as the process's own one after the other.
ALL = """
import json, sys
from weft.cli import main
for arguments in json.loads(sys.argv[1]):
    print("=====8<=====", flush=True)
    sys.argv = ["weft", *arguments]
    try:
        main()
    except SystemExit:
        pass
"""
# Fixtures that start a process.
PROCESSES = frozenset({"command", "commands", "started", "in_terminal", "in_terminals"})
Done = subprocess.CompletedProcess[str]
Command = Callable[..., Done]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark tests that start a process as `programs`."""
    if not PROCESSES.isdisjoint(getattr(item, "fixturenames", ())):
        item.add_marker("programs")


@pytest.fixture(autouse=True)
def few_layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run two of the model's eight layers, except in tests of its texts (`fluent`)."""
    if request.node.get_closest_marker("fluent") is None:
        monkeypatch.setenv(warm.LAYERS, "2")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A WEFT_HOME for the test, without other WEFT variables."""
    for name in ("WEFT_MODEL", "WEFT_ENGINE", "WEFT_KV_BUDGET", "WEFT_LOG", "WEFT_DB", *SERVER):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "weft-home"
    warm.new_home(folder)
    monkeypatch.setenv("WEFT_HOME", str(folder))
    return folder


parser = cache(testing._get_command)


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """Build the parser from the signatures of the verbs only once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", parser)
        yield


@contextlib.contextmanager
def library() -> Iterator[Library]:
    """The library of the test's commands."""
    opened = Library()
    try:
        yield opened
    finally:
        opened.close()


def names() -> list[str]:
    """Return the names of all looms, the one changed last first."""
    with library() as opened:
        return [row.name for row in opened.looms()]


def stored_loom(name: str) -> StoredLoom:
    """Return a loom for reading."""
    with library() as opened:
        return opened.open(name)


def loom_of(name: str) -> Loom:
    """Return the tree of a loom."""
    return stored_loom(name).loom


@pytest.fixture(scope="session")
def shelves(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """`shelves(home, "grown", make)`: copy the looms that `make` creates, once for all tests."""
    place = tmp_path_factory.mktemp("shelves")

    def fill(home: Path, name: str, make: Callable[[], object]) -> None:
        if not (place / name).exists():
            make()
            shutil.copytree(home, place / name)
        shutil.copytree(place / name, home, dirs_exist_ok=True)

    return fill


@pytest.fixture
def weft() -> Weft:
    """`weft("run", "Hello", stdin="…")` in this process."""
    from weft.cli.app import app

    def run(*arguments: str, stdin: str | bytes = "") -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return run


@pytest.fixture
def command() -> Command:
    """`command("run", "Hello")` as `python -m weft` in a process of its own."""

    def run(
        *arguments: str, stdin: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return forks.run(
            forks.WEFT,
            *arguments,
            input=stdin,
            encoding=environment.get("PYTHONIOENCODING", "utf-8"),
            env=clean_environment(**environment),
        )

    return run


@pytest.fixture
def commands() -> Callable[..., Done]:
    """`commands([("ls",), …])`: run commands in one new process; return their outputs."""

    def run(verbs: list[tuple[str, ...]], **environment: str) -> Done:
        done = forks.run(ALL, json.dumps(verbs), env=clean_environment(**environment))
        done.check_returncode()
        return done

    return run


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`started("run", "Hello")`: return a running process."""
    processes = []

    def start(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
        pipes = {"stdout": stdout, "stderr": subprocess.PIPE}
        process = forks.start(forks.WEFT, *arguments, **pipes, env=clean_environment())
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def in_terminal() -> Callable[..., str]:
    """`in_terminal("run", "Hello")`: all that is written to a terminal of 24 × 80.

    typed: what is typed there, echoed as terminals do. code: how the command has to end.
    """

    def run(
        *arguments: str, typed: str = "", code: int = 0, script: bool = False, **environment: str
    ) -> str:
        import pty

        ours, theirs = pty.openpty()
        program, *arguments = arguments if script else (forks.WEFT, *arguments)
        screen = {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        process = forks.start(
            program,
            *arguments,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=clean_environment(**{**screen, **environment}),
        )
        os.write(ours, typed.encode())
        os.close(theirs)
        parts = []
        # A closed terminal reads as an error on Linux, as empty elsewhere.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 65536):
                parts.append(part)
        os.close(ours)
        output = b"".join(parts).decode()
        assert process.wait() == code, output
        return output

    return run


@pytest.fixture
def in_terminals(in_terminal) -> Callable[..., dict[tuple[str, ...], str]]:
    """`in_terminals([("ls",), …])`: run commands in one process; return each output."""

    def run(verbs: list[tuple[str, ...]], **options: str) -> dict[tuple[str, ...], str]:
        written = in_terminal(ALL, json.dumps(verbs), script=True, **options).split(MARK)
        return dict(zip(verbs, written[1:], strict=True))

    return run


@pytest.fixture
def command_environment() -> Callable[..., dict[str, str]]:
    """Return the environment of commands, with more variables."""
    return clean_environment


def clean_environment(**more: str) -> dict[str, str]:
    """Return this environment with PYTHONPATH and UTF-8, without color settings."""
    dropped = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {
        **kept,
        "PYTHONPATH": str(SOURCE),
        "PYTHONIOENCODING": "utf-8",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }
