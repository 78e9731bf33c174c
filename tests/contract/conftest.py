"""Every engine and fake over one small model, and the oracle: one plain forward pass.

`pytest tests/contract --engine module:Class` shows the laws on another engine, whose own plain
forward is then the oracle. It is made by `Class.load(folder)` of a small Llama with the embedded
model's tokenizer, or by `Class()` where it has no `load`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fakes import HiddenFake, LateFake, SequenceFake
from shallow import shallow
from weft.engines.base import Engine, Row
from weft.engines.numpy import NumpyEngine
from weft.lm import LM
from weft.tokens.tokenizer import Tokenizer

KINDS = ["numpy", "torch", "sequence", "hidden", "late"]
WITH_KV = ["numpy", "torch", "sequence", "late"]

GIVEN = "given"  # the engine that --engine names

Make = Callable[..., LM]
Oracle = Callable[[Sequence[int]], NDArray[np.float32]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--engine")
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    for name, kinds in (("kind", KINDS), ("kv_kind", WITH_KV)):
        if name in metafunc.fixturenames and not any(name in names for names in own):
            metafunc.parametrize(name, [GIVEN] if given else kinds, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--engine"):
        laws = [item for item in items if GIVEN in _params(item).values()]
        config.hook.pytest_deselected(items=[item for item in items if item not in laws])
        items[:] = laws


def _params(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture(scope="session")
def given_engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    module, _, name = request.config.getoption("--engine").partition(":")
    kind = getattr(import_module(module), name)
    engine = kind.load(shallow()) if hasattr(kind, "load") else kind()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def text() -> Tokenizer:
    return Tokenizer.from_folder(shallow())


@pytest.fixture(scope="session")
def numpy_engine() -> Iterator[NumpyEngine]:
    engine = NumpyEngine.load(shallow())
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def torch_engine() -> Iterator[Engine]:
    pytest.importorskip("torch", reason="torch is not installed")
    from weft.engines.torch import TorchEngine

    engine = TorchEngine.load(shallow(), dtype="float32")
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def oracle(request: pytest.FixtureRequest) -> Oracle:
    """Raw logits after every token, by the model's own library: float32 [T, V]."""
    if request.config.getoption("--engine"):
        engine = request.getfixturevalue("given_engine")

        def plain(ids: Sequence[int]) -> NDArray[np.float32]:
            output = engine.forward([Row((), list(ids), 0, None, tuple(range(len(ids))))])
            return np.stack([output.logits(i) for i in range(len(ids))])

        return plain
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(shallow(), dtype=torch.float32).eval()

    def run(ids: Sequence[int]) -> NDArray[np.float32]:
        with torch.no_grad():
            logits: NDArray[np.float32] = model(torch.tensor([list(ids)])).logits[0].numpy()
        return logits

    return run


@pytest.fixture
def make(request: pytest.FixtureRequest, text: Tokenizer) -> Iterator[Make]:
    """Make an LM over a shared engine, one at a time; afterwards nothing of it may be left."""
    made: list[LM] = []

    def finish(lm: LM) -> None:
        lm.tree.check()
        lm.driver.close()
        lm.tree.check()
        assert lm.tree.room.must == 0
        if lm.tree.fragments is not None:
            assert lm.tree.fragments.usage() == (0, 0)

    def make_lm(kind: str, wrap: Callable[[Engine], Engine] | None = None, **options: Any) -> LM:
        if made:
            finish(made.pop())
        name = f"{kind}_engine" if kind in ("torch", GIVEN) else "numpy_engine"
        engine: Engine = request.getfixturevalue(name)
        fake = {"sequence": SequenceFake, "hidden": HiddenFake, "late": LateFake}.get(kind)
        if fake is not None:
            engine = fake(engine)
        if wrap is not None:
            engine = wrap(engine)
        lm = LM(engine, text, **options)
        made.append(lm)
        return lm

    yield make_lm
    for lm in made:
        finish(lm)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kv_kind(request: pytest.FixtureRequest) -> str:
    """Kinds whose fragments are Weft's business: laws 2 and 4 to 7 are about those."""
    return str(request.param)
