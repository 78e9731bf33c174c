"""Laws of the known lower-level names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from shallow import shallow, shallow_gguf
from weft import samples
from weft._core.sched.work import Extend, Logits
from weft.compat import n8loom
from weft.errors import ConfigError, EngineUnavailable, Unsupported


@pytest.fixture(scope="module")
def lm() -> Iterator[weft.LM]:
    with weft.load("tiny") as lm:
        yield lm


@pytest.fixture
def ids(lm: weft.LM) -> list[int]:
    return n8loom.Loom(lm, samples.game24).tokens


def logits(lm: weft.LM, place: Any) -> np.ndarray:
    (ticket,) = lm.submit([Extend(place, (), (Logits(place.depth),))])
    lm.drive([ticket])
    return ticket.result()[0]


def test_fragment_clip_fuse_gives_the_logits_of_one_forward(lm: weft.LM, ids: list[int]) -> None:
    want = logits(lm, lm.place(ids))
    cache, n_run = n8loom.prompt_to_cache(lm, lm.tokenizer, ids)
    assert n_run == len(ids)
    head = n8loom.clip_frag(n8loom.frag_cache(cache, 0, 15), 9)
    tail = n8loom.frag_cache(cache, 9, len(ids))
    fused = n8loom.fuse_cache_frags([[a, b] for a, b in zip(head, tail, strict=True)], 0)
    assert fused.token_ids == ids
    lm.clear_cache()
    assert np.abs(logits(lm, fused.place(lm)) - want).max() < 1e-4


def test_arrays_have_the_known_shape(lm: weft.LM, ids: list[int]) -> None:
    cache, _ = n8loom.prompt_to_cache(lm, lm.tokenizer, ids)
    assert len(cache) == lm.info.n_layers
    assert cache[0].keys.shape == cache[0].values.shape == (1, 2, len(ids), 64)
    assert cache[0].offset == len(ids)
    frags = n8loom.frag_cache(cache)
    assert frags[0].keys.shape[2] == len(ids) - 1
    keys, values = frags[0]
    assert keys is frags[0].keys
    assert values is frags[0].values


def test_fragments_of_a_node_fuse_to_its_path(lm: weft.LM) -> None:
    loom = n8loom.Loom(lm, lm.tokenizer, samples.game24)
    node = loom.add_text_child("4 + 9").make_children(n=1, max_tokens=4, seed=1)[0]
    frags = [each.frag for each in node.path]
    fused = n8loom.fuse_cache_frags([list(layer) for layer in zip(*frags, strict=True)])
    assert fused.token_ids == node.get_prefix_tokens()
    want = logits(lm, node.place)
    lm.clear_cache()
    assert np.abs(logits(lm, fused.place(lm)) - want).max() < 1e-4


def test_fragments_that_do_not_follow_each_other_raise(lm: weft.LM, ids: list[int]) -> None:
    cache, _ = n8loom.prompt_to_cache(lm, lm.tokenizer, ids)
    tail = n8loom.frag_cache(cache, 9, 12)
    head = n8loom.frag_cache(cache, 0, 5)
    with pytest.raises(ConfigError, match="cannot follow"):
        n8loom.fuse_cache_frags([[a, b] for a, b in zip(head, tail, strict=True)])
    lone = n8loom.fuse_cache_frags([[frag] for frag in tail])
    with pytest.raises(ConfigError, match="full prefix"):
        lone.place(lm)


def test_prompt_to_cache_continues_a_cache_and_leaves_an_offset_out(
    lm: weft.LM, ids: list[int]
) -> None:
    full, _ = n8loom.prompt_to_cache(lm, lm.tokenizer, ids)
    cache, n_run = n8loom.prompt_to_cache(lm, lm.tokenizer, ids[:8])
    assert n_run == 8
    same, n_run = n8loom.prompt_to_cache(lm, lm.tokenizer, ids[8:], cache, 512, 2)
    assert same is cache
    assert n_run == len(ids) - 10
    assert cache.token_ids == ids[:-2]
    assert np.abs(cache[3].keys - full[3].keys[:, :, :-2]).max() < 1e-4
    with pytest.raises(ConfigError, match="offset"):
        n8loom.prompt_to_cache(lm, lm.tokenizer, ids, offset=len(ids) + 1)


@pytest.mark.parametrize("how", ["whole", "last", "one behind", "none"])
def test_cache_and_prompt_denote_one_path(lm: weft.LM, ids: list[int], how: str) -> None:
    want, *_ = n8loom.generate_batched(lm, lm.tokenizer, ids, 1, max_tokens=8)
    behind, _ = n8loom.prompt_to_cache(lm, lm.tokenizer, ids, offset=1)
    prompt, cache = {
        "whole": (ids, n8loom.prompt_to_cache(lm, lm.tokenizer, ids)[0]),
        "last": (ids[-1:], behind),
        "one behind": (ids[-4:], behind),
        "none": (ids, None),
    }[how]
    lm.clear_cache()
    new, *_ = n8loom.generate_batched(lm, lm.tokenizer, prompt, 1, prompt_cache=cache, max_tokens=8)
    assert new == want


def engines() -> list[Any]:
    """The engines whose KV a program holds in hand."""
    names = {"numpy": (), "torch": pytest.mark.torch}
    names |= {"mlx": pytest.mark.mlx, "llamacpp": pytest.mark.llamacpp}
    return [pytest.param(name, marks=mark, id=name) for name, mark in names.items()]


@pytest.fixture(scope="module", params=engines())
def engine_lm(request: pytest.FixtureRequest) -> Iterator[weft.LM]:
    """An LM on each engine."""
    name = request.param
    packages = {"torch": "torch", "mlx": "mlx_lm", "llamacpp": "llama_cpp"}
    if name in packages:
        pytest.importorskip(packages[name], reason=f"{packages[name]} is not installed")
    source = shallow_gguf() if name == "llamacpp" else shallow()
    with weft.load(str(source), engine=name, dtype="float32", kv_budget="16MiB") as lm:
        yield lm


def test_cache_loop_of_n8loom_continues_after_a_node(engine_lm: weft.LM) -> None:
    """make_children, by hand: the node's own tokens and the cache of its prefix."""
    lm, tokenizer = engine_lm, engine_lm.tokenizer
    root = n8loom.Loom(lm, tokenizer, samples.game24)
    node = root.add_text_child("4 + 9").add_text_child(" = 13 (left: 10 13 13)")
    want = [child.tokens for child in node.make_children(n=2, temp=0.0, max_tokens=6)]
    for prompt in (node.tokens, node.get_prefix_tokens(), []):
        cache = node.get_prefix_cache()
        assert cache.token_ids == node.get_prefix_tokens()
        assert cache[0].offset == len(cache.token_ids)
        result, new, n_prompt, lengths, _ = n8loom.generate_batched(
            lm, tokenizer, prompt, 2, prompt_cache=cache, max_tokens=6
        )
        assert result == want
        assert n_prompt == len(node.get_prefix_tokens())
        frags = n8loom.frag_batch_gen(new, 0, lengths)
        assert frags[1][0].keys.shape[2] == lengths[1]
        *_, final = n8loom.generate_batched_stream(
            lm, tokenizer, prompt, 2, prompt_cache=node.get_prefix_cache(), max_tokens=6
        )
        assert final["tokens"] == want


def test_text_child_built_by_hand_equals_add_text_child(engine_lm: weft.LM) -> None:
    """The known constructor: the prefix cache is filled, and the child's slots are cut out."""
    lm, tokenizer = engine_lm, engine_lm.tokenizer
    root = n8loom.Loom(lm, tokenizer, samples.game24)
    child = root.add_text_child("4 + 9 = 13")
    cache = root.get_prefix_cache()
    n_above = cache[0].offset
    same, n_run = n8loom.prompt_to_cache(lm, tokenizer, child.tokens, c=cache)
    assert same is cache
    assert n_run == len(child.tokens)
    frags = n8loom.frag_cache(cache, n_above, n_above + n_run)
    for mine, own in zip(frags, child.frag, strict=True):
        assert mine.token_ids == own.token_ids
        assert mine.start == own.start == n_above
        for one, other in zip(mine, own, strict=True):
            assert np.abs(np.asarray(one) - np.asarray(other)).max() < 1e-3
    fused = n8loom.fuse_cache_frags(
        [[a, b] for a, b in zip(n8loom.frag_cache(cache, 0, n_above), frags, strict=True)]
    )
    want = child.make_children(n=1, temp=0.0, max_tokens=5)[0].tokens
    for prompt_cache in (cache, fused):
        new, *_ = n8loom.generate_batched(
            lm, tokenizer, child.tokens, 1, prompt_cache=prompt_cache, max_tokens=5
        )
        assert new == [want]


def test_plain_list_filled_in_place_has_its_tokens(engine_lm: weft.LM) -> None:
    lm, tokenizer = engine_lm, engine_lm.tokenizer
    ids = n8loom.Loom(lm, samples.game24).tokens
    mine: list[Any] = []
    if lm.info.name == "mlx":
        from mlx_lm.models.cache import make_prompt_cache

        mine = make_prompt_cache(lm.engine.model)
    layers = list(mine)
    n8loom.prompt_to_cache(lm, tokenizer, ids[:9], c=mine)
    assert all(one is other for one, other in zip(layers, mine, strict=False))
    n8loom.prompt_to_cache(lm, tokenizer, ids[9:-1], c=mine)
    assert mine[0].offset == len(ids) - 1
    assert n8loom.frag_cache(mine, 0, 4)[0].token_ids == tuple(ids[:4])
    want, *_ = n8loom.generate_batched(lm, tokenizer, ids, 1, max_tokens=5)
    new, *_ = n8loom.generate_batched(lm, tokenizer, ids[-1:], 1, prompt_cache=mine, max_tokens=5)
    assert new == want


def test_cache_of_unknown_tokens_raises(lm: weft.LM, ids: list[int]) -> None:
    cache, _ = n8loom.prompt_to_cache(lm, lm.tokenizer, ids)
    unknown = [n8loom.KVCache(layer.keys, layer.values) for layer in cache]
    with pytest.raises(ConfigError, match="with token ids"):
        n8loom.generate_batched(lm, lm.tokenizer, ids, 1, prompt_cache=unknown)


def test_generate_batched_returns_the_known_five(lm: weft.LM, ids: list[int]) -> None:
    new, cache, n_prompt, lengths, ended = n8loom.generate_batched(
        lm, lm.tokenizer, ids, 3, max_tokens=30, temp=0.8, min_p=0.05, stop_strings=["\n"], seed=3
    )
    assert n_prompt == len(ids)
    assert lengths == [len(row) for row in new]
    assert len(ended) == 3
    assert cache[0].keys.shape[:3] == (3, 2, max(lengths))
    prompt_cache, _ = n8loom.prompt_to_cache(lm, lm.tokenizer, ids)
    full = n8loom.frag_cache(prompt_cache, 0, len(ids))
    for row, frags in enumerate(n8loom.frag_batch_gen(cache, 0, lengths)):
        fused = n8loom.fuse_cache_frags([[a, b] for a, b in zip(full, frags, strict=True)])
        assert fused.token_ids == ids + new[row]
        got = logits(lm, fused.place(lm))
        assert np.abs(got - logits(lm, lm.place(ids + new[row]))).max() < 1e-4


def test_stream_ends_with_the_result_of_the_batch(lm: weft.LM, ids: list[int]) -> None:
    options = {"max_tokens": 10, "temp": 0.8, "seed": 3}
    new, cache, *_ = n8loom.generate_batched(lm, lm.tokenizer, ids, 2, **options)
    *updates, final = n8loom.generate_batched_stream(lm, lm.tokenizer, ids, 2, **options)
    assert final["type"] == "final"
    assert final["tokens"] == new
    assert np.abs(final["prompt_cache"][0].keys - cache[0].keys).max() < 1e-4
    assert updates[-1]["tokens"] == new


def test_load_for_loom_returns_arguments_of_loom() -> None:
    model, tokenizer = n8loom.load_for_loom("tiny")
    with model:
        root = n8loom.Loom(model, tokenizer, samples.sum)
        assert root.ramify(n=2, max_tokens=2)
        assert isinstance(root.children[0], n8loom.Heddle)
        with pytest.raises(ConfigError, match="adapter_path"):
            n8loom.load_for_loom("tiny", adapter_path="x")


def test_load_for_loom_of_a_gguf_file_grows() -> None:
    model, tokenizer = n8loom.load_for_loom(str(shallow_gguf()))
    with model:
        root = n8loom.Loom(model, tokenizer, samples.sum)
        assert len(root.ramify(n=2, max_tokens=2)) == 2


def test_bfloat16_arrays_survive_as_float32() -> None:
    """B2: NumPy has no bfloat16."""
    from weft.loom.kv_fragments import _to_bfloat16, _to_float32

    bits = np.arange(0, 2**16, 7, dtype=np.uint16)
    bits = bits[(bits & 0x7F80) != 0x7F80]  # no infinities and NaNs
    marks = {"k.0.dtype": np.array("bfloat16")}
    wide = _to_float32(bits, marks, "k.0")
    assert wide.dtype == np.float32
    assert (_to_bfloat16(wide, marks, "k.0") == bits).all()


@pytest.mark.torch
def test_bfloat16_model_has_fragments() -> None:
    """B2."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from weft.engines.hub import resolve

    folder = resolve("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    loom = n8loom.Loom(model, tokenizer, samples.game24)
    node = loom.add_text_child("4 + 9 = 13")
    assert node.frag[0].keys.dtype == np.float32
    lm = weft.LM.from_model(model, tokenizer)
    want = logits(lm, node.place)
    frags = [each.frag for each in node.path]
    fused = n8loom.fuse_cache_frags([list(layer) for layer in zip(*frags, strict=True)])
    lm.clear_cache()
    before = lm.stats().prefilled
    assert np.abs(logits(lm, fused.place(lm)) - want).max() < 0.1
    assert lm.stats().prefilled - before <= 1


def test_tokenizer_config_is_that_of_transformers() -> None:
    pytest.importorskip("transformers")
    plain, _ = n8loom.load_for_loom("tiny")
    template = "{% for m in messages %}<<{{ m.content }}>>{% endfor %}"
    model, tokenizer = n8loom.load_for_loom("tiny", tokenizer_config={"chat_template": template})
    assert type(tokenizer).__module__.startswith("transformers")
    root = n8loom.Loom(model, tokenizer, samples.sum)
    assert root.text == f"<<{samples.sum}>>"
    assert model.tokenize(samples.sum) == plain.tokenize(samples.sum)
    assert root.ramify(n=2, max_tokens=2)
    for options in ({"model_config": {"rope_theta": 1.0}}, {"adapter_path": "x"}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            n8loom.load_for_loom("tiny", **options)


def test_model_of_another_library_raises_with_a_short_message() -> None:
    kind = type("Model", (dict,), {"__repr__": lambda self: "x" * 7000})
    kind.__module__ = "mlx_lm.models.llama"
    for call in (
        lambda: n8loom.Loom(kind(), "tokenizer", "Hi"),
        lambda: weft.load(kind(), "tokenizer"),
    ):
        with pytest.raises((ConfigError, EngineUnavailable), match="model of MLX|mlx") as caught:
            call()
        assert len(str(caught.value)) < 250
    with pytest.raises(ConfigError, match="name is of type Model; allowed are a name"):
        weft.load_model_by_name(kind())
    for wrong in ([1] * 9999, {"a": "x" * 9999}, b"x" * 9999):
        with pytest.raises(ConfigError, match="model is") as caught:
            weft.load(wrong)
        assert len(str(caught.value)) < 250


def test_fused_cache_is_accepted_by_the_engines_own_model() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from weft.engines.torch.model import cache_name

    config = transformers.LlamaConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    tokenizer = weft.load("tiny").tokenizer
    root = n8loom.Loom(model, tokenizer, "Some words to begin with.")
    child = root.add_text_child(" And more of them.")
    frags = [list(layer) for layer in zip(root.frag, child.frag, strict=True)]
    cache = n8loom.fuse_cache_frags(frags).for_model(model, tokenizer)
    ids = [*root.tokens, *child.tokens]
    with torch.no_grad():
        full = model(torch.tensor([[*ids, 7]])).logits[0, -1]
        ahead = model(torch.tensor([[7]]), **{cache_name(model): cache}).logits[0, -1]
    assert float((full - ahead).abs().max()) < 1e-4
    lm = weft.load("tiny")
    fused = n8loom.fuse_cache_frags([[frag] for frag in n8loom.Loom(lm, "Hi").frag])
    with pytest.raises(Unsupported, match="no cache object"):
        fused.for_model(lm)


CHAT = "<|bos|><|user|>Hello<|end|><|assistant|>"


def test_special_tokens_in_given_text_are_read_as_in_n8loom(lm: weft.LM) -> None:
    """A chat prompt written by hand has the tokens of the template, not its characters."""
    want = lm.text.encode_chat([{"role": "user", "content": "Hello"}])
    root = n8loom.Loom(lm, CHAT, template=False)
    assert root.tokens == want
    turn = "<|end|><|user|>x<|end|><|assistant|>"
    ids = lm.text.continuation(turn, special=True)
    assert len(ids) < len(lm.text.continuation(turn))
    node = root.add_text_child(turn)
    assert (node.tokens, root.ramify(turn).tokens) == (ids, ids)
    assert [each.tokens for each in root.ramify([turn, turn])] == [ids, ids]
    assert node.measure("<|end|>").tokens == (lm.eog_token,)
    node.text = turn
    assert node.tokens == ids
    assert type(node.ramify(n=1, max_tokens=1)[0]) is n8loom.Heddle
    assert n8loom.Heddle(lm, None, turn).tokens == ids


def test_special_false_and_chat_messages_give_plain_text(lm: weft.LM) -> None:
    plain = lm.text.continuation("<|end|>")
    root = n8loom.Loom(lm, lm.tokenizer, "<|end|>")
    assert root.chat_template_used
    assert root.tokens == weft.Loom(lm, "<|end|>").tokens
    assert [t for t in root.tokens if t in lm.text.stop_ids] == [lm.eog_token]
    assert root.add_text_child("<|end|>", special=False).tokens == plain
    assert root.ramify("<|end|>", special=False).tokens == plain
    raw = n8loom.Loom(lm, CHAT, template=False, special=False)
    assert raw.tokens == weft.Loom(lm, CHAT, template=False).tokens


def test_opened_loom_reads_text_as_its_class_does(lm: weft.LM, tmp_path: Path) -> None:
    root = n8loom.Loom(lm, "Hello")
    root.add_text_child("<|end|>")
    root.save(tmp_path / "x.loom.json")
    second = n8loom.Loom.open(tmp_path / "x.loom.json", lm)
    assert second.children[0].add_text_child("<|end|>").tokens == [lm.eog_token]
    ours = weft.Loom.open(tmp_path / "x.loom.json", lm)
    assert len(ours.children[0].add("<|end|>").tokens) > 1
