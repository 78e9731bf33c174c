"""Folders as GGUF files: each family that is written computes what its folder does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="gguf is not installed")

from recipe.export_gguf import export_gguf, main
from shallow import TINY, shallow
from weft.engines.base import Row
from weft.engines.gguf import read_gguf
from weft.engines.numpy import NumpyEngine
from weft.errors import ModelLoadError, Unsupported

pytestmark = pytest.mark.llamacpp

IDS = list(range(6, 70))
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with scaled rotation": ("Llama", {"rope_parameters": LLAMA3}),
    "llama with biases": ("Llama", {"attention_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_exported_family_computes_the_logits_of_its_folder(family: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import transformers

    from weft.engines.llamacpp import LlamaCppEngine

    name, more = FAMILIES[family]
    size = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = getattr(transformers, f"{name}Config")(
        **size, num_key_value_heads=2, vocab_size=2048, max_position_embeddings=256, **more
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():  # biases begin as zeros
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "folder")
    for file in TINY.glob("*token*"):
        shutil.copy(file, tmp_path / "folder")
    export_gguf(tmp_path / "folder", tmp_path / "model.gguf")
    rows = [Row((), IDS, 0, None, (0, 63))]
    engine = LlamaCppEngine.load(tmp_path / "model.gguf", dtype="float32", n_threads=1)
    result, wanted = engine.forward(rows), NumpyEngine.load(tmp_path / "folder").forward(rows)
    for index in (0, 1):
        np.testing.assert_allclose(result.logits(index), wanted.logits(index), atol=2e-3)
    engine.close()


def test_matrices_have_the_requested_type_and_the_rest_is_exact(tmp_path: Path) -> None:
    for kind in ("f32", "f16", "q8_0"):
        export_gguf(shallow(), tmp_path / "a.gguf", kind)
        header = read_gguf(tmp_path / "a.gguf")
        types = {len(t.shape): t.type for t in header.tensors.values()}
        assert types == {1: "f32", 2: kind}
    assert header.values["tokenizer.chat_template"] == (TINY / "chat_template.jinja").read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["a.gguf"]


def changed(tmp_path: Path, file: str, **values: Any) -> Path:
    folder = shutil.copytree(shallow(), tmp_path / "folder")
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**config, **values}))
    return folder


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
        ("tokenizer.json", {"normalizer": {"type": "NFC"}}, "byte-level BPE"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, "cuts text"),
    ],
)
def test_model_that_cannot_be_written_raises_and_leaves_no_file(
    file: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = changed(tmp_path, file, **values)
    with pytest.raises(Unsupported, match=message):
        export_gguf(folder, tmp_path / "a.gguf")
    with pytest.raises(Unsupported, match="'q4_0'"):
        export_gguf(shallow(), tmp_path / "a.gguf", "q4_0")
    assert not list(tmp_path.glob("*.gguf*"))


def test_command_that_cannot_export_prints_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["export", str(tmp_path), str(tmp_path / "a.gguf")])
    assert main() == 1
    assert "cannot be exported" in capsys.readouterr().err
    with pytest.raises(ModelLoadError):
        export_gguf(tmp_path, tmp_path / "a.gguf")
