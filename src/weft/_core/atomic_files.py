"""Files: written so that a kill leaves the old or the new one; read with errors that name them."""

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
except ImportError:  # Windows, where nobody removes a file that is open
    fcntl = None  # type: ignore[assignment]

AnyPath = str | os.PathLike[str]

_PART = re.compile(r"\.weft-[0-9a-f]{16}\.part")
_SETTLED_S = 60.0  # age of a part that nobody writes to, where files cannot be locked
_BUSY_S = 2.0  # how long a file may be open elsewhere, where that keeps it from being replaced
# What the sync of a folder says where folders cannot be synced.
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
_brief = reprlib.Repr()
_brief.maxlevel, _brief.maxstring, _brief.maxother = 2, 60, 60


# Writing --------------------------------------------------------------------------------------


def write(path: AnyPath, content: bytes | str | Iterable[str]) -> None:
    """Write a file: whatever happens meanwhile, it is the old one or the new one, whole.

    When the call returns, the new one outlives a crash of the machine. A link stays a link, a
    file keeps its mode; what is no file, such as a pipe, is written straight. Text is UTF-8, lone
    surrogates as their escapes. What killed writes have left in the folder goes before.
    Raises: StoreError when it cannot be written; nothing has changed then.
    """
    name = os.fspath(path)
    try:
        found = _status(name)
        if found is not None and not stat.S_ISREG(found.st_mode):
            with open(name, "wb") as straight:
                straight.writelines(_encoded(content))
            return
        target = _target(name, found)
        _sweep_once(target.parent)
        _replace(target, content, found)
    except OSError as error:
        raise StoreError(f"cannot write {display_path(path)}: {error_reason(error)}") from error


def check_writable(path: AnyPath) -> None:
    """Raise what `write` would raise now, before there is anything to write; nothing changes."""
    name = os.fspath(path)
    try:
        found = _status(name)
        if os.path.isdir(os.path.realpath(name)):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if found is None or stat.S_ISREG(found.st_mode):
            part = open_temp(_target(name, found).parent)
            part.close()
            os.unlink(part.name)
    except OSError as error:
        raise StoreError(f"cannot write {display_path(path)}: {error_reason(error)}") from error


def _target(name: str | bytes, found: os.stat_result | None) -> Path:
    """Return the file that is to be replaced: a link to it shall still be one."""
    if found is not None and not os.access(name, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return Path(os.fsdecode(os.path.realpath(name)))


def remove_stale_temp_files(folder: Path) -> None:
    """Remove what killed writes have left in a folder; what somebody still writes stays.

    Never raises: what cannot be removed now is removed another time.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _PART.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    _remove_unless_written(entry.path)


@lru_cache(maxsize=1024)
def _sweep_once(folder: Path) -> None:
    remove_stale_temp_files(folder)


def _replace(
    target: Path, content: bytes | str | Iterable[str], old: os.stat_result | None
) -> None:
    # In the same folder, so that the last step is one rename; with a name of its own, so that a
    # long one fits and nobody else's file looks like it.
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
                # While it is locked: nobody may take it for a leftover before it has its name.
                os.replace(file.name, target)
        if fcntl is None:
            _rename_patiently(file.name, target)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(file.name)
    _sync_folder(target.parent)


def _rename_patiently(part: str, target: Path) -> None:
    """Rename on a system where a file that somebody reads cannot be replaced."""
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
    """Return a new file to write to, locked as long as it is open: so it is known to be in use.

    `remove_stale_temp_files` removes files that a killed process left in the folder.
    """
    while True:
        file = (folder / f".weft-{secrets.token_hex(8)}.part").open("xb")
        if _try_lock(file.fileno()) is False or os.fstat(file.fileno()).st_nlink == 0:
            # Somebody swept it between its making and its lock.
            file.close()
            continue
        return file


def _remove_unless_written(path: str) -> None:
    age = time.time() - os.stat(path).st_mtime
    with open(path, "r+b") as file:
        locked = _try_lock(file.fileno())
        if locked:
            os.unlink(path)
    if locked is None and age > _SETTLED_S:
        os.unlink(path)


def _try_lock(fd: int) -> bool | None:
    """Lock an open file until it is closed; None where files cannot be locked."""
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
    """Let the new name outlive a crash too, where the system can."""
    if os.name == "nt":
        return
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # one may write in a folder that one may not read
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)


def _encoded(content: bytes | str | Iterable[str]) -> Iterable[bytes]:
    if isinstance(content, bytes):
        return [content]
    parts = [content] if isinstance(content, str) else content
    return (part.encode("utf-8", "backslashreplace") for part in parts)


def _status(name: str | bytes) -> os.stat_result | None:
    try:
        return os.stat(name)
    except FileNotFoundError:
        return None
    except ValueError as error:  # a zero byte in it
        raise OSError(errno.EINVAL, str(error)) from error


# Reading --------------------------------------------------------------------------------------


def read(path: AnyPath, error: type[WeftError] = StoreError, *, most: int | None = None) -> bytes:
    """Return what is in a file, or comes out of a pipe; never waits for a pipe that nobody fills.

    most: how many bytes it may have; what is larger is not read.
    Raises: `error`, naming the file, for all that cannot be read; FormatError for what is larger.
    """
    try:
        with open(path, "rb", opener=_open_now) as file:
            found = os.fstat(file.fileno())
            if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
                raise OSError(errno.EINVAL, "it is a device, not a file")
            check_size(found.st_size, most)
            if found.st_size > _memory_bytes():
                raise MemoryError
            if not stat.S_ISREG(found.st_mode):
                os.set_blocking(file.fileno(), True)
            data = file.read() if most is None else file.read(most + 1)
            check_size(len(data), most)
            return data
    except (OSError, ValueError, MemoryError) as problem:
        raise error(f"cannot read {display_path(path)}: {error_reason(problem)}") from problem


def check_size(n_bytes: int, most: int | None) -> None:
    """Refuse what has more bytes than it may have. Raises: FormatError, without a file's name."""
    if most is not None and n_bytes > most:
        raise FormatError(f"it is larger than the {most:,} bytes that are read".replace(",", " "))


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

    what: what a broken file is said not to be, as in "x.json is `what`: …".
    unread: the class for a file that cannot be read at all, where it is another.
    nan: whether NaN and Infinity, which are no JSON, are numbers.
    Raises: `error` (or `unread`), naming the file and the place in it.
    """
    data = read(path, unread or error)
    try:
        return parse_json(data, nan=nan)
    except ValueError as problem:
        raise error(f"{display_path(path)} is {what}: {problem}") from problem


def parse_json(data: bytes | str, *, nan: bool = False) -> Any:
    """Return the value of a JSON text. Raises: ValueError, whatever is wrong with it."""
    text = data if isinstance(data, str) else str(data, "utf-8-sig")
    try:
        return json.loads(text, parse_constant=None if nan else _no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@contextmanager
def with_filename(path: AnyPath) -> Iterator[None]:
    """Let a FormatError or a ConfigError raised inside say which file it is about."""
    try:
        yield
    except (FormatError, ConfigError) as error:
        kind = FormatError if isinstance(error, FormatError) else ConfigError
        raise kind(f"{display_path(path)}: {error}", hint=error.hint) from error


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _memory_bytes() -> float:
    """Return how much memory the machine has: a file with holes may be longer than that."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return math.inf


def _open_now(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


# Looking at what was read ---------------------------------------------------------------------

# What using a value that is not as expected may raise.
PARSE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)


def require_field(record: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    """Return a field that must be there and of this kind. Raises: FormatError."""
    if name not in record:
        raise FormatError(f"{where} has no {name!r}; the file is broken")
    value = record[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise FormatError(
            f"{name!r} of {where} is {repr_short(value)}; a {kind.__name__} belongs there"
        )
    return value


def parse_number(value: object, where: str) -> float:
    """Return a number; "inf", "-inf" and "nan" are the ones that JSON has no word for."""
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if not isinstance(value, bool) and isinstance(value, int | float):
        with suppress(OverflowError):
            return float(value)
    raise FormatError(f"{where} is {repr_short(value)}; a number belongs there")


def parse_int(value: object, where: str, low: int, high: int | None = None) -> int:
    """Return a whole number from `low` to below `high`, if there is one. Raises: FormatError."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value >= low and (high is None or value < high):
            return value
    last = "" if high is None else f" to {high - 1}"
    raise FormatError(
        f"{where} is {repr_short(value)}; a whole number from {low}{last} belongs there"
    )


def json_number(value: float) -> float | str:
    """Return a number as JSON can hold it; those it has no word for by name: inf, -inf, nan."""
    return value if math.isfinite(value) else str(value)


def repr_short(value: object) -> str:
    """Return a value as a message shows it: short, however large or deep it is."""
    return _brief.repr(value)


def display_path(path: AnyPath) -> str:
    """Return a path as a message shows it."""
    name = os.fsdecode(path)
    return name if name.isprintable() and name else repr(name)


def error_reason(error: BaseException) -> str:
    """Return why a file could not be read or written."""
    if isinstance(error, MemoryError):
        return "it does not fit into memory"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
