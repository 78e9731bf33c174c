"""LoRA adapters on the torch engine agree with PEFT, and are never mixed."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from pathlib import Path

import numpy as np
import pytest

# What PEFT itself warns of is not ours.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.filterwarnings("ignore:aLoRA is"),
]
torch = pytest.importorskip("torch", reason="torch is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from families import build  # noqa: E402
from loopback_hub import Repo, point_at, serve  # noqa: E402
from weft import AsyncLM, Branch, BranchStore, Heddle, Loom, load  # noqa: E402
from weft._core.sampling.params import SamplingParams  # noqa: E402
from weft._core.sampling.sampler import Sampler  # noqa: E402
from weft._core.sched.work import Extend, Logits, Run  # noqa: E402
from weft.errors import (  # noqa: E402
    ConfigError,
    ModelLoadError,
    ModelMismatch,
    StaleHandle,
    Unsupported,
)
from weft.service.store import sidecar  # noqa: E402
from weft.service.store.metadata import LoomMetadata  # noqa: E402

IDS = [5, 17, 33, 8, 90, 41]
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj", "o_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "bloom": ["query_key_value", "dense_h_to_4h"],
    "mamba": ["in_proj", "x_proj"],
}


# A setting that is followed, a family it is tried on.
FOLLOWED = [
    ("llama", {}),
    ("gpt2", {}),
    ("bloom", {}),
    ("mamba", {}),
    ("llama", {"use_rslora": True}),
    ("llama", {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    ("llama", {"layers_to_transform": [1], "init_lora_weights": "orthogonal"}),
    ("llama", {"target_modules": ["q_proj", "lm_head"]}),
]
REFUSED = [
    ({"use_dora": True}, "use_dora"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [8]}, "alora_invocation_tokens"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ({"bias": "lora_only"}, "bias='none' is supported"),
    ({"target_modules": ["embed_tokens"]}, "lora_embedding_A"),
]


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

    from weft._core.tokens.tokenizer import Tokenizer

    backend = Backend(models.BPE({chr(40 + i): i for i in range(80)}, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer.wrap(backend)


@pytest.mark.parametrize(("name", "options"), FOLLOWED)
def test_adapter_gives_what_peft_gives_and_the_model_alone_stays(
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


def test_adapter_on_the_hub_is_loaded_by_its_id(tmp_path, text, monkeypatch) -> None:
    expected = adapter(tmp_path / "law", "llama", 1)
    files = {file.name: file.read_bytes() for file in (tmp_path / "law").iterdir()}
    model = AsyncLM(lm_of("llama", text), as_torch=False)
    with serve() as hub:
        point_at(monkeypatch, hub.url, tmp_path / "cache")
        hub.add(Repo("maker/law")).push("main", files)
        model.add_new_lora("maker/law", "law")
        with pytest.raises(ModelLoadError, match="maker/none is neither a folder"):
            model.add_new_lora("maker/none", "none")
    got = model.next_token_logprobs_sync(IDS, lora_name="law")
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert list(model.lm.adapters) == ["law"]


@pytest.mark.parametrize("family", ["llama", "bloom", "mamba"])
def test_two_adapters_and_the_model_alone_never_mix_in_a_gather(tmp_path, text, family) -> None:
    """Each call adds one token, so that each adapter continues its own KV."""
    rows = {None: plain_rows(build(family))}
    for seed, name in enumerate(("law", "med")):
        adapter(tmp_path / name, family, seed)
        rows[name] = plain_rows(peft.PeftModel.from_pretrained(build(family), tmp_path / name))
    lm = lm_of(family, text)
    model = AsyncLM(lm, as_torch=False)
    for name in ("law", "med"):
        model.add_new_lora(str(tmp_path / name), name)
    assert sorted(lm.adapters) == ["law", "med"]

    async def ask(n):
        names = [None, "law", "med"] * 4
        calls = [model.next_token_logprobs(IDS[:n], lora_name=name) for name in names]
        return list(zip(names, await asyncio.gather(*calls), strict=True))

    for n in range(3, len(IDS) + 1):
        for name, row in asyncio.run(ask(n)):
            np.testing.assert_allclose(row, rows[name][n - 1], atol=1e-4)


def plain_rows(model):
    """Log-probabilities after each of IDS, by a plain forward: [T, V]."""
    with torch.no_grad():
        return model.eval()(torch.tensor([IDS])).logits[0].log_softmax(-1).numpy()


def test_reused_adapter_name_drops_the_first_ones_kv(tmp_path, text) -> None:
    first, second = (adapter(tmp_path / str(n), "llama", n) for n in (3, 4))
    lm = lm_of("llama", text)
    model = AsyncLM(lm, as_torch=False)
    for n, expected in ((3, first), (4, second)):
        model.add_new_lora(str(tmp_path / str(n)), "law")
        np.testing.assert_allclose(
            model.next_token_logprobs_sync(IDS, lora_name="law"), expected, atol=1e-4
        )
    place = lm.place(IDS, namespace="law")
    stored = lm.stats().kv_tokens
    model.remove_lora("law")
    assert lm.stats().kv_tokens < stored
    with pytest.raises(ValueError, match="unknown LoRA adapter: 'law'; known are none"):
        model.next_token_logprobs_sync(IDS, lora_name="law")
    with pytest.raises(ConfigError, match="unknown LoRA adapter"):
        model.remove_lora("law")
    with pytest.raises(StaleHandle, match="'law' was removed"):
        lm.submit([Extend(place, (), (Logits(place.depth),))])


def test_removed_adapter_fails_what_waits_for_it_and_nothing_else(tmp_path, text) -> None:
    adapter(tmp_path / "law", "llama", 1)
    lm = lm_of("llama", text)
    lm.add_adapter("law", tmp_path / "law")
    greedy = SamplingParams(temperature=0)

    def ask():
        places = [lm.place(IDS, namespace=name) for name in (None, "law")]
        return lm.submit([Run(place, Sampler(greedy, 0), max_tokens=6) for place in places])

    full = ask()
    lm.drive(full)
    alone, law = (ticket.result().tokens for ticket in full)
    assert alone != law, "equal tokens under another adapter go on differently"
    cut = ask()
    for _ in range(3):
        lm.driver.exclusive(lambda: None)
        lm.scheduler.step()
    lm.remove_adapter("law")
    lm.drive(cut)
    assert cut[0].result().tokens == alone
    with pytest.raises(StaleHandle, match="'law' was removed"):
        cut[1].result()
    lm.tree.check()


def test_many_names_taken_and_given_back_leave_nothing(tmp_path, text) -> None:
    adapter(tmp_path / "law", "llama", 1)
    lm = lm_of("llama", text)
    for _ in range(4):
        lm.add_adapter("law", tmp_path / "law")
        AsyncLM(lm).next_token_logprobs_sync(IDS, lora_name="law")
    lm.remove_adapter("law")
    assert not list(lm.adapters)
    assert not lm.tree.roots
    copy = weakref.ref(lm.engine.model)
    lm.close()
    gc.collect()
    assert copy() is None
    with pytest.raises(StaleHandle, match="closed"):
        lm.add_adapter("law", tmp_path / "law")


def test_kv_of_the_base_is_not_taken_for_an_adapters(tmp_path, text) -> None:
    adapter(tmp_path / "law", "llama", 1)
    lm = lm_of("llama", text)
    lm.add_adapter("law", tmp_path / "law")
    plain = Loom(lm, IDS)
    assert sidecar.save(plain, tmp_path / "base.safetensors") == len(IDS)
    lm.clear_cache()
    adapted = Loom(lm, IDS, adapter="law")
    actual = sidecar.load(adapted, tmp_path / "base.safetensors")
    assert actual.n_tokens == 0
    assert "another LoRA adapter" in actual.notice
    assert sidecar.load(plain, tmp_path / "base.safetensors").n_tokens == len(IDS)


def test_owners_model_is_not_adapted(tmp_path, text) -> None:
    adapter(tmp_path / "law", "llama", 1)
    own, ids = build("llama").eval(), torch.tensor([IDS])
    with torch.no_grad():
        before, weights = own(ids).logits, [w.clone() for w in own.parameters()]
        lm = load(own, text.object)
        lm.add_adapter("law", tmp_path / "law")
        AsyncLM(lm).next_token_logprobs_sync(IDS, lora_name="law")
        assert torch.equal(own(ids).logits, before)
    assert all(map(torch.equal, own.parameters(), weights))
    assert not any(module._forward_hooks for module in own.modules())


def test_kv_of_an_adapter_is_loaded_for_that_adapter_only(tmp_path, text) -> None:
    for n in (1, 2):
        adapter(tmp_path / str(n), "llama", n)
    lm, other = lm_of("llama", text), lm_of("llama", text)
    lm.add_adapter("law", tmp_path / "1")
    kept = lm.kv.to_bytes(lm.place(IDS, namespace="law"))
    with pytest.raises(ConfigError, match="unknown LoRA adapter: 'law'"):
        other.kv.load(kept)
    other.add_adapter("law", tmp_path / "2")
    with pytest.raises(ModelMismatch, match="another LoRA adapter named 'law'"):
        other.kv.load(kept)
    other.add_adapter("law", tmp_path / "1")
    place = other.kv.load(kept)
    assert other.kv.size(place) == len(IDS)
    got, expected = (
        AsyncLM(each, as_torch=False).next_token_logprobs_sync([*IDS, 7], lora_name="law")
        for each in (other, lm)
    )
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert other.stats().reused >= len(IDS)


@pytest.mark.parametrize(("options", "named"), REFUSED)
def test_unsupported_adapter_option_raises_and_is_named(tmp_path, text, options, named) -> None:
    adapter(tmp_path, "llama", 1, **options)
    lm = lm_of("llama", text)
    with pytest.raises(Unsupported, match=named):
        lm.add_adapter("x", tmp_path)
    assert not list(lm.adapters)


def test_adapter_that_does_not_fit_the_model_raises(tmp_path, text) -> None:
    lm = lm_of("llama", text)
    with pytest.raises(ModelLoadError, match=r"adapter_config\.json"):
        lm.add_adapter("x", tmp_path)
    adapter(tmp_path / "gpt2", "gpt2", 1)
    with pytest.raises(ConfigError, match="of another model"):
        lm.add_adapter("x", tmp_path / "gpt2")
    config = tmp_path / "gpt2" / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(Unsupported, match="IA3"):
        lm.add_adapter("x", tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="name is ''"):
        lm.add_adapter("", tmp_path)
    with pytest.raises(ConfigError, match="folder is None"):
        lm.add_adapter("x", None)
    assert not list(lm.adapters)
    tiny = load("tiny")
    with pytest.raises(Unsupported, match="numpy engine runs no LoRA"):
        tiny.add_adapter("x", tmp_path)


def test_branches_with_and_without_an_adapter_run_together(tmp_path, text) -> None:
    wanted = {name: adapter(tmp_path / name, "llama", n) for n, name in enumerate(("law", "med"))}
    lm = lm_of("llama", text)
    for name in wanted:
        lm.add_adapter(name, tmp_path / name)
    names = [None, "law", "med", None, "law"]
    store, created = BranchStore(lm), [Branch.create(lm, seed=1, adapter=name) for name in names]
    store.prefill([(branch, IDS[:-2]) for branch in created])
    for token in IDS[-2:]:
        store.commit([(branch, token) for branch in created])  # lines of all three in one call
    for name, branch in zip(names, created, strict=True):
        assert branch.adapter == branch.fork().adapter == name
        if name is not None:
            row = torch.tensor(branch.logits).log_softmax(-1).numpy()
            np.testing.assert_allclose(row, wanted[name], atol=1e-4)
    np.testing.assert_allclose(created[0].logits, created[3].logits, atol=1e-4)
    assert np.abs(created[0].logits - created[1].logits).max() > 0.01
    np.testing.assert_allclose(created[1].perplexity, created[4].perplexity, rtol=1e-4)
    data = created[1].save()
    assert Branch.load(lm, data).adapter == "law"
    np.testing.assert_allclose(Branch.load(lm, data).logits, created[1].logits, atol=1e-4)
    for name in wanted:
        loom = Loom(lm, IDS, adapter=name)
        assert loom.adapter == name
        (best,) = loom.grow(n=1, max_tokens=4, temperature=0.0)
        assert best.tokens[0] == int(wanted[name].argmax())
        by_hand = Branch.create(lm, temperature=0.0, adapter=name)
        by_hand.prefill(IDS)
        assert best.tokens == [piece.token for piece, _ in zip(by_hand, range(4), strict=False)]
        loom.save(tmp_path / "kept.loom.json")
        repeated = Loom.open(tmp_path / "kept.loom.json", lm)
        assert repeated.adapter == name
        assert repeated.children[0].grow(n=1, max_tokens=2, temperature=0.0)[0].tokens
        assert Loom.open(tmp_path / "kept.loom.json").adapter == name
    lm.remove_adapter("law")
    with pytest.raises(StaleHandle, match="'law' was removed"):
        created[1].commit(5)
    created[0].commit(5)
    with pytest.raises(ConfigError, match="unknown LoRA adapter"):
        Branch.create(lm, adapter="law")
    with pytest.raises(ConfigError, match="unknown LoRA adapter"):
        Loom(lm, IDS, adapter="law")
    with pytest.raises(ConfigError, match="unknown LoRA adapter"):
        Branch.load(lm, data)


def test_search_in_a_loom_with_an_adapter_asks_the_adapter(tmp_path, text) -> None:
    """Prompts of a judge or a task run with the loom's adapter."""
    from weft.search import best_of_n
    from weft.search.score import judge, verdicts

    adapter(tmp_path / "law", "llama", 1)
    lm = lm_of("llama", text)
    lm.add_adapter("law", tmp_path / "law")
    words = ("yes", "no")
    alone, law = (verdicts(lm, ["Is it?"], words, name).values for name in (None, "law"))
    assert alone != law
    for name, want in ((None, alone), ("law", law)):
        with Loom(lm, "Once", adapter=name) as loom:
            requested = judge(lambda _: "Is it?", words)
            actual = best_of_n(lm, loom, n=2, max_tokens=2, value=requested, seed=0)
            assert [node.score for node in actual.loom.leaves] == pytest.approx(want * 2)


def test_loom_is_of_the_adapter_that_grew_it(tmp_path, text) -> None:
    """Another one of that name is none of it, in files and where looms are kept."""
    for name, seed in (("first", 1), ("second", 2)):
        adapter(tmp_path / name, "llama", seed)
    lm = lm_of("llama", text)
    lm.add_adapter("law", tmp_path / "first")
    loom = Loom(lm, IDS, adapter="law")
    loom.save(tmp_path / "kept.json")
    head = LoomMetadata.from_json(LoomMetadata.from_loom(loom).to_json())
    assert head == LoomMetadata.from_loom(loom)
    lm.remove_adapter("law")
    repeated = Loom.open(tmp_path / "kept.json", lm)  # to be read
    repeated.save(tmp_path / "again.json")
    lm.add_adapter("law", tmp_path / "second")
    for file in ("kept.json", "again.json"):
        with pytest.raises(ModelMismatch, match="grown with another LoRA adapter named 'law'"):
            Loom.open(tmp_path / file, lm)
        assert Loom.open(tmp_path / file, lm, force=True).tokens == IDS
    with pytest.raises(ModelMismatch, match="another LoRA adapter"):
        head.loom(lm, Heddle, force=False)
    lm.add_adapter("law", tmp_path / "first")
    assert Loom.open(tmp_path / "kept.json", lm).tokens == IDS


def test_looms_without_an_adapter_entry_open(tmp_path, text) -> None:
    adapter(tmp_path / "law", "llama", 1)
    lm = lm_of("llama", text)
    lm.add_adapter("law", tmp_path / "law")
    loom = Loom(lm, IDS, adapter="law")
    loom.save(tmp_path / "kept.json")
    data = json.loads((tmp_path / "kept.json").read_text())
    del data["model"]["adapter"]
    (tmp_path / "kept.json").write_text(json.dumps(data))
    assert Loom.open(tmp_path / "kept.json", lm).adapter == "law"
    mark, *more = json.loads(LoomMetadata.from_loom(loom).to_json())
    assert LoomMetadata.from_json(json.dumps([mark[:3], *more])).loom(lm, Heddle, force=False)
    plain = json.loads(LoomMetadata.from_loom(Loom(lm, IDS)).to_json())
    assert len(plain[0]) == 3
