"""Runs the command: inside this process, or as one of its own."""

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
# Where nobody listens: a server that runs on this machine is not this test's business.
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
Done = subprocess.CompletedProcess[str]
Command = Callable[..., Done]


@pytest.fixture(autouse=True)
def few_layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the model's eight layers run, but where a test is about what it says (`fluent`)."""
    if request.node.get_closest_marker("fluent") is None:
        monkeypatch.setenv(warm.LAYERS, "2")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A WEFT_HOME of the test's own; no other wishes about the command."""
    for name in ("WEFT_MODEL", "WEFT_ENGINE", "WEFT_KV_BUDGET", "WEFT_LOG", "WEFT_DB", *SERVER):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "weft-home"
    warm.new_home(folder)
    monkeypatch.setenv("WEFT_HOME", str(folder))
    return folder


parser = cache(testing._get_command)


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """The parser, from the signatures of the verbs, is made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "_get_command", parser)
        yield


@contextlib.contextmanager
def library() -> Iterator[Library]:
    """The library that the commands of this test keep their looms in."""
    found = Library()
    try:
        yield found
    finally:
        found.close()


def names() -> list[str]:
    """The looms there are, the one changed last first."""
    with library() as found:
        return [row.name for row in found.looms()]


def held(name: str) -> StoredLoom:
    """A loom, to be read."""
    with library() as found:
        return found.open(name)


def loom_of(name: str) -> Loom:
    """The tree of a loom."""
    return held(name).loom


@pytest.fixture(scope="session")
def shelves(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """`shelves(home, "grown", make)`: what `make` keeps in a home, made by the first test only."""
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
    """`commands([("ls",), …])`: what all write, run as one process's own one after the other."""

    def run(verbs: list[tuple[str, ...]], **environment: str) -> Done:
        done = forks.run(ALL, json.dumps(verbs), env=clean_environment(**environment))
        done.check_returncode()
        return done

    return run


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """`started("run", "Hello")`: a process that is still running."""
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
    """`in_terminals([("ls",), …])`: what each command writes, all run by one process."""

    def run(verbs: list[tuple[str, ...]], **options: str) -> dict[tuple[str, ...], str]:
        written = in_terminal(ALL, json.dumps(verbs), script=True, **options).split(MARK)
        return dict(zip(verbs, written[1:], strict=True))

    return run


@pytest.fixture
def command_environment() -> Callable[..., dict[str, str]]:
    """The environment that commands run in, with more variables."""
    return clean_environment


def clean_environment(**more: str) -> dict[str, str]:
    """This environment with the sources found, UTF-8 spoken, and no wish about colours."""
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
