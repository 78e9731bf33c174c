"""16-bit weights that a CPU does not multiply: widened when used, stored once.

Which CPUs those are is set here, so that all run these, whatever they have themselves.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402

from families import IDS, build, plain_logits, stepped  # noqa: E402
from weft.engines.base import Row  # noqa: E402
from weft.engines.torch import TorchEngine, weight_layout  # noqa: E402
from weft.engines.torch.weights import experts, packed, upcast  # noqa: E402
from weft.engines.torch.weights.experts import PackedExperts  # noqa: E402
from weft.engines.torch.weights.packed import PackedConv1D, PackedLinear  # noqa: E402

pytestmark = pytest.mark.torch

HALF = [torch.bfloat16, torch.float16]
MUCH = {torch.bfloat16: 0.15, torch.float16: 0.02}
MODELS = [(name, dtype) for name in ("llama", "gpt2", "gemma2", "mamba") for dtype in HALF]
# In bfloat16 a last bit may choose another expert.
MODELS += [(name, torch.float16) for name in ("mixtral", "gpt_oss")]


@pytest.fixture
def old_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with no products of 16-bit numbers."""
    for module in (experts, weight_layout, packed):
        monkeypatch.setattr(module, "is_unpacked", lambda dtype: dtype in HALF)
    monkeypatch.setattr(weight_layout, "is_upcast", lambda dtype: dtype in HALF)


def stored(model) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def n_threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(24, 12), (700, 96), (1, 5), (64, 64), (130, 700)])
def test_product_is_that_of_float32_rounded_once(
    dtype, shape: tuple[int, int], n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any number of rows; by row and by column, in full blocks and their rest."""
    monkeypatch.setattr(upcast, "_BLOCK_BYTES", 1 << 14)
    n_out, n_in = shape
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(n_out, n_in, generator=generator).to(dtype)
    bias = torch.randn(n_out, generator=generator).to(dtype)
    for rows in [(n_in,), (0, n_in), (1, n_in), (3, n_in), (4, n_in), (33, n_in), (2, 3, n_in)]:
        x = torch.randn(*rows, 2, generator=generator)[..., 0].to(dtype)
        for stored in (weight, weight.t().contiguous().t()):
            for given in (bias, None):
                got = upcast.upcast_product(x, stored, given)
                wide = None if given is None else given.float()
                want = F.linear(x.float(), weight.float(), wide).to(dtype)
                assert (got.dtype, got.shape) == (dtype, want.shape)
                step = torch.finfo(dtype).eps
                torch.testing.assert_close(got, want, rtol=2 * step, atol=step * n_in**0.5)


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_loaded_and_handed_over_they_compute_what_the_model_does(
    name: str, dtype, tmp_path: Path, old_cpu: None, caplog
) -> None:
    model = build(name, dtype)
    model.save_pretrained(tmp_path)
    want = plain_logits(model, IDS).numpy()
    with caplog.at_level(logging.INFO, "weft.engines.torch"):
        loaded, handed = TorchEngine.load(tmp_path), TorchEngine.adopt(model)
    assert "in memory twice" not in caplog.text
    assert loaded.info.fingerprint == handed.info.fingerprint
    for engine in (loaded, handed):
        assert stored(engine.model)
        assert all(layer.weight.dtype == dtype for layer in stored(engine.model))
        got = engine.forward([Row((), IDS, 0, None, tuple(range(len(IDS))))])
        rows = np.stack([got.logits(i) for i in range(len(IDS))])
        np.testing.assert_allclose(rows, want, atol=MUCH[dtype])
        if engine.fragments is not None:
            np.testing.assert_allclose(stepped(engine), want, atol=MUCH[dtype])
    for layer in stored(handed.model):
        assert layer._packed.data_ptr() == layer._parameters["weight"].data_ptr()
    assert not stored(model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_weights_written_by_the_owner_are_used(name: str, old_cpu: None) -> None:
    model = build(name, torch.bfloat16)
    engine = TorchEngine.adopt(model)
    before = stepped(engine)
    mixtures = [m for m in engine.model.modules() if isinstance(m, PackedExperts)]
    assert bool(mixtures) == (name == "mixtral")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.75)
    want = plain_logits(model, IDS).numpy()
    assert np.abs(before - want).max() > MUCH[torch.bfloat16]
    np.testing.assert_allclose(stepped(engine), want, atol=MUCH[torch.bfloat16])
    other = build(name, torch.bfloat16, seed=1)
    for weight, new in zip(model.parameters(), other.parameters(), strict=True):
        weight.data = new.data
    want = plain_logits(other, IDS).numpy()
    np.testing.assert_allclose(stepped(engine), want, atol=MUCH[torch.bfloat16])


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_gradients_reach_an_owners_weights_through_the_engines_copy(
    name: str, old_cpu: None
) -> None:
    model, plain = build(name, torch.bfloat16), build(name, torch.bfloat16)
    engine = TorchEngine.adopt(model)
    for owner in (engine.model, plain):
        owner(torch.tensor([IDS])).logits.float().logsumexp(-1).sum().backward()
    got, want = (dict(each.named_parameters()) for each in (model, plain))
    assert any(weight.grad.any() for weight in want.values() if weight.grad is not None)
    for key, weight in want.items():
        torch.testing.assert_close(got[key].grad, weight.grad, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_loaded_model_is_run_with_gradients_too(name: str, tmp_path: Path, old_cpu: None) -> None:
    model = build(name, torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = TorchEngine.load(tmp_path).model
    with torch.enable_grad():
        got = loaded(torch.tensor([IDS])).logits
    assert got.requires_grad
    want = plain_logits(model, IDS)
    torch.testing.assert_close(got[0].detach().float(), want, atol=0.15, rtol=0)


def test_loaded_weight_of_gpt2_is_turned_once(tmp_path: Path, old_cpu: None) -> None:
    build("gpt2", torch.bfloat16).save_pretrained(tmp_path)
    turned = [m for m in stored(TorchEngine.load(tmp_path).model) if isinstance(m, PackedConv1D)]
    assert turned
    for layer in turned:
        assert layer._packed.stride(1) == 1
        assert layer._parameters.get("weight") is None


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_twice_false_skips_copies(name: str, old_cpu: None) -> None:
    model = build(name)  # in float32, which is multiplied
    assert not weight_layout.pack(model, keep=True, twice=False)
    assert not stored(model)
    assert not [m for m in model.modules() if isinstance(m, PackedExperts)]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_they_are_saved_and_loaded_into(name: str, tmp_path: Path, old_cpu: None) -> None:
    first, other = (build(name, torch.bfloat16, seed=seed) for seed in (0, 1))
    first.save_pretrained(tmp_path / "model")
    engine = TorchEngine.load(tmp_path / "model")
    engine.model.save_pretrained(tmp_path / "again")
    actual = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    for key, weight in first.state_dict().items():
        assert torch.equal(actual.state_dict()[key], weight), key
    engine.model.load_state_dict(other.state_dict())
    want = plain_logits(other, IDS).numpy()
    np.testing.assert_allclose(stepped(engine), want, atol=MUCH[torch.bfloat16])


def test_false_leaves_the_layers_as_they_are(tmp_path: Path, old_cpu: None) -> None:
    model = build("llama", torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert not stored(TorchEngine.load(tmp_path, packed_weights=False).model)
    assert not stored(TorchEngine.adopt(model, packed_weights=False).model)
    assert not stored(TorchEngine.adopt(build("llama")).model)  # float32 is multiplied


def test_only_what_this_cpu_does_not_multiply_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    def has(capability: str, bf16: bool) -> list[bool]:
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
            patch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: bf16)
            patch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
            return [upcast.is_upcast(d) for d in (torch.bfloat16, torch.float16, torch.float32)]

    assert has("AVX2", bf16=False) == [True, True, False]
    assert has("AVX2", bf16=True) == [False, True, False]
    assert has("AVX512", bf16=False) == [False, False, False]
    assert has("NEON", bf16=False) == [False, False, False]
