"""What the owner of a model does beside an engine that runs it: trains it, and casts."""

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
def test_a_step_of_an_optimizer_is_noticed(text: Tokenizer, kind: str, how: dict[str, Any]) -> None:
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


def test_an_optimizer_of_another_model_is_none_of_its_business() -> None:
    one, other = build("llama"), build("llama")
    engine = TorchEngine.adopt(one)
    mark = engine.weights_version()
    train(other, torch.optim.AdamW(other.parameters(), fused=True))
    assert engine.weights_version() == mark


def test_a_count_of_steps_ends_with_its_engine() -> None:
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
def test_a_callers_autocast_is_the_callers_own(text: Tokenizer, name: str) -> None:
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
def test_a_callers_default_device_is_the_callers_own(text: Tokenizer, name: str, kv: Any) -> None:
    """As after `torch.set_default_device("cuda")`; "meta", which has no values, stands for it."""
    model = build(name)
    try:
        torch.set_default_device("meta")
        engine = TorchEngine.adopt(model, kv=kv)
        assert engine.info.kv == ("hidden" if name == "mamba" else "addressable")
        with weft.LM(engine, text) as lm:
            rows = AsyncLM(lm, as_torch=False)
            found = [rows.next_token_logprobs_sync(IDS[:n]) for n in (20, 25)]
            grown = weft.Loom(lm, IDS[:10]).grow(n=2, max_tokens=4, seed=1, top_k=8)
            kept = rows.batch_next_token_logprobs_sync([IDS[:7], IDS[:9], IDS[:11]])
            torch.set_default_device(None)
            for n, row in zip((20, 25, 7, 9, 11), (*found, *kept), strict=True):
                want = plain_logits(model, IDS[:n])[-1].log_softmax(-1).numpy()
                assert np.abs(row - want).max() < 1e-3
            assert off(lm, model, grown[0].get_prefix_tokens()) < 1e-3
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_loaded_in_inference_mode_is_one_that_can_be_trained(dtype: str) -> None:
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


def _assigned(model: Any) -> None:
    model.load_state_dict(build("llama").state_dict(), assign=True)


def _another_head(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.3)


def _another_module(model: Any) -> None:
    model.model.layers[1].mlp = build("llama").model.layers[1].mlp


def _resized(model: Any) -> None:
    model.resize_token_embeddings(150)


@pytest.mark.parametrize("change", [_assigned, _another_head, _another_module, _resized])
def test_what_an_owner_replaces_is_told(text: Tokenizer, change: Any) -> None:
    """The engine's copy shares what was there: it would go on with that in silence."""
    model = build("llama")
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        assert off(lm, model, IDS) < 1e-3
        change(model)
        for ids in (IDS, [*IDS, 5]):
            with pytest.raises(ForwardError, match="was replaced by another after"):
                AsyncLM(lm).next_token_logprobs_sync(ids)
        with pytest.raises(ForwardError, match="load the model again"):
            weft.Loom(lm, IDS[:10]).grow(max_tokens=2)
    with weft.LM(TorchEngine.adopt(model), text) as again:
        assert off(again, model, IDS) < 1e-3


def test_what_is_put_back_is_run_again_and_told_again_when_it_is_gone(text: Tokenizer) -> None:
    model = build("llama")
    was = model.model.layers[1].mlp
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        for _ in range(2):
            assert off(lm, model, IDS) < 1e-3
            _another_module(model)
            with pytest.raises(ForwardError, match="or put back what was there"):
                AsyncLM(lm).next_token_logprobs_sync(IDS)
            model.model.layers[1].mlp = was


def test_what_leaves_a_models_parts_where_they_are_is_no_replacement(text: Tokenizer) -> None:
    model = build("llama")
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        for change in (
            lambda: model.train().eval(),
            lambda: model.load_state_dict(build("qwen2").state_dict(), strict=False),
            lambda: model.tie_weights(),
            lambda: model.requires_grad_(False).requires_grad_(True),
        ):
            change()
            assert off(lm, model, IDS) < 1e-3


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_model_that_was_converted_and_turned_back_has_rounded_what_is_not_saved(
    text: Tokenizer, name: str
) -> None:
    """Its weights are shared; rotary frequencies are the copy's own, and kept their digits."""
    model = build(name)
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        assert off(lm, model, IDS) < 1e-3
        model.bfloat16()
        with pytest.raises(ForwardError, match=r"is torch.bfloat16 .* load the model again$"):
            AsyncLM(lm).next_token_logprobs_sync(IDS)
        model.float()
        for ids in (IDS, [*IDS, 5]):
            with pytest.raises(ForwardError, match="(inv_freq|scale) of the model .* turned back"):
                AsyncLM(lm).next_token_logprobs_sync(ids)
    with weft.LM(TorchEngine.adopt(model), text) as again:
        assert off(again, model, IDS) < 1e-3


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_that_was_converted_and_says_the_same_as_the_engine_is_run(
    text: Tokenizer, name: str
) -> None:
    model = build(name)
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        assert off(lm, model, IDS) < 1e-3
        if name == "gpt2":  # it has no frequencies
            model.bfloat16().float()
        else:
            model.double().float()
        assert off(lm, model, IDS) < 1e-3


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


def steered(name: str) -> tuple[Any, _Steered]:
    model = build(name)
    layers, n = model.base_model.layers, model.config.hidden_size
    layers[1] = _Steered(layers[1], n)
    return model, layers[1]


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_an_owners_vectors_count_as_weights(text: Tokenizer, name: str) -> None:
    model, layer = steered(name)
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        assert off(lm, model, IDS) < 1e-3
        before = plain_logits(model, IDS)[-1]
        layer.vector.copy_(torch.linspace(-3, 3, len(layer.vector)))
        assert (plain_logits(model, IDS)[-1] - before).abs().max() > 0.1
        assert off(lm, model, IDS) < 1e-3
        layer.vector.zero_()
        assert off(lm, model, [*IDS, 5]) < 1e-3

        layer.vector = torch.ones(len(layer.vector))
        with pytest.raises(ForwardError, match=r"layers\.1\.vector of the model was replaced"):
            AsyncLM(lm).next_token_logprobs_sync(IDS)


def test_a_buffer_that_the_model_writes_as_it_runs_is_no_weight(text: Tokenizer) -> None:
    model, layer = steered("llama")
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        loom, before = weft.Loom(lm, IDS), layer.n_called.item()
        loom.grow(max_tokens=3)
        loom.grow(max_tokens=3)
        assert layer.n_called > before
        assert lm.stats().prefilled == len(IDS)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_a_closed_lm_has_no_cache_and_its_branches_are_stale(text: Tokenizer, name: str) -> None:
    lm = weft.LM(TorchEngine.adopt(build(name)), text)
    branch = weft.Branch.create(lm, seed=1)
    branch.prefill(IDS)
    lm.close()
    lm.clear_cache()
    AsyncLM(lm).clear_cache()
    with pytest.raises(StaleHandle):
        branch.produce()


class _Recorder:
    """A tool of the owner's that looks at a layer, with what no copy can be made of."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.lock = threading.Lock()

    def see(self, module: Any, given: Any, out: Any) -> None:
        with self.lock:
            self.seen.append(out.shape[-2])


def _look(store: list[int], module: Any, given: Any) -> None:
    store.append(given[0].shape[-2])


def test_an_owners_hooks_keep_what_they_see_where_the_owner_looks(text: Tokenizer) -> None:
    """Weft runs a copy of the modules; a hook's own object is none of the model's parts."""
    model, recorder, store = build("llama"), _Recorder(), []
    model.model.layers[1].mlp.register_forward_hook(recorder.see)
    model.model.layers[0].mlp.register_forward_pre_hook(functools.partial(_look, store))
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        recorder.seen.clear()
        store.clear()
        AsyncLM(lm).next_token_logprobs_sync(IDS)
        assert recorder.seen == store == [len(IDS)]


def test_a_hook_that_is_the_models_own_sees_the_copy() -> None:
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


def _pull(module: Any, given: Any, out: Any) -> Any:
    return out + torch.linspace(-3, 3, out.shape[-1])


def _push(module: Any, given: Any) -> Any:
    return (given[0] * 1.5,)


HOOKING = {
    "behind": lambda layer: layer.register_forward_hook(_pull),
    "behind, always": lambda layer: layer.register_forward_hook(_pull, always_call=True),
    "behind, with keywords": lambda layer: layer.register_forward_hook(
        lambda module, given, keywords, out: _pull(module, given, out), with_kwargs=True
    ),
    "before": lambda layer: layer.register_forward_pre_hook(_push),
    "before, with keywords": lambda layer: layer.register_forward_pre_hook(
        lambda module, given, keywords: (_push(module, given), keywords), with_kwargs=True
    ),
}


NORMS = {
    "llama": "model.layers.1.input_layernorm",
    "mamba": "backbone.layers.1.norm",
    "rwkv": "rwkv.blocks.1.ln1",
}


@pytest.mark.parametrize("how", HOOKING)
@pytest.mark.parametrize("name", NORMS)
def test_hooks_that_an_owner_puts_on_or_takes_off_are_told(
    text: Tokenizer, name: str, how: str
) -> None:
    """The engine's copy has those of the load, and went on with them in silence."""
    model = build(name)
    norm = model.get_submodule(NORMS[name])
    hook = HOOKING[how](norm)
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        assert off(lm, model, IDS) < 1e-3
        hook.remove()
        for ids in (IDS, [*IDS, 5]):
            with pytest.raises(ForwardError, match="the hooks on .* became others after"):
                AsyncLM(lm).next_token_logprobs_sync(ids)
        if "keywords" not in how:  # the same one again
            HOOKING[how](norm)
            assert off(lm, model, IDS) < 1e-3
    norm._forward_hooks.clear()
    norm._forward_pre_hooks.clear()
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        for _ in range(2):
            assert off(lm, model, IDS) < 1e-3
            hook = HOOKING[how](norm)
            with pytest.raises(ForwardError, match="or put back what was there"):
                AsyncLM(lm).next_token_logprobs_sync(IDS)
            hook.remove()


def test_hooks_in_another_order_or_of_the_whole_model_are_told(text: Tokenizer) -> None:
    model = build("llama")
    model.lm_head.register_forward_hook(_pull)
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        for module in (model.lm_head, model):
            hook = module.register_forward_hook(lambda *_: None, prepend=True)
            with pytest.raises(ForwardError, match="the hooks on (lm_head|the model) became"):
                AsyncLM(lm).next_token_logprobs_sync(IDS)
            hook.remove()
            assert off(lm, model, IDS) < 1e-3


def test_hooks_that_transformers_puts_there_say_nothing(text: Tokenizer) -> None:
    """It leaves those behind that gave hidden states, and has some for training."""
    model = build("llama")
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        model(input_ids=torch.tensor([IDS]), output_hidden_states=True)
        assert any(each._forward_hooks for each in model.modules())
        assert off(lm, model, IDS) < 1e-3
        model.enable_input_require_grads()
        assert off(lm, model, [*IDS, 5]) < 1e-3
        hook = model.model.layers[1].register_forward_hook(_look)
        with pytest.raises(ForwardError, match=r"the hooks on model\.layers\.1 became"):
            AsyncLM(lm).next_token_logprobs_sync(IDS)
        hook.remove()
        model.disable_input_require_grads()
        assert off(lm, model, [*IDS, 7]) < 1e-3


def test_a_hook_that_looks_at_where_a_token_stands_is_told_at_load() -> None:
    model = build("llama")

    def pull_last(module: Any, given: Any, out: Any) -> Any:
        out = out.clone()
        out[:, -1] += 3
        return out

    hook = model.model.layers[1].mlp.register_forward_hook(pull_last)
    with pytest.raises(Unsupported, match=r"it has hooks on model\.layers\.1\.mlp, .* take such"):
        TorchEngine.adopt(model)
    hook.remove()
    TorchEngine.adopt(model).close()


def test_what_cannot_be_copied_is_named() -> None:
    model = build("llama")
    model.model.layers[1].lock = threading.Lock()
    model.writer = open(__file__)
    try:
        told = r"for what is in writer, model\.layers\.1\.lock: .*take that off the model"
        with pytest.raises(Unsupported, match=told):
            TorchEngine.adopt(model)
    finally:
        model.writer.close()
    del model.writer, model.model.layers[1].lock
    TorchEngine.adopt(model).close()


@pytest.mark.parametrize("is_packed", [None, True])
def test_what_is_kept_of_a_tip_is_none_of_weights_before_also_beside_a_run(
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
