"""CPU cores and memory available to this process, and how OpenMP threads wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_SYSTEM = Path("/")
# libgomp spins for milliseconds by default, so one preempted thread keeps all others busy. With
# 1,000 rounds (about 10 µs) threads sleep at most barriers; a kernel may then wake all of them on
# one core, where two threads are as slow as one. 10,000 rounds cover the usual differences.
_WAIT_VARIABLES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def usable_cores() -> int:
    """Return how many cores may be used, at least 1: limited by CPU affinity and the cgroup's
    quota.

    A quota of 1.5 cores counts as 1: further threads are stopped for the rest of each period.

    Cost: reads a few small files.
    """
    try:
        n = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        n = os.cpu_count() or 1
    quota = cgroup_quota(_SYSTEM)
    return max(1, n if quota is None else min(n, int(quota)))


def idle_cores(system: Path = _SYSTEM) -> int:
    """Return how many cores are idle now, this thread's own included; at least 1.

    If CPU affinity restricts the process, return all of its cores: load elsewhere says nothing
    about them. Without /proc, the load average of the last minute counts.

    Cost: 15 µs.
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


class ThreadTimes(NamedTuple):
    """Seconds that a thread has run on a core, and has waited for a core."""

    running_s: float
    waiting_s: float

    @property
    def wanted_s(self) -> float:
        """Seconds that the thread was runnable: running or waiting for a core."""
        return self.running_s + self.waiting_s


def thread_times(system: Path = _SYSTEM) -> dict[int, ThreadTimes]:
    """Return the times of each thread of this process, by thread id.

    Empty if the system is not Linux. Cost: 10 µs a thread.
    """
    tasks = str(system / "proc/self/task")
    times = {}
    with suppress(OSError, ValueError):
        for name in os.listdir(tasks):
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                running, waiting, _ = _read_bytes(f"{tasks}/{name}/schedstat").split()
                times[int(name)] = ThreadTimes(int(running) / 1e9, int(waiting) / 1e9)
    return times if any(each.running_s for each in times.values()) else {}


def _read_bytes(path: str) -> bytes:
    """Return the first bytes of a system file, at a fifth of the cost of `Path.read_text`."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 256)
    finally:
        os.close(file)


def wait_variables() -> dict[str, str]:
    """Return the environment variables that let OpenMP threads sleep instead of spin at barriers.

    OpenMP runtimes read them once, when they are loaded. Empty if the user has set one of them.
    """
    is_set = any(name in os.environ for name in _WAIT_VARIABLES)
    return {} if is_set else dict(_WAIT_VARIABLES)


@contextmanager
def passive_waiting() -> Iterator[None]:
    """Set `wait_variables` inside a block that imports a library, and unset them afterwards."""
    variables = wait_variables()
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def cgroup_quota(system: Path) -> float | None:
    """Return the cores that the process's control groups allow; None: no limit.

    system: the folder that contains proc and sys.
    """
    quotas = [_quota(folder, is_v2=is_v2) for folder, is_v2 in cgroups("cpu", system)]
    return min([quota for quota in quotas if quota is not None], default=None)


def cgroups(controller: str, system: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of control groups with a controller, and True for version 2.

    controller: "cpu" or "memory". system: the folder that contains proc and sys.
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
    """Return a group's folder and those above it: in a container only `base` may exist."""
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
    except (OSError, ValueError, ZeroDivisionError):  # the value is "max": no limit
        return None


def bytes_left(system: Path = _SYSTEM) -> int | None:
    """Return the free memory in bytes: the least of the machine's, the cgroup's and `ulimit -v`.

    File cache of a cgroup, which can be dropped at any time, counts as free. None if the system
    does not report it. Cost: reads a few small files.
    """
    limits = [_of_machine(system), _of_address_space(system)]
    limits += [_of_group(folder, is_v2=is_v2) for folder, is_v2 in cgroups("memory", system)]
    left = [n for n in limits if n is not None]
    return max(0, min(left)) if left else None


def _of_machine(system: Path) -> int | None:
    kilobytes = _field(system / "proc/meminfo", "MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _of_address_space(system: Path) -> int | None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        used = _field(system / "proc/self/status", "VmSize:")
        if limit != resource.RLIM_INFINITY and used is not None:
            return limit - used * 1024
    return None


def _of_group(folder: Path, *, is_v2: bool) -> int | None:
    names = ("memory.max", "memory.current") if is_v2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes"
    )  # fmt: skip
    try:
        limit, used = (int((folder / name).read_text("ascii")) for name in names)
    except (OSError, ValueError):  # the value is "max": no limit
        return None
    of_files = _field(folder / "memory.stat", "inactive_file" if is_v2 else "total_inactive_file")
    return limit - used + (of_files or 0)


def _field(path: Path, name: str) -> int | None:
    """Return the number after a name, in a file with one name per line."""
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text("ascii").splitlines():
            first, *more = line.split()
            if first == name:
                return int(more[0])
    return None
