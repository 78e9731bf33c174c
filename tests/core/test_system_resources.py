"""Cores are counted as the process may use them: affinity, and quotas of both kinds of cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weft._core import system_resources

V1 = "4:memory:/a/b\n3:cpu,cpuacct:/a/b\n1:name=systemd:/\n"


def write(system: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text)
    return system


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/outer/inner\n",
                "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
                "sys/fs/cgroup/outer/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/a/b/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/a/b/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        # In a container only its own group is mounted, at the top.
        ({"proc/self/cgroup": "0::/../x\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1.0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "nonsense\n"}, None),
        ({"proc/self/cgroup": "nonsense\n"}, None),
    ],
)
def test_cpu_quota_of_any_cgroup_version_is_read(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    assert system_resources.cgroup_quota(write(tmp_path, files)) == quota


def test_usable_cores_are_limited_by_the_quota_and_at_minimum_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system_resources, "_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert system_resources.usable_cores() == 8
    for limit, usable in (("350000", 3), ("20000", 1), ("9900000", 8)):
        write(
            tmp_path,
            {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{limit} 100000\n"},
        )
        assert system_resources.usable_cores() == usable


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no CPU affinity")
def test_pinned_process_has_one_usable_core() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from weft._core.system_resources import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "1"


def has_four(monkeypatch: pytest.MonkeyPatch, n_usable: int = 4) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    cores = set(range(n_usable))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)


def test_load_of_other_processes_does_not_reduce_the_cores_of_a_pinned_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    has_four(monkeypatch, 2)
    assert system_resources.idle_cores(write(tmp_path, {"proc/loadavg": "0 0 0 9/412 99"})) == 2


@pytest.mark.parametrize(
    ("loadavg", "idle"),
    [("0.50 1.00 2.00 1/412 99\n", 4), ("0 0 0 3/412 99", 2), ("0 0 0 9/412 99", 1)],
)
def test_idle_cores_are_cores_minus_running_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, loadavg: str, idle: int
) -> None:
    has_four(monkeypatch)
    assert system_resources.idle_cores(write(tmp_path, {"proc/loadavg": loadavg})) == idle


def test_without_proc_idle_cores_follow_the_load_average(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    has_four(monkeypatch)
    monkeypatch.setattr(os, "getloadavg", lambda: (2.1, 0.0, 0.0), raising=False)
    assert system_resources.idle_cores(tmp_path) == 2
    monkeypatch.delattr(os, "getloadavg")
    assert system_resources.idle_cores(tmp_path) == 4


def test_thread_times_are_in_seconds(tmp_path: Path) -> None:
    files = {
        "proc/self/task/7/schedstat": "1500000000 500000000 12\n",
        "proc/self/task/9/schedstat": "0 0 0\n",
    }
    times = system_resources.thread_times(write(tmp_path, files))
    assert times == {7: (1.5, 0.5), 9: (0.0, 0.0)}
    assert times[7].wanted_s == 2.0


@pytest.mark.parametrize("text", ["0 0 0\n", "nonsense\n"])
def test_thread_times_without_a_source_are_empty(tmp_path: Path, text: str) -> None:
    assert system_resources.thread_times(tmp_path) == {}
    assert (
        system_resources.thread_times(write(tmp_path, {"proc/self/task/7/schedstat": text})) == {}
    )


def test_openmp_threads_wait_passively_unless_the_user_sets_a_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with system_resources.passive_waiting():
        assert [os.environ.get(name) for name in names] == ["PASSIVE", "10000"]
    assert not any(name in os.environ for name in names)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with system_resources.passive_waiting():
        assert [os.environ.get(name) for name in names] == ["ACTIVE", None]
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
