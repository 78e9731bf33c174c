"""How much memory this process may still take, where it is held to some of the machine's, too."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from .cores import cgroups

_SYSTEM = Path("/")


def bytes_left(system: Path = _SYSTEM) -> int | None:
    """Return what is left: of the machine's, of a control group's limit, of `ulimit -v`.

    What a group holds of files, and can let go at any time, counts as left. None where the system
    does not tell. Cost: a few small files are read.
    """
    told = [_of_machine(system), _of_address_space(system)]
    told += [_of_group(folder, is_v2=is_v2) for folder, is_v2 in cgroups("memory", system)]
    left = [n for n in told if n is not None]
    return max(0, min(left)) if left else None


def _of_machine(system: Path) -> int | None:
    kilobytes = _field(system / "proc/meminfo", "MemAvailable:")
    return None if kilobytes is None else kilobytes * 1024


def _of_address_space(system: Path) -> int | None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        taken = _field(system / "proc/self/status", "VmSize:")
        if most != resource.RLIM_INFINITY and taken is not None:
            return most - taken * 1024
    return None


def _of_group(folder: Path, *, is_v2: bool) -> int | None:
    names = ("memory.max", "memory.current") if is_v2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes"
    )  # fmt: skip
    try:
        most, taken = (int((folder / name).read_text("ascii")) for name in names)
    except (OSError, ValueError):  # "max" is no number: no limit
        return None
    of_files = _field(folder / "memory.stat", "inactive_file" if is_v2 else "total_inactive_file")
    return most - taken + (of_files or 0)


def _field(path: Path, name: str) -> int | None:
    """Return the number behind a name, in a file of a line each."""
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text("ascii").splitlines():
            first, *more = line.split()
            if first == name:
                return int(more[0])
    return None
