"""Programs as processes that are forked from a process with all imports.

A test of the command needs its streams, terminal, signals and exit code. It hardly ever needs its
imports, which take most of the time of a small command. `start` works like `subprocess.Popen`. A
program whose environment changes imports (HF_HOME …) is not forked, nor is any program on a system
without fork.

`python tests/forks.py FD` is the process that forks: it receives programs from a socket. For each
program it reports its process number and its exit through a pipe.
"""

from __future__ import annotations

import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, BinaryIO, NamedTuple

WEFT = "from weft.cli import main; main()"
PRELOADED = """
import huggingface_hub, rich.live, tokenizers, numpy, jinja2, llguidance
import weft, weft.cli.app, weft.loading, weft.loom, weft.branch, weft.asynclm
import weft.engines.numpy.engine
import weft.service.store.library, sqlalchemy.dialects.sqlite, alembic.command, alembic.script
try:
    import sqlalchemy.dialects.postgresql.psycopg, psycopg
except ImportError:
    pass
import weft._core.tokens.sandbox, weft.service.store.file, weft.service.store.json_output
import weft.viz.html, weft.viz.notebook
from weft.search import *
import warm
warm.keep_weights()
warm.embedded()
warm.keep_tokenizer()
warm.embedded_tokenizer()
# The parser, from the signatures of the verbs, is the same for all.
import functools, typer.main
typer.main.get_command = functools.cache(typer.main.get_command)
typer.main.get_command(weft.cli.app.app)
"""
# Variables that imports read: a program with another value of these is not forked.
_READ_BY_IMPORTS = ("HF_", "HUGGINGFACE_", "PYTHON", "OMP_", "OPENBLAS_", "LD_")
_PIPED = ("stdin", "stdout", "stderr")


class Process:
    """A forked program, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, program: Mapping[str, Any], files: Mapping[str, Any]) -> None:
        self.args = program["arguments"]
        self.returncode: int | None = None
        theirs: list[int] = []
        for name in _PIPED:
            ours, given = _ends(name, files.get(name))
            setattr(self, name, ours)
            theirs.append(given)
        self._reports, report = os.pipe()
        socket.send_fds(_server().socket, [json.dumps(program).encode()], [*theirs, report])
        for number, name in zip([*theirs, report], (*_PIPED, ""), strict=True):
            if not name or files.get(name) in (None, subprocess.PIPE, subprocess.DEVNULL):
                os.close(number)
        self.pid = int(self._line())  # of the first one, all is imported meanwhile

    stdin: BinaryIO | None
    stdout: BinaryIO | None
    stderr: BinaryIO | None

    def poll(self) -> int | None:
        """Return the exit code; None while the program runs."""
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or minus the signal."""
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[bytes, bytes]:
        """Return all output when the program has ended."""
        output: dict[str, bytes] = {}

        def read(name: str) -> None:
            output[name] = getattr(self, name).read()

        readers = [threading.Thread(target=read, args=(each,)) for each in ("stdout", "stderr")]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return output["stdout"], output["stderr"]

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program."""
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        self.returncode = int(self._line())
        os.close(self._reports)

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(self._reports, 1) or b"\n"
        return line


def start(
    code: str = WEFT,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    **files: Any,
) -> Any:
    """Start a program. stdin, stdout, stderr: as of `subprocess.Popen`; None is nothing."""
    env = base() if env is None else env
    if _is_of_imports(env) or not hasattr(os, "fork"):
        files = {name: files.get(name, subprocess.DEVNULL) for name in _PIPED}
        return subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, cwd=cwd, **files)
    place = os.fspath(cwd) if cwd is not None else os.getcwd()
    program = {"code": code, "arguments": arguments, "environment": dict(env), "cwd": place}
    return Process(program, files)


def run(
    code: str = WEFT,
    *arguments: str,
    input: str = "",
    encoding: str = "utf-8",
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; return what it wrote."""
    import tempfile

    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as errors,
    ):
        given.write(input.encode(encoding))
        given.seek(0)
        process = start(code, *arguments, stdin=given, stdout=out, stderr=errors, **options)
        try:
            code_ = process.wait(timeout)
        finally:
            process.kill()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode(encoding).replace("\r\n", "\n"))
    return subprocess.CompletedProcess(process.args, code_, *texts)


def _ends(name: str, file: Any) -> tuple[BinaryIO | None, int]:
    """Return the test's end of a stream, if it is a pipe, and the program's end."""
    if file == subprocess.PIPE:
        reading, writing = os.pipe()
        if name == "stdin":
            return os.fdopen(writing, "wb"), reading
        return os.fdopen(reading, "rb"), writing
    if file in (None, subprocess.DEVNULL):
        return None, os.open(os.devnull, os.O_RDWR)
    return None, file if isinstance(file, int) else file.fileno()


def _is_of_imports(env: Mapping[str, str]) -> bool:
    return any(
        env.get(name) != base().get(name)
        for name in {*env, *base()}
        if name.startswith(_READ_BY_IMPORTS) and name != "PYTHONIOENCODING"
    )


@cache
def base() -> dict[str, str]:
    """Return the environment of the imports; programs with this environment are forked."""
    from pathlib import Path

    source = str(Path(__file__).parents[1] / "src")
    own = {"PYTHONPATH": source, "PYTHONIOENCODING": "utf-8", "HF_HUB_OFFLINE": "1"}
    kept = {name: value for name, value in os.environ.items() if name != "WEFT_TESTS_LAYERS"}
    return {**kept, **own, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Server(NamedTuple):
    """The one that forks, and the socket to it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket


@cache
def _server() -> Server:
    ours, theirs = socket.socketpair()
    number = theirs.fileno()
    command = [sys.executable, __file__, str(number)]
    process = subprocess.Popen(command, env=base(), pass_fds=(number,), stdin=subprocess.DEVNULL)
    theirs.close()
    return Server(process, ours)


def close() -> None:
    """End the one that forks, if it was begun."""
    if _server.cache_info().currsize:
        server = _server()
        server.socket.close()
        server.process.wait()
        _server.cache_clear()


def serve(server: socket.socket) -> None:
    """Fork the programs that arrive at the socket; in a fork, return when it shall end."""
    exec(PRELOADED, {})
    gc.collect()
    gc.freeze()  # else each fork would traverse all objects when it ends
    assert threading.active_count() == 1
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C of a terminal reaches each fork by itself
    reports: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([server, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report_exits(reports)
        if server not in ready:
            continue
        data, files, _, _ = socket.recv_fds(server, 1 << 20, 4)
        if not data:
            return
        *streams, report = files
        child = os.fork()
        if not child:
            signal.set_wakeup_fd(-1)
            for number in (server.detach(), woken, wake, report, *reports.values()):
                os.close(number)
            _be(json.loads(data), streams)
            return
        os.write(report, b"%d\n" % child)
        reports[child] = report
        for number in streams:
            os.close(number)


def _report_exits(reports: dict[int, int]) -> None:
    while reports:
        child, status = os.waitpid(-1, os.WNOHANG)
        if not child:
            return
        os.write(reports[child], b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(reports.pop(child))


def _be(program: Mapping[str, Any], streams: list[int]) -> None:
    """Run a program as `python -c` would. Raises: the program's exceptions."""
    for number, theirs in enumerate(streams):
        os.dup2(theirs, number)
        os.close(theirs)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(program["cwd"])
    os.environ.clear()
    os.environ.update(program["environment"])
    time.tzset()
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    for number, name in enumerate(_PIPED):
        raw = open(number, "rb" if name == "stdin" else "wb", closefd=False)
        file = io.TextIOWrapper(
            raw,
            encoding or "utf-8",
            "backslashreplace" if name == "stderr" else errors or "strict",
            line_buffering=name == "stderr" or raw.isatty(),
        )
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c", *program["arguments"]]
    sys.path[0] = ""
    exec(compile(program["code"], "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
