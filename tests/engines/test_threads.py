"""The NumPy engine finds how many BLAS threads serve it, on machines that are simulated here."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from threadpoolctl import threadpool_info

from weft._core.system_resources import ThreadTimes
from weft.engines import threads as threads_module
from weft.engines.threads import AutoThreads, BlasThreads, CoreShare, ThreadTuner, TrialLoss
from weft.errors import ConfigError

Machine = Callable[[int], float]  # seconds of a forward of one token, by threads


def idle(threads: int) -> float:
    """A second thread helps, more do not."""
    return {1: 1.0, 2: 0.65, 4: 0.62}.get(threads, 0.7) * 1e-3


def busy(threads: int) -> float:
    """Threads wait for each other."""
    return {1: 1.5, 2: 60.0}.get(threads, 400.0) * 1e-3


def noisy(machine: Machine, seed: int) -> Machine:
    """A tenth of the forwards are slowed by other work."""
    rng = random.Random(seed)
    return lambda n: machine(n) * (rng.uniform(2, 8) if rng.random() < 0.1 else rng.uniform(1, 1.2))


def ran(choice: ThreadTuner, machine: Machine, seconds: float) -> float:
    """Let forwards run for that long; return the time of one, in the mean."""
    spent, n = 0.0, 0
    while spent < seconds:
        took = machine(choice.threads)
        choice.add(took, 1)
        spent += took
        n += 1
    return spent / n


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("max_threads", [2, 3, 8])
def test_tuned_count_is_near_the_best_fixed_count_idle_and_busy(
    seed: int, max_threads: int
) -> None:
    for machine in (idle, busy):
        choice = ThreadTuner(max_threads, TrialLoss(), lambda: 8)
        best = min(choice.counts, key=machine)
        mean = ran(choice, noisy(machine, seed), 4.0)
        fixed = noisy(machine, seed)
        alone = [fixed(best) for _ in range(1000)]
        assert mean < 1.25 * sum(alone) / len(alone)


def test_tuner_follows_a_machine_that_becomes_busy_and_idle() -> None:
    choice = ThreadTuner(2, TrialLoss(), lambda: 8)
    ran(choice, idle, 1.0)
    assert choice.counts[choice.index] == 2
    assert ran(choice, busy, 3.0) < 1.3 * busy(1)
    assert choice.counts[choice.index] == 1
    ran(choice, idle, 3.0)
    assert choice.counts[choice.index] == 2


def test_trials_of_all_sizes_pay_into_one_account() -> None:
    account = TrialLoss()
    sizes = [ThreadTuner(2, account, lambda: 8) for _ in range(6)]
    spent, lost = 0.0, 0.0
    while spent < 10.0:
        for choice in sizes:
            took = busy(choice.threads)
            lost += took - busy(1)
            choice.add(took, 1)
            spent += took
    assert lost < 0.1 * spent


def test_more_threads_than_idle_cores_are_not_tried() -> None:
    n_idle = 1
    choice = ThreadTuner(4, TrialLoss(), lambda: n_idle)
    assert counts_in(choice, busy, 600) == {1}
    n_idle = 2
    assert counts_in(choice, idle, 60) == {1, 2}
    n_idle = 4
    assert counts_in(choice, idle, 600) == {1, 2, 4}
    n_idle = 1  # from two only down
    assert counts_in(choice, idle, 600) <= {1, 2, 4}


def test_spinning_threads_of_the_process_do_not_end_a_series_of_trials() -> None:
    """They count as running for a while after a forward with more than one."""
    n_calls = 0

    def idle_cores() -> int:
        nonlocal n_calls
        n_calls += 1
        return 2 if n_calls == 1 else 1

    choice = ThreadTuner(2, TrialLoss(), idle_cores)
    counts_in(choice, idle, 20)
    assert choice.counts[choice.index] == 2
    n_calls, choice = 0, ThreadTuner(2, TrialLoss(), idle_cores)
    took = []
    for _ in range(600):
        took.append(choice.threads)
        choice.add(busy(took[-1]), 1)
    assert took.count(2) == 1  # it was slow: no second trial before the cores are idle


def counts_in(choice: ThreadTuner, machine: Machine, n: int) -> set[int]:
    """The numbers that n forwards took."""
    observed = set()
    for _ in range(n):
        observed.add(choice.threads)
        choice.add(machine(choice.threads), 1)
    return observed


def blas_threads() -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in threads_module._BLAS_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_forward_limits_the_blas_and_gives_its_setting_back() -> None:
    before = blas_threads()
    for threads, n_tokens in ((1, 9), (2, 9), (2, 1)):
        with BlasThreads(threads).limited(n_tokens):
            assert set(blas_threads()) == {threads}
        assert blas_threads() == before
    with pytest.raises(ZeroDivisionError), BlasThreads(3).limited(9):
        raise ZeroDivisionError
    assert blas_threads() == before


@pytest.mark.usefixtures("unset")
def test_tuned_count_does_not_exceed_the_usable_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cores in (1, 2, 3):
        monkeypatch.setattr(threads_module, "usable_cores", lambda cores=cores: cores)
        threads, observed = BlasThreads("auto"), set[int]()
        for n_tokens in [8] * 40 + [1] * 5:
            with threads.limited(n_tokens):
                observed |= set(blas_threads())
        assert max(observed) <= cores
        with threads.limited(1):
            assert set(blas_threads()) == {1}


@pytest.mark.usefixtures("unset")
def test_environment_variables_fix_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = blas_threads()
    threads = BlasThreads("auto")
    for _ in range(40):
        with threads.limited(8):
            assert blas_threads() == before


@pytest.mark.parametrize("threads", [0, -1, "many", True, 1.5])
def test_invalid_number_of_threads_raises(threads: object) -> None:
    with pytest.raises(ConfigError, match="threads is"):
        BlasThreads(threads)  # type: ignore[arg-type]


class Processes:
    """A machine of `cores` by a clock of its own, with `n_busy` other processes on it.

    Threads get equal parts of the cores. If they have to share them, a forward with more than one
    thread takes 20 times as long, as threads that spin for a preempted one do.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int, n_busy: int) -> None:
        self.cores, self.n_busy = cores, n_busy
        self.now = self.cpu = 0.0
        self.times: dict[int, ThreadTimes] = {}
        self.counts: list[int] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "process_time", lambda: self.cpu)
        self.auto = AutoThreads(idle=self.idle, waits=lambda: dict(self.times))

    def idle(self) -> int:
        return max(1, self.cores - self.n_busy)

    def forward(self, auto: AutoThreads | None = None) -> float:
        """Run a forward that takes 0.1 s with one thread on an idle core; return its CPU time."""
        cpu = self.cpu
        with (auto or self.auto).measured(8, self.cores) as n:
            self.counts.append(n)
            share = min(1.0, self.cores / (n + self.n_busy))
            wall_s = 0.1 / n / share * (20 if n > 1 and share < 1 else 1)
            for number in range(n):
                before = self.times.get(number, ThreadTimes(0.0, 0.0))
                running = before.running_s + share * wall_s
                waiting = before.waiting_s + (1 - share) * wall_s
                self.times[number] = ThreadTimes(running, waiting)
            self.now += wall_s
            self.cpu += n * share * wall_s
        return self.cpu - cpu


@pytest.mark.parametrize("n_busy", [1, 2, 4, 8, 32])
def test_first_forward_on_a_busy_machine_takes_one_thread(
    monkeypatch: pytest.MonkeyPatch, n_busy: int
) -> None:
    machine = Processes(monkeypatch, 2, n_busy)
    cpu_s = [machine.forward() for _ in range(50)]
    assert set(machine.counts) == {1}
    assert sum(cpu_s) == pytest.approx(50 * 0.1)


@pytest.mark.parametrize("n_busy", [2, 4, 8, 32])
def test_machine_that_becomes_busy_gets_one_thread_after_two_forwards(
    monkeypatch: pytest.MonkeyPatch, n_busy: int
) -> None:
    machine = Processes(monkeypatch, 2, 0)
    for _ in range(10):
        machine.forward()
    machine.n_busy = n_busy
    for _ in range(50):
        machine.forward()
    assert machine.counts == [2] * 12 + [1] * 48
    machine.n_busy = 0
    for _ in range(50):
        machine.forward()
    assert machine.counts[-20:] == [2] * 20


def test_fewer_threads_are_never_tried_while_each_gets_its_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Processes(monkeypatch, 4, 0)
    for _ in range(300):
        machine.forward()
    assert set(machine.counts) == {4}


def test_more_threads_that_the_user_allows_later_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Processes(monkeypatch, 2, 0)
    machine.forward()
    machine.cores = 16
    for _ in range(200):
        machine.forward()
    assert (machine.counts[0], machine.counts[-1]) == (2, 16)


def test_block_that_raises_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Processes(monkeypatch, 4, 0)
    with pytest.raises(ZeroDivisionError), machine.auto.measured(8, 4):
        machine.now += 5.0 / 0
    assert machine.auto.choice(8, 4).index == 2
    assert not machine.auto.share.is_crowded


@pytest.mark.parametrize(
    ("waiting_s", "is_crowded"), [(0.0, False), (0.04, False), (0.05, True), (0.4, True)]
)
def test_thread_that_gets_less_than_seven_tenths_of_a_core_is_crowded(
    waiting_s: float, is_crowded: bool
) -> None:
    times = {1: ThreadTimes(0.0, 0.0), 2: ThreadTimes(5.0, 9.0)}
    share = CoreShare(lambda: dict(times))
    times |= {1: ThreadTimes(0.1, waiting_s), 2: ThreadTimes(5.0, 9.0)}
    share.add(0.1, 0.1, 2)
    assert share.is_crowded == is_crowded


def test_thread_that_hardly_wants_a_core_is_not_judged() -> None:
    times = {1: ThreadTimes(0.0, 0.0), 2: ThreadTimes(0.0, 0.0)}
    share = CoreShare(lambda: dict(times))
    times |= {1: ThreadTimes(1.0, 0.0), 2: ThreadTimes(0.01, 0.09)}
    share.add(1.0, 1.01, 2)
    assert not share.is_crowded


@pytest.mark.parametrize(("cpu_s", "is_crowded"), [(0.2, False), (0.15, False), (0.1, True)])
def test_without_times_of_threads_cpu_time_over_wall_time_decides(
    cpu_s: float, is_crowded: bool
) -> None:
    share = CoreShare(dict)
    share.add(0.1, cpu_s, 2)
    assert share.is_crowded == is_crowded
