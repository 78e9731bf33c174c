"""The calls of N8Loom and genlm-backend that MLX users have, with models that mlx-lm loads."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from mlx_lm import load  # noqa: E402
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache  # noqa: E402

import weft  # noqa: E402
from shallow import shallow  # noqa: E402
from weft._core.sampling.metrics import log_softmax  # noqa: E402
from weft.compat import n8loom  # noqa: E402
from weft.compat.genlm import AsyncMlxLM, load_model_by_name  # noqa: E402
from weft.compat.genlm.mlx import Query  # noqa: E402
from weft.errors import ConfigError, Unsupported  # noqa: E402

pytestmark = pytest.mark.mlx

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlx" / "main.py"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    model, tokenizer = load(str(shallow()))[:2]
    model.set_dtype(getattr(mx, request.param))
    lm = weft.load(model, tokenizer)
    yield model, tokenizer
    lm.close()


def tolerance(model: Any) -> float:
    return 1e-3 if model.model.norm.weight.dtype == mx.float32 else 0.3


def plain(model: Any, ids: list[int], cache: Any = None) -> np.ndarray:
    return np.array(model(mx.array([ids]), cache=cache)[0, -1].astype(mx.float32))


@pytest.mark.parametrize("four_bit", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_known_reflection_program_gives_sixteen_answers(
    four_bit: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("example_mlx", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(four_bit=four_bit, max_tokens=5)
    assert "16 revised answers: " in capsys.readouterr().out


def test_prefix_cache_of_a_node_is_the_models_own_class(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    root = n8loom.Loom(model, tokenizer, weft.samples.greeting)
    (child,) = root.make_children(n=1, max_tokens=6, seed=1)
    cache, ids = child.get_prefix_cache(), child.get_prefix_tokens()
    assert all(type(layer) is KVCache for layer in cache)
    assert cache[0].offset == len(ids)
    want = plain(model, [*ids, 7])
    assert np.abs(plain(model, [7], cache) - want).max() <= tolerance(model)
    assert trim_prompt_cache(cache, 3) == 3
    assert np.abs(plain(model, [*ids[-2:], 7], cache) - want).max() <= tolerance(model)


def test_fragments_are_mlx_arrays_and_fuse_to_a_cache_of_the_model(
    pair: tuple[Any, Any],
) -> None:
    model, tokenizer = pair
    root = n8loom.Loom(model, tokenizer, weft.samples.greeting)
    (child,) = root.make_children(n=1, max_tokens=6, seed=1)
    above, own = root.frag, child.frag
    assert isinstance(own[0].keys, mx.array)
    assert own[0].keys.dtype == model.model.norm.weight.dtype
    cache = n8loom.fuse_cache_frags(list(zip(above, own, strict=True)))
    ids = child.get_prefix_tokens()
    want = plain(model, [*ids, 7])
    assert np.abs(plain(model, [7], cache) - want).max() <= tolerance(model)
    shorter = n8loom.fuse_cache_frags([[frag] for frag in n8loom.clip_frag(above, 5)])
    assert shorter[0].offset == 5
    lm = weft.load(model, tokenizer)
    assert lm.kv.size(shorter.place(lm)) == 5


def test_prompts_are_written_to_caches_that_model_and_weft_continue(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    ids = tokenizer.encode("The owl saw the moon and sang.")
    mine = make_prompt_cache(model)
    cache, n = n8loom.prompt_to_cache(model, tokenizer, ids, c=mine, offset=1)
    assert n == len(ids) - 1
    assert all(type(layer) is KVCache for layer in mine)
    assert mine[0] is cache[0]
    frags = n8loom.frag_cache(mine, 0, 4)
    assert frags[0].keys.shape[2] == 4
    second, n = n8loom.prompt_to_cache(model, tokenizer, ids[-1:], c=cache)
    assert (n, second[0].offset) == (1, len(ids))
    rows, new, start, lengths, _ = n8loom.generate_batched(
        model, tokenizer, [], 2, prompt_cache=second, max_tokens=5, temp=1.0, seed=3
    )
    assert start == len(ids)
    assert n8loom.frag_batch_gen(new, 0, lengths)[1][0].keys.shape[2] == lengths[1] == len(rows[1])
    want = plain(model, [*ids, 9])
    assert np.abs(plain(model, [9], second) - want).max() <= tolerance(model)
    # The model has added a slot of its own.
    with pytest.raises(ConfigError, match="with token ids"):
        second.place(weft.load(model, tokenizer))


def test_model_of_the_caller_is_unchanged_after_a_loom(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    names = set(dict(model))
    with n8loom.Loom(model, tokenizer, weft.samples.greeting) as loom:
        loom.grow(n=2, max_tokens=4)
    assert set(dict(model)) == names
    ids = tokenizer.encode("Anna lived near the river.")
    cache = make_prompt_cache(model)
    stepped = [plain(model, [token], cache) for token in ids]
    assert np.abs(stepped[-1] - plain(model, ids)).max() <= tolerance(model)


def test_known_async_class_answers(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    known = AsyncMlxLM(model, tokenizer, cache_size=40)
    ids = tokenizer.encode("The owl saw")
    want = log_softmax(plain(model, ids)[None])[0]

    async def main() -> tuple[Any, Any, Any, Any]:
        one = await known.next_token_logprobs(ids)
        many = await known.batch_next_token_logprobs([ids, ids[:2], ids])
        sampled = await known.sample(ids, 4, [], temperature=1.0, seed=1)
        together = await asyncio.gather(*(known.next_token_logprobs(ids[:n]) for n in (1, 2, 3)))
        return one, many, sampled, together

    for _ in range(2):  # in two event loops
        one, many, sampled, together = asyncio.run(main())
        assert np.abs(np.asarray(one) - want).max() <= tolerance(model)
        assert len(many) == 3
        assert len(sampled) == 4
        assert np.allclose(np.asarray(together[1]), np.asarray(many[1]), atol=1e-5)
    assert np.allclose(np.asarray(known.next_token_logprobs_sync(ids)), np.asarray(one), atol=1e-5)
    known.clear_cache()
    assert asyncio.run(known.next_token_logprobs(ids)) is not None


def test_models_by_name_run_on_mlx() -> None:
    folder = str(shallow())
    for known in (load_model_by_name(folder, backend="mlx"), AsyncMlxLM.from_name(folder)):
        assert isinstance(known, AsyncMlxLM)
        assert known.lm.info.name == "mlx"
        assert known.next_token_logprobs_sync([1, 2, 3]).shape == (known.lm.info.n_vocab,)
        with pytest.raises((ConfigError, Unsupported, ValueError), match="nobody"):
            known.next_token_logprobs_sync([1, 2, 3], lora_name="nobody")
        known.lm.close()


def test_model_by_name_has_mlx_lms_tokenizer() -> None:
    folder = str(shallow())
    known, own = AsyncMlxLM.from_name(folder), load(folder)[1]
    assert type(known.tokenizer) is type(own)
    for prompt in ("Hello <|end|> x", "<|user|>Hi<|end|><|assistant|>"):
        assert known.tokenizer.encode(prompt) == own.encode(prompt)
        assert known.tokenizer.encode(prompt) != known.lm.tokenizer.encode(prompt)
    assert known.tokenizer.eos_token_ids == own.eos_token_ids
    assert known.mlx_lm_model is known.model is known.lm.engine.model
    known.lm.close()


def test_known_forms_of_mlx_are_accepted(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    known = AsyncMlxLM(model, tokenizer, cache_size=40, prefill_step_size=64)
    assert known.mlx_lm_model is model
    assert (known.cache_size, known.prefill_step_size, known.kv_cachable) == (40, 64, True)
    assert isinstance(known.generation_stream, mx.Stream)
    known.clear_cache()
    ids = tokenizer.encode("The owl saw the moon.")
    assert known.walk_cache([3, *ids])[2] is None
    known.cache_kv(ids[:-1])
    node, n_matched, past, kv_node, n_kv = known.walk_cache(ids)
    assert (n_matched, n_kv) == (len(ids) - 1, len(ids) - 1)
    assert node.n_tokens == kv_node.n_tokens == n_kv
    cache = known.lm.kv.engine_cache(ids[:-1])
    used = [(each.keys[0, :, : len(ids) - 1], each.values[0, :, : len(ids) - 1]) for each in cache]
    want = mx.stack([mx.stack([layer[kind] for layer in used]) for kind in (0, 1)])
    assert past.shape == want.shape
    assert mx.allclose(past, want, atol=1e-6)

    async def ask() -> list[Any]:
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(3)]
        known.add_query(Query(ids, futures[0], past, node, n_matched))
        known.add_query(ids, futures[1], past)
        known.add_query(Query(ids[:2], futures[2]))
        return list(await asyncio.gather(*futures))

    one, same, other = asyncio.run(ask())
    assert np.array_equal(np.asarray(one), np.asarray(same))
    assert np.abs(np.asarray(one) - log_softmax(plain(model, ids)[None])[0]).max() < 0.3
    assert not np.allclose(np.asarray(one), np.asarray(other))
    with pytest.raises(ConfigError, match="future"):
        known.add_query(ids)


def test_kv_added_to_the_cache_is_used(pair: tuple[Any, Any]) -> None:
    model, tokenizer = pair
    known = AsyncMlxLM(model, tokenizer)
    long, short = tokenizer.encode("The owl saw the moon."), tokenizer.encode("The bee")
    padding = len(long) - len(short)
    caches = make_prompt_cache(model)
    model(mx.array([long]), cache=caches)
    for cache, own in zip(caches, known.lm.kv.engine_cache(short), strict=True):
        for name in ("keys", "values"):
            padded = mx.pad(
                getattr(own, name)[:, :, : len(short)], [(0, 0), (0, 0), (padding, 0), (0, 0)]
            )
            used = getattr(cache, name)[:, :, : len(long)]
            setattr(cache, name, mx.concatenate([used, padded], axis=0))
        cache.left_padding = mx.array([0, padding])
    known.clear_cache()
    logprobs = np.full((2, known.lm.info.n_vocab), -5.0, dtype=np.float32)
    queries = [Query(long, None), Query(short, None)]
    known.add_to_cache(queries, caches, logprobs)
    for ids in (long, short):
        assert known.lm.kv.size(ids) == len(ids)
        assert known.walk_cache(ids)[0].logits[0] == -5.0
        row = np.asarray(known.next_token_logprobs_sync([*ids, 7]))
        want = log_softmax(plain(model, [*ids, 7])[None])[0]
        assert np.abs(row - want).max() < 0.3
    known.clear_cache()
    assert known.lm.kv.size(long) == 0
