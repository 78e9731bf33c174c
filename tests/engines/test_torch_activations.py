"""GELU by one tanh: which modules are fused, and that they compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from transformers.activations import ACT2FN  # noqa: E402

from families import IDS, build, plain_logits, stepped  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.attention_hook import attach_context  # noqa: E402
from weft.engines.torch.fused.activations import fuse_activations  # noqa: E402
from weft.engines.torch.paged import kernel  # noqa: E402

if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.kernels,
    pytest.mark.usefixtures("one_load_check"),
]
DEVICE = torch.device("cpu" if kernel.is_interpreted() else "cuda")


@pytest.mark.parametrize(
    ("name", "is_fused"),
    [("gelu_new", True), ("gelu_fast", True), ("gelu_accurate", True), ("gelu", False),
     ("gelu_10", False), ("quick_gelu", False), ("silu", False), ("relu2", False)],
)  # fmt: skip
def test_tanh_gelu_in_several_operations_is_recognised(name: str, *, is_fused: bool) -> None:
    module = torch.nn.ModuleDict({"act": ACT2FN[name]})
    attach_context(module)
    assert fuse_activations(module) == is_fused
    x = torch.linspace(-4, 4, 99)
    torch.testing.assert_close(module["act"](x), ACT2FN[name](x))  # no step runs


def test_replaced_forward_is_not_patched() -> None:
    own: Any = ACT2FN["gelu_new"]
    own.forward = lambda x: 2 * x
    attach_context(own)
    assert fuse_activations(own) == 0


def test_model_gives_what_it_did() -> None:
    model = build("gpt2").to(DEVICE)
    kinds = [type(module) for module in model.modules()]
    engine = TorchEngine.adopt(model, kv="paged", graphs=False)
    here = {type(module).__name__ for module in engine.model.modules()}
    assert "NewGELUActivationByStep" in here
    np.testing.assert_allclose(stepped(engine), plain_logits(build("gpt2"), IDS).numpy(), atol=2e-4)
    assert [type(module) for module in model.modules()] == kinds
