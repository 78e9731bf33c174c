"""The decoders that run without their modules: the same numbers, and modules where those matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import FAMILIES, build, plain_logits  # noqa: E402
from weft.engines.base import Row, ScoreSpan, Span  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.fused import FusedDecoder  # noqa: E402

pytestmark = pytest.mark.torch

FUSED = ("llama", "mistral", "qwen2", "qwen3")
IDS = [5, 9, 40, 7, 33, 2, 61, 18, 12, 50, 3, 44]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward without modules ran, in turn."""
    seen: list[int] = []
    run = FusedDecoder.hidden

    def hidden(self: FusedDecoder, token_ids: Any, positions: Any) -> Any:
        seen.append(token_ids.shape[1])
        return run(self, token_ids, positions)

    monkeypatch.setattr(FusedDecoder, "hidden", hidden)
    return seen


def made(name: str, how: str, folder: Path) -> TorchEngine:
    if how == "handed over":
        return TorchEngine.adopt(build(name))
    build(name).save_pretrained(folder)
    return TorchEngine.load(folder)


def stepped(engine: TorchEngine) -> np.ndarray:
    """All rows of IDS: a prefill, then token by token in a tail of its own."""
    trunk, tail = engine.fragments.new(None), engine.fragments.new(None)
    first = engine.forward([Row((), IDS[:6], 0, trunk, tuple(range(6)))])
    rows = [first.logits(i) for i in range(6)]
    for n in range(6, len(IDS)):
        row = Row((Span(trunk, 6),), IDS[n : n + 1], n, tail, (0,))
        rows.append(engine.forward([row]).logits(0))
    return np.stack(rows)


@pytest.mark.parametrize("how", ["loaded", "handed over"])
@pytest.mark.parametrize("name", FUSED)
def test_it_computes_what_the_model_does(name: str, how: str, tmp_path: Path, calls) -> None:
    engine = made(name, how, tmp_path)
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


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(FUSED)))
def test_models_it_does_not_know_run_their_modules(name: str, calls) -> None:
    TorchEngine.adopt(build(name)).forward([Row((), IDS, 0, None, (0,))])
    assert not calls


def test_a_model_with_hooks_or_a_forward_of_its_own_runs_its_modules(calls) -> None:
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_the_modules(dtype: str, tmp_path: Path, calls) -> None:
    build("llama").save_pretrained(tmp_path)
    TorchEngine.load(tmp_path, dtype=dtype).forward([Row((), IDS, 0, None, (0,))])
    assert not calls


@pytest.mark.parametrize("how", ["loaded", "handed over"])
def test_what_is_written_into_the_weights_counts(how: str, tmp_path: Path, calls) -> None:
    engine = made("qwen2", how, tmp_path)
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


def test_scores_are_of_the_same_numbers(tmp_path: Path) -> None:
    engine = made("qwen3", "loaded", tmp_path)
    row = Row((), IDS, 0, None, (), (ScoreSpan(0, IDS[1:], 3),))
    ((score,),) = engine.forward([row]).scores()
    plain = plain_logits(build("qwen3"), IDS).log_softmax(-1)[:-1]
    want = plain[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])].numpy()
    np.testing.assert_allclose(score.logprobs, want, atol=1e-4)


def test_a_class_that_does_something_else_by_now_is_run_by_its_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check at load holds it against the model's own forward."""
    monkeypatch.setattr("weft.engines.torch.fused._normed", lambda x, norm: x)
    model = build("llama")
    engine = TorchEngine.adopt(model)
    got = engine.forward([Row((), IDS, 0, None, (11,))]).logits(0)
    np.testing.assert_allclose(got, plain_logits(model, IDS)[-1].numpy(), atol=2e-4)
