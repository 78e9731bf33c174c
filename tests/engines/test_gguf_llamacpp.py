"""Tokenizers of GGUF files, against llama.cpp's: every pre-tokenizer that is known by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from gguf_files import rewritten
from shallow import shallow_gguf
from tokenizer_texts import TEXTS
from weft.engines.gguf import read_gguf
from weft.engines.gguf.pretokenizers import PRE_TOKENIZERS
from weft.engines.gguf.tokenizer import read_tokenizer
from weft.engines.llamacpp import vocabulary

pytestmark = [pytest.mark.llamacpp, pytest.mark.engines]


@pytest.mark.parametrize("pre", [*PRE_TOKENIZERS, "default"])
def test_300_texts_are_tokenized_as_llama_cpp_does(pre: str, tmp_path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["tokenizer.ggml.pre"] = pre
        values.pop("tokenizer.ggml.add_bos_token")

    header = read_gguf(rewritten(tmp_path / "a.gguf", shallow_gguf(), change))
    result, wanted = read_tokenizer(header), vocabulary.read_tokenizer(header)
    for text in TEXTS:
        assert result.encode(text, special=True) == wanted.encode(text, special=True), text
