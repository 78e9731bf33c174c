"""An owner trains or casts a model while an engine runs it."""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
import types
import weakref
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch.optim.optimizer import _global_optimizer_post_hooks as HOOKS  # noqa: E402

import weft  # noqa: E402
from families import build, plain_logits  # noqa: E402
from shallow import shallow  # noqa: E402
from weft import AsyncLM  # noqa: E402
from weft._core.tokens.tokenizer import Tokenizer  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.errors import ForwardError, StaleHandle, Unsupported  # noqa: E402

pytestmark = pytest.mark.torch
IDS = [(i * i * 5 + 11 * i + 3) % 117 + 3 for i in range(30)]


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.from_folder(shallow())


def off(lm: weft.LM, model: Any, ids: list[int]) -> float:
    """How far a row is from the model's own."""
    want = plain_logits(model, ids)[-1].log_softmax(-1).numpy()
    got = AsyncLM(lm, as_torch=False).next_token_logprobs_sync(ids)
    return float(np.abs(got - want).max())


def train(model: Any, optimizer: Any) -> None:
    ids = torch.tensor([IDS])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_step_of_an_optimizer_is_noticed(text: Tokenizer, kind: str, how: dict[str, Any]) -> None:
    """Fused ones write what PyTorch does not count."""
    model = build("llama")
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **how)
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        before = plain_logits(model, IDS)[-1]
        assert off(lm, model, IDS) < 1e-3
        train(model, optimizer)
        assert (plain_logits(model, IDS)[-1] - before).abs().max() > 0.1
        assert off(lm, model, IDS) < 1e-3
        train(model, optimizer)
        assert off(lm, model, [*IDS, 5]) < 1e-3


def test_optimizer_of_another_model_does_not_change_the_version() -> None:
    one, other = build("llama"), build("llama")
    engine = TorchEngine.adopt(one)
    mark = engine.weights_version()
    train(other, torch.optim.AdamW(other.parameters(), fused=True))
    assert engine.weights_version() == mark


def test_optimizer_hook_is_removed_with_its_engine() -> None:
    before = len(HOOKS)
    closed, dropped = TorchEngine.adopt(build("llama")), TorchEngine.adopt(build("llama"))
    assert len(HOOKS) == before + 2
    closed.close()
    assert len(HOOKS) == before + 1
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None
    assert len(HOOKS) == before


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral", "mamba"])
def test_callers_autocast_is_the_callers_own(text: Tokenizer, name: str) -> None:
    """Its KV would be of another dtype, and stay for who comes after."""
    model = build(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine = TorchEngine.adopt(model)
    assert engine.info.kv == ("hidden" if name == "mamba" else "addressable")
    with weft.LM(engine, text) as lm:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = AsyncLM(lm, as_torch=False)
            inside = [rows.next_token_logprobs_sync(IDS[:n]) for n in (20, 25)]
            grown = weft.Loom(lm, IDS[:10]).grow(n=2, max_tokens=4, seed=1)
        for n, row in zip((20, 25), inside, strict=True):
            want = plain_logits(model, IDS[:n])[-1].log_softmax(-1).numpy()
            assert np.abs(row - want).max() < 1e-3
        assert off(lm, model, IDS) < 1e-3
        assert off(lm, model, grown[0].get_prefix_tokens()) < 1e-3


PAGED = pytest.param("mixtral", "paged", marks=pytest.mark.kernels)


@pytest.mark.parametrize(
    ("name", "kv"), [*((name, "auto") for name in ("llama", "gemma2", "gpt2", "mamba")), PAGED]
)
def test_callers_default_device_is_the_callers_own(text: Tokenizer, name: str, kv: Any) -> None:
    """As after `torch.set_default_device("cuda")`; "meta", which has no values, stands for it."""
    model = build(name)
    try:
        torch.set_default_device("meta")
        engine = TorchEngine.adopt(model, kv=kv)
        assert engine.info.kv == ("hidden" if name == "mamba" else "addressable")
        with weft.LM(engine, text) as lm:
            rows = AsyncLM(lm, as_torch=False)
            actual = [rows.next_token_logprobs_sync(IDS[:n]) for n in (20, 25)]
            grown = weft.Loom(lm, IDS[:10]).grow(n=2, max_tokens=4, seed=1, top_k=8)
            kept = rows.batch_next_token_logprobs_sync([IDS[:7], IDS[:9], IDS[:11]])
            torch.set_default_device(None)
            for n, row in zip((20, 25, 7, 9, 11), (*actual, *kept), strict=True):
                want = plain_logits(model, IDS[:n])[-1].log_softmax(-1).numpy()
                assert np.abs(row - want).max() < 1e-3
            assert off(lm, model, grown[0].get_prefix_tokens()) < 1e-3
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_loaded_in_inference_mode_is_one_that_can_be_trained(dtype: str) -> None:
    """PyTorch 2.11 could not even run it: its weights had been laid otherwise."""
    with torch.inference_mode():
        engine = TorchEngine.load(shallow(), dtype=dtype)
    state = [*engine.model.parameters(), *engine.model.buffers()]
    assert not any(tensor.is_inference() for tensor in state)
    with weft.LM(engine, Tokenizer.from_folder(shallow())) as lm:
        model = engine.model
        assert off(lm, model, IDS) < (1e-3 if dtype == "float32" else 0.1)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(1.1)
        assert off(lm, model, IDS) < (1e-3 if dtype == "float32" else 0.1)


def test_call_on_converted_model_raises_forward_error(text: Tokenizer) -> None:
    model = build("llama")
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        assert off(lm, model, IDS) < 1e-3
        model.bfloat16()
        with pytest.raises(ForwardError, match="when it was loaded and is .* load the model again"):
            AsyncLM(lm).next_token_logprobs_sync(IDS)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_model_converted_and_back_is_run(text: Tokenizer, name: str) -> None:
    model = build(name)
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        assert off(lm, model, IDS) < 1e-3
        model.double().float()
        assert off(lm, model, IDS) < 1e-3


def test_copy_of_model_with_a_lock_is_unsupported() -> None:
    model = build("llama")
    model.lock = threading.Lock()
    with pytest.raises(Unsupported, match=r"cannot be copied: .*lock.* remove the attribute"):
        TorchEngine.adopt(model)


class _Steered(torch.nn.Module):
    """A layer with a vector of the owner's behind it, saved with the weights, and a count."""

    def __init__(self, layer: Any, n: int) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("vector", torch.zeros(n))
        self.register_buffer("n_called", torch.zeros(()))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.n_called += 1
        return self.layer(*args, **kwargs) + self.vector


def with_biases(name: str) -> tuple[Any, _Steered]:
    model = build(name)
    layers, n = model.base_model.layers, model.config.hidden_size
    layers[1] = _Steered(layers[1], n)
    return model, layers[1]


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_saved_buffers_count_as_weights(text: Tokenizer, name: str) -> None:
    model, layer = with_biases(name)
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        assert off(lm, model, IDS) < 1e-3
        before = plain_logits(model, IDS)[-1]
        layer.vector.copy_(torch.linspace(-3, 3, len(layer.vector)))
        assert (plain_logits(model, IDS)[-1] - before).abs().max() > 0.1
        assert off(lm, model, IDS) < 1e-3
        layer.vector.zero_()
        assert off(lm, model, [*IDS, 5]) < 1e-3


def test_buffer_that_the_model_writes_is_not_a_weight(text: Tokenizer) -> None:
    model, layer = with_biases("llama")
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        loom, before = weft.Loom(lm, IDS), layer.n_called.item()
        loom.grow(max_tokens=3)
        loom.grow(max_tokens=3)
        assert layer.n_called > before
        assert lm.stats().prefilled == len(IDS)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_closed_lm_has_no_cache_and_its_branches_are_stale(text: Tokenizer, name: str) -> None:
    lm = weft.LM(TorchEngine.adopt(build(name)), text)
    branch = weft.Branch.create(lm, seed=1)
    branch.prefill(IDS)
    lm.close()
    lm.clear_cache()
    AsyncLM(lm).clear_cache()
    with pytest.raises(StaleHandle):
        branch.produce()


def test_model_with_replaced_weights_is_run_after_close_and_load(text: Tokenizer) -> None:
    model = build("llama")
    lm = weft.load(model, text)
    assert weft.load(model, text) is lm
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.roll(1, 0))
    lm.close()
    with weft.load(model, text) as reloaded:
        assert off(reloaded, model, IDS) < 1e-3


class _Recorder:
    """A tool of the owner that observes a layer and has a member that cannot be copied."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.lock = threading.Lock()

    def see(self, module: Any, given: Any, out: Any) -> None:
        with self.lock:
            self.sizes.append(out.shape[-2])


def _look(store: list[int], module: Any, given: Any) -> None:
    store.append(given[0].shape[-2])


def test_hooks_of_the_user_store_into_the_users_objects(text: Tokenizer) -> None:
    """Weft runs a copy of the modules; a hook's own object is none of the model's parts."""
    model, recorder, store = build("llama"), _Recorder(), []
    model.model.layers[1].mlp.register_forward_hook(recorder.see)
    model.model.layers[0].mlp.register_forward_pre_hook(functools.partial(_look, store))
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        recorder.sizes.clear()
        store.clear()
        AsyncLM(lm).next_token_logprobs_sync(IDS)
        assert recorder.sizes == store == [len(IDS)]


def test_hook_bound_to_a_module_is_copied() -> None:
    """One that is bound to a layer changes that layer's state; the owner's is not touched."""
    model = build("llama")
    layer = model.model.layers[1]
    layer.n_calls = 0

    def count(self: Any, module: Any, given: Any, out: Any) -> None:
        self.n_calls += 1

    layer.mlp.register_forward_hook(types.MethodType(count, layer))
    engine = TorchEngine.adopt(model)
    assert layer.n_calls == 0
    assert engine.model.model.layers[1].n_calls > 0


def test_hook_that_depends_on_the_token_index_is_unsupported() -> None:
    model = build("llama")

    def pull_last(module: Any, given: Any, out: Any) -> Any:
        out = out.clone()
        out[:, -1] += 3
        return out

    hook = model.model.layers[1].mlp.register_forward_hook(pull_last)
    with pytest.raises(Unsupported, match=r"it has hooks on model\.layers\.1\.mlp, .* remove such"):
        TorchEngine.adopt(model)
    hook.remove()
    TorchEngine.adopt(model).close()


@pytest.mark.parametrize("is_packed", [None, True])
def test_results_after_a_weight_change_use_the_new_weights_during_a_run(
    text: Tokenizer, is_packed: bool | None
) -> None:
    """While something runs nothing can be forgotten; who asks waits for that, as new work does."""
    model = build("llama")
    engine = TorchEngine.adopt(model, packed_weights=is_packed)
    with weft.LM(engine, text) as lm, weft.Branch.create(lm) as branch:
        exact = AsyncLM(lm, strict=True, as_torch=False)
        branch.prefill(IDS)
        no_end = {token: float("-inf") for token in text.stop_ids}
        loom = weft.Loom(lm, IDS[:10], template=False)
        for ask in (
            lambda: exact.next_token_logprobs_sync(IDS),
            lambda: asyncio.run(exact.next_token_logprobs_uncached(IDS)),
            lambda: torch.from_numpy(branch.logits).log_softmax(-1).numpy(),
            lambda: (weft.BranchStore(lm).produce([branch]), branch.logits)[1],
        ):
            ask()
            stream = loom.stream(n=2, max_tokens=60, logit_bias=no_end)
            next(stream)
            with torch.no_grad():
                model.lm_head.weight.mul_(-1.1)
            want = plain_logits(model, IDS)[-1].log_softmax(-1)
            got = torch.from_numpy(np.asarray(ask())).log_softmax(-1)
            assert float((got - want).abs().max()) < 1e-3
            assert sum(len(delta.token_ids) for delta in stream) > 60  # it went on to its end
