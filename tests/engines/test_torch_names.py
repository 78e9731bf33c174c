"""Fingerprints in files while an owner trains the model that an engine runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import weft  # noqa: E402
from families import build  # noqa: E402
from shallow import shallow  # noqa: E402
from weft._core.tokens.tokenizer import Tokenizer  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.errors import ModelMismatch  # noqa: E402

pytestmark = pytest.mark.torch
IDS = [(i * i * 5 + 11 * i + 3) % 117 + 3 for i in range(30)]


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.from_folder(shallow())


def train(model: Any) -> None:
    ids = torch.tensor([IDS])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    optimizer.step()
    optimizer.zero_grad()


def lm_of_model(model: Any, text: Tokenizer) -> weft.LM:
    return weft.LM(TorchEngine.adopt(model), text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma3_text", "mamba", "gpt_oss"])
def test_weights_that_are_the_same_keep_their_name(name: str, dtype: str, text: Tokenizer) -> None:
    with lm_of_model(build(name, getattr(torch, dtype)), text) as lm:
        lm.clear_cache()  # weights are looked at again
        assert lm.fingerprint() == lm.info.fingerprint
        weft.Loom(lm, IDS).next(1)
        assert lm.fingerprint() == lm.info.fingerprint


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_weights_that_were_trained_have_another_name(name: str, text: Tokenizer) -> None:
    model = build(name)
    with lm_of_model(model, text) as lm:
        train(model)
        after = lm.fingerprint()
        assert after != lm.info.fingerprint
        assert lm.fingerprint() == after
    assert lm.fingerprint() == after  # of a closed LM
    with lm_of_model(model, text) as repeated:
        assert repeated.fingerprint() == after


def test_uncounted_writes_count_after_clear_cache(text: Tokenizer) -> None:
    model = build("llama")
    with lm_of_model(model, text) as lm:
        weight = model.model.layers[0].mlp.up_proj.weight.data
        weight *= 2
        lm.clear_cache()
        assert lm.fingerprint() != lm.info.fingerprint
        weight /= 2
        lm.clear_cache()
        assert lm.fingerprint() == lm.info.fingerprint


def test_files_of_earlier_weights_raise(text: Tokenizer, tmp_path: Path) -> None:
    model = build("llama")
    with lm_of_model(model, text) as lm:
        loom = weft.Loom(lm, IDS)
        loom.save(tmp_path / "before.json", kv=True)
        kv = lm.kv.to_bytes(loom)
        with weft.Branch.create(lm) as branch:
            branch.prefill(IDS)
            saved = branch.save()
        train(model)
        with pytest.raises(ModelMismatch, match="has other weights"):
            weft.Loom.open(tmp_path / "before.json", lm)
        with pytest.raises(ModelMismatch, match="has other weights"):
            lm.kv.load(kv)
        with pytest.raises(ModelMismatch):
            weft.Branch.load(lm, saved)
        forced = weft.Loom.open(tmp_path / "before.json", lm, force=True)
        assert forced.tokens == loom.tokens
        forced.save(tmp_path / "after.json", kv=True)
    with lm_of_model(build("llama"), text) as first, pytest.raises(ModelMismatch):
        weft.Loom.open(tmp_path / "after.json", first)
    with lm_of_model(model, text) as trained:
        assert weft.Loom.open(tmp_path / "after.json", trained).tokens == loom.tokens
