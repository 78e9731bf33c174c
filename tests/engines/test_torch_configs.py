"""Folders with unusual configs on torch: logits are those of Transformers' own forward."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

from configured import CONFIGURED, IDS, save, stepped
from families import plain_logits
from weft.engines.torch import TorchEngine

pytestmark = pytest.mark.torch

_DEFAULT = ("llama_llama3", "gemma3", "phi3")
CASES = [
    pytest.param(name, marks=() if name in _DEFAULT else pytest.mark.engines) for name in CONFIGURED
]


@pytest.mark.parametrize("name", CASES)
def test_logits_of_unusual_configs_equal_transformers(name: str, tmp_path: Path) -> None:
    want = plain_logits(save(name, tmp_path), IDS).numpy()
    engine = TorchEngine.load(tmp_path, dtype="float32", n_ctx=64)  # longrope: its short factors
    np.testing.assert_allclose(stepped(engine, IDS), want, atol=2e-3)
