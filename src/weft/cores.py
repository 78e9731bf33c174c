"""How many cores this process may use: fewer than the machine has, where it is held to some."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SYSTEM = Path("/")


def usable_cores() -> int:
    """Return how many cores may be used: the machine's, CPU affinity's, and a cgroup's quota.

    A quota of a core and a half counts as one: threads beyond it are stopped for the rest of each
    period. At least 1. Cost: a few small files are read.
    """
    try:
        n = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        n = os.cpu_count() or 1
    quota = cgroup_quota(_SYSTEM)
    return max(1, n if quota is None else min(n, int(quota)))


def idle_cores(system: Path = _SYSTEM) -> int:
    """Return how many cores this thread may have just now, its own among them: the machine's, less
    those that something else runs on; at least 1. All of its own where it is held to some of them:
    what runs elsewhere says nothing of those.

    Cost: 15 µs. Where the system does not tell who runs, the load of the last minute says it.
    """
    n = os.cpu_count() or 1
    with suppress(AttributeError, OSError):
        if (mine := len(os.sched_getaffinity(0))) < n:
            return mine
    try:
        running = int((system / "proc/loadavg").read_text("ascii").split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        try:
            running = 1 + round(os.getloadavg()[0])
        except (AttributeError, OSError):
            running = 1
    return max(1, n - max(running - 1, 0))


def cgroup_quota(system: Path) -> float | None:
    """Return how many cores' time the process's control groups allow; None: no limit.

    system: the folder that holds proc and sys.
    """
    found = [_quota(folder, is_v2=is_v2) for folder, is_v2 in cgroups("cpu", system)]
    return min([quota for quota in found if quota is not None], default=None)


def cgroups(controller: str, system: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the groups that limit something, and whether each is of version 2.

    controller: "cpu", "memory". system: the folder that holds proc and sys.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text("utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers or controller in controllers.split(","):
            base = system / "sys/fs/cgroup" / (controllers and controller)
            for folder in _up(base, path):
                yield folder, not controllers


def _up(base: Path, path: str) -> list[Path]:
    """Return a group's folder and those above it: in a container only `base` may be there."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _quota(folder: Path, *, is_v2: bool) -> float | None:
    try:
        if is_v2:
            limit, period = (folder / "cpu.max").read_text("utf-8").split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text("utf-8")
            period = (folder / "cpu.cfs_period_us").read_text("utf-8")
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number: no limit
        return None
