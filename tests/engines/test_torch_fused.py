"""The decoders that run without their modules: the same numbers, and modules where those matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cases import one_in  # noqa: E402
from families import FAMILIES, FUSED, IDS, build, plain_logits, stepped  # noqa: E402
from weft.engines.base import Row, ScoreSpan  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.check import check_paths  # noqa: E402
from weft.engines.torch.fused.decoder import FusedDecoder  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward without modules ran, in turn."""
    recorded: list[int] = []
    run = FusedDecoder.hidden

    def hidden(self: FusedDecoder, token_ids: Any, positions: Any) -> Any:
        recorded.append(token_ids.shape[1])
        return run(self, token_ids, positions)

    monkeypatch.setattr(FusedDecoder, "hidden", hidden)
    return recorded


def result(name: str, how: str, folder: Path) -> TorchEngine:
    if how == "handed over":
        return TorchEngine.adopt(build(name))
    build(name).save_pretrained(folder)
    return TorchEngine.load(folder)


@pytest.mark.parametrize("how", ["loaded", "handed over"])
@pytest.mark.parametrize("name", FUSED)
def test_logits_equal_those_of_the_model(name: str, how: str, tmp_path: Path, calls) -> None:
    engine = result(name, how, tmp_path)
    calls.clear()
    got = stepped(engine)
    assert calls == [6] + [1] * 6
    np.testing.assert_allclose(got, plain_logits(build(name), IDS).numpy(), atol=2e-4)


def test_biases_of_every_layer_count(tmp_path: Path, calls) -> None:
    torch.manual_seed(1)
    config = build("llama").config
    config.attention_bias = config.mlp_bias = True
    model = type(build("llama"))(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
    model.save_pretrained(tmp_path)
    for engine in (TorchEngine.load(tmp_path), TorchEngine.adopt(model)):
        calls.clear()
        np.testing.assert_allclose(stepped(engine), plain_logits(model, IDS).numpy(), atol=2e-4)
        assert calls


@pytest.mark.parametrize("how", ["written into", "put in its place"])
def test_another_bias_counts(how: str, tmp_path: Path, calls) -> None:
    """Of layers whose biases lie in one piece, and one of them is changed."""
    build("qwen2").save_pretrained(tmp_path)
    engine, plain = TorchEngine.load(tmp_path), build("qwen2")
    requested = [model.base_model.layers[1].self_attn for model in (engine.model, plain)]
    stored = [(each.q_proj.bias, each.k_proj.bias) for each in requested]
    assert stored[0][0].data_ptr() + stored[0][0].nbytes == stored[0][1].data_ptr()
    with torch.no_grad():
        fresh = torch.linspace(-2, 2, len(stored[0][1]))
        for attention, (_, bias) in zip(requested, stored, strict=True):
            if how == "written into":
                bias.copy_(fresh)
            else:
                attention.k_proj.bias = torch.nn.Parameter(fresh.clone())
    calls.clear()
    np.testing.assert_allclose(stepped(engine), plain_logits(plain, IDS).numpy(), atol=2e-4)
    assert calls


@pytest.mark.parametrize("name", one_in(4, sorted(set(FAMILIES) - set(FUSED))))
def test_models_it_does_not_know_run_their_modules(name: str, calls) -> None:
    TorchEngine.adopt(build(name)).forward([Row((), IDS, 0, None, (0,))])
    assert not calls


def test_model_with_hooks_or_a_forward_of_its_own_runs_its_modules(calls) -> None:
    doubled = build("llama")
    layer = doubled.model.layers[1].mlp
    layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    patched = build("llama")
    own = patched.model.layers[0].mlp.forward
    patched.model.layers[0].mlp.forward = lambda x: own(x) + 1
    for model in (doubled, patched):
        got = TorchEngine.adopt(model).forward([Row((), IDS, 0, None, (11,))]).logits(0)
        np.testing.assert_allclose(got, plain_logits(model, IDS)[-1].numpy(), atol=2e-4)
    assert not calls


class Stretched(torch.nn.Embedding):
    """Says something else of a token that no check at load asks about."""

    def forward(self, input: Any) -> Any:
        return super().forward(input) * torch.where(input == IDS[-1], 3.0, 1.0)[..., None]


class Packed(torch.nn.Module):
    """A linear layer as quantisers make them: no weight that could be read."""

    def __init__(self, of: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = of.in_features, of.out_features
        self.codes = of.weight

    def forward(self, x: Any) -> Any:
        return x @ self.codes.T


def test_modules_of_other_classes_run(calls) -> None:
    assert IDS[-1] not in check_paths(build("llama"))
    stretched, packed = build("llama"), build("qwen3")
    was = stretched.get_input_embeddings().weight
    stretched.set_input_embeddings(Stretched(*was.shape, _weight=was))
    for layer in packed.model.layers:
        layer.self_attn.q_proj = Packed(layer.self_attn.q_proj)
    for model in (stretched, packed):
        got = TorchEngine.adopt(model).forward([Row((), IDS, 0, None, (11,))]).logits(0)
        np.testing.assert_allclose(got, plain_logits(model, IDS)[-1].numpy(), atol=2e-4)
    assert not calls


def test_adapter_of_the_owners_counts_while_it_is_trained(calls) -> None:
    """A fresh one adds nothing, so that a look at the numbers does not show it."""
    peft = pytest.importorskip("peft")
    model = build("llama")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    peft.inject_adapter_in_model(config, model)
    engine = TorchEngine.adopt(model.eval())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_()
    np.testing.assert_allclose(stepped(engine), plain_logits(model, IDS).numpy(), atol=1e-3)
    assert not calls


@pytest.mark.parametrize("how", ["loaded", "handed over"])
def test_hook_on_the_engines_model_counts_from_when_it_is_there(
    how: str, tmp_path: Path, calls
) -> None:
    engine, twin = result("llama", how, tmp_path), build("llama")
    calls.clear()
    hooks = [
        model.model.layers[1].register_forward_hook(lambda module, inputs, output: 2 * output)
        for model in (engine.model, twin)
    ]
    np.testing.assert_allclose(stepped(engine), plain_logits(twin, IDS).numpy(), atol=2e-4)
    assert not calls
    for hook in hooks:
        hook.remove()
    np.testing.assert_allclose(stepped(engine), plain_logits(twin, IDS).numpy(), atol=2e-4)
    assert calls


def test_float16_runs_the_modules(tmp_path: Path, calls) -> None:
    build("llama").save_pretrained(tmp_path)
    TorchEngine.load(tmp_path, dtype="float16").forward([Row((), IDS, 0, None, (0,))])
    assert not calls


@pytest.mark.parametrize("name", FUSED)
def test_bfloat16_error_is_not_larger_than_that_of_the_modules(name: str, calls) -> None:
    want = plain_logits(build(name), IDS)
    model = build(name, torch.bfloat16)
    theirs = plain_logits(model, IDS) - want
    ours = torch.from_numpy(stepped(TorchEngine.adopt(model))) - want
    assert calls
    assert float(ours.square().mean()) < 1.5 * float(theirs.square().mean())


@pytest.mark.parametrize("how", ["loaded", "handed over"])
def test_weights_written_in_place_are_used(how: str, tmp_path: Path, calls) -> None:
    engine = result("qwen2", how, tmp_path)
    before = stepped(engine)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            for part in ("weight", "bias"):
                weight = getattr(getattr(engine.model.model.layers[1].self_attn, name), part)
                if weight is not None:
                    weight.mul_(1.5)
        engine.model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
        engine.model.model.norm.weight.mul_(1.25)
    after = stepped(engine)
    assert calls
    assert np.abs(after - before).max() > 0.01
    engine._fused = None  # the modules' own answer
    np.testing.assert_allclose(after, stepped(engine), atol=2e-4)


@pytest.mark.parametrize("how", ["data", "assign"])
def test_weights_that_others_take_the_place_of_count_no_more(
    how: str, tmp_path: Path, calls
) -> None:
    engine, other = result("qwen2", "loaded", tmp_path), build("qwen2", seed=1)
    if how == "data":
        for weight, new in zip(engine.model.parameters(), other.parameters(), strict=True):
            weight.data = new.data.clone()
    else:
        engine.model.load_state_dict(other.state_dict(), assign=True)
    calls.clear()
    np.testing.assert_allclose(stepped(engine), plain_logits(other, IDS).numpy(), atol=2e-4)
    assert calls


@pytest.mark.parametrize("which", ["k_proj", "v_proj"])
def test_separated_weights_are_multiplied_one_by_one(which: str, tmp_path: Path, calls) -> None:
    """One of a layer's was given another before an engine took the model over."""
    model = result("llama", "loaded", tmp_path).model
    torch.manual_seed(2)
    for layer in model.model.layers:
        linear = getattr(layer.self_attn, which)
        linear.weight = torch.nn.Parameter(torch.randn(linear.weight.shape))
    engine = TorchEngine.adopt(model)
    calls.clear()
    np.testing.assert_allclose(stepped(engine), plain_logits(model, IDS).numpy(), atol=2e-4)
    assert calls == [6] + [1] * 6


def test_scores_are_of_the_same_numbers(tmp_path: Path) -> None:
    engine = result("qwen3", "loaded", tmp_path)
    row = Row((), IDS, 0, None, (), (ScoreSpan(0, IDS[1:], 3),))
    ((score,),) = engine.forward([row]).scores()
    plain = plain_logits(build("qwen3"), IDS).log_softmax(-1)[:-1]
    want = plain[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])].numpy()
    np.testing.assert_allclose(score.logprobs, want, atol=1e-4)


def test_class_that_does_something_else_by_now_is_run_by_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check at load holds it against the model's own forward."""
    monkeypatch.setattr("weft.engines.torch.fused.decoder._normed", lambda x, norm: x)
    model = build("llama")
    engine = TorchEngine.adopt(model)
    got = engine.forward([Row((), IDS, 0, None, (11,))]).logits(0)
    np.testing.assert_allclose(got, plain_logits(model, IDS)[-1].numpy(), atol=2e-4)
