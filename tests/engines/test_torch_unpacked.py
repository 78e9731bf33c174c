"""Float32 weights on a CPU with AVX2 only: used in place, and products equal the plain ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402

from families import IDS, build, plain_logits  # noqa: E402
from weft.engines.base import Row  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.weights import unpacked  # noqa: E402
from weft.engines.torch.weights.packed import PackedLinear  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")


@pytest.mark.parametrize(
    ("capability", "expected"), [("AVX2", True), ("AVX512", False), ("DEFAULT", False)]
)
def test_float32_is_unpacked_on_avx2_only(
    capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert unpacked.is_unpacked(torch.float32) is expected


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (64,), (65,), (1, 3), (2, 5)])
def test_product_equals_the_plain_product(shape: tuple[int, ...], *, has_bias: bool) -> None:
    x, weight = torch.randn(*shape, 24), torch.randn(36, 24)
    bias = torch.randn(36) if has_bias else None
    got = unpacked.unpacked_product(x, weight, bias)
    torch.testing.assert_close(got, F.linear(x, weight, bias), atol=1e-5, rtol=1e-4)
    assert got.is_contiguous()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_loaded_model_uses_weights_in_place_and_gives_the_same_logits(
    name: str, tmp_path: Path, avx2: None
) -> None:
    model = build(name)
    config = model.config
    config.intermediate_size = 1 << 14  # large enough that the engine considers packing
    if name == "gpt2":
        config.n_inner = 1 << 14
    model = type(model)(config).eval()
    model.save_pretrained(tmp_path)
    engine = TorchEngine.load(tmp_path)
    layers = [each for each in engine.model.modules() if isinstance(each, PackedLinear)]
    assert layers
    assert not any(layer._packed.is_mkldnn for layer in layers)
    for n in (1, 4, len(IDS)):
        output = engine.forward([Row((), IDS[:n], 0, None, (n - 1,))]).logits(0)
        want = plain_logits(model, IDS[:n])[-1].numpy()
        np.testing.assert_allclose(output, want, atol=2e-4)
