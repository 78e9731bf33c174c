"""Paths of the real models that tests marked `models` load; `make models` fetches them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_FOLDER = "SmolLM2-135M-Instruct"
GEMMA3_GGUF = "gemma-3-270m-Q4_K_M.gguf"


def models_dir() -> Path:
    """Return the folder of real models: $WEFT_TEST_MODELS or ~/.cache/weft/models."""
    return Path(os.environ.get("WEFT_TEST_MODELS") or Path.home() / ".cache/weft/models")


def real_model(name: str) -> Path:
    """Return the path of a real model; skip the calling test if the model is absent."""
    path = models_dir() / name
    if not path.exists():
        pytest.skip(f"{path} is absent: make models fetches it")
    return path
