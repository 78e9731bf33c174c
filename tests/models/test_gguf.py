"""GGUF files of real models: the tokenizer built from the file is llama.cpp's."""

from __future__ import annotations

from pathlib import Path

import pytest

from real_models import GEMMA3_GGUF, SMOLLM2_GGUF, models_dir, real_model
from tokenizer_texts import TEXTS
from tools.models import VOCABULARIES
from weft.engines.gguf import read_gguf
from weft.engines.gguf.header import read_header
from weft.engines.gguf.tokenizer import read_tokenizer

pytestmark = [pytest.mark.llamacpp]


def assert_equal_tokenizers(file: Path, *, has_tensors: bool) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from weft.engines.llamacpp import vocabulary

    header = read_gguf(file) if has_tensors else read_header(file)
    own, wanted = read_tokenizer(header), vocabulary.read_tokenizer(header)
    assert own.stop_ids == wanted.stop_ids
    assert own.special_ids == wanted.special_ids
    assert own.chat_template == wanted.chat_template
    for text in TEXTS:
        for special in (False, True):
            for add_bos in (None, False):
                options = {"special": special, "add_bos": add_bos}
                assert own.encode(text, **options) == wanted.encode(text, **options), text
        ids = wanted.encode(text, add_bos=False)
        assert own.decode(ids, first=True) == wanted.decode(ids, first=True)


@pytest.mark.parametrize("name", [SMOLLM2_GGUF, GEMMA3_GGUF])
def test_tokenizer_of_a_model_equals_llama_cpps(name: str) -> None:
    assert_equal_tokenizers(real_model(name), has_tensors=True)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokenizer_of_a_vocabulary_equals_llama_cpps(name: str) -> None:
    """llama.cpp ships vocabularies of models without weights, in the source of llama-cpp-python."""
    file = models_dir() / "vocabularies" / f"ggml-vocab-{name}.gguf"
    if not file.exists():
        pytest.skip(f"{file} is absent: make models fetches it")
    assert_equal_tokenizers(file, has_tensors=False)
