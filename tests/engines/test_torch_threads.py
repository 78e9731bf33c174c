"""The torch engine finds how many of OpenMP's threads serve it, on machines that are simulated."""

from __future__ import annotations

from collections.abc import Iterator

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
def test_thread_count_of_the_environment_is_kept(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "2")
    before = torch.get_num_threads()
    with CpuThreads(CPU).limited(8):
        assert torch.get_num_threads() == before


@pytest.fixture
def with_three(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in threads_module._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def counts_inside(engine: TorchEngine, n_rows: int) -> set[int]:
    """The numbers of threads that a layer sees in a forward that is let one."""
    to, recorded = engine._threads._limit.to, []
    engine._threads._limit.to = lambda _: to(1)
    layer = engine.model.model.layers[0]
    hook = layer.register_forward_hook(lambda *_: recorded.append(torch.get_num_threads()))
    engine.forward([Row((), [1, 2, 3], 0, None, (2,)) for _ in range(n_rows)])
    hook.remove()
    engine._threads._limit.to = to
    return set(recorded)


@pytest.mark.usefixtures("with_three")
def test_forward_leaves_the_number_of_threads_as_it_was() -> None:
    engine = TorchEngine.adopt(build("llama"))
    assert counts_inside(engine, 2) == {1}
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("with_three")
def test_strict_row_runs_with_all_threads() -> None:
    """One path that has no KV and gets none, as `AsyncLM(strict=True)` asks."""
    assert counts_inside(TorchEngine.adopt(build("llama")), 1) == {3}


@pytest.mark.usefixtures("with_three")
def test_number_that_is_set_inside_a_forward_stays() -> None:
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
