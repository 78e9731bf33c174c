"""GGUF files on the torch engine: each family computes what its Transformers model does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
import transformers  # noqa: E402

from gguf_files import rewritten, write_model  # noqa: E402
from recipe.export_gguf import export_gguf  # noqa: E402
from shallow import TINY, shallow, shallow_gguf  # noqa: E402
from weft.engines.base import Row  # noqa: E402
from weft.engines.gguf import read_gguf  # noqa: E402
from weft.engines.gguf.checkpoint import GGUFCheckpoint  # noqa: E402
from weft.engines.gguf.families import READ_BY_TRANSFORMERS, transformers_config  # noqa: E402
from weft.engines.gguf.tokenizer import read_tokenizer  # noqa: E402
from weft.engines.numpy import NumpyEngine  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.check import quantised  # noqa: E402
from weft.engines.torch.gguf_loader import load_gguf  # noqa: E402
from weft.errors import Unsupported  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
IDS = list(range(6, 70))
ROWS = [Row((), IDS, 0, None, (0, 63))]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SIZE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
}
LLAMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rms_norm_eps": 1e-4, "rope_parameters": {"rope_theta": 100000.0}}),
    "llama with scaled rotation": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 32}),
    "llama with biases and its own head": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_theta": 1000000.0}}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
FACTORS = [1.0 + 0.1 * i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 128,
    "long_factor": [2 * factor for factor in FACTORS],
    "short_factor": FACTORS,
}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("gemma", "Gemma", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        "Gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 7},
    ),
    "phi3": ("phi3", "Phi3", {"sliding_window": 16, "pad_token_id": 0}),
    "phi3 with scaled rotation": (
        "phi3",
        "Phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 128,
            "pad_token_id": 0,
        },
    ),
}


def random_model(name: str, config: Any) -> Any:
    """Return a model with random weights, none of them zero or one."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.05, std=0.1)
    return model.eval()


def logits_of(model: Any) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits


def assert_same(loaded: Any, model: Any) -> None:
    """Weights are equal to the bit, and so are the logits that they give."""
    wanted = model.state_dict()
    for name, weight in loaded.state_dict().items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6, msg=name)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=0, atol=1e-4)
    assert quantised(loaded) == ""


@pytest.mark.parametrize("family", LLAMAS)
def test_llama_families_equal_their_folder(family: str, tmp_path: Path) -> None:
    name, more = LLAMAS[family]
    model = random_model(
        f"{name}ForCausalLM", getattr(transformers, f"{name}Config")(**{**SIZE, **more})
    )
    model.save_pretrained(tmp_path / "folder")
    for file in TINY.glob("*token*"):
        shutil.copy(file, tmp_path / "folder")
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf")
    assert_same(load_gguf(tmp_path / "model.gguf", CPU, "auto").model, model)
    result = NumpyEngine.load(tmp_path / "model.gguf").forward(ROWS)
    wanted = NumpyEngine.load(tmp_path / "folder").forward(ROWS)
    for index in (0, 1):
        np.testing.assert_allclose(result.logits(index), wanted.logits(index), atol=1e-4)


def written(family: str, path: Path) -> tuple[Any, Path]:
    """Return a random model and its file."""
    kind, name, more = OTHERS[family]
    config = getattr(transformers, "Gemma3TextConfig" if kind == "gemma3" else f"{name}Config")
    model = random_model(f"{name}ForCausalLM", config(**{**SIZE, **more}))
    return model, write_model(model, path / "model.gguf", shallow_gguf(), kind)


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_equal_their_model(family: str, tmp_path: Path) -> None:
    model, file = written(family, tmp_path)
    assert_same(load_gguf(file, CPU, "auto").model, model)


UNUSUAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "starcoder2": (
        "starcoder2",
        "Starcoder2",
        {"norm_epsilon": 0.3, "sliding_window": 16, "rope_parameters": {"rope_theta": 777.0}},
    ),
    "stablelm": (
        "stablelm",
        "StableLm",
        {
            "layer_norm_eps": 0.3,
            "rope_parameters": {"rope_theta": 777.0, "partial_rotary_factor": 0.5},
        },
    ),
}


@pytest.mark.parametrize("family", UNUSUAL)
def test_numbers_that_transformers_reader_drops_are_taken_from_the_file(
    family: str, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    kind, name, more = UNUSUAL[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZE, **more})
    model = random_model(f"{name}ForCausalLM", config)
    file = write_model(model, tmp_path / "model.gguf", shallow_gguf(), kind)
    assert_same(load_gguf(file, CPU, "auto").model, model)


@pytest.mark.llamacpp
@pytest.mark.engines
@pytest.mark.parametrize("family", [name for name in OTHERS if name != "phi3"])
def test_other_families_equal_llamacpp(family: str, tmp_path: Path) -> None:
    """Not of a Phi 3 with a sliding window, which llama.cpp ignores."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from weft.engines.llamacpp import LlamaCppEngine

    _, file = written(family, tmp_path)
    engine = LlamaCppEngine.load(file, dtype="float32", n_threads=1)
    result, wanted = TorchEngine.load(file).forward(ROWS), engine.forward(ROWS)
    for index in (0, 1):
        np.testing.assert_allclose(result.logits(index), wanted.logits(index), atol=2e-3)
    engine.close()


def test_family_that_transformers_reads_is_not_quantised_either(tmp_path: Path) -> None:
    size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "vocab_size": 2048}
    model = random_model("GPT2LMHeadModel", transformers.GPT2Config(**size, eos_token_id=1))
    file = write_model(model, tmp_path / "model.gguf", shallow_gguf(), "gpt2")
    loaded = load_gguf(file, CPU, "auto")
    assert loaded.model.hf_quantizer is not None
    assert_same(loaded.model, model)
    assert loaded.tokenizer.encode("12 + 3") == read_tokenizer(read_gguf(file)).encode("12 + 3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["embedded", "gemma3"])
def test_file_and_folder_give_the_same_engine(family: str, dtype: str, tmp_path: Path) -> None:
    file, folder = shallow_gguf(), shallow()
    if family == "gemma3":
        model, file = written(family, tmp_path)
        model.save_pretrained(folder := tmp_path / "folder")
    result, wanted = (TorchEngine.load(path, dtype=dtype) for path in (file, folder))
    assert type(result) is type(wanted)
    for name in ("dtype", "kv", "context_length", "kv_bytes_per_token", "capabilities"):
        assert getattr(result.info, name) == getattr(wanted.info, name), name
    kinds = [
        [(name, type(module)) for name, module in engine.model.named_modules()]
        for engine in (result, wanted)
    ]
    assert kinds[0] == kinds[1]
    for index in (0, 1):
        np.testing.assert_array_equal(
            result.forward(ROWS).logits(index), wanted.forward(ROWS).logits(index)
        )


def test_weights_are_dequantised_into_the_wanted_dtype(tmp_path: Path) -> None:
    export_gguf(shallow(), tmp_path / "a.gguf", "q8_0")
    exact = GGUFCheckpoint(read_gguf(tmp_path / "a.gguf"))
    model = load_gguf(tmp_path / "a.gguf", CPU, "bfloat16").model
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    for name, weight in model.state_dict().items():
        if name in exact.tensors:
            assert torch.equal(weight, torch.from_numpy(exact.read(name)).bfloat16()), name


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_scaled_rotary_embeddings_are_in_the_configuration(
    values: dict[str, Any], wanted: dict[str, Any], tmp_path: Path
) -> None:
    file = rewritten(tmp_path / "a.gguf", shallow_gguf(), lambda own: own.update(values))
    rope = transformers_config(read_gguf(file))["rope_parameters"]
    assert rope == {"rope_theta": rope["rope_theta"], **wanted}


def test_unknown_scaling_is_unsupported(tmp_path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["llama.rope.scaling.type"] = "twisted"

    file = rewritten(tmp_path / "a.gguf", shallow_gguf(), change)
    with pytest.raises(Unsupported, match="scales its rotary embedding by 'twisted'; allowed"):
        TorchEngine.load(file)


def test_transformers_reads_the_families_that_are_left_to_it() -> None:
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    theirs = {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS}
    known = {name.replace("_moe", "moe").replace("_", "-") for name in theirs}
    assert known >= READ_BY_TRANSFORMERS
