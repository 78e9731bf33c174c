"""Models with PEFT layers inside that their owner hands over, and switches afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.torch,
    # What PEFT itself warns of is not ours.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),
]

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="peft is not installed")

import weft  # noqa: E402
from families import build, plain_logits  # noqa: E402
from shallow import shallow  # noqa: E402
from weft import AsyncLM  # noqa: E402
from weft._core.tokens.tokenizer import Tokenizer  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.errors import ForwardError, Unsupported  # noqa: E402

IDS = [(i * i * 5 + 11 * i + 3) % 117 + 3 for i in range(30)]
TARGETS = {
    "llama": ["q_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "mamba": ["in_proj"],
    "rwkv": ["key"],
}


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.from_folder(shallow())


def adapted(family: str) -> Any:
    """A PEFT model with two adapters that both say something; the first one is active."""
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=TARGETS[family])
    wrapped = peft.get_peft_model(build(family), config, adapter_name="one")
    wrapped.add_adapter("two", config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return wrapped.eval()


def off(lm: weft.LM, model: Any, ids: list[int]) -> float:
    """How far a row is from the model's own."""
    want = plain_logits(model, ids)[-1].log_softmax(-1).numpy()
    got = AsyncLM(lm, as_torch=False).next_token_logprobs_sync(ids)
    return float(np.abs(got - want).max())


@contextmanager
def _other(wrapped: Any) -> Iterator[None]:
    wrapped.set_adapter("two")
    yield
    wrapped.set_adapter("one")


@contextmanager
def _merged(wrapped: Any) -> Iterator[None]:
    wrapped.merge_adapter()
    yield
    wrapped.unmerge_adapter()


WAYS: list[Callable[[Any], Any]] = [_other, _merged, lambda m: m.disable_adapter()]


@pytest.mark.parametrize("switch", WAYS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba", "rwkv"])
def test_switched_adapters_raise_until_they_are_switched_back(
    text: Tokenizer, family: str, switch: Callable[[Any], Any]
) -> None:
    """Each layer of the engine's copy has switches of its own: it went on with them in silence."""
    wrapped = adapted(family)
    model = wrapped.get_base_model()
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        assert off(lm, model, IDS) < 1e-3
        for _ in range(2):  # cached rows are not returned, either
            with switch(wrapped):
                for ids in (IDS, [*IDS, 5]):
                    with pytest.raises(ForwardError, match="PEFT adapters of .* were switched"):
                        AsyncLM(lm).next_token_logprobs_sync(ids)
            assert off(lm, model, IDS) < 1e-3


def test_changes_of_inactive_adapters_are_allowed(text: Tokenizer) -> None:
    wrapped = adapted("llama")
    model = wrapped.get_base_model()
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        for change in (
            lambda: wrapped.set_adapter("one"),
            lambda: wrapped.add_adapter("three", wrapped.peft_config["one"]),
            lambda: wrapped.train().eval(),
        ):
            change()
            assert off(lm, model, IDS) < 1e-3


@pytest.mark.parametrize("state", ["merged", "disabled"])
def test_model_is_run_as_its_adapters_were_switched_at_load(text: Tokenizer, state: str) -> None:
    wrapped = adapted("llama")
    model = wrapped.get_base_model()
    if state == "merged":
        wrapped.merge_adapter()
    else:
        wrapped.base_model.disable_adapter_layers()
    with weft.LM(TorchEngine.adopt(model), text) as lm:
        assert off(lm, model, IDS) < 1e-3


def test_adapters_that_a_forward_would_unmerge_are_unsupported() -> None:
    """The engine's copy would take them out of the shared weights, and the owner's once more."""
    wrapped = adapted("llama")
    model = wrapped.get_base_model()
    wrapped.merge_adapter()
    wrapped.base_model.disable_adapter_layers()
    before = model.model.layers[0].self_attn.q_proj.base_layer.weight.clone()
    with pytest.raises(Unsupported, match=r"merged and disabled.* call unmerge_adapter\(\) first"):
        TorchEngine.adopt(model)
    assert torch.equal(model.model.layers[0].self_attn.q_proj.base_layer.weight, before)
