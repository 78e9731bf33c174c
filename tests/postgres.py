"""A PostgreSQL of the tests' own: in a temporary folder, on a port of its own, gone afterwards.

Debian's package is taken where it is installed; else it is installed (as root) or unpacked into a
cache (as anybody). Where neither can be had, tests skip with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import ports

_INSTALLED = Path("/usr/lib/postgresql")
_TIMEOUT_S = 300


class Unavailable(Exception):
    """There is no PostgreSQL to be had here; says why."""


class Cluster:
    """A PostgreSQL that runs."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.bin = programs()
        self._as = _other_user()
        self.port = port
        if self._as:
            shutil.chown(folder, self._as)
        command = ("initdb", "-D", str(folder / "data"), "-A", "trust", "-U", "weft", "-E", "UTF8")
        self.run(*command, "--no-sync", "--no-instructions")
        self.start()

    def run(self, program: str, *arguments: str) -> str:
        """Run one of PostgreSQL's programs, which do not run as root."""
        become = ["setpriv", "--reuid", self._as, "--regid", self._as, "--clear-groups"]
        done = subprocess.run(
            [*(become if self._as else []), str(self.bin / program), *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            cwd=self.folder,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
        if done.returncode:
            raise Unavailable(f"{program}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def start(self) -> None:
        options = f"-p {self.port} -h 127.0.0.1 -k {self.folder} -c fsync=off -c max_connections=60"
        log = str(self.folder / "log")
        data = str(self.folder / "data")
        self.run("pg_ctl", "-D", data, "-l", log, "-o", options, "-w", "start")

    def stop(self, mode: str = "fast") -> None:
        self.run("pg_ctl", "-D", str(self.folder / "data"), "-m", mode, "-w", "stop")

    def url(self, name: str) -> str:
        """Return the URL of an empty schema of that name: as good as a database, and quicker."""
        import psycopg

        here = f"postgresql://weft@127.0.0.1:{self.port}/postgres"
        with psycopg.connect(here, autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}".encode())
        return f"{here}?options=-csearch_path%3D{name}"


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Yield a PostgreSQL that runs until the end. Raises: Unavailable."""
    folder = Path(tempfile.mkdtemp(prefix="weft-pg-"))  # a short name: sockets have a limit
    folder.chmod(0o755)
    server = None
    with ports.reserved() as port:
        try:
            server = Cluster(folder, port)
            yield server
        finally:
            if server is not None:
                try:
                    server.stop("immediate")
                except Unavailable:
                    time.sleep(0)  # it was stopped
            shutil.rmtree(folder, ignore_errors=True)


@cache
def programs() -> Path:
    """Return the folder of initdb and pg_ctl. Raises: Unavailable."""
    folder = _in(_INSTALLED) or _in(_cache() / "usr/lib/postgresql")
    if folder is None:
        (_installed if os.geteuid() == 0 else _unpacked)()
        folder = _in(_INSTALLED) or _in(_cache() / "usr/lib/postgresql")
    if folder is None:
        raise Unavailable("no initdb in Debian's package")
    return folder


def _in(folder: Path) -> Path | None:
    paths = sorted(folder.glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
    return paths[-1].parent if paths else None


def _installed() -> None:
    install = ("apt-get", "install", "-y", "-q", "--no-install-recommends", "postgresql")
    try:
        _apt(*install)
    except Unavailable:  # the lists may be old, or were never fetched
        _apt("apt-get", "update", "-q")
        _apt(*install)


def _unpacked() -> None:
    folder = _cache()
    folder.mkdir(parents=True, exist_ok=True)
    names = _apt("apt-cache", "depends", "postgresql").split()
    name = next((each for each in names if each.startswith("postgresql-1")), None)
    if name is None:
        raise Unavailable("apt knows no postgresql")
    _apt("apt-get", "download", name, f"postgresql-client-{name.rpartition('-')[2]}", at=folder)
    for package in folder.glob("*.deb"):
        _apt("dpkg", "-x", str(package), str(folder))


def _apt(*command: str, at: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            cwd=at,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()[-300:]}")
    return done.stdout


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft/postgresql"


def _other_user() -> str:
    """Return who runs it when we are root; "" when we are not."""
    if os.geteuid():
        return ""
    import pwd

    names = {user.pw_name for user in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


def main() -> None:
    """Say where PostgreSQL is; get it where it is not."""
    try:
        print(programs())
    except Unavailable as error:
        raise SystemExit(f"no PostgreSQL: {error}") from error


if __name__ == "__main__":
    main()
