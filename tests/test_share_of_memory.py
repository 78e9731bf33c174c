"""Memory is counted as the process may take it: the machine's, a container's, of addresses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import weft
from weft import loading
from weft._core import system_resources

MACHINE = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:    4000000 kB\n"}
V1 = "4:memory:/a\n3:cpu,cpuacct:/a\n"
GROUP_1 = "sys/fs/cgroup/memory/a/memory."


def write(system: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text)
    return system


def group(limit: str, taken: str, of_files: str, at: str = "") -> dict[str, str]:
    folder = f"sys/fs/cgroup/{at}memory."
    return {
        f"{folder}max": f"{limit}\n",
        f"{folder}current": f"{taken}\n",
        f"{folder}stat": f"anon 7\ninactive_file {of_files}\nactive_file 9\n",
    }


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        ({"proc/meminfo": "nonsense\n"}, None),
        (MACHINE, 4_096_000_000),
        ({**MACHINE, "proc/self/cgroup": "0::/\n", **group("max", "5", "0")}, 4_096_000_000),
        ({**MACHINE, "proc/self/cgroup": "0::/\n", **group("1000", "700", "200")}, 500),
        ({"proc/self/cgroup": "0::/\n", **group("1000", "700", "200")}, 500),
        ({"proc/self/cgroup": "0::/\n", **group("1000", "1700", "200")}, 0),
        (
            {
                "proc/self/cgroup": "0::/outer/inner\n",
                **group("max", "1", "0", at="outer/inner/"),
                **group("900", "100", "0", at="outer/"),
            },
            800,
        ),
        (
            {
                "proc/self/cgroup": V1,
                f"{GROUP_1}limit_in_bytes": "1000\n",
                f"{GROUP_1}usage_in_bytes": "600\n",
                f"{GROUP_1}stat": "total_inactive_file 50\n",
            },
            450,
        ),
    ],
)
def test_bytes_left_is_the_minimum_of_all_limits(
    tmp_path: Path, files: dict[str, str], left: int | None
) -> None:
    assert system_resources.bytes_left(write(tmp_path, files)) == left


@pytest.mark.parametrize(
    ("left", "budget"),
    [(None, 4 << 30), (64 << 30, 4 << 30), (2 << 30, 1 << 30), (1 << 20, 64 << 20)],
)
def test_automatic_cpu_budget_depends_on_free_memory(
    monkeypatch: pytest.MonkeyPatch, left: int | None, budget: int
) -> None:
    monkeypatch.setattr(loading, "bytes_left", lambda: left)
    with weft.load("tiny") as lm:
        assert lm.tree.budget.capacity == budget // lm.info.kv_bytes_per_token


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
def test_bytes_left_respects_a_limited_address_space() -> None:
    code = (
        "import resource; from weft._core.system_resources import _field, bytes_left, _SYSTEM;"
        "taken = _field(_SYSTEM / 'proc/self/status', 'VmSize:') * 1024;"
        "resource.setrlimit(resource.RLIMIT_AS, (taken + (300 << 20),) * 2);"
        "print(bytes_left() >> 20)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 200 < int(done.stdout) <= 300
