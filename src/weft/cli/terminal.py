"""Which terminal this is: each has a loom of its own that was drawn last there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def terminal() -> str:
    """Return a mark of the terminal; "" where none can be told.

    On Linux and macOS it is the session: every window, tab, tmux pane and login over ssh has its
    own, and what runs in one, scripts and pipelines too, has the same. A job without a terminal
    (cron, a service, a step of CI) has one for its own length; so has what a container was
    entered with, whose session is outside of it. On Windows it is the console.
    """
    marks = _console() if os.name == "nt" else _session()
    if not marks:
        return ""
    return hashlib.blake2b("\n".join(marks).encode(), digest_size=8).hexdigest()


def _session() -> list[str]:
    try:
        leader = _leader()
    except OSError:
        return []
    if leader <= 0:
        return []
    # A number is given again some day; when the leader began is not. macOS has no /proc: its
    # terminals name their tabs instead.
    began = _process_status(leader)[_BEGAN:][:1]
    boot = _read(Path("/proc/sys/kernel/random/boot_id")).strip()
    return [str(leader), *began, boot or os.environ.get("TERM_SESSION_ID", "")]


def _leader() -> int:
    """Return the number of our session's leader, as /proc counts; 0 where it cannot be told.

    A container without a /proc of its own sees that of the system around it, where all have other
    numbers.
    """
    process, leader = os.getpid(), os.getsid(0)
    told = _read(Path("/proc/self/stat")).partition(" ")[0]
    if told and int(told) != process:
        process = int(told)
        leader = int(_process_status(process)[_SESSION])
    return leader or _first_inside(process)


def _first_inside(process: int) -> int:
    """Return the first process of a session whose leader is outside of our container."""
    while status := _process_status(process):
        parent = int(status[_PARENT])
        if _process_status(parent)[_SESSION:][:1] != ["0"]:
            return process
        process = parent
    return 0


# Where /proc/PID/stat says it, counted from behind the name.
_PARENT, _SESSION, _BEGAN = 1, 3, 19


def _process_status(process: int) -> list[str]:
    return _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()


def _console() -> list[str]:
    import ctypes

    window = ctypes.windll.kernel32.GetConsoleWindow()  # type: ignore[attr-defined]
    tab = os.environ.get("WT_SESSION", "")
    return [str(window), tab] if window or tab else []


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
