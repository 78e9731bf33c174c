"""The NumPy engine against Transformers' own code: the embedded model, random checkpoints."""

from __future__ import annotations

import importlib.resources
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from weft.engines.base import Row
from weft.engines.numpy import NumpyEngine
from weft.errors import Unsupported

pytestmark = pytest.mark.torch

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied, four queries a KV head": ("llama", {}),
    "tied, one KV head": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "as many KV heads as heads": ("llama", {"num_key_value_heads": 8}),
    "head dimension of its own": ("llama", {"head_dim": 12}),
    "biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window never reached": ("mistral", {"sliding_window": 256}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 12}),
}
IDS = np.random.default_rng(5).integers(0, 97, 200).tolist()


@pytest.fixture(scope="module")
def tiny() -> Path:
    return Path(str(importlib.resources.files("weft") / "data" / "tiny"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def random_model(name: str, dtype: str = "float32") -> Any:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind, changes = VARIANTS[name]
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**COMMON | changes))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.to(getattr(torch, dtype)).eval()


def oracle(model: Any, ids: list[int]) -> NDArray[np.float32]:
    import torch

    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


def all_logits(engine: NumpyEngine, ids: list[int], chunk: int = 77) -> NDArray[np.float32]:
    """Prefill in chunks, then the last few tokens one by one."""
    fragment = engine.fragments.new(None)
    sizes = [chunk] * ((len(ids) - 9) // chunk)
    sizes += [len(ids) - 9 - sum(sizes)] + [1] * 9
    logits, lo = [], 0
    for size in filter(None, sizes):
        row = Row((), ids[lo : lo + size], lo, fragment, tuple(range(size)))
        output = engine.forward([row])
        logits += [output.logits(i) for i in range(size)]
        lo += size
    return np.stack(logits)


def test_embedded_model_agrees_with_transformers_far_into_its_context(tiny: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    ids = np.random.default_rng(0).integers(0, 2048, 1200).tolist()
    expected = oracle(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), ids)
    logits = all_logits(NumpyEngine.load(tiny), ids, 500)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", VARIANTS)
def test_random_models_agree_with_transformers(name: str, tmp_path: Path) -> None:
    model = random_model(name)
    model.save_pretrained(tmp_path)
    engine = NumpyEngine.load(tmp_path)
    np.testing.assert_allclose(all_logits(engine, IDS), oracle(model, IDS), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_are_computed_in_float32(dtype: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = random_model("untied, four queries a KV head", dtype)
    model.save_pretrained(tmp_path)
    engine = NumpyEngine.load(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert engine.info.dtype == "float32"
    np.testing.assert_allclose(all_logits(engine, IDS), oracle(model, IDS), atol=TOLERANCE, rtol=0)


def test_sharded_weights_give_the_logits_of_a_single_file(tmp_path: Path) -> None:
    model = random_model("biases everywhere")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    full, shards = (NumpyEngine.load(tmp_path / name) for name in ("whole", "shards"))
    assert full.info.fingerprint == shards.info.fingerprint
    np.testing.assert_array_equal(all_logits(full, IDS), all_logits(shards, IDS))


@pytest.mark.parametrize("name", ["linear rope", "llama3 rope", "tied, one KV head"])
def test_older_spelling_of_rope_parameters_means_the_same(name: str, tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path)
    new = all_logits(NumpyEngine.load(tmp_path), IDS)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    file.write_text(json.dumps(config))
    np.testing.assert_array_equal(all_logits(NumpyEngine.load(tmp_path), IDS), new)


def test_window_shorter_than_the_context_raises_until_n_ctx_fits(tmp_path: Path) -> None:
    model = random_model("mistral, window never reached")
    model.config.sliding_window = 64
    model.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="window 64"):
        NumpyEngine.load(tmp_path)
    engine = NumpyEngine.load(tmp_path, n_ctx=64)
    np.testing.assert_allclose(
        all_logits(engine, IDS[:64]), oracle(model, IDS[:64]), atol=TOLERANCE, rtol=0
    )


def test_info_describes_the_embedded_model(tiny: Path) -> None:
    calls: list[tuple[str, int, int, str]] = []
    info = NumpyEngine.load(tiny, progress=lambda *call: calls.append(call)).info
    assert (info.name, info.dtype, info.kv) == ("numpy", "float32", "addressable")
    assert (info.n_layers, info.n_vocab, info.context_length) == (8, 2048, 2048)
    assert info.kv_bytes_per_token == 8 * 2 * 2 * 64 * 4
    assert calls[-1] == ("load", 8, 8, "")
