"""An id for the terminal in which a command runs. Each terminal remembers its last loom."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def terminal() -> str:
    """Return an id of the terminal; "" if it cannot be determined.

    On Linux and macOS this is the POSIX session. Every window, tab, tmux pane and ssh login has
    its own, shared by the scripts and pipelines in it. A job without a terminal (cron, a service,
    CI) has an id of its own. On Windows it is the console.
    """
    parts = _console() if os.name == "nt" else _session()
    if not parts:
        return ""
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def _session() -> list[str]:
    """Return the parts of the terminal's id on Linux and macOS."""
    try:
        leader = _leader()
    except OSError:
        return []
    if leader <= 0:
        return []
    # Process ids are reused, so the start time of the leader is added. macOS has no /proc, but its
    # terminals set an id for each tab.
    start_time = _process_status(leader)[_START_TIME:][:1]
    boot = _read(Path("/proc/sys/kernel/random/boot_id")).strip()
    return [str(leader), *start_time, boot or os.environ.get("TERM_SESSION_ID", "")]


def _leader() -> int:
    """Return the process id of the POSIX session's leader; 0 if it cannot be determined.

    If a container sees its host's /proc, the id is that of the host, so that /proc has an entry
    for it.
    """
    process, leader = os.getpid(), os.getsid(0)
    proc_id = _read(Path("/proc/self/stat")).partition(" ")[0]
    if proc_id and int(proc_id) != process:
        process = int(proc_id)
        leader = int(_process_status(process)[_SESSION])
    return leader or _first_inside(process)


def _first_inside(process: int) -> int:
    """Return the oldest ancestor of a process that is inside this container; 0 if none.

    Used if the session leader is outside of the container, where its id is 0.
    """
    while status := _process_status(process):
        parent = int(status[_PARENT])
        if _process_status(parent)[_SESSION:][:1] != ["0"]:
            return process
        process = parent
    return 0


# Indexes of fields in /proc/PID/stat, counted after the process name.
_PARENT, _SESSION, _START_TIME = 1, 3, 19


def _process_status(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat; [] if it cannot be read."""
    return _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()


def _console() -> list[str]:
    """Return the parts of the terminal's id on Windows."""
    import ctypes

    window = ctypes.windll.kernel32.GetConsoleWindow()  # type: ignore[attr-defined]
    tab = os.environ.get("WT_SESSION", "")
    return [str(window), tab] if window or tab else []


def _read(file: Path) -> str:
    """Return a file's text; "" if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
