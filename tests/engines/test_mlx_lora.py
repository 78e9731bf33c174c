"""LoRA adapters on the mlx engine agree with mlx-lm, and with PEFT's on torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm import load  # noqa: E402
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters  # noqa: E402

import weft  # noqa: E402
from mlx_families import build, plain_logits  # noqa: E402
from shallow import shallow  # noqa: E402
from weft._core.sampling.metrics import log_softmax  # noqa: E402
from weft.compat.genlm import AsyncMlxLM  # noqa: E402
from weft.engines.mlx import MlxEngine  # noqa: E402
from weft.errors import ConfigError, ModelLoadError, Unsupported  # noqa: E402

pytestmark = pytest.mark.mlx

IDS = [20, 21, 90, 41, 33]
SETTINGS = {"rank": 4, "scale": 2.5, "dropout": 0.0}


def loaded(quantise: bool = False) -> tuple[Any, Any]:
    model, tokenizer = load(str(shallow()))[:2]
    model.set_dtype(mx.float32)
    if quantise:
        from mlx import nn

        nn.quantize(model, 64, 4)
    mx.eval(model.parameters())
    return model, tokenizer


def own_format(folder: Path, seed: int, **config: Any) -> Path:
    """A random adapter as mlx-lm saves one."""
    folder.mkdir()
    model, _ = loaded()
    keys = ["self_attn.q_proj", "mlp.down_proj"]
    linear_to_lora_layers(model, 2, {**SETTINGS, "keys": keys})
    key = mx.random.key(seed)
    arrays = {
        name: mx.random.normal(array.shape, key=key) * 0.1
        for name, array in tree_flatten(model.parameters())
        if name.endswith((".lora_a", ".lora_b"))
    }
    assert len(arrays) == 8
    mx.save_safetensors(str(folder / "adapters.safetensors"), arrays)
    values = {"fine_tune_type": "lora", "num_layers": 2}
    values |= {"lora_parameters": {**SETTINGS, "keys": keys}, **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def peft_format(folder: Path, **config: Any) -> Path:
    """A random adapter as PEFT saves one."""
    folder.mkdir()
    key = mx.random.key(7)
    path = "base_model.model.model.layers.1.self_attn.v_proj"
    arrays = {
        f"{path}.lora_A.weight": mx.random.normal((4, 256), key=key),
        f"{path}.lora_B.weight": mx.random.normal((128, 4), key=key),
    }
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), arrays)
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["v_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def logprobs(model: Any) -> np.ndarray:
    return log_softmax(plain_logits(model, IDS)[-1:])[0]


@pytest.mark.parametrize("quantise", [False, True], ids=["float32", "4bit"])
def test_adapters_of_mlx_lm_run_in_separate_rows(tmp_path: Path, quantise: bool) -> None:
    model, tokenizer = loaded(quantise)
    plain = logprobs(model)
    known = AsyncMlxLM(model, tokenizer)
    for name, seed in (("one", 1), ("two", 2)):
        known.add_new_lora(str(own_format(tmp_path / name, seed)), name)
    for name in ("one", None, "two", "one"):
        want = plain
        if name is not None:
            other, _ = loaded(quantise)
            want = logprobs(load_adapters(other, str(tmp_path / name)))
            assert np.abs(want - plain).max() > 0.1
        got = np.asarray(known.next_token_logprobs_sync(IDS, lora_name=name))
        assert np.abs(got - want).max() < 1e-3
    assert np.abs(logprobs(model) - plain).max() == 0  # the owner's model is as it was
    known.remove_lora("one")
    with pytest.raises(ValueError, match="one"):
        known.next_token_logprobs_sync(IDS, lora_name="one")
    known.lm.close()


def test_adapter_of_pefts_is_the_same_as_on_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    folder = peft_format(tmp_path / "peft")
    result = []
    for engine in ("torch", "mlx"):
        with weft.load(str(shallow()), engine=engine, dtype="float32") as lm:
            lm.add_adapter("a", folder)
            rows = weft.AsyncLM(lm).next_token_logprobs_sync(IDS, lora_name="a")
            result.append((np.asarray(rows), lm.fingerprint("a")))
    assert np.abs(result[0][0] - result[1][0]).max() < 1e-3
    assert result[0][1] == result[1][1]


def test_adapters_that_do_not_fit_raise_and_change_nothing(tmp_path: Path) -> None:
    engine = MlxEngine.load(shallow(), dtype="float32")
    (tmp_path / "empty").mkdir()
    short = own_format(tmp_path / "short", 1)
    full = (short / "adapters.safetensors").read_bytes()
    (short / "adapters.safetensors").write_bytes(full[:-100])
    for folder, kind, why in (
        (own_format(tmp_path / "dora", 1, fine_tune_type="dora"), Unsupported, "dora"),
        (own_format(tmp_path / "bare", 1, lora_parameters={}), ModelLoadError, "scale"),
        (peft_format(tmp_path / "bias", bias="all"), Unsupported, "biases"),
        (tmp_path / "empty", ModelLoadError, "adapter"),
        (tmp_path / "nowhere", ModelLoadError, "adapter"),
        (short, ModelLoadError, "read"),
    ):
        with pytest.raises(kind, match=why):
            engine.add_adapter("a", folder)
    other = MlxEngine.adopt(build("llama"))
    with pytest.raises(ConfigError, match="another model"):
        other.add_adapter("a", own_format(tmp_path / "fits", 1))
    engine.add_adapter("a", tmp_path / "fits")
    engine.close()
    other.close()
