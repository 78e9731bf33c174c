"""Laws of files: old or new and never half, read with errors that name them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft._core import atomic_files
from weft.errors import ConfigError, FormatError, ModelLoadError, StoreError

posix = pytest.mark.skipif(os.name == "nt", reason="POSIX only")
LEFTOVER = ".weft-0123456789abcdef.part"


@pytest.fixture(autouse=True)
def fresh() -> None:
    """As a process that has just begun: no folder was swept yet."""
    atomic_files._sweep_once.cache_clear()


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# Writing


@pytest.mark.parametrize("content", ["tëxt", "tëxt".encode(), ["të", "", "xt"]])
def test_written_content_is_read_back(tmp_path: Path, content: Any) -> None:
    atomic_files.write(tmp_path / "x", content)
    assert atomic_files.read_text(tmp_path / "x") == "tëxt"
    assert names(tmp_path) == ["x"]


def test_lone_surrogate_is_written_as_its_escape(tmp_path: Path) -> None:
    atomic_files.write(tmp_path / "x", "a\udc80")
    assert atomic_files.read(tmp_path / "x") == b"a\\udc80"


def test_failure_in_the_middle_leaves_only_the_old_file(tmp_path: Path) -> None:
    def content() -> Iterator[str]:
        yield "new" * 100_000
        raise ConfigError("this cannot be written")

    atomic_files.write(tmp_path / "x", "old")
    with pytest.raises(ConfigError):
        atomic_files.write(tmp_path / "x", content())
    assert atomic_files.read(tmp_path / "x") == b"old"
    assert names(tmp_path) == ["x"]


def test_longest_allowed_file_name_can_be_written(tmp_path: Path) -> None:
    atomic_files.write(tmp_path / ("x" * 255), "1")
    assert names(tmp_path) == ["x" * 255]


@posix
def test_write_keeps_a_link_and_a_mode(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    atomic_files.write(tmp_path / "there" / "x", "old")
    (tmp_path / "there" / "x").chmod(0o600)
    (tmp_path / "link").symlink_to("there/x")
    atomic_files.write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there" / "x").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "there" / "x").stat().st_mode) == 0o600


@posix
def test_write_to_a_dangling_link_creates_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("x")
    atomic_files.write(tmp_path / "link", "new")
    assert (tmp_path / "x").read_text() == "new"


@posix
def test_pipe_or_device_is_written_directly(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    heard: list[str] = []
    reader = threading.Thread(target=lambda: heard.append((tmp_path / "pipe").read_text()))
    reader.start()
    atomic_files.write(tmp_path / "pipe", ["a", "b"])
    reader.join()
    assert heard == ["ab"]
    assert names(tmp_path) == ["pipe"]
    atomic_files.write("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@posix
@pytest.mark.skipif(os.name != "nt" and os.geteuid() == 0, reason="root may write everything")
def test_write_protected_file_is_unchanged(tmp_path: Path) -> None:
    atomic_files.write(tmp_path / "x", "old")
    (tmp_path / "x").chmod(0o400)
    for attempt in (
        lambda: atomic_files.check_writable(tmp_path / "x"),
        lambda: atomic_files.write(tmp_path / "x", "new"),
    ):
        with pytest.raises(StoreError, match="cannot write .*x: Permission denied"):
            attempt()
    assert (tmp_path / "x").read_text() == "old"


def test_check_of_a_path_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    atomic_files.check_writable(tmp_path / "old")
    atomic_files.check_writable(tmp_path / "new")
    assert names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "old"


@pytest.mark.parametrize("path", ["", "no/folder/x", "a\0b", "."])
def test_path_that_cannot_be_written_raises_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="cannot write") as written:
        atomic_files.write(path, "x")
    with pytest.raises(StoreError) as tried:
        atomic_files.check_writable(path)
    assert str(tried.value) == str(written.value)
    assert names(tmp_path) == []


def test_only_atomic_files_writes_files() -> None:
    writes = re.compile(
        r"""\.write_(text|bytes)\(|open\([^)\n]*["'][rb]*[wxa+]|O_(WRONLY|RDWR|CREAT)|shutil\.[cm]|tempfile"""
        r"""|save_file|np\.save"""
    )
    package = Path(atomic_files.__file__).parents[1]
    # The download library writes files of its own, in a temporary folder.
    kept = ("os.devnull, os.O_WRONLY", "import tempfile", "tempfile.TemporaryDirectory(")

    def written(text: str) -> bool:
        for allowed_text in kept:
            text = text.replace(allowed_text, "")
        return writes.search(text) is not None

    writers = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if written(file.read_text("utf-8"))
    }
    # The board is memory that processes share, and has no name once it is there; the
    # runtime file of a server must be private from the start.
    allowed = ("_core/atomic_files.py", "engines/vllm/shared_logits.py")
    assert writers == {*allowed, "service/api/runtime_file.py"}


# Leftovers


def test_leftover_of_a_killed_write_is_removed_by_the_next_write(tmp_path: Path) -> None:
    (tmp_path / LEFTOVER).write_text("half")
    os.utime(tmp_path / LEFTOVER, (1, 1))
    others = [".weft-0123.part", "weft-0123456789abcdef.part", f"{LEFTOVER}.bak", ".x.part"]
    for other in others:
        (tmp_path / other).write_text("other content")
    (tmp_path / ".weft-fedcba9876543210.part").mkdir()
    atomic_files.write(tmp_path / "x", "1")
    assert names(tmp_path) == sorted([".weft-fedcba9876543210.part", *others, "x"])


@posix
def test_leftover_of_a_running_process_stays(tmp_path: Path) -> None:
    """Not even when it has been at it for an hour, and goes the moment it dies."""
    code = (
        "import sys; from weft._core import atomic_files\n"
        "def parts():\n"
        "    yield 'x'; print(flush=True); sys.stdin.read(1); yield 'y'\n"
        "atomic_files.write(sys.argv[1], parts())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "slow")]
    for dies in (False, True):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            (part,) = tmp_path.glob("*.part")
            os.utime(part, (1, 1))
            atomic_files.remove_stale_temp_files(tmp_path)
            assert part.exists()
            if dies:
                process.kill()
            else:
                process.communicate(b"\n", 30)
    assert (tmp_path / "slow").read_text() == "xy"
    assert part.exists()
    atomic_files.remove_stale_temp_files(tmp_path)
    assert names(tmp_path) == ["slow"]


@posix
def test_without_file_locks_only_old_leftovers_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_files, "_try_lock", lambda fd: None)
    (tmp_path / LEFTOVER).write_text("half")
    atomic_files.write(tmp_path / "x", "1")
    assert names(tmp_path) == sorted([LEFTOVER, "x"])
    os.utime(tmp_path / LEFTOVER, (time.time() - 90,) * 2)
    atomic_files.remove_stale_temp_files(tmp_path)
    assert names(tmp_path) == ["x"]


@posix
def test_temporary_file_removed_before_its_lock_is_created_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, left = atomic_files._try_lock, [True, True]

    def swept_first(fd: int) -> bool | None:
        if left:
            left.pop()
            for part in tmp_path.glob("*.part"):
                part.unlink()
        return lock(fd)

    monkeypatch.setattr(atomic_files, "_try_lock", swept_first)
    atomic_files.write(tmp_path / "x", "1")
    assert names(tmp_path) == ["x"]


KILLED = ["plain", "save", "branch", "kv", "run", "grow", "chat", "resume"]


@pytest.mark.programs
@posix
@pytest.mark.parametrize(
    ("names", "n_kills"),
    [
        (["plain"], 2),
        pytest.param(KILLED, 2, marks=pytest.mark.programs),
        *(pytest.param([name], 50, marks=pytest.mark.slow) for name in KILLED),
    ],
)
def test_killed_write_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, names: list[str], n_kills: int
) -> None:
    script = Path(__file__).parents[1] / "kills.py"
    done = subprocess.run(
        [sys.executable, str(script), ",".join(names), str(tmp_path), str(n_kills), "1"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    counts = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, _, _ in counts] == names
    assert all(int(old) + int(new) == n_kills for _, old, new in counts)


# Reading


@posix
def test_pipe_is_read_to_its_end_and_a_pipe_without_writer_is_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert atomic_files.read(tmp_path / "pipe") == b""

    writing = os.open(tmp_path / "pipe", os.O_RDWR)  # which does not wait for a reader

    def fill() -> None:
        for part in (b"a" * 100_000, b"b"):
            os.write(writing, part)
            time.sleep(0.05)
        os.close(writing)

    writer = threading.Thread(target=fill)
    writer.start()
    assert atomic_files.read(tmp_path / "pipe") == b"a" * 100_000 + b"b"
    writer.join()


@pytest.mark.parametrize("path", ["", "nothing", "a\0b", "."])
def test_unreadable_path_raises_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="cannot read"):
        atomic_files.read(path, ModelLoadError)


@posix
@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null"])
def test_device_is_not_read_as_a_file(device: str) -> None:
    with pytest.raises(StoreError, match="a device"):
        atomic_files.read(device)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1 column 1"),
        (b'{\n "a": }', "line 2 column 7"),
        (b"\xff", "position 0"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"1" * 5000, "integer string conversion"),
        (b"NaN", "NaN is no JSON"),
    ],
)
def test_broken_json_raises_and_names_the_position(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(FormatError, match=f"x is no such thing: .*{message}"):
        atomic_files.read_json(tmp_path / "x", FormatError, "no such thing")


def test_json_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert atomic_files.read_json(tmp_path / "x", FormatError, "") == {"a": 1}


def test_messages_show_shortened_values() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 10_000, list(range(1000)), {str(i): i for i in range(1000)}):
        assert len(atomic_files.repr_short(value)) < 200
    while deep:  # freed in pieces
        deep = deep.pop()
