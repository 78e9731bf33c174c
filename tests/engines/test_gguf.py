"""GGUF files without llama.cpp: the NumPy engine, the choice of an engine, the tokenizer."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from gguf_files import rewritten
from recipe.export_gguf import export_gguf
from shallow import TINY, shallow, shallow_gguf
from tokenizer_texts import TEXTS
from weft import loading, samples
from weft._core.installation import install_hint
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.base import Row
from weft.engines.checkpoint import open_checkpoint
from weft.engines.gguf import read_gguf
from weft.engines.gguf.checkpoint import GGUFCheckpoint
from weft.engines.gguf.tokenizer import read_tokenizer
from weft.engines.numpy import NumpyEngine
from weft.engines.numpy.model import from_bfloat16_bits, to_bfloat16_bits
from weft.errors import EngineUnavailable, ModelLoadError, Unsupported

IDS = list(range(6, 70))
ROWS = [Row((), IDS, 0, None, (0, 63))]


def test_file_and_folder_give_equal_logits() -> None:
    result = NumpyEngine.load(shallow_gguf()).forward(ROWS)
    wanted = NumpyEngine.load(shallow()).forward(ROWS)
    for index in (0, 1):
        np.testing.assert_array_equal(result.logits(index), wanted.logits(index))


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_dequantised_weights_are_near_those_of_the_folder(kind: str, tmp_path: Path) -> None:
    export_gguf(shallow(), tmp_path / "a.gguf", kind)
    result, wanted = GGUFCheckpoint(read_gguf(tmp_path / "a.gguf")), open_checkpoint(shallow())
    assert set(result.tensors) == set(wanted.tensors) - {"lm_head.weight"}
    for name in result.tensors:
        exact = wanted.read(name)
        np.testing.assert_allclose(result.read(name), exact, atol=np.abs(exact).max() / 127)


def test_load_takes_tokenizer_template_and_sampling_from_the_file(tmp_path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values |= {"general.sampling.temp": 0.5, "general.sampling.top_k": 7}

    file = rewritten(tmp_path / "a.gguf", shallow_gguf(), change)
    with weft.load(file, engine="numpy") as lm, weft.load(shallow(), engine="numpy") as wanted:
        assert lm.info.name == "numpy"
        assert lm.text.chat_template == wanted.text.chat_template
        assert (lm.defaults.temperature, lm.defaults.top_k) == (0.5, 7)
        result, same = (
            weft.Loom(each, samples.sum).grow(max_tokens=12, temperature=0)[0].tokens
            for each in (lm, wanted)
        )
        assert result == same


def test_file_and_folder_tokenize_300_texts_alike() -> None:
    result, wanted = read_tokenizer(read_gguf(shallow_gguf())), Tokenizer.from_folder(TINY)
    assert result.vocab_bytes == wanted.vocab_bytes
    assert result.special_ids == wanted.special_ids
    assert result.stop_ids == wanted.stop_ids
    for text in TEXTS:
        for special in (False, True):
            assert result.encode(text, special=special) == wanted.encode(text, special=special), (
                text
            )
        assert result.decode(result.encode(text, add_bos=False)) == text
    chat = [{"role": "user", "content": "1 + <|user|> 2"}]
    assert result.encode_chat(chat) == wanted.encode_chat(chat)


def test_unknown_pre_tokenizer_warns_and_keeps_the_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(values: dict[str, Any]) -> None:
        values["tokenizer.ggml.pre"] = "of-tomorrow"

    header = read_gguf(rewritten(tmp_path / "a.gguf", shallow_gguf(), change))
    with caplog.at_level(logging.WARNING, "weft.engines"):
        result = read_tokenizer(header)
    assert "a.gguf has the unknown pre-tokenizer 'of-tomorrow'" in caplog.text
    assert all(result.decode(result.encode(text, add_bos=False)) == text for text in TEXTS)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("bert", Unsupported, "tokenizer of the type 'bert'; allowed are gpt2, llama, gemma4"),
        ("none", ModelLoadError, "has no tokenizer; pass tokenizer="),
    ],
)
def test_other_tokenizers_are_named(
    kind: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    def change(values: dict[str, Any]) -> None:
        values["tokenizer.ggml.model"] = kind

    file = rewritten(tmp_path / "a.gguf", shallow_gguf(), change)
    with pytest.raises(error, match=message):
        weft.load(file, engine="numpy")


def test_token_that_is_no_text_is_a_load_error(tmp_path: Path) -> None:
    data = bytearray(shallow_gguf().read_bytes())
    at = data.index(b"tokenizer.ggml.tokens")
    at = data.index(b"the", at)
    data[at] = 0xFF
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"the tokenizer in .*a.gguf cannot be read"):
        weft.load(tmp_path / "a.gguf", engine="numpy")


# Memory ---------------------------------------------------------------------------------------


def test_pack_rounds_to_the_nearest_bfloat16_and_ties_to_even() -> None:
    values = np.float32([1.0, -2.5, 1.00390625, 1.01171875, 1.004, 0.0])
    assert from_bfloat16_bits(to_bfloat16_bits(values)).tolist() == [
        1.0,
        -2.5,
        1.0,
        1.015625,
        1.0078125,
        0.0,
    ]


@pytest.mark.parametrize("source", ["folder", "file"])
def test_bfloat16_weights_compute_what_the_same_numbers_in_float32_compute(source: str) -> None:
    path = shallow() if source == "folder" else shallow_gguf()
    exact, engine = NumpyEngine.load(path), NumpyEngine.load(path, dtype="bfloat16")
    assert engine.info.extra["weights"] == "bfloat16"
    assert engine.info.fingerprint != exact.info.fingerprint
    result, wanted = engine.forward(ROWS), exact.forward(ROWS)  # the model is stored in bfloat16
    for index in (0, 1):
        np.testing.assert_allclose(result.logits(index), wanted.logits(index), atol=1e-4)


def test_weights_are_kept_in_bfloat16_if_float32_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    n_values = sum(np.prod(each.shape) for each in open_checkpoint(shallow()).tensors.values())
    left = 4 * int(n_values)
    monkeypatch.setattr("weft.engines.numpy.engine.bytes_left", lambda: 2 * left)
    assert NumpyEngine.load(shallow_gguf()).info.extra["weights"] == "float32"
    monkeypatch.setattr("weft.engines.numpy.engine.bytes_left", lambda: left)
    with caplog.at_level(logging.WARNING, "weft.engines"):
        assert NumpyEngine.load(shallow_gguf()).info.extra["weights"] == "bfloat16"
    assert "its weights are stored in bfloat16" in caplog.text
    assert NumpyEngine.load(shallow_gguf(), dtype="float32").info.extra["weights"] == "float32"


# The choice of an engine ----------------------------------------------------------------------


def of_family(path: Path, name: str) -> Path:
    """Write a file that says it is of another architecture."""

    def change(values: dict[str, Any]) -> None:
        values["general.architecture"] = name
        for key in [key for key in values if key.startswith("llama.")]:
            values[key.replace("llama.", f"{name}.")] = values.pop(key)

    return rewritten(path, shallow_gguf(), change)


def only(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    """Let the packages of engines be those alone."""
    monkeypatch.setattr(loading, "find_spec", lambda name: name in installed or None)


TORCH = ("torch", "transformers", "accelerate")


def test_llamacpp_runs_a_file_if_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "llama_cpp", *TORCH)
    assert loading.gguf_engine(shallow_gguf()) == "llamacpp"


def test_numpy_runs_its_families_before_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(monkeypatch, *TORCH)
    assert loading.gguf_engine(shallow_gguf()) == "numpy"
    assert loading.gguf_engine(shallow_gguf(), device="cuda") == "torch"
    assert loading.gguf_engine(of_family(tmp_path / "a.gguf", "falcon")) == "torch"


def test_missing_engine_is_named_once_with_both_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = of_family(tmp_path / "a.gguf", "falcon")
    only(monkeypatch)
    with pytest.raises(EngineUnavailable) as caught:
        weft.load(file)
    text = str(caught.value)
    assert "a.gguf is a falcon model" in text
    assert text.index(install_hint("torch")) < text.index(install_hint("llamacpp"))
    assert caught.value.hint == install_hint("torch")


def test_package_that_transformers_needs_is_named_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(monkeypatch, "torch", "transformers")
    with pytest.raises(EngineUnavailable, match=r"not installed: accelerate; run: .*\[torch\]"):
        weft.load(of_family(tmp_path / "a.gguf", "falcon"), engine="torch")


def test_family_of_llamacpp_alone_names_llamacpp_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = of_family(tmp_path / "a.gguf", "plamo3")
    only(monkeypatch, *TORCH)
    with pytest.raises(EngineUnavailable) as caught:
        weft.load(file)
    assert "torch" not in str(caught.value)
    assert caught.value.hint == install_hint("llamacpp")
    with pytest.raises(Unsupported, match="a plamo3 model, which runs on llamacpp: not"):
        weft.load(file, engine="torch")


def test_numpy_rejects_another_family_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="is a falcon model; the numpy engine runs GGUF files of"):
        weft.load(of_family(tmp_path / "a.gguf", "falcon"), engine="numpy")


def test_tensor_that_the_family_lacks_is_named(tmp_path: Path) -> None:
    file = of_family(tmp_path / "a.gguf", "gemma")
    header = read_gguf(file)
    header.tensors["blk.0.ssm_a"] = header.tensors["output_norm.weight"]
    with pytest.raises(Unsupported, match="has the tensor 'blk.0.ssm_a', which no other gemma"):
        GGUFCheckpoint(header)


CHILD = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "llama_cpp", "accelerate"):
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Blocked())
import importlib.util, weft
from weft import loading
real = loading.find_spec
loading.find_spec = lambda name: None if name == "llama_cpp" else real(name)
with weft.load(sys.argv[1]) as lm:
    assert lm.info.name == "numpy", lm.info
    print(len(weft.Loom(lm, "Say: ", template=False).grow(max_tokens=4, temperature=0)[0].tokens))
"""


def test_file_runs_with_the_base_install_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(shallow_gguf())], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "4"
