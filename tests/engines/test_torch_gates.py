"""Activation and product of gated parts as one kernel: which are fused, and their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from transformers.activations import ACT2FN  # noqa: E402

from families import IDS, build, plain_logits, stepped  # noqa: E402
from weft.engines.base import Row  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.attention_hook import attach_context  # noqa: E402
from weft.engines.torch.fused import gates  # noqa: E402
from weft.engines.torch.fused.gates import fuse_gates  # noqa: E402
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
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def actual(model: Any) -> int:
    attach_context(model)
    return fuse_gates(model, next(model.parameters()).dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "activation", "n_given"),
    [("gemma2", "gelu_tanh", 2), ("olmo2", "silu", 2), ("cohere", "silu", 2), ("phi3", "silu", 1),
     ("granite4", "silu", 1), ("qwen2_moe", "silu", 2), ("gpt2", "", 0), ("opt", "", 0)],
)  # fmt: skip
def test_gated_modules_of_a_family_are_patched(
    name: str, activation: str, n_given: int, dtype: str
) -> None:
    model = build(name, getattr(torch, dtype))
    assert actual(model) == 3 * bool(n_given)
    for module in model.modules():
        form = module.__dict__.get("weft_form")
        if form is not None:
            assert (form.activation, len(form.inputs)) == (activation, n_given)


class Gated(torch.nn.Module):
    """One of these parts, but for what a subclass does."""

    def __init__(self, act: str = "silu", n_between: int = 24) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(16, n_between) for _ in range(2))
        self.down = torch.nn.Linear(n_between, 16)
        self.act = ACT2FN[act]

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Both(torch.nn.Module):
    """Of one layer for gate and up."""

    def __init__(self, *, is_turned: bool) -> None:
        super().__init__()
        self.both, self.down = torch.nn.Linear(16, 48), torch.nn.Linear(24, 16)
        self.act, self.is_turned = ACT2FN["gelu"], is_turned

    def forward(self, x: Any) -> Any:
        first, second = self.both(x).chunk(2, -1)
        if self.is_turned:
            first, second = second, first
        return self.down(self.act(first) * second)


class Scaled(Gated):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 1.25


class OfSome(Gated):
    """The largest of its gates alone count."""

    def forward(self, x: Any) -> Any:
        gate = self.gate(x)
        gate = gate * (gate > gate.mean(-1, keepdim=True))
        return self.down(self.act(gate) * self.up(x))


class CutOff(Gated):
    """As large as numbers of a model come, and no larger."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.gate, self.up):
            layer.weight.data.mul_(0.1)

    def forward(self, x: Any) -> Any:
        up = self.up(x).clamp(-10, 10)
        return self.down(self.act(self.gate(x).clamp(max=10)) * up)


class Twice(Gated):
    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.gate(x)) * self.act(self.up(x)))


class WithMore(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(16))


class WithAnother(Gated):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)


def test_modules_that_compute_something_else_are_not_fused() -> None:
    torch.manual_seed(0)
    patched = Gated()
    patched.forward = lambda x: 2 * x
    watched = Gated()
    watched.act = torch.nn.SiLU()
    watched.act.register_forward_hook(lambda module, given, result: result * 2)
    others = (Scaled(), OfSome(), CutOff(), Twice(), WithMore(), WithAnother(), patched, watched)
    for other in (*others, Gated("relu"), Gated("quick_gelu"), Gated("gelu_10")):
        assert actual(other) == 0, type(other).__name__


@pytest.mark.parametrize("n_between", [16, 24])
@pytest.mark.parametrize(
    ("act", "name"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh"),
     ("gelu_pytorch_tanh", "gelu_tanh")],
)  # fmt: skip
def test_gate_is_recognised_among_layers_of_one_shape(act: str, name: str, n_between: int) -> None:
    torch.manual_seed(0)
    module = Gated(act, n_between)
    assert actual(module) == 1
    form = module.__dict__["weft_form"]
    assert (form.inputs, form.down, form.activation) == (("gate", "up"), "down", name)


@pytest.mark.parametrize("is_turned", [False, True])
def test_half_with_the_gate_is_recognised(*, is_turned: bool) -> None:
    torch.manual_seed(0)
    module = Both(is_turned=is_turned)
    assert actual(module) == 1
    assert module.__dict__["weft_form"].is_swapped == is_turned


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernel_gates_as_pytorch_does(activation: Any, dtype: str) -> None:
    """More tokens than a program takes, and more numbers, neither a multiple; far out too. Compared
    with float64: PyTorch's own float32 differs from one processor to another.
    """
    seeded = torch.Generator(DEVICE).manual_seed(1)
    both = torch.randn(1, 70, 2 * 1100 + 8, device=DEVICE, generator=seeded) * 6
    both = both.to(getattr(torch, dtype))
    for gate, up in (
        (both[..., :1100], both[..., 1100:2200]),
        (both[..., 1108:], both[..., 4:1104]),
        (both[0, :, :1100].contiguous(), both[0, :, 1100:2200]),
        (both[:, :0, :1100], both[:, :0, 1100:2200]),
    ):
        result = elementwise.act_and_mul(gate, up, activation)
        want = ACTIVATIONS[activation](gate.double()) * up.double()
        assert result.is_contiguous()
        assert (result.dtype, result.shape) == (gate.dtype, gate.shape)
        # Far below zero what is left is the difference of two halves, each rounded as float32.
        own, inner = torch.finfo(result.dtype), torch.finfo(torch.float32).eps
        max_n = own.eps * (want.abs() + own.tiny) + 8 * inner * (gate.double() * up.double()).abs()
        assert ((result.double() - want).abs() <= max_n).all()


@pytest.mark.parametrize("name", ["gemma2", "phi3"])
def test_model_gives_what_it_did_and_is_not_touched(name: str) -> None:
    model = build(name).to(DEVICE)
    kinds = [type(module) for module in model.modules()]
    engine = TorchEngine.adopt(model, kv="paged", graphs=False)
    forms = [module.__dict__.get("weft_form") for module in engine.model.modules()]
    assert sum(isinstance(form, gates._GatedMlp) for form in forms) == 3
    want = plain_logits(build(name), IDS).numpy()
    np.testing.assert_allclose(stepped(engine), want, atol=2e-4)
    assert [type(module) for module in model.modules()] == kinds


def test_hook_on_an_activation_is_called() -> None:
    model = build("gemma2").to(DEVICE)
    engine = TorchEngine.adopt(model, kv="paged", graphs=False)
    before = stepped(engine)
    for layer in engine.model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, given, result: result + 1)
    engine.fragments.clear()
    assert np.abs(stepped(engine) - before).max() > 0.1


CHANGES: dict[str, Any] = {
    "numbers lie apart": lambda y: y.transpose(1, 2).contiguous().transpose(1, 2),
    "one gate for all tokens": lambda y: y.mean(1, keepdim=True),
    "one gate for all numbers": lambda y: y.mean(-1, keepdim=True),
}


@pytest.mark.parametrize("layer", ["gate_proj", "up_proj"])
@pytest.mark.parametrize("change", CHANGES)
def test_gate_changed_by_a_hook_is_used_unchanged(layer: str, change: str) -> None:
    """One step alone: of all tokens so far, whose gates some hooks make one."""
    engine = TorchEngine.adopt(build("gemma2").to(DEVICE), kv="paged", graphs=False)
    change_it = CHANGES[change]
    module = getattr(engine.model.model.layers[1].mlp, layer)
    module.register_forward_hook(lambda module, given, result: change_it(result))
    want = plain_logits(engine.model, IDS).numpy()
    row = Row((), IDS, 0, None, tuple(range(len(IDS))))
    output = engine.forward([row])
    got = np.stack([output.logits(i) for i in range(len(IDS))])
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_another_activation_counts() -> None:
    engine = TorchEngine.adopt(build("gemma2").to(DEVICE), kv="paged", graphs=False)
    engine.model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    want = plain_logits(engine.model, IDS).numpy()
    np.testing.assert_allclose(stepped(engine), want, atol=2e-4)
