"""The torch engine finds how many of OpenMP's threads serve it, on machines that are simulated."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import build  # noqa: E402
from weft.engines.base import Row  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch import threads as threads_module  # noqa: E402
from weft.engines.torch.threads import CpuThreads, one_thread_if_busy  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", threads_module._VARIABLES)
def test_what_the_environment_says_holds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    before = torch.get_num_threads()
    with CpuThreads(CPU).limited(8):
        assert torch.get_num_threads() == before


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="PyTorch without MKL")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux tells of threads")
def test_products_take_no_more_threads_than_they_are_let(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of MKL, too, after somebody has said how many PyTorch is to take."""
    for name in threads_module._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        threads = CpuThreads(CPU, idle=lambda: 1)
        threads._auto.choice(8, 2).index = 0
        a, b = torch.rand(64, 1024), torch.rand(1024, 1024)
        a @ b
        while any(is_running()):  # threads that have worked look out for more for a while
            time.sleep(0.01)
        worked = working()
        with threads.limited(8):
            for _ in range(30):
                a @ b
                torch.exp(b)
        mine = [each - worked.get(name, 0) for name, each in working().items()]
        assert sorted(mine)[-2] < 0.3 * max(mine)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def is_running() -> Iterator[bool]:
    """Yield for each thread of this process but the calling one whether it runs or could."""
    for place in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            if int(place.name) != threading.get_native_id():
                yield (place / "stat").read_text().rpartition(")")[2].split()[0] == "R"


def working() -> dict[str, int]:
    """How long each thread of this process has run: ns, by its number."""
    found = {}
    for place in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            found[place.name] = int((place / "schedstat").read_text().split()[0])
    return found


@pytest.fixture
def with_three(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in threads_module._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def seen_inside(engine: TorchEngine, n_rows: int) -> set[int]:
    """The numbers of threads that a layer sees in a forward that is let one."""
    to, seen = engine._threads._limit.to, []
    engine._threads._limit.to = lambda _: to(1)
    layer = engine.model.model.layers[0]
    hook = layer.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    engine.forward([Row((), [1, 2, 3], 0, None, (2,)) for _ in range(n_rows)])
    hook.remove()
    engine._threads._limit.to = to
    return set(seen)


@pytest.mark.usefixtures("with_three")
def test_a_forward_leaves_the_number_of_threads_as_it_was() -> None:
    engine = TorchEngine.adopt(build("llama"))
    assert seen_inside(engine, 2) == {1}
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("with_three")
def test_what_is_to_be_the_same_to_the_last_bit_takes_all_threads() -> None:
    """One path that has no KV and gets none, as `AsyncLM(strict=True)` asks."""
    assert seen_inside(TorchEngine.adopt(build("llama")), 1) == {3}


@pytest.mark.usefixtures("with_three")
def test_a_number_that_is_set_inside_a_forward_stays() -> None:
    threads = CpuThreads(CPU, idle=lambda: 1)
    threads._auto.choice(8, 3).index = 0
    with threads.limited(8):
        torch.set_num_threads(2)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("with_three")
@pytest.mark.parametrize(("n_idle", "threads"), [(1, 1), (2, 1), (3, 3), (8, 3)])
def test_loading_on_a_busy_machine_takes_one_thread(
    monkeypatch: pytest.MonkeyPatch, n_idle: int, threads: int
) -> None:
    monkeypatch.setattr(threads_module, "usable_cores", lambda: 8)
    with one_thread_if_busy(lambda: n_idle):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 3


def test_loading_keeps_threads_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    with one_thread_if_busy(lambda: 1):
        assert torch.get_num_threads() == before
