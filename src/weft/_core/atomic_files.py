"""Atomic writes, and reads whose errors name the file."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import reprlib
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import ConfigError, FormatError, StoreError, WeftError

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed
    fcntl = None  # type: ignore[assignment]

AnyPath = str | os.PathLike[str]

_PART = re.compile(r"\.weft-[0-9a-f]{16}\.part")
_SETTLED_S = 60.0  # without file locks, an older temporary file counts as abandoned
_BUSY_S = 2.0  # on Windows, retry this long while another process has the file open
# Errors of fsync on file systems that cannot sync folders.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxstring, _brief.maxother = 2, 60, 60


# Writing --------------------------------------------------------------------------------------


def write(path: AnyPath, content: bytes | str | Iterable[str]) -> None:
    """Write a file atomically: after a crash it has the old or the new content.

    When the call returns, the new content survives a crash of the machine. A symbolic link stays a
    link, and a file keeps its mode. Other targets, such as pipes, are written directly. Text is
    UTF-8, lone surrogates as escapes. Removes stale temporary files in the folder first.

    Raises: StoreError if it cannot be written; nothing has changed then.
    """
    name = os.fspath(path)
    try:
        status = _status(name)
        if status is not None and not stat.S_ISREG(status.st_mode):
            with open(name, "wb") as straight:
                straight.writelines(_encoded(content))
            return
        target = _target(name, status)
        _sweep_once(target.parent)
        _replace(target, content, status)
    except OSError as error:
        raise StoreError(f"cannot write {display_path(path)}: {error_reason(error)}") from error


def check_writable(path: AnyPath) -> None:
    """Raise the error that `write` would raise now; changes nothing."""
    name = os.fspath(path)
    try:
        status = _status(name)
        if os.path.isdir(os.path.realpath(name)):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if status is None or stat.S_ISREG(status.st_mode):
            part = open_temp(_target(name, status).parent)
            part.close()
            os.unlink(part.name)
    except OSError as error:
        raise StoreError(f"cannot write {display_path(path)}: {error_reason(error)}") from error


def _target(name: str | bytes, status: os.stat_result | None) -> Path:
    """Return the file to replace: the target of a symbolic link."""
    if status is not None and not os.access(name, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return Path(os.fsdecode(os.path.realpath(name)))


def remove_stale_temp_files(folder: Path) -> None:
    """Remove temporary files of killed processes in a folder; files in use stay.

    Never raises: what cannot be removed now is removed later.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _PART.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    _remove_unless_written(entry.path)


@lru_cache(maxsize=1024)
def _sweep_once(folder: Path) -> None:
    """Remove stale temporary files of a folder, once per process."""
    remove_stale_temp_files(folder)


def _replace(
    target: Path, content: bytes | str | Iterable[str], old: os.stat_result | None
) -> None:
    """Write a temporary file and rename it to the target. old: status of the file to replace."""
    # In the same folder, so that the last step is one rename. The temporary name is not derived
    # from
    # the target's, which may be too long, and cannot be mistaken for a user's file.
    file = open_temp(target.parent)
    try:
        with file:
            if old is not None:
                with suppress(OSError):  # a file system without modes
                    os.chmod(file.name, stat.S_IMODE(old.st_mode))
            file.writelines(_encoded(content))
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                # Rename while it is locked, so that no process removes it as stale.
                os.replace(file.name, target)
        if fcntl is None:
            _rename_patiently(file.name, target)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(file.name)
    _sync_folder(target.parent)


def _rename_patiently(part: str, target: Path) -> None:
    """Rename on Windows, where a file that is open elsewhere cannot be replaced."""
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            os.replace(part, target)
            return
        except PermissionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def open_temp(folder: Path) -> BinaryIO:
    """Return a new temporary file, locked while it is open to mark it as in use.

    `remove_stale_temp_files` removes files that a killed process left in the folder.
    """
    while True:
        file = (folder / f".weft-{secrets.token_hex(8)}.part").open("xb")
        if _try_lock(file.fileno()) is False or os.fstat(file.fileno()).st_nlink == 0:
            # Another process removed it between its creation and its lock.
            file.close()
            continue
        return file


def _remove_unless_written(path: str) -> None:
    """Delete a temporary file after a failure."""
    age = time.time() - os.stat(path).st_mtime
    with open(path, "r+b") as file:
        locked = _try_lock(file.fileno())
        if locked:
            os.unlink(path)
    if locked is None and age > _SETTLED_S:
        os.unlink(path)


def _try_lock(fd: int) -> bool | None:
    """Lock an open file until it is closed; None if files cannot be locked."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a crash of the machine, if the system supports it."""
    if os.name == "nt":
        return
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # a folder may be writable but not readable
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)


def _encoded(content: bytes | str | Iterable[str]) -> Iterable[bytes]:
    """Yield the content as bytes."""
    if isinstance(content, bytes):
        return [content]
    parts = [content] if isinstance(content, str) else content
    return (part.encode("utf-8", "backslashreplace") for part in parts)


def _status(name: str | bytes) -> os.stat_result | None:
    """Return the status of a file; None if it does not exist."""
    try:
        return os.stat(name)
    except FileNotFoundError:
        return None
    except ValueError as error:  # the name has a zero byte
        raise OSError(errno.EINVAL, str(error)) from error


# Reading --------------------------------------------------------------------------------------


def read(
    path: AnyPath, error: type[WeftError] = StoreError, *, max_bytes: int | None = None
) -> bytes:
    """Return the content of a file or pipe; never blocks on a pipe without a writer.

    max_bytes: maximum size in bytes.

    Raises: `error`, naming the file, if it cannot be read; FormatError if it is larger.
    """
    try:
        with open(path, "rb", opener=_open_now) as file:
            status = os.fstat(file.fileno())
            if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                raise OSError(errno.EINVAL, "it is a device, not a file")
            check_size(status.st_size, max_bytes)
            if status.st_size > _memory_bytes():
                raise MemoryError
            if not stat.S_ISREG(status.st_mode):
                os.set_blocking(file.fileno(), True)
            data = file.read() if max_bytes is None else file.read(max_bytes + 1)
            check_size(len(data), max_bytes)
            return data
    except (OSError, ValueError, MemoryError) as problem:
        raise error(f"cannot read {display_path(path)}: {error_reason(problem)}") from problem


def check_size(n_bytes: int, max_bytes: int | None) -> None:
    """Raise FormatError, without a file name, if a size exceeds the maximum."""
    if max_bytes is not None and n_bytes > max_bytes:
        raise FormatError(f"it is larger than the {max_bytes:,} bytes that are read")


def read_text(path: AnyPath, error: type[WeftError] = StoreError) -> str:
    """Return a file's text, which is UTF-8. Raises: `error`, naming the file."""
    data = read(path, error)
    try:
        return str(data, "utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{display_path(path)} is not UTF-8 text: {problem}") from problem


def read_json(
    path: AnyPath,
    error: type[WeftError],
    what: str,
    *,
    unread: type[WeftError] | None = None,
    nan: bool = False,
) -> Any:
    """Return the value in a JSON file.

    Args:
        path: the file.
        error: the exception class for a broken file.
        what: the reason in the message of a broken file, as in "x.json is `what`: …".
        unread: the exception class for a file that cannot be read; None: `error`.
        nan: accept NaN and Infinity, which are not JSON.

    Raises: `error` (or `unread`), naming the file and the position.
    """
    data = read(path, unread or error)
    try:
        return parse_json(data, nan=nan)
    except ValueError as problem:
        raise error(f"{display_path(path)} is {what}: {problem}") from problem


def parse_json(data: bytes | str, *, nan: bool = False) -> Any:
    """Return the value of a JSON text. Raises: ValueError for any defect."""
    text = data if isinstance(data, str) else str(data, "utf-8-sig")
    try:
        return json.loads(text, parse_constant=None if nan else _reject_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextmanager
def with_filename(path: AnyPath) -> Iterator[None]:
    """Add the file's name to a FormatError or ConfigError raised inside."""
    try:
        yield
    except (FormatError, ConfigError) as error:
        kind = FormatError if isinstance(error, FormatError) else ConfigError
        raise kind(f"{display_path(path)}: {error}", hint=error.hint) from error


def _reject_constant(name: str) -> None:
    """Reject NaN and Infinity while parsing JSON. Raises: ValueError."""
    raise ValueError(f"{name} is no JSON")


def _memory_bytes() -> float:
    """Return the machine's memory in bytes: a sparse file may be larger."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return math.inf


def _open_now(path: str, flags: int) -> int:
    """Open a file without waiting for a writer of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


# Validating what was read ---------------------------------------------------------------------

# Exceptions of code that uses an unexpected value.
PARSE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def require_field(record: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """Return a required field of a certain type. Raises: FormatError."""
    if name not in record:
        raise FormatError(f"{where} has no {name!r}; the file is broken")
    value = record[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(
            f"{name!r} of {where} is {repr_short(value)}; a {kind.__name__} belongs there"
        )
    return value


def parse_number(value: object, where: str) -> float:
    """Return a number; also "inf", "-inf" and "nan", which JSON cannot represent. Raises:
    FormatError.
    """
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if not isinstance(value, bool) and isinstance(value, int | float):
        with suppress(OverflowError):
            return float(value)
    raise FormatError(f"{where} is {repr_short(value)}; a number belongs there")


def parse_int(value: object, where: str, low: int, high: int | None = None) -> int:
    """Return an integer from `low` to below `high`, if given. Raises: FormatError."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= low and (high is None or value < high):
            return value
    last = "" if high is None else f" to {high - 1}"
    raise FormatError(f"{where} is {repr_short(value)}; an integer from {low}{last} belongs there")


def json_number(value: float) -> float | str:
    """Return a number as JSON can represent it; inf, -inf and nan as strings."""
    return value if math.isfinite(value) else str(value)


def repr_short(value: object) -> str:
    """Return the repr of a value for messages, shortened."""
    return _brief.repr(value)


def display_path(path: AnyPath) -> str:
    """Return a path for messages."""
    name = os.fsdecode(path)
    return name if name.isprintable() and name else repr(name)


def error_reason(error: BaseException) -> str:
    """Return the reason why a file could not be read or written."""
    if isinstance(error, MemoryError):
        return "it does not fit into memory"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
