"""Folders that Transformers has saved, on MLX: logits are those of Transformers' own forward."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

import mlx_lm

import weft
from configured import CONFIGURED, IDS, WINDOW, save, save_as, stepped
from families import plain_logits
from real_models import SMOLLM2_FOLDER, real_model
from shallow import shallow
from weft._core.sampling.metrics import log_softmax
from weft.engines.base import Row
from weft.engines.mlx import MlxEngine
from weft.engines.mlx.config import mlx_lm_keys, windows_of
from weft.engines.numpy import NumpyEngine
from weft.errors import ConfigError, Unsupported

pytestmark = pytest.mark.mlx

# Largest error of a log-probability, of up to 20. mlx-lm rounds Gemma 3's embedding scale to
# bfloat16, and has the exact GELU where the others have an approximation, or the reverse.
TOLERANCE = {"gemma": 0.02, "gemma3": 0.02, "starcoder2": 0.02, "gpt_neox": 0.02}


@pytest.mark.parametrize("name", list(CONFIGURED))
def test_logits_of_unusual_configs_equal_transformers(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    want = log_softmax(plain_logits(model, IDS).numpy())
    engine = MlxEngine.load(tmp_path, dtype="float32", n_ctx=64)  # longrope: its short factors
    np.testing.assert_allclose(
        log_softmax(stepped(engine, IDS)), want, atol=TOLERANCE.get(name, 1e-3)
    )


@pytest.mark.parametrize("name", ["llama_llama3", "gemma3", "qwen3"])
def test_old_files_with_top_level_rope_keys_give_the_same(name: str, tmp_path: Path) -> None:
    want = log_softmax(plain_logits(save(name, tmp_path), IDS).numpy())
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    if name == "gemma3":
        config["rope_local_base_freq"] = rope["sliding_attention"].pop("rope_theta")
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    file.write_text(json.dumps(config))
    engine = MlxEngine.load(tmp_path, dtype="float32")
    np.testing.assert_allclose(
        log_softmax(stepped(engine, IDS)), want, atol=TOLERANCE.get(name, 1e-3)
    )


def test_long_factors_serve_contexts_beyond_the_original(tmp_path: Path) -> None:
    save("phi3_longrope", tmp_path)
    short = stepped(MlxEngine.load(tmp_path, dtype="float32", n_ctx=64), IDS[:8])
    long = stepped(MlxEngine.load(tmp_path, dtype="float32"), IDS[:8])
    assert np.abs(short - long).max() > 0.1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma2", {"sliding_window": WINDOW, "head_dim": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    ],
)
def test_windows_that_mlx_lm_lacks_limit_the_context(
    name: str, changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_as(name, tmp_path, **({"head_dim": 8} | changes))
    with caplog.at_level(logging.WARNING, "weft.engines.mlx"):
        engine = MlxEngine.load(tmp_path, dtype="float32")
    assert f"limited to the window of {WINDOW}" in caplog.text
    assert engine.info.context_length == WINDOW
    want = log_softmax(plain_logits(model, IDS[:WINDOW]).numpy())
    np.testing.assert_allclose(log_softmax(stepped(engine, IDS[:WINDOW])), want, atol=1e-3)
    with pytest.raises(ConfigError, match="n_ctx"):
        MlxEngine.load(tmp_path, n_ctx=WINDOW + 1)


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("glm", {"partial_rotary_factor": 0.5, "head_dim": 8}, "partial_rotary_factor = 0.5"),
        ("mamba", {"state_size": 4, "head_dim": None}, "layer_norm_epsilon = 0.3"),
        (
            "qwen2_moe",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            | {"shared_expert_intermediate_size": 16, "norm_topk_prob": True, "head_dim": 8},
            "norm_topk_prob = True",
        ),
    ],
)
def test_numbers_that_mlx_lm_ignores_raise(
    kind: str, changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    save_as(kind, tmp_path, **changes)
    with pytest.raises(Unsupported, match=key):
        MlxEngine.load(tmp_path)


def test_models_that_mlx_lm_loads_wrongly_raise(tmp_path: Path) -> None:
    """mlx_lm.load takes a rotary base of 10,000 for 777."""
    shutil.copytree(shallow(), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 777.0}
    config.pop("rope_theta", None)
    file.write_text(json.dumps(config))
    model, tokenizer = mlx_lm.load(str(tmp_path / "model"))[:2]
    call = f'weft.load({str(tmp_path / "model")!r}, engine="mlx")'
    with pytest.raises(Unsupported, match=r"rope_theta = 777.0.*would be wrong; ") as caught:
        weft.load(model, tokenizer)
    assert str(caught.value).endswith(f"; load the folder with {call}")
    assert caught.value.hint == call
    assert "another engine" not in str(caught.value)
    for own in (str(shallow()), str(tmp_path / "model")):
        right, tokenizer = mlx_lm.load(str(shallow()))[:2]
        with weft.load(right, tokenizer) as lm:  # as mlx-lm reads it, it is right
            assert lm.info.name == "mlx"
        with weft.load(own, engine="mlx") as lm:
            assert lm.info.name == "mlx"


def test_families_that_mlx_lm_computes_otherwise_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "head_dim": 8}
    save_as("ernie4_5_moe", tmp_path, **experts)
    with caplog.at_level(logging.WARNING, "weft.engines.mlx"):
        MlxEngine.load(tmp_path)
    assert "other logits than Transformers for ernie4_5_moe" in caplog.text


def test_keys_of_a_text_part_are_translated_in_it() -> None:
    text = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "hidden_size": 8}
    keys = mlx_lm_keys({"model_type": "mistral3", "text_config": text})
    assert keys["text_config"]["rope_theta"] == 5e5
    assert keys["text_config"]["hidden_size"] == 8


def test_windows_follow_each_familys_rule() -> None:
    level = {"sliding_window": 9, "num_hidden_layers": 4}
    assert windows_of({"model_type": "mistral"} | level) == [9] * 4
    assert windows_of({"model_type": "qwen2"} | level) == [None] * 4
    used = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}
    assert windows_of(used | level) == [None, None, None, 9]
    assert windows_of({"model_type": "gemma2"} | level) == [9, None, 9, None]
    assert windows_of({"model_type": "mistral", "num_hidden_layers": 4}) == []


@pytest.mark.models
def test_smollm2_folder_of_transformers_5_gives_numpys_logits() -> None:
    """mlx-lm alone takes a rotary base of 10,000 for 100,000: errors of up to 12."""
    folder = real_model(SMOLLM2_FOLDER)
    with weft.load(str(folder), engine="numpy", dtype="float32") as lm:
        ids = lm.tokenize("The capital of Portugal is Lisbon, and the capital of Italy is Rome.")
        row = Row((), ids, 0, None, tuple(range(len(ids))))
        output = lm.engine.forward([row])
        want = log_softmax(np.stack([output.logits(i) for i in range(len(ids))]))
        assert isinstance(lm.engine, NumpyEngine)
    with weft.load(str(folder), engine="mlx", dtype="float32") as lm:
        output = lm.engine.forward([row])
        got = log_softmax(np.stack([output.logits(i) for i in range(len(ids))]))
    np.testing.assert_allclose(got, want, atol=2e-3)
