"""LoRA adapters on the torch engine agree with PEFT, and are never mixed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

# What PEFT itself warns of is not ours.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),
]
torch = pytest.importorskip("torch", reason="torch is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from families import build  # noqa: E402
from weft import AsyncLM, load  # noqa: E402
from weft.errors import ConfigError, ModelLoadError, StaleHandle, Unsupported  # noqa: E402

IDS = [5, 17, 33, 8, 90, 41]
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj", "o_proj"], "gpt2": ["c_attn", "c_proj"]}


def adapter(folder: Path, name: str, seed: int, **options):
    """Save a random adapter for a fresh copy of the model; return what it gives for IDS."""
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS[name], **options}
    wrapped = peft.get_peft_model(build(name).eval(), peft.LoraConfig(**options))
    for key, weight in wrapped.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(weight, std=0.2)
    wrapped.save_pretrained(folder)
    with torch.no_grad():
        return wrapped(torch.tensor([IDS])).logits[0, -1].log_softmax(-1).numpy()


def lm_of(name: str, text):
    return load(build(name).eval(), text.object)


@pytest.fixture(scope="module")
def text():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    from weft.tokens.tokenizer import Tokenizer

    backend = Backend(models.BPE({chr(40 + i): i for i in range(80)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer.wrap(backend)


@pytest.mark.parametrize("name", list(TARGETS))
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
def test_an_adapter_gives_what_peft_gives_and_the_model_alone_stays(
    tmp_path, text, name, options
) -> None:
    expected = adapter(tmp_path / "law", name, 1, **options)
    lm = lm_of(name, text)
    model = AsyncLM(lm, as_torch=False)
    alone = model.next_token_logprobs_sync(IDS)
    model.add_new_lora(str(tmp_path / "law"), "law")
    got = model.next_token_logprobs_sync(IDS, lora_name="law")
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert np.abs(got - alone).max() > 0.01
    np.testing.assert_array_equal(model.next_token_logprobs_sync(IDS), alone)
    lm.clear_cache()
    np.testing.assert_allclose(model.next_token_logprobs_sync(IDS), alone, atol=1e-6)


def test_two_adapters_and_the_model_alone_never_mix_in_a_gather(tmp_path, text) -> None:
    wanted = {name: adapter(tmp_path / name, "llama", n) for n, name in enumerate(("law", "med"))}
    lm = lm_of("llama", text)
    model = AsyncLM(lm, as_torch=False)
    alone = model.next_token_logprobs_sync(IDS)
    for name in wanted:
        model.add_new_lora(str(tmp_path / name), name)
    assert sorted(lm.adapters) == ["law", "med"]

    async def ask():
        names = [None, "law", "med"] * 4
        calls = [model.next_token_logprobs(IDS, lora_name=name) for name in names]
        return list(zip(names, await asyncio.gather(*calls), strict=True))

    for name, row in asyncio.run(ask()):
        np.testing.assert_allclose(row, alone if name is None else wanted[name], atol=1e-4)


def test_a_name_taken_again_forgets_what_the_first_computed(tmp_path, text) -> None:
    first, second = (adapter(tmp_path / str(n), "llama", n) for n in (3, 4))
    lm = lm_of("llama", text)
    model = AsyncLM(lm, as_torch=False)
    for n, expected in ((3, first), (4, second)):
        model.add_new_lora(str(tmp_path / str(n)), "law")
        np.testing.assert_allclose(
            model.next_token_logprobs_sync(IDS, lora_name="law"), expected, atol=1e-4
        )
    place = lm.place(IDS, namespace="law")
    held = lm.stats().kv_tokens
    model.remove_lora("law")
    assert lm.stats().kv_tokens < held
    with pytest.raises(ValueError, match="unknown LoRA adapter: 'law'; known are none"):
        model.next_token_logprobs_sync(IDS, lora_name="law")
    with pytest.raises(ConfigError, match="unknown LoRA adapter"):
        model.remove_lora("law")
    from weft.aio.tree import read_of

    ticket = lm.submit([read_of(place)])[0]
    lm.drive([ticket])
    with pytest.raises(StaleHandle, match="'law' was removed"):
        ticket.result()


def test_what_is_no_plain_adapter_of_this_model_is_refused(tmp_path, text) -> None:
    lm = lm_of("llama", text)
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json"):
        lm.adapters.add(lm, "x", tmp_path)
    adapter(tmp_path / "gpt2", "gpt2", 1)
    with pytest.raises(ConfigError, match="of another model"):
        lm.adapters.add(lm, "x", tmp_path / "gpt2")
    adapter(tmp_path / "dora", "llama", 1, use_dora=True)
    with pytest.raises(Unsupported, match="use_dora"):
        lm.adapters.add(lm, "x", tmp_path / "dora")
    config = tmp_path / "dora" / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(Unsupported, match="IA3"):
        lm.adapters.add(lm, "x", tmp_path / "dora")
    with pytest.raises(ConfigError, match="name is ''"):
        lm.adapters.add(lm, "", tmp_path)
    assert not list(lm.adapters)
    tiny = load("tiny")
    with pytest.raises(Unsupported, match="numpy engine runs no LoRA"):
        tiny.adapters.add(tiny, "x", tmp_path)
