"""Lack of memory at any moment: the failed call changes nothing, and succeeds later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import build, plain_logits  # noqa: E402
from weft.engines.base import Fragment, Row, Span  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.layout import Layout, Slots  # noqa: E402
from weft.errors import ForwardError, ModelLoadError  # noqa: E402

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


class Scarcity:
    """Counts what takes memory, and lets one such call fail: the `at`th from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n = self.at = 0
        for kind, name in ((Layout, "empty"), (Slots, "copy_from"), (Slots, "copy")):
            monkeypatch.setattr(kind, name, self._scarce(getattr(kind, name)))

    def _scarce(self, does: Callable[..., Any]) -> Callable[..., Any]:
        def tries(*given: Any) -> Any:
            self.n += 1
            if self.n == self.at:
                raise MemoryError("there is no memory")
            return does(*given)

        return tries


class Life:
    """Fragments that grow alone and side by side, come and go, are cut, joined and settled."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine, self.store = engine, engine.fragments
        self.paths: dict[int, list[int]] = {}
        self.parts: dict[int, list[Fragment]] = {}
        self.worst = 0.0
        self.last: tuple[int, ...] = ()  # names of the last step
        self.n_failed = 0

    def repeated(self, does: Callable[[], None]) -> None:
        """Do something; where it fails for want of memory go on as before, and do it then."""
        before = self.lengths()
        try:
            does()
        except (MemoryError, ForwardError):
            self.n_failed += 1
            assert self.lengths() == before
            self.step(*self.last)
            does()

    def lengths(self) -> dict[int, list[int]]:
        return {name: [each.length for each in parts] for name, parts in self.parts.items()}

    def begin(self, name: int, n: int) -> None:
        ids = [(name * 31 + 7 * i) % 117 + 3 for i in range(n)]
        fragment = self.store.new(None)
        self.engine.forward([Row((), ids, 0, fragment)])
        self.paths[name], self.parts[name] = ids, [fragment]

    def step(self, *names: int) -> None:
        """Grow some by a token; without names nothing is done."""
        rows = []
        for name in names:
            *above, own = self.parts[name]
            path = tuple(Span(each, each.length) for each in above)
            token = (13 * name + len(self.paths[name])) % 117 + 3
            rows.append(Row(path, [token], len(self.paths[name]), own, (0,)))
        output = self.engine.forward(rows) if rows else None
        self.last = names
        for number, (name, row) in enumerate(zip(names, rows, strict=True)):
            assert output is not None
            self.paths[name].append(row.tokens[0])
            want = plain_logits(self.engine.model, self.paths[name])[-1]
            off = float((torch.from_numpy(output.logits(number)) - want).abs().max())
            self.worst = max(self.worst, off)

    def split(self, name: int, at: int) -> None:
        (own,) = self.parts[name]
        self.parts[name] = [self.store.split(own, at), own]

    def join(self, name: int) -> None:
        upper, lower = self.parts[name]
        self.store.join(upper, lower)
        self.parts[name] = [lower]

    def drop(self, name: int) -> None:
        self.store.free(self.parts[name].pop())

    def settle(self, name: int) -> None:
        self.store.settle(self.parts[name][-1])

    def free(self, name: int) -> None:
        self.last = tuple(each for each in self.last if each != name)
        for fragment in self.parts.pop(name):
            self.store.free(fragment)

    def run(self) -> None:
        self.repeated(partial(self.begin, 0, 5))
        self.repeated(partial(self.begin, 1, 6))
        self.repeated(partial(self.begin, 2, 5))
        self.repeated(partial(self.begin, 3, 100))
        for names in ((0, 1), (0, 1), (1, 0, 3), (0, 1), (0, 1, 2, 3), (2, 3), (3, 2, 0)):
            self.repeated(partial(self.step, *names))
        self.repeated(partial(self.split, 3, 60))
        self.repeated(partial(self.step, 3, 2))
        self.repeated(partial(self.settle, 1))
        self.repeated(partial(self.free, 0))
        self.repeated(partial(self.free, 2))
        self.repeated(partial(self.step, 3, 1))
        self.repeated(partial(self.join, 3))
        self.repeated(partial(self.step, 1, 3))
        for _ in range(3):
            self.repeated(partial(self.step, 3))
        self.repeated(partial(self.begin, 4, 50))
        self.repeated(partial(self.split, 4, 20))
        self.repeated(partial(self.drop, 4))  # what shared its block may be given one of its size
        for name in (1, 3, 4):
            self.repeated(partial(self.free, name))


@pytest.fixture(scope="module")
def engine() -> Iterator[TorchEngine]:
    result = TorchEngine.adopt(build("llama"))
    assert isinstance(result, TorchEngine)
    yield result
    result.close()


@pytest.mark.programs  # the longest of laws
def test_any_single_allocation_may_fail(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarcity = Scarcity(monkeypatch)
    plain = Life(engine)
    plain.run()
    n_calls, n_failed = scarcity.n, 0
    assert plain.worst < 1e-4
    for at in range(1, n_calls + 1):
        scarcity.n, scarcity.at = 0, at
        life = Life(engine)
        life.run()
        n_failed += life.n_failed
        assert life.worst < 1e-4, f"call {at} of {n_calls}"
        assert engine.fragments.usage() == (0, 0), f"call {at} of {n_calls}"
    assert n_failed > n_calls / 2


def test_load_without_memory_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the model would be recomputed, and the lack of memory not be reported."""

    def scarce(*_: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 GB")

    monkeypatch.setattr(Layout, "zeros", scarce)
    with pytest.raises(ModelLoadError, match="no memory left to run LlamaForCausalLM"):
        TorchEngine.adopt(build("llama"))


def test_other_errors_while_slots_move_are_raised(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only for want of memory a block stays as large as it is, without a word."""

    def breaks(*_: Any) -> Any:
        raise RuntimeError("shapes differ")

    memory = engine.fragments
    lower = memory.new(None)
    engine.forward([Row((), list(range(3, 53)), 0, lower)])
    upper = memory.split(lower, 20)
    with monkeypatch.context() as patch:
        patch.setattr(Slots, "copy_from", breaks)
        with pytest.raises(RuntimeError, match="shapes differ"):
            memory.free(lower)
    memory.free(upper)
    assert memory.usage() == (0, 0)
