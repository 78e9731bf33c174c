"""Norms of a model's own modules, as one kernel each: which are fused, and their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from cases import first_of  # noqa: E402
from families import IDS, build, plain_logits, stepped  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.attention_hook import attach_context  # noqa: E402
from weft.engines.torch.fused.norms import fuse_norms  # noqa: E402
from weft.engines.torch.paged import elementwise, kernel  # noqa: E402

if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.kernels,
    pytest.mark.usefixtures("one_load_check"),
]
DEVICE = torch.device("cpu" if kernel.is_interpreted() else "cuda")
F = torch.nn.functional


def actual(model: Any) -> int:
    attach_context(model)
    return fuse_norms(model, next(model.parameters()).dtype)


def norms_of(model: Any) -> list[Any]:
    kinds = ("RMSNorm", "CohereLayerNorm", "ByStep")
    return [module for module in model.modules() if type(module).__name__.endswith(kinds)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "olmo2", "phi3", "mixtral", "gpt_oss"])
def test_all_norms_of_a_family_are_patched(name: str, dtype: str) -> None:
    model = build(name, getattr(torch, dtype))
    n_norms = len(norms_of(model))
    assert actual(model) == n_norms > 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_centred_norms_are_patched(dtype: str) -> None:
    model = build("cohere", getattr(torch, dtype))
    assert actual(model) == 3 + 1
    assert all(module.__dict__["weft_form"].is_centred for module in norms_of(model))


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt"])
def test_norms_that_are_one_operation_are_not(name: str) -> None:
    assert actual(build(name)) == 0


class Norm(torch.nn.Module):
    """One of these norms, but for what a subclass does."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 2, 16))
        self.eps = eps

    def forward(self, x: Any) -> Any:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class ScaledFirst(Norm):
    def forward(self, x: Any) -> Any:
        return super().forward(self.weight * x)


class OfLength(Norm):
    def forward(self, x: Any) -> Any:
        return self.weight * F.normalize(x, dim=-1)


class Gated(Norm):
    def forward(self, x: Any, gate: Any) -> Any:
        return super().forward(x) * gate


class Biased(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(16))


class CutOff(Norm):
    def forward(self, x: Any) -> Any:
        return super().forward(x).clamp(-10, 10)


class WithMore(Norm):
    """Its root takes more than it says."""

    def forward(self, x: Any) -> Any:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)


def test_other_norms_are_not_fused() -> None:
    assert actual(Norm()) == actual(torch.nn.Sequential(Norm(), Norm(1e-5))) - 1 == 1
    patched = Norm()
    patched.forward = lambda x: 2 * x
    strided = Norm()
    strided.weight.data = torch.ones(32)[::2]
    cut = CutOff()
    cut.weight.data = torch.linspace(2, 4, 16)
    for other in (
        *(ScaledFirst(), OfLength(), Gated(), Biased(), WithMore(), cut, patched, strided),
    ):
        assert actual(other) == 0, type(other).__name__


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_rows_along_two_axes_are_normed(shift: float, *, is_centred: bool) -> None:
    """Of heads that lie token by token, of some of the numbers of a token, and of one token."""
    seeded = torch.Generator(DEVICE).manual_seed(1)
    full = torch.randn(1, 70, 6, 40, device=DEVICE, generator=seeded)
    weight = torch.randn(40, device=DEVICE, generator=seeded)
    some = (full, full.transpose(1, 2), full[:, :, 1:4], full[:, :, :2].transpose(1, 2))
    for x in (*some, full[0, 0], full[:, 0], full[0, :1], full[:, :0]):
        normed = F.layer_norm if is_centred else F.rms_norm
        for some in (weight, torch.stack((weight, weight), 1)[:, 0], None):
            result = elementwise.rms_norm(x, some, 1e-6, shift, is_centred=is_centred)
            want = normed(x, (40,), None if some is None else weight + shift, eps=1e-6)
            torch.testing.assert_close(result, want)
            assert result.is_contiguous()
    assert elementwise.supports_rms_norm(full, weight)
    assert elementwise.supports_rms_norm(full, None)
    for other in (weight[:1], weight.repeat_interleave(2)[::2], weight[:1].expand(40)):
        assert not elementwise.supports_rms_norm(full, other)
    assert elementwise.RowLayout.from_tensor(full[..., ::2]) is None
    assert elementwise.RowLayout.from_tensor(full.expand(3, -1, -1, -1)) is None


@pytest.mark.parametrize(("name", "n"), [("gemma4", 2), ("gemma3n", 3), ("olmo2", 0)])
def test_norms_without_a_weight_are_patched(name: str, n: int) -> None:
    model = build(name)
    actual(model)
    forms = [m for m in norms_of(model) if "weft_form" in m.__dict__]
    assert sum("weight" not in module._parameters for module in forms) == n


def test_epsilon_and_weight_set_in_a_norm_are_used() -> None:
    """Another epsilon, or a weight whose numbers lie apart."""
    engine = TorchEngine.adopt(build("olmo2").to(DEVICE), kv="paged", graphs=False)
    layer = engine.model.model.layers[0]
    layer.self_attn.q_norm.variance_epsilon = 1.0
    layer.post_attention_layernorm.weight.data = torch.randn(64, device=DEVICE)[::2]
    want = plain_logits(engine.model, IDS).numpy()
    np.testing.assert_allclose(stepped(engine), want, atol=2e-4)


@pytest.mark.parametrize("name", first_of(["gemma3_text", "gpt_oss"]))
def test_norm_weights_written_by_the_owner_are_used(name: str) -> None:
    model = build(name).to(DEVICE)
    engine = TorchEngine.adopt(model, kv="paged", graphs=False)
    before = stepped(engine)
    np.testing.assert_allclose(before, plain_logits(model.cpu(), IDS).numpy(), atol=2e-4)
    model.to(DEVICE)
    with torch.no_grad():
        for norm in norms_of(model):
            norm.weight.mul_(1.5)
    after = stepped(TorchEngine.adopt(model, kv="paged", graphs=False))
    engine.fragments.clear()
    np.testing.assert_allclose(stepped(engine), after, atol=1e-5)
    assert np.abs(after - before).max() > 0.01


def test_owners_modules_stay_what_they_are() -> None:
    model = build("gemma2").to(DEVICE)
    kinds = [type(module) for module in model.modules()]
    engine = TorchEngine.adopt(model, kv="paged", graphs=False)
    assert [type(module) for module in model.modules()] == kinds
    assert [type(module) for module in engine.model.modules()] != kinds
