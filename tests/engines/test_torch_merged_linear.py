"""Layers of one input as one product: which are put together, and what they give."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("triton", reason="triton is not installed; it comes with torch for CUDA")

from cases import first_of  # noqa: E402
from families import IDS, build, plain_logits, stepped  # noqa: E402
from weft.engines.torch import TorchEngine, weight_layout  # noqa: E402
from weft.engines.torch.attention_hook import attach_context  # noqa: E402
from weft.engines.torch.engine import open_model  # noqa: E402
from weft.engines.torch.fused import merged_linear  # noqa: E402
from weft.engines.torch.fused.merged_linear import fuse_siblings  # noqa: E402
from weft.engines.torch.lora import LoraAdapters  # noqa: E402
from weft.engines.torch.paged import kernel  # noqa: E402

if not (kernel.is_interpreted() or torch.cuda.is_available()):
    pytest.skip("triton has neither its interpreter nor a card", allow_module_level=True)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.kernels,
    pytest.mark.usefixtures("one_load_check"),
]
DEVICE = torch.device("cpu" if kernel.is_interpreted() else "cuda")
F = torch.nn.functional


def loaded(name: str) -> Any:
    """A model whose weights lie as on a card."""
    with torch.inference_mode(False):
        model = build(name).to(DEVICE)
    weight_layout.merge_sibling_weights(model)
    return model


def opened(model: Any) -> TorchEngine:
    engine = open_model(
        model, n_ctx=None, fingerprint="x", state_bytes=None, kv="paged", graphs=False
    )
    assert isinstance(engine, TorchEngine)
    return engine


def together(model: Any) -> list[list[str]]:
    """The layers that are one product, by name in the order of their weights, of each group."""
    actual: dict[int, list[tuple[int, str]]] = {}
    for name, module in model.named_modules():
        place = module.__dict__.get("weft_sibling")
        if place is not None:
            actual.setdefault(id(place.product), []).append((place.number, name.split(".")[-1]))
    return [[name for _, name in sorted(group)] for group in actual.values()]


class Products:
    """Counts products, and what columns they have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.widths: list[int] = []
        plain = F.linear

        def counted(x: Any, weight: Any, bias: Any = None) -> Any:
            self.widths.append(len(weight))
            return plain(x, weight, bias)

        monkeypatch.setattr(merged_linear.F, "linear", counted)


@pytest.mark.parametrize(
    ("name", "groups"),
    first_of(
        [
            ("gemma2", [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]),
            ("gemma3_text", [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]),
            ("cohere", [["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]]),
            ("gpt_oss", [["q_proj", "k_proj", "v_proj"]]),
            ("deepseek_v3", [["q_a_proj", "kv_a_proj_with_mqa"], ["gate_proj", "up_proj"]]),
            # One number per token; merged with it, the others would not be aligned.
            ("qwen2_moe", [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]),
            ("phi3", []),
            ("gpt2", []),
        ],
        n=2,
    ),
)
def test_layers_with_the_same_input_are_one_product(name: str, groups: list[list[str]]) -> None:
    engine = opened(loaded(name))
    actual = together(engine.model)
    assert actual == groups * (len(actual) // max(1, len(groups)))
    assert bool(actual) == bool(groups)
    want = plain_logits(build(name), IDS).numpy()
    np.testing.assert_allclose(stepped(engine), want, atol=2e-4)


@pytest.mark.slow
def test_step_has_so_many_products_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three layers: two and one of each."""
    widths, result = [], []
    for model in (loaded("gemma3_text"), build("gemma3_text").to(DEVICE)):
        engine = opened(model)
        with monkeypatch.context() as patch:
            products = Products(patch)
            result.append(stepped(engine))
        widths.append(products.widths)
    assert len(widths[1]) - len(widths[0]) == 3 * 3 * 7  # a prefill and six steps
    assert {32 + 16 + 16, 48 + 48} < set(widths[0])
    np.testing.assert_allclose(*result, atol=1e-4)


def test_weights_of_an_owner_stay_where_they_are() -> None:
    model = build("gemma2").to(DEVICE)
    places = [weight.data_ptr() for weight in model.parameters()]
    engine = TorchEngine.adopt(model, kv="paged", graphs=False)
    assert together(engine.model) == []
    assert [weight.data_ptr() for weight in model.parameters()] == places


class Two(torch.nn.Module):
    """Two layers that share a piece of memory, as `merge_sibling_weights` stores them."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Linear(8, n, **more) for n in (16, 24))
        weight_layout._make_adjacent([self.first.weight, self.second.weight])
        weight_layout._make_biases_adjacent([self.first, self.second])
        attach_context(self)


class Step:
    """Stands for one that has kernels: siblings ask for nothing more."""

    has_fused_ops = True


def running(module: Any) -> Any:
    module.first.__dict__["weft_seat"].call.step = Step()
    return module


@torch.inference_mode()
@pytest.mark.parametrize("has_bias", [True, False])
def test_each_gets_its_own_whatever_it_is_given(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, the same or another, once or twice."""
    module = running(Two(bias=has_bias))
    assert fuse_siblings(module) == 2
    x, y = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    products = Products(monkeypatch)
    calls = [("first", x), ("second", x), ("second", y), ("first", y), ("first", x), ("second", y)]
    calls += [("first", x), ("first", x), ("second", x), ("second", x)]
    for name, given in calls:
        layer = getattr(module, name)
        want = torch.addmm(layer.bias if has_bias else torch.zeros(()), given[0], layer.weight.t())
        torch.testing.assert_close(layer(given)[0], want)
    assert products.widths[:2] == [40, 40]  # of x, then of y


@torch.inference_mode()
def test_weights_written_or_set_in_a_layer_are_used() -> None:
    module = running(Two())
    fuse_siblings(module)
    x = torch.randn(3, 8)

    def check() -> None:
        for layer in (module.first, module.second):
            want = torch.addmm(layer.bias, x, layer.weight.t())
            torch.testing.assert_close(layer(x), want)

    check()
    x = torch.randn(3, 8)
    module.second.weight.mul_(2)
    check()
    x = torch.randn(3, 8)
    module.first.weight.data = torch.randn(16, 8)
    module.second.bias.data = torch.randn(24)
    check()


@torch.inference_mode()
def test_copied_layers_use_their_own_weights() -> None:
    module = running(Two())
    fuse_siblings(module)
    x = torch.randn(3, 8)
    module.first(x)
    twin = copy.deepcopy(module)
    twin.first.weight.mul_(3)
    twin.second.weight.mul_(3)
    for one in (module, twin):
        for layer in (one.first, one.second):
            torch.testing.assert_close(layer(x), torch.addmm(layer.bias, x, layer.weight.t()))


class Doubling(torch.nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight * 2


def doubled(layer: Any) -> None:
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Doubling())


def turned(layer: Any) -> None:
    """The same numbers in the same place, in another order."""
    layer.weight.data = layer.weight.data.view(-1).as_strided(layer.weight.shape, (1, 16))


OTHERS: dict[str, Any] = {
    "a hook before": lambda layer: layer.register_forward_pre_hook(
        lambda module, given: (given[0].mul_(2), None)[1]
    ),
    "a hook behind": lambda layer: layer.register_forward_hook(
        lambda module, given, result: (given[0].mul_(2), None)[1]
    ),
    "a parametrised weight": doubled,
    "another order": turned,
    "no bias": lambda layer: setattr(layer, "bias", None),
    "another bias": lambda layer: setattr(layer, "bias", torch.nn.Parameter(torch.ones(16))),
    "another weight": lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.ones(16, 8))),
}


@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_changes_of_a_layer_count(change: str, *, has_bias: bool) -> None:
    """In the middle of a forward, and in the next. The first is the one that is changed."""
    torch.manual_seed(0)
    module = running(Two(bias=has_bias))
    fuse_siblings(module)
    twin = copy.deepcopy(module)
    for layer in (twin.first, twin.second):
        layer.__class__ = torch.nn.Linear
    x = torch.randn(1, 3, 8)
    with torch.no_grad():
        module.first(x), module.second(x)
        for pair in (module, twin):
            OTHERS[change](pair.first)
        for _ in range(2):
            actual = []
            for pair in (module, twin):
                given = x.clone()
                actual.append([layer(given) for layer in (pair.first, pair.second, pair.first)])
            for one, other in zip(*actual, strict=True):
                torch.testing.assert_close(one, other)


@torch.inference_mode()
def test_adapters_hooks_leave_them_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write to no input; other hooks may."""
    module = running(Two())
    fuse_siblings(module)
    products, x = Products(monkeypatch), torch.randn(3, 8)
    module.first.register_forward_hook(LoraAdapters(module)._hook("first"))
    module.first(x), module.second(x)
    assert products.widths == [40]
    module.second.register_forward_hook(lambda module, given, result: result)
    module.first(x), module.second(x)
    assert products.widths[1:] == [16, 24]


def test_outputs_are_released_after_the_last_layer() -> None:
    module = running(Two())
    fuse_siblings(module)
    with torch.inference_mode():
        x = torch.randn(3, 8)
        module.first(x), module.second(x)
    product = module.first.__dict__["weft_sibling"].product
    assert product._parts == {}
    del x
    assert product._input() is None


def test_layers_with_hooks_or_of_two_places_are_not_moved() -> None:
    model = build("gemma2")
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    attention.k_proj.register_forward_hook(lambda module, given, result: result * 2)
    mlp.up_proj.weight = mlp.gate_proj.weight
    places = [attention.k_proj.weight.data_ptr(), mlp.up_proj.weight.data_ptr()]
    weight_layout.merge_sibling_weights(model)
    assert [attention.k_proj.weight.data_ptr(), mlp.up_proj.weight.data_ptr()] == places
    others = [attention.q_proj.weight, attention.v_proj.weight]
    assert merged_linear.as_merged(others) is not None


def test_tensor_that_is_written_to_between_calls_is_not_the_same() -> None:
    model = build("gemma2")
    kind = type(model.model.layers[0].mlp)

    class Writing(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Any) -> Any:
            gate = self.act_fn(self.gate_proj(x))
            x += 1
            return self.down_proj(gate * self.up_proj(x))

    for layer in model.model.layers:
        layer.mlp.__class__ = Writing
    want = plain_logits(model, IDS).numpy()
    weight_layout.merge_sibling_weights(model)
    engine = opened(model.to(DEVICE))
    assert together(engine.model) == [["q_proj", "k_proj", "v_proj"]] * 3
    np.testing.assert_allclose(stepped(engine), want, atol=2e-4)


@pytest.mark.parametrize("name", ["cohere", "gemma3_text"])
def test_model_with_merged_weights_is_saved_completely(name: str, tmp_path: Path) -> None:
    model, plain = loaded(name), build(name)
    model.save_pretrained(tmp_path)
    repeated = type(model).from_pretrained(tmp_path)
    for key, weight in plain.state_dict().items():
        torch.testing.assert_close(repeated.state_dict()[key], weight)


def test_model_with_merged_weights_is_pickled() -> None:
    model = loaded("cohere")
    repeated = pickle.loads(pickle.dumps(model))
    assert isinstance(repeated.save_pretrained, weight_layout.UnmergedSave)
    assert repeated.save_pretrained._model() is repeated
    torch.testing.assert_close(repeated.state_dict(), model.state_dict())
