"""Numbers of config.json against those that a library took, and models with unusual ones."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from shallow import shallow
from weft._core.sampling.metrics import log_softmax
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.base import Row
from weft.engines.config_check import canonical_numbers, check_config
from weft.engines.numpy import NumpyEngine
from weft.errors import Unsupported

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "attention_dropout": 0.1,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4},
}


def test_older_rope_keys_are_the_same_numbers() -> None:
    older = {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    assert canonical_numbers(older) == {"rope.rope_theta": 500.0, "rope.factor": 4.0}
    assert canonical_numbers({"rotary_emb_base": 500}) == {"rope.rope_theta": 500}
    check_config(CONFIG, {**CONFIG, "rope_parameters": None, **older}, library="x")


def test_numbers_of_a_text_part_count() -> None:
    assert canonical_numbers({"text_config": CONFIG, "rms_norm_eps": 7.0})["rms_norm_eps"] == 1e-5


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rms_norm_eps": 1e-6}, r"rms_norm_eps = 1e-05 \(x has 1e-06\)"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok = 2"),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 4}}, "rope.rope_theta = 500.0"),
        ({"rope_parameters": {"rope_theta": 500.0}}, "rope.factor = 4"),
        ({"rope_parameters": None}, "rope.rope_theta = 500.0, rope.factor = 4"),
        ({"rms_norm_eps": None}, "rms_norm_eps = 1e-05 from"),
    ],
)
def test_number_that_is_not_taken_is_named(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(Unsupported, match=match):
        check_config(CONFIG, {**CONFIG, **changes}, library="x")


def test_epsilon_of_the_models_own_modules_counts() -> None:
    taken = {**CONFIG, "rms_norm_eps": None}
    check_config(CONFIG, taken, library="x", epsilons=[1e-5])
    with pytest.raises(Unsupported, match="rms_norm_eps"):
        check_config(CONFIG, taken, library="x", epsilons=[1e-6])


def test_numbers_of_training_and_generation_may_differ() -> None:
    taken = {**CONFIG, "bos_token_id": 2, "attention_dropout": 0.0, "max_position_embeddings": 7}
    check_config(CONFIG, taken, library="x")


def test_other_ignored_numbers_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weft.engines"):
        check_config({**CONFIG, "swiglu_limit": 7.0, "unused_switch": False}, CONFIG, library="x")
    assert caplog.messages == ["x ignores of config.json: swiglu_limit = 7.0"]


# Engines ---------------------------------------------------------------------------------------


def unusual(folder: Path) -> Path:
    """Copy the small model with another rotary base and another epsilon."""
    shutil.copytree(shallow(), folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 777.0}
    config["rms_norm_eps"] = 0.3
    config.pop("rope_theta", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(engine: Any) -> np.ndarray:
    ids = [(i * 37) % 900 + 20 for i in range(24)]
    output = engine.forward([Row((), ids, 0, None, tuple(range(len(ids))))])
    return np.stack([np.asarray(output.logits(i)) for i in range(len(ids))])


@pytest.mark.torch
def test_unusual_numbers_reach_numpy_and_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from transformers import AutoModelForCausalLM

    from weft.engines.torch import TorchEngine

    folder = unusual(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = [(i * 37) % 900 + 20 for i in range(24)]
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0].numpy()
    for engine in (NumpyEngine.load(folder), TorchEngine.load(folder, dtype="float32")):
        np.testing.assert_allclose(logits(engine), want, atol=1e-3)
    assert np.abs(logits(NumpyEngine.load(shallow())) - want).max() > 0.1


@pytest.mark.llamacpp
def test_unusual_numbers_reach_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    pytest.importorskip("gguf", reason="gguf is not installed")
    from recipe.export_gguf import export_gguf
    from weft.engines.llamacpp import LlamaCppEngine

    folder = unusual(tmp_path / "model")
    export_gguf(folder, tmp_path / "model.gguf", "f32")
    engine = LlamaCppEngine.load(
        tmp_path / "model.gguf", dtype="float32", n_threads=1, kv_bytes=1 << 21
    )
    want = logits(NumpyEngine.load(folder))
    np.testing.assert_allclose(logits(engine), want, atol=2e-3)
    engine.close()


@pytest.mark.llamacpp
def test_numbers_that_llama_cpp_prints_are_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    pytest.importorskip("gguf", reason="gguf is not installed")
    from recipe.export_gguf import export_gguf
    from weft.engines.gguf import read_gguf
    from weft.engines.llamacpp.hyperparameters import check_hyperparameters
    from weft.engines.llamacpp.library import load_model

    export_gguf(unusual(tmp_path / "model"), tmp_path / "model.gguf", "f32")
    header = read_gguf(tmp_path / "model.gguf")
    model = load_model(header.file)
    assert float(model.report["freq_base_train"]) == 777.0
    check_hyperparameters(header, model.report)
    with pytest.raises(Unsupported, match=r"rope.freq_base = 777.0 \(llama.cpp has 10000.0\)"):
        check_hyperparameters(header, {**model.report, "freq_base_train": "10000.0"})
    with pytest.raises(Unsupported, match="layer_norm_rms_epsilon"):
        check_hyperparameters(header, {**model.report, "f_norm_rms_eps": "1.0e-05"})
    header.values[f"{header.architecture}.attention.sliding_window"] = 64
    with caplog.at_level(logging.WARNING, "weft.engines.llamacpp"):
        check_hyperparameters(header, model.report)
    assert "sliding window of 0 for the 64" in caplog.text
    model.close()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_unusual_numbers_reach_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    from weft.compat.genlm import AsyncVirtualLM
    from weft.engines.vllm import VllmEngine, engine

    folder = unusual(tmp_path / "model")
    small = {"dtype": "float32", "max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
    observed: list[dict[str, Any]] = []
    check = engine.check_config

    def noted(stored: Any, taken: Any, **options: Any) -> None:
        observed.append(canonical_numbers(taken))
        check(stored, taken, **options)

    monkeypatch.setattr(engine, "check_config", noted)
    with weft.LM(VllmEngine.load(folder, **small), Tokenizer.from_folder(folder)) as lm:
        assert (observed[0]["rope.rope_theta"], observed[0]["rms_norm_eps"]) == (777.0, 0.3)
        want = logits(NumpyEngine.load(folder))
        np.testing.assert_allclose(log_softmax(logits(lm.engine)), log_softmax(want), atol=2e-3)
        known = AsyncVirtualLM(lm, cache_size=0, cache_opts={})
        own = lm.engine.model.get_tokenizer()
        prompt = "Hello <|end|> x"
        assert known.tokenizer.encode(prompt) == own.encode(prompt)
        assert known.tokenizer.encode(prompt) != lm.tokenizer.encode(prompt)
        assert known.async_llm_engine is lm.engine.model
