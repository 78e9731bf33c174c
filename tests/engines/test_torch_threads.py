"""The torch engine finds how many of OpenMP's threads serve it, on machines that are simulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import build  # noqa: E402
from weft.engines.base import Row  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch import threads as threads_module  # noqa: E402
from weft.engines.torch.threads import CpuThreads, Crowd  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


class Machine:
    """A machine of some cores, by a clock of its own; `beside` of them are wanted by others, too.

    A forward takes its part on each thread; where two want one core, all of its threads wait, and
    the system takes each of those away 150 times a second.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
        self.cores, self.beside = cores, 0
        self.now, self.taken = 0.0, 0.0
        self.seen: list[int] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
        monkeypatch.setattr(threads_module, "usable_cores", lambda: cores)
        for name in threads_module._VARIABLES:
            monkeypatch.delenv(name, raising=False)
        self.threads = CpuThreads(CPU, idle=self.idle, taken=lambda: int(self.taken))
        self.threads._limit = self  # type: ignore[assignment]

    def to(self, n: int) -> Any:
        self.seen.append(n)
        return torch.no_grad()  # any that does nothing

    def idle(self) -> int:
        return max(1, self.cores - self.beside)

    def run(self, n_tokens: int, what: str = "") -> float:
        began = self.now
        with self.threads.limited(n_tokens, what):
            n = self.seen[-1]
            took = 0.01 * n_tokens / n
            if n > self.idle():
                took *= 10
                self.taken += max(1.0, 150 * self.beside * took)
            self.now += took
            self.taken += took  # one a second, of what a machine does by itself
        return self.now - began


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Machine]:
    return lambda cores: Machine(monkeypatch, cores)


@pytest.mark.parametrize("cores", [2, 3, 16])
def test_all_threads_are_kept_while_nobody_wants_the_cores(
    machine: Callable[[int], Machine], cores: int
) -> None:
    alone = machine(cores)
    for n_tokens in [1, 8, 32, 500] * 100:
        alone.run(n_tokens)
    assert set(alone.seen) == {cores}


@pytest.mark.parametrize(("cores", "beside", "best"), [(2, 1, 1), (2, 2, 1), (16, 4, 8)])
def test_fewer_are_found_where_others_want_the_cores(
    machine: Callable[[int], Machine], cores: int, beside: int, best: int
) -> None:
    busy = machine(cores)
    busy.beside = beside
    fixed = 0.01 * 8 / best
    took = sum(busy.run(8) for _ in range(400))
    assert took < 1.3 * 400 * fixed
    assert busy.seen[-50:].count(best) > 40
    busy.beside = 0
    for _ in range(600):
        busy.run(8)
    assert busy.seen[-50:].count(cores) > 40


def test_what_is_new_begins_with_what_was_found(machine: Callable[[int], Machine]) -> None:
    busy = machine(16)
    busy.beside = 8
    for _ in range(100):
        busy.run(8)
    found = busy.seen[-1]
    assert found == 8
    busy.run(500)
    busy.run(1 << 20, "draw")
    assert max(busy.seen[-2:]) <= found


def test_a_block_that_fails_says_nothing(machine: Callable[[int], Machine]) -> None:
    alone = machine(4)
    with pytest.raises(ZeroDivisionError), alone.threads.limited(8):
        raise ZeroDivisionError
    assert alone.threads._choices[("", 4, 4)].at == 2
    assert not alone.threads._crowd._last


@pytest.mark.parametrize(("n_taken", "is_there"), [(0, False), (2, False), (8, True)])
def test_a_crowd_is_there_where_cores_are_taken_away_often(n_taken: int, is_there: bool) -> None:
    crowd = Crowd()
    assert not crowd.is_there()
    crowd.saw(0.1, n_taken, 2)
    assert crowd.is_there() == is_there
    for _ in range(8):
        crowd.saw(0.1, 0, 2)
    assert not crowd.is_there()


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
        threads._choice(("", 4, 2)).at = 0
        a, b = torch.rand(64, 1024), torch.rand(1024, 1024)
        a @ b
        time.sleep(0.3)  # threads that have worked look out for more for a while
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


def working() -> dict[str, int]:
    """How long each thread of this process has run: ns, by its number."""
    found = {}
    for place in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            found[place.name] = int((place / "schedstat").read_text().split()[0])
    return found


def test_more_threads_that_pytorch_is_given_are_taken(
    machine: Callable[[int], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = machine(16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    alone.run(8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    for _ in range(200):
        alone.run(8)
    assert (alone.seen[0], alone.seen[-1]) == (2, 16)


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
    threads._choice(("", 4, 3)).at = 0
    with threads.limited(8):
        torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
