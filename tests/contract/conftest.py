"""Every engine and fake over one small model, and the oracle: one plain forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fakes import HiddenFake, LateFake, SequenceFake
from shallow import shallow
from weft.engines.base import Engine
from weft.engines.numpy import NumpyEngine
from weft.lm import LM
from weft.tokens.tokenizer import Tokenizer

KINDS = ["numpy", "torch", "sequence", "hidden", "late"]
WITH_KV = ["numpy", "torch", "sequence", "late"]

Make = Callable[..., LM]
Oracle = Callable[[Sequence[int]], NDArray[np.float32]]


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
def oracle() -> Oracle:
    """Raw logits after every token, by the model's own library: float32 [T, V]."""
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
        name = "torch_engine" if kind == "torch" else "numpy_engine"
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


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=WITH_KV)
def kv_kind(request: pytest.FixtureRequest) -> str:
    """Kinds whose fragments are Weft's business: laws 2 and 4 to 7 are about those."""
    return str(request.param)
