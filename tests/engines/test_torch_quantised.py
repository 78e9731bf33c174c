"""Quantised models keep the laws at their own tolerance, against their own plain forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import N_VOCAB, build, plain_logits  # noqa: E402
from quantised import KINDS, config_of  # noqa: E402
from weft import LM, load  # noqa: E402
from weft.engines.base import Row, Span  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.errors import ModelMismatch, Unsupported  # noqa: E402

# What the quantising libraries themselves warn of is not ours.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
COPIES_BADLY = "bitsandbytes 4 bit"  # on a CPU
IDS = [(i * i * 5 + 11 * i + 3) % (N_VOCAB - 3) + 3 for i in range(60)]


def near(got: Any, want: Any, kind: str) -> None:
    assert float(np.abs(np.asarray(got) - np.asarray(want)).max()) <= KINDS[kind][1]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def owned(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A quantised model that its owner keeps, and the folder it was read from."""
    config, folder = config_of(kind), tmp_path_factory.mktemp("plain")
    build("llama_wide").save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    )
    return model.eval(), folder


@pytest.fixture
def engine(owned: Any, kind: str) -> TorchEngine:
    model, folder = owned
    if kind == COPIES_BADLY:
        return TorchEngine.load(folder, dtype="float32", quantization_config=config_of(kind))
    return TorchEngine.adopt(model)


def test_tree_equals_the_models_own_plain_forward(
    owned: Any, engine: TorchEngine, kind: str
) -> None:
    model, _ = owned
    assert engine.info.kv == "addressable"
    assert engine.info.extra["quantised"]
    store = engine.fragments
    trunk = store.new(None)
    engine.forward([Row((), IDS[:9], 0, trunk)])
    above = (Span(trunk, 9),)
    tails = [store.new(trunk) for _ in range(3)]
    for step in range(4):  # in one step with each other and with a prefill
        rows = [
            Row(above, [IDS[20 + 5 * i + step]], 9 + step, tail, (0,))
            for i, tail in enumerate(tails)
        ]
        output = engine.forward([*rows, Row((), IDS[step : 30 + step], 0, None, (29,))])
        for i in range(3):
            ids = [*IDS[:9], *IDS[20 + 5 * i : 21 + 5 * i + step]]
            near(output.logits(i), plain_logits(model, ids)[-1], kind)
        near(output.logits(3), plain_logits(model, IDS[step : 30 + step])[-1], kind)
    upper = store.split(tails[0], 2)
    path = (*above, Span(upper, 2), Span(tails[0], 2))
    repeated = engine.forward([Row(path, [7], 13, None, (0,))]).logits(0)
    near(repeated, plain_logits(model, [*IDS[:9], *IDS[20:24], 7])[-1], kind)
    data = store.export(trunk)
    loaded = store.load(data, None)
    after = engine.forward([Row((Span(loaded, 9),), [7], 9, None, (0,))]).logits(0)
    near(after, plain_logits(model, [*IDS[:9], 7])[-1], kind)


def test_two_owners_of_one_model_leave_it_as_it_was(owned: Any, kind: str) -> None:
    model, _ = owned
    if kind == COPIES_BADLY:
        with pytest.raises(Unsupported, match="load its folder"):
            TorchEngine.adopt(model)
        return
    before = plain_logits(model, IDS[:20])
    first, second = TorchEngine.adopt(model), TorchEngine.adopt(model)
    for engine in (first, second):
        got = engine.forward([Row((), IDS[:20], 0, None, (19,))]).logits(0)
        near(got, before[-1], kind)
    first.close()
    near(second.forward([Row((), IDS[:5], 0, None, (4,))]).logits(0), before[4], kind)
    assert torch.equal(plain_logits(model, IDS[:20]), before)


def test_folder_is_quantised_as_it_is_read(
    owned: Any, engine: TorchEngine, kind: str, tmp_path: Path
) -> None:
    """By a configuration that is given, or by the folder's own."""
    model, folder = owned
    want = plain_logits(model, IDS[:20])[-1]
    result = TorchEngine.load(folder, dtype="float32", quantization_config=config_of(kind))
    near(result.forward([Row((), IDS[:20], 0, None, (19,))]).logits(0), want, kind)
    model.save_pretrained(tmp_path)
    read = TorchEngine.load(tmp_path)
    plainly = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    want = plain_logits(plainly, IDS[:20])[-1]
    near(read.forward([Row((), IDS[:20], 0, None, (19,))]).logits(0), want, kind)
    plain = TorchEngine.load(folder).info.fingerprint
    assert result.info.fingerprint == engine.info.fingerprint != plain
    if kind != COPIES_BADLY:  # what is saved of it, says something else
        assert read.info.fingerprint == result.info.fingerprint


def test_kv_of_a_quantised_model_is_its_own(owned: Any, engine: TorchEngine) -> None:
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.BPE({chr(40 + i): i for i in range(80)}, []))
    backend.decoder = decoders.ByteLevel()
    with LM(engine, backend) as lm:
        saved = lm.kv.to_bytes([5, 6, 7])
        assert lm.kv.load(saved).ids() == [5, 6, 7]
    plain = transformers.AutoModelForCausalLM.from_pretrained(owned[1])
    with load(plain, backend) as lm, pytest.raises(ModelMismatch):
        lm.kv.load(saved)


@pytest.mark.gpu
def test_bitsandbytes_runs_where_its_kernels_are(tmp_path: Path) -> None:
    for kind in ("bitsandbytes 8 bit", "bitsandbytes 4 bit"):
        build("llama_wide").save_pretrained(tmp_path)
        engine = TorchEngine.load(tmp_path, device="cuda", quantization_config=config_of(kind))
        assert engine.info.device.startswith("cuda")
        got = engine.forward([Row((), IDS[:20], 0, None, (19,))]).logits(0)
        near(got, plain_logits(engine.model, IDS[:20])[-1], kind)
