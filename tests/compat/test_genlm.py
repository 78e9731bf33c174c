"""The names of genlm-backend: what clients use, and what that system got wrong."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import random
import shutil
import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import weft
from shallow import shallow, shallow_gguf
from weft import AsyncLM
from weft._core.tokens.tokenizer import Tokenizer
from weft.compat import genlm
from weft.compat.genlm import (
    AsyncMlxLM,
    AsyncTokenCharacterTrie,
    AsyncTransformer,
    AsyncVirtualLM,
    MockAsyncLM,
    OutputCache,
    ParallelTokenCharacterTrie,
    Token,
    TokenCharacterTrie,
    TokenTrie,
    decode_vocab,
    get_byte_vocab,
    load_model_by_name,
)
from weft.errors import ConfigError, EngineUnavailable, ModelLoadError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))


# Tokens and vocabularies ------------------------------------------------------------------------


def test_token_is_bytes_with_an_id() -> None:
    one, same, twin = Token(3, b"ab"), Token(3, b"xx"), Token(4, b"ab")
    assert one == same
    assert one != twin
    assert hash(one) == hash(same)
    assert sorted([twin, one]) == [one, twin]
    assert one <= same < twin
    assert one == b"ab"
    assert b"ab" not in {one: 1}
    assert isinstance(one, bytes)
    assert (one.byte_string, one.token_id, len(one)) == (b"ab", 3, 2)
    assert repr(one) == "Token(token_id=3, byte_string=b'ab')"
    for second in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert (second.token_id, second.byte_string) == (3, b"ab")
    assert genlm.as_bytes(one) == genlm.as_bytes(b"ab") == b"ab"
    assert genlm.is_plain_bytes(b"ab")
    assert not genlm.is_plain_bytes(one)
    for wrong in ((True, b""), ("3", b""), (3, "ab")):
        with pytest.raises(TypeError):
            Token(*wrong)


def tokenizers_of_each_kind():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    chars = {character: i for i, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    level = Backend(models.BPE(chars, []))
    level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    level.decoder = decoders.ByteLevel()
    # "a" is there twice: as a character and as its byte.
    pieces = {"<unk>": 0, "▁": 1, "a": 2, "▁a": 3, **{f"<0x{b:02X}>": 4 + b for b in range(256)}}
    fallback = Backend(models.BPE(pieces, [("▁", "a")], byte_fallback=True, unk_token="<unk>"))
    fallback.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    meta = Backend(models.BPE({"▁": 0, "b": 1, "▁b": 2, "é": 3}, [("▁", "b")]))
    meta.decoder = decoders.Metaspace()
    return {"byte level": level, "byte fallback": fallback, "metaspace": meta}


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "metaspace"])
def test_byte_vocabularies_are_exact_and_keep_duplicates_apart(kind: str) -> None:
    backend = tokenizers_of_each_kind()[kind]
    tokens, strings = decode_vocab(backend)
    assert len(tokens) == len(strings) == backend.get_vocab_size()
    assert [token.token_id for token in tokens] == list(range(len(tokens)))
    assert get_byte_vocab(backend) == [token.byte_string for token in tokens]
    if kind == "byte level":
        assert sorted(token.byte_string for token in tokens) == [bytes([b]) for b in range(256)]
    elif kind == "byte fallback":
        assert tokens[3].byte_string == b" a"
        assert tokens[4 + 0xC3].byte_string == b"\xc3"
        assert tokens[2].byte_string == tokens[4 + ord("a")].byte_string == b"a"
        assert tokens[2] != tokens[4 + ord("a")]
    else:
        assert [token.byte_string for token in tokens] == [b" ", b"b", b" b", "é".encode()]


def test_bytes_that_are_no_text_are_decoded_by_the_given_mode(text) -> None:
    tokens, replaced = decode_vocab(text, "replace")
    broken = next(t.token_id for t in tokens if t.byte_string == b"\xc3")
    assert replaced[broken] == "�"
    assert decode_vocab(text, "latin1")[1][broken] == "Ã"
    own = decode_vocab(text)[1]
    assert own[broken] == "Ã"  # as the tokenizer writes it
    assert len(set(own)) == len({token.byte_string for token in tokens})
    with pytest.raises(ValueError, match="allowed"):
        decode_vocab(text, "nosuch")
    with pytest.raises(ValueError, match="Could not decode byte representation"):
        decode_vocab("no tokenizer")


# Tries --------------------------------------------------------------------------------------------

WORDS = [b"a", b"ab", b"abc", b"b", b"ab", b""]


def naive(words, weights, best):
    """Weight of every prefix, by looking at every word."""
    prefixes = {word[:n] for word in words for n in range(len(word) + 1)}
    return {
        prefix: best([w for word, w in zip(words, weights, strict=True) if word.startswith(prefix)])
        for prefix in prefixes
    }


@pytest.mark.parametrize("kind", [TokenCharacterTrie, ParallelTokenCharacterTrie])
@pytest.mark.parametrize("sign", [1, -1])
def test_weight_of_a_prefix_is_that_of_its_words(kind, sign: int) -> None:
    tokens = [Token(number, word) for number, word in enumerate(WORDS)]
    trie = kind(tokens)
    weights = [sign * (i + 1.5) for i in range(len(WORDS))]
    for result, best in ((trie.weight_sum(weights), sum), (trie.weight_max(weights), max)):
        expected = naive(WORDS, weights, best)
        for node, edges in enumerate(trie.children):
            if edges:  # no leaf
                assert result[node] == pytest.approx(expected[bytes(trie.node2prefix[node])])
        for number, token in enumerate(tokens):
            leaf = trie.word2leaf[(token.byte_string, number)]
            assert result[leaf] == pytest.approx(weights[number])
            assert trie.leaf2word[leaf] == (token.byte_string, number)
    assert trie.root == len(trie.children) - 1
    assert result.dtype == (np.float32 if kind is ParallelTokenCharacterTrie else np.float64)
    for node, edges in enumerate(trie.children):
        assert all(below < node for below in edges.values())  # children first, root last
    rows = np.array([weights, weights[::-1]])
    np.testing.assert_allclose(trie.batch_weight_sum(rows)[1], trie.weight_sum(weights[::-1]))
    np.testing.assert_allclose(trie.batch_weight_max(rows)[0], trie.weight_max(weights))


def test_plain_bytes_warn_and_must_be_unique() -> None:
    with pytest.warns(DeprecationWarning, match="give Tokens"):
        trie = TokenCharacterTrie([b"a", b"ab"])
    assert set(trie.word2leaf) == {b"a", b"ab"}
    with (
        pytest.warns(DeprecationWarning, match="plain bytes"),
        pytest.raises(ValueError, match="Duplicate"),
    ):
        TokenCharacterTrie([b"a", b"a"])
    with pytest.raises(ValueError, match="Duplicate"):
        TokenCharacterTrie([Token(0, b"a"), Token(0, b"a")])
    with pytest.raises(ValueError, match="2 weights for 1"):
        TokenCharacterTrie([Token(0, b"a")]).weight_sum([1, 2])
    with pytest.raises(ValueError, match="device"):
        ParallelTokenCharacterTrie([Token(0, b"a")], device="tpu")


def test_cancelled_weight_changes_no_other_and_loops_may_change(text) -> None:
    trie = AsyncTokenCharacterTrie.from_vocab(decode_vocab(text)[0], backend="sequential")
    n = text.n_vocab
    expected = trie.trie.weight_sum(np.ones(n))
    requests: list[int] = []
    real = trie.trie.batch_weight_sum
    trie.trie.batch_weight_sum = lambda ws: (requests.append(len(ws)), real(ws))[1]

    async def main():
        tasks = [asyncio.ensure_future(trie.weight_sum(np.ones(n))) for _ in range(6)]
        bad = asyncio.ensure_future(trie.weight_sum(np.ones(3)))
        best = asyncio.ensure_future(trie.weight_max(-np.ones(n)))
        await asyncio.sleep(0)
        tasks[2].cancel()
        return await asyncio.gather(*tasks, bad, best, return_exceptions=True)

    for _ in range(2):
        *sums, bad, best = asyncio.run(main())
        assert isinstance(sums.pop(2), asyncio.CancelledError)
        assert all(np.array_equal(each, expected) for each in sums)
        assert isinstance(bad, ValueError)
        assert best[trie.trie.root] == -1
    assert max(requests) >= 5
    with pytest.raises(ValueError, match="Unknown backend"):
        AsyncTokenCharacterTrie.from_vocab([], backend="x")
    assert "digraph" in TokenCharacterTrie([Token(0, b"a")]).visualize([1, 2, 3])


# Caches -------------------------------------------------------------------------------------------


def test_output_cache_keeps_the_latest_and_a_second_set_evicts_nothing() -> None:
    cache = OutputCache(2)
    cache["a"], cache["b"] = 1, 2
    cache["b"] = 3
    assert "a" in cache
    assert cache["a"] == 1
    cache["c"] = 4
    assert "b" not in cache
    assert len(cache) == 2
    with pytest.raises(KeyError):
        cache["b"]
    cache.clear()
    assert len(cache) == 0


def test_token_trie_keeps_all_tokens_and_may_be_deep() -> None:
    trie = TokenTrie()
    child = trie.add_token(1)
    below = child.add_token(2, logprobs="x")
    assert trie.add_token(1) is child
    assert trie.get_token(1).get_token(2) is below
    assert trie.has_token(1)
    last = trie.extend_cache(0, [1, 2] + [3] * 3000, np.zeros((3002, 4), np.float32), 0)
    np.testing.assert_allclose(last.logprobs, np.log(np.full(4, 0.25)), rtol=1e-6)
    assert trie.get_token(1).get_token(2) is below
    last.past_key_values = object()
    trie.clear_kv_cache()
    assert last.past_key_values is None
    assert repr(trie) == "<TokenTrie of 3002 tokens>"


# Models -------------------------------------------------------------------------------------------


def test_mock_gives_the_documented_numbers_at_any_context_length(text) -> None:
    mock = MockAsyncLM(text)
    rows = {ids: np.asarray(mock.next_token_logprobs_sync(list(ids))) for ids in [(), (3, 0), (5,)]}
    drawn = np.random.RandomState(5).rand(text.n_vocab)
    expected = drawn - np.log(np.exp(drawn).sum())
    np.testing.assert_allclose(rows[5,], expected, atol=1e-6)
    assert rows[()].shape == (text.n_vocab,)
    assert np.isfinite(np.asarray(mock.next_token_logprobs_sync([60_000] * 5000))).all()
    second = asyncio.run(MockAsyncLM.from_name("tiny").next_token_logprobs([5]))
    np.testing.assert_array_equal(np.asarray(second), rows[5,])
    with pytest.raises(ValueError, match="lora_name"):
        mock.next_token_logprobs_sync([1], lora_name="law")
    assert isinstance(load_model_by_name("tiny", backend="mock"), MockAsyncLM)


def test_load_model_by_name_of_a_gguf_file_needs_no_backend() -> None:
    model = load_model_by_name(str(shallow_gguf()))
    with model.lm:
        assert model.next_token_logprobs_sync([1, 2]).shape == (model.lm.info.n_vocab,)


def test_model_by_name_loads_and_an_unknown_name_raises() -> None:
    model = load_model_by_name("tiny")
    assert isinstance(model, AsyncLM)
    assert model.lm.info.name == "numpy"
    assert load_model_by_name("tiny", "numpy", {"n_ctx": 64}).lm.n_ctx == 64
    with pytest.raises(ValueError, match="Invalid backend: 'sgl'"):
        load_model_by_name("tiny", backend="sgl")
    assert AsyncMlxLM.__init__.__doc__
    assert AsyncVirtualLM.__init__.__doc__
    if find_spec("vllm") is None:
        with pytest.raises(EngineUnavailable, match="needs the package 'vllm'"):
            load_model_by_name("tiny", backend="vllm")
    assert isinstance(EngineUnavailable("x"), ImportError)


@pytest.fixture(scope="module")
def hf():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(str(files("weft") / "data" / "tiny"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@pytest.mark.torch
def test_program_of_a_client_runs_on_a_loaded_model(hf) -> None:
    """All prefixes in one batch, lora_name in each call, byte tokens: as in genlm-control."""
    import torch

    model = AsyncTransformer(*hf)
    ids = hf[1].encode("Once upon a time")
    assert all(isinstance(token, Token) for token in model.byte_vocab)
    assert len(model.byte_vocab) == len(model.str_vocab)

    async def program():
        prefixes = [ids[: n + 1] for n in range(len(ids))]
        rows = await model.batch_next_token_logprobs(prefixes, lora_name=None)
        one = await model.next_token_logprobs(ids, lora_name=None)
        sample = await model.sample(ids, 5, [], temperature=0, lora_name=None)
        return rows, one, sample

    rows, one, sample = asyncio.run(program())
    with torch.no_grad():
        plain = hf[0](torch.tensor([ids])).logits[0].log_softmax(-1)
    assert isinstance(rows, torch.Tensor)
    torch.testing.assert_close(rows, plain, atol=1e-4, rtol=0)
    torch.testing.assert_close(one, plain[-1], atol=1e-4, rtol=0)
    assert sample[0] == int(plain[-1].argmax())
    assert model.model is hf[0]
    assert (model.batch_size, model.timeout, model.queries) == (20, 0.02, [])
    with pytest.raises(ValueError, match="empty"):
        model.next_token_logprobs_sync([])


@pytest.mark.torch
def test_queries_added_by_hand_are_answered_in_order(hf) -> None:
    model = AsyncTransformer(*hf, batch_size=3)

    async def program():
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(5)]
        model.add_query([5, 6], futures[0])
        model.add_query([10**6], futures[1], past=None)
        assert len(model.queries) == 2
        model.add_query([5, 7], futures[2])  # that makes three
        assert not model.queries
        assert futures[0].done()
        assert isinstance(futures[1].exception(), ValueError)
        model.add_query([8], futures[3])
        model.reset_async_queries()
        assert futures[3].cancelled()
        model.add_query([8, 9], futures[4])
        model.batch_evaluate_queries()
        return futures[0].result(), futures[2].result(), futures[4].result()

    for ids, row in zip(([5, 6], [5, 7], [8, 9]), asyncio.run(program()), strict=True):
        np.testing.assert_array_equal(row, model.next_token_logprobs_sync(ids))


@pytest.mark.torch
def test_model_by_name_is_the_transformers_model(hf) -> None:
    import torch

    folder, ids = str(shallow()), hf[1].encode("Once upon a time")
    for options in ({"torch_dtype": "float32"}, {"attn_implementation": "eager"}):
        model = AsyncTransformer.from_name(folder, hf_opts=options)
        assert type(model.model) is type(hf[0])
        with torch.no_grad():
            plain = model.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
        row = model.next_token_logprobs_uncached(ids)
        torch.testing.assert_close(row, plain, atol=0.1, rtol=0)
        new = model.model.generate(torch.tensor([ids]), max_new_tokens=3, do_sample=False)
        assert new.shape == (1, len(ids) + 3)
    assert model.model.config._attn_implementation == "eager"
    with pytest.raises(ModelLoadError, match="nosuch"):
        AsyncTransformer.from_name(folder, hf_opts={"nosuch": 1})


@pytest.mark.torch
def test_bitsandbytes_opts_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.compat.genlm import models

    options = {"load_in_8bit": True, "llm_int8_threshold": 5.0}
    if find_spec("bitsandbytes") is None:
        with pytest.raises(EngineUnavailable, match="pip install bitsandbytes"):
            AsyncTransformer.from_name("tiny", bitsandbytes_opts=options)
    observed = {}
    monkeypatch.setattr(models, "find_spec", lambda name: name)
    monkeypatch.setattr(models, "load", lambda source, **given: observed.update(given))
    with pytest.raises(AttributeError):  # there is no model
        AsyncTransformer.from_name(str(shallow()), bitsandbytes_opts=options)
    config = observed["engine_options"]["quantization_config"]
    assert (config.load_in_8bit, config.llm_int8_threshold) == (True, 5.0)


@pytest.mark.torch
def test_every_signature_of_the_vllm_class_is_known(hf, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.compat.genlm import models

    with weft.load("tiny") as lm:
        monkeypatch.setattr(type(lm.engine), "tokenizer", lambda self: hf[1])
        monkeypatch.setattr(models, "load", lambda *_, **__: lm)
        monkeypatch.setattr("weft.engines.engine_names", lambda: ("vllm",))
        factory = AsyncVirtualLM.from_name("tiny", engine_opts={"seed": 1}, batch_size=3)
        new = [
            AsyncVirtualLM(lm),
            AsyncVirtualLM(async_llm_engine=lm, cache_size=0, cache_opts={}),
            AsyncVirtualLM(lm, 5, {"move_to_cpu": True}),
            AsyncVirtualLM(llm_engine=lm),
            AsyncVirtualLM(lm, None, 5, None, 7, 0.5),
            factory,
        ]
        prompt = f"Hello {hf[1].eos_token} x"
        for known in new:
            assert known.tokenizer is hf[1]
            assert known.tokenizer.encode(prompt) != lm.tokenizer.encode(prompt)
            assert known.async_llm_engine is known.llm_engine is known.model
        assert [known.batch_size for known in new] == [20, 20, 20, 20, 7, 3]
        assert new[4].timeout == 0.5
        with pytest.raises(ConfigError, match="arguments by position"):
            AsyncVirtualLM(lm, 5, {}, 7)


@pytest.mark.torch
def test_known_parameters_are_mapped_or_raise(hf, tmp_path) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        AsyncTransformer(*hf, timeout=-1)
    folder = str(files("weft") / "data" / "tiny")
    model = AsyncTransformer.from_name(folder, hf_opts={"torch_dtype": "float32"}, batch_size=4)
    assert (model.lm.info.dtype, model.batch_size) == ("float32", 4)
    capped = AsyncMlxLM(weft.load("tiny"), cache_size=3)
    for number in range(9):
        capped.next_token_logprobs_sync([5, number])
    assert capped.lm.scheduler.logits_cache.used_bytes <= 3 * 4 * capped.lm.info.n_vocab


@pytest.mark.torch
def test_concurrent_extensions_of_stored_contexts_stay_separate(hf) -> None:
    """Their known errors: rows mixed between prefixes, caches changed in place, waiters left."""
    import torch

    model = AsyncTransformer(*hf)
    rng = random.Random(3)
    heads = [[rng.randrange(5, 900) for _ in range(6)] for _ in range(2)]
    for head in heads:
        model.cache_kv(head)
    contexts = [[*head, 7, *tail] for head in heads for tail in ([], [8], [8, 9])] * 2

    async def program():
        return await asyncio.gather(*map(model.next_token_logprobs, contexts))

    for _ in range(2):
        for ids, row in zip(contexts, asyncio.run(program()), strict=True):
            with torch.no_grad():
                plain = hf[0](torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            torch.testing.assert_close(row, plain, atol=1e-4, rtol=0)
    node, n_matched, past, base = model.walk_cache(contexts[0])
    assert (n_matched, base) == (7, 6)
    assert node.logits is not None
    assert past is not None


# Under its names ---------------------------------------------------------------------------------


def test_known_programs_may_read_the_bytes_of_tokens() -> None:
    token = Token(3, b"ab")
    assert Token.as_bytes(token) == Token.as_bytes(b"ab") == b"ab"
    assert type(Token.as_bytes(token)) is bytes
    assert Token.is_plain_bytes(b"ab")
    assert not any(map(Token.is_plain_bytes, (token, "ab", 3)))


class End:
    """A mark that is one symbol, like genlm-control's end of sequence."""

    def __iter__(self):
        return iter([self])


def test_trie_takes_some_tokens_and_end_marks_and_counts_by_position() -> None:
    end = End()
    some = [Token(7, b"ab"), Token(3, b"a"), Token(9, b"ab"), end]
    trie = TokenCharacterTrie(some)
    assert trie.idx_to_leaf[:, 0].tolist() == [0, 1, 2, 3]
    assert [trie.leaf2word[leaf] for leaf in trie.idx_to_leaf[:, 1]] == list(trie.word2leaf)
    assert list(trie.word2leaf) == [(b"ab", 7), (b"a", 3), (b"ab", 9), end]
    assert trie.node2prefix[trie.word2leaf[end]] == [end]
    assert trie.children[trie.children[trie.root][end]] == {(None, 3): trie.word2leaf[end]}
    sums = trie.weight_sum([1, 2, 4, 8])
    assert sums[trie.root] == 15
    assert sums[trie.children[trie.root][ord("a")]] == 7
    assert trie.ordering.tolist() == [n for n, edges in enumerate(trie.children) if edges]
    assert [each.tolist() for each in trie.jump] == [sorted(e.values()) for e in trie.children]
    chars = TokenCharacterTrie(["äb", "ä"])
    assert list(chars.children[chars.root]) == ["ä"]
    with pytest.raises(ValueError, match="2 weights for 8 nodes"):
        trie.visualize([1, 2])


@pytest.mark.parametrize("n", [1, 5])
def test_both_tries_agree_on_a_vocabulary(text, n: int) -> None:
    tokens = decode_vocab(text)[0]
    trie, parallel = TokenCharacterTrie(tokens), ParallelTokenCharacterTrie(tokens, "cpu")
    weights = np.random.default_rng(n).normal(size=(n, len(tokens)))
    for name in ("batch_weight_sum", "batch_weight_max"):
        np.testing.assert_allclose(
            getattr(parallel, name)(weights), getattr(trie, name)(weights), atol=1e-4
        )


def test_unknown_weight_raises(text) -> None:
    trie = AsyncTokenCharacterTrie(TokenCharacterTrie([Token(0, b"a")]))

    async def main() -> None:
        trie.start()
        with pytest.raises(ValueError, match="Unknown operation: 'mean'"):
            await trie._queue_request([1], "mean")
        await trie.cleanup()

    asyncio.run(main())
    assert trie._task is None


def test_strings_of_a_vocabulary_stay_apart() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    chars = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(chars)}
    vocab["Ãĥ"] = len(chars)  # bytes c3 83, which are the text Ã, as byte c3 is written
    backend = Backend(models.BPE(vocab, [("Ã", "ĥ")]))
    backend.decoder = decoders.ByteLevel()
    tokens, strings = decode_vocab(backend)
    assert strings[vocab["Ãĥ"]] == "Ã"
    assert strings[vocab["Ã"]] == "<0xC3>"
    assert strings[vocab["ĥ"]] == "ĥ"
    assert len(set(strings)) == len(tokens)


def test_tokens_that_do_not_spell_the_text_byte_for_byte_raise() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(genlm.ByteVocabError, match="neither ByteLevel nor SentencePiece"):
        get_byte_vocab(backend)
    with pytest.raises(ValueError, match="Could not decode byte representation"):
        decode_vocab(backend)


@pytest.mark.torch
def test_byte_decoder_is_validated_against_a_tokenizer() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from weft._core.tokens.codec import _BYTE_LEVEL

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: at for at, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    right = {character: _BYTE_LEVEL[ord(character)] for character in alphabet}
    genlm.check_byte_decoder(tokenizer, right)
    for wrong in ({}, {"a": 999}, {**right, "â": 1}, dict.fromkeys(right, 999)):
        with pytest.raises(genlm.ByteDecoderError):
            genlm.check_byte_decoder(tokenizer, wrong)


class Uniform(genlm.AsyncLM):
    """A program's own model by genlm-backend's signatures."""

    async def next_token_logprobs(self, token_ids):
        return self.next_token_logprobs_sync(token_ids)

    def next_token_logprobs_sync(self, token_ids):
        return np.full(len(self.byte_vocab), -np.log(len(self.byte_vocab)), dtype=np.float32)


def test_str_vocab_of_a_subclass_is_that_of_decode_vocab(text) -> None:
    for tokenizer in (text, *tokenizers_of_each_kind().values()):
        assert Uniform(tokenizer).str_vocab == decode_vocab(tokenizer)[1]


# By name -----------------------------------------------------------------------------------------


@pytest.mark.torch
def test_model_by_name_has_the_transformers_tokenizer(hf) -> None:
    import torch

    folder = str(files("weft") / "data" / "tiny")
    model = load_model_by_name(folder, "hf", {"hf_opts": {"torch_dtype": "float"}, "batch_size": 3})
    assert isinstance(model, AsyncTransformer)
    assert (model.lm.info.dtype, model.batch_size) == ("float32", 3)
    assert model.device == torch.device("cpu")
    end = hf[1].eos_token
    for prompt in (f"{end}Hi", "Once upon a time"):
        assert model.tokenizer.encode(prompt) == hf[1].encode(prompt)
        assert model.tokenizer(prompt)["input_ids"] == hf[1](prompt)["input_ids"]
    assert model.tokenizer.get_vocab() == hf[1].get_vocab()
    assert model.tokenizer.convert_ids_to_tokens([7]) == hf[1].convert_ids_to_tokens([7])
    assert (model.tokenizer.name_or_path, model.tokenizer.eos_token) == (folder, end)
    assert len(model.byte_vocab) == len(hf[1])
    assert model.str_vocab == decode_vocab(hf[1])[1] == MockAsyncLM.from_name("tiny").str_vocab
    assert type(MockAsyncLM.from_name("tiny").tokenizer) is type(hf[1])
    named = AsyncTransformer.from_name("tiny", hf_opts={"torch_dtype": torch.float32})
    assert named.lm.info.model == named.tokenizer.name_or_path == "tiny"
    ids = hf[1].encode("Once upon a time")
    row = named.next_token_logprobs_uncached(ids)  # a plain call, as is known
    np.testing.assert_array_equal(row, model.next_token_logprobs_uncached(ids))
    with torch.no_grad():
        plain = hf[0](torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(row, plain, atol=1e-4, rtol=0)


@pytest.mark.torch
def test_tiny_by_name_gives_tensors_and_takes_a_batch_size() -> None:
    import torch

    model = load_model_by_name("tiny", llm_opts={"batch_size": 7, "n_ctx": 64})
    assert (model.batch_size, model.lm.n_ctx) == (7, 64)
    assert isinstance(model.next_token_logprobs_sync([5, 6]), torch.Tensor)
    arrays = load_model_by_name("tiny", llm_opts={"as_torch": False})
    assert isinstance(arrays.next_token_logprobs_sync([5, 6]), np.ndarray)


@pytest.mark.torch
def test_cuda_without_vllm_selects_torch(monkeypatch, caplog) -> None:
    from weft.asynclm import factory

    monkeypatch.setattr(factory, "_has_cuda", lambda: True)
    monkeypatch.setattr(factory, "find_spec", lambda name: None if name == "vllm" else object())
    folder = str(files("weft") / "data" / "tiny")
    options = {"engine_opts": {"gpu_memory_utilization": 0.3}}
    model = load_model_by_name(folder, llm_opts=options)
    assert model.lm.info.name == "torch"
    assert "engine_opts are for vLLM" in caplog.text
    assert options["engine_opts"]  # the caller's stay as they were
    monkeypatch.setattr(factory, "_has_cuda", lambda: False)
    with pytest.raises(TypeError, match="engine_opts"):
        load_model_by_name(folder, llm_opts=options)


@pytest.mark.torch
def test_added_query_is_answered_when_its_loop_is_next_free(hf) -> None:
    model = AsyncTransformer(*hf)

    async def main():
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in range(4)]
        model.add_query([5, 6], futures[0], None)
        model.add_query([10**6], futures[1])
        model.add_query([5, 7], futures[2])
        model.add_query([5, 8], futures[3])
        futures[3].cancel()
        good, bad, also = await asyncio.gather(*futures[:3], return_exceptions=True)
        assert isinstance(bad, ValueError)
        return good, also

    good, also = asyncio.run(main())
    assert model.queries == []
    np.testing.assert_array_equal(good, model.next_token_logprobs_sync([5, 6]))
    np.testing.assert_array_equal(also, model.next_token_logprobs_sync([5, 7]))
    model.queries = []  # as known programs do
    model.batch_evaluate_queries()


@pytest.mark.torch
def test_cache_is_walked_like_the_known_trie(hf) -> None:
    model = AsyncTransformer(*hf)
    model.clear_cache()
    ids = [5, 6, 7]
    assert model.walk_cache(ids)[1:] == (0, None, 0)
    row = model.next_token_logprobs_sync(ids)
    node = model._caches[None]
    for token in ids:
        assert node.has_token(token)
        assert not node.has_token(99)
        node = node.get_token(token)
    assert (node.n_tokens, node.has_kv) == (3, True)
    assert node.past_key_values is not None
    np.testing.assert_allclose(node.logprobs, row)
    with pytest.raises(KeyError):
        node.get_token(99)
    node, n_matched, past, base = model.walk_cache([*ids, 9])
    assert (n_matched, past.n_tokens, base) == (3, 3, 3)
    model.clear_kv_cache()
    assert node.past_key_values is None
    assert node.logits is not None
    assert repr(model.cache) == "<CachedContext of 0 tokens>"
    with pytest.raises(ConfigError, match="integers"):
        model.walk_cache(None)


# Installed under the known names ---------------------------------------------------------------


def program(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a Python of its own, with further places to import from."""
    result = os.pathsep.join(map(str, [*paths, *sys.path]))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": result},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


USE = """
import sys
import weft.compat.genlm
{install}
import genlm.backend, genlm.backend.tokenization.vocab
from genlm.backend import AsyncTransformer, load_model_by_name
from genlm.backend.llm import MockAsyncLM, AsyncLM
from genlm.backend.llm.hf import Query
from genlm.backend.tokenization import Token, decode_vocab
from genlm.backend.tokenization.bytes import ByteVocabError, get_byte_vocab
from genlm.backend.trie import AsyncTokenCharacterTrie, TokenCharacterTrie
from genlm.backend.trie.parallel import ParallelTokenCharacterTrie
from genlm.backend.cache import OutputCache
assert Token is weft.compat.genlm.Token
assert TokenCharacterTrie is weft.compat.genlm.TokenCharacterTrie
assert issubclass(MockAsyncLM, AsyncLM)
for name in [name for name in sys.modules if name.startswith("genlm.backend.llm")]:
    del sys.modules[name]  # as their own suite does after each test
from genlm.backend.llm import MockAsyncLM as again
assert again is MockAsyncLM
weft.compat.genlm.install()  # again: nothing
assert "torch" not in sys.modules
"""


def genlm_at(folder: Path) -> Path:
    """Make a folder with a genlm-backend and a client of it."""
    for name in ("backend", "control"):
        (folder / "genlm" / name).mkdir(parents=True)
        (folder / "genlm" / name / "__init__.py").write_text("import sys\n")
    return folder


def test_known_imports_give_weft_without_genlm_backend(tmp_path: Path) -> None:
    install = USE.format(install="weft.compat.genlm.install()")
    done = program(install)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(genlm_at(tmp_path) / "genlm" / "backend")
    done = program(install + "import genlm.control", tmp_path)  # with a client of it
    assert done.returncode == 0, done.stderr


@pytest.mark.programs
def test_installed_genlm_backend_is_replaced_on_request_only(tmp_path: Path) -> None:
    place = genlm_at(tmp_path)
    done = program(USE.format(install="weft.compat.genlm.install(replace=True)"), place)
    assert done.returncode == 0, done.stderr
    done = program("import weft.compat.genlm as g; g.install()", place)
    assert "ConfigError: genlm-backend is installed" in done.stderr
    assert "install(replace=True)" in done.stderr
    done = program("import genlm.control, weft.compat.genlm as g; g.install()", place)
    assert "ConfigError: genlm.control is imported already" in done.stderr


@pytest.mark.programs
def test_type_checkers_see_what_an_asynclm_has(tmp_path: Path, monkeypatch, type_cache) -> None:
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    monkeypatch.chdir(ROOT)
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", type_cache]
    out, _, _ = api.run([*settings, "--follow-imports=silent", str(file)])
    errors = [line.split("program.py:")[1] for line in out.splitlines() if "error:" in line]
    assert [error.split(":")[0] for error in errors] == ["14", "15"], out
    assert "abstract" in errors[0]
    assert 'has no attribute "walk_cach"' in errors[1]


PROGRAM = """import weft
from weft.asynclm import AbstractAsyncLM
from weft.compat.genlm import AsyncTransformer, MockAsyncLM

class Half(AbstractAsyncLM):
    pass

model = weft.AsyncLM(weft.load("tiny"))
model.cache_kv([1])
print(model.walk_cache([1])[1] + 1)
model.clear_kv_cache()
mock: MockAsyncLM = weft.load_model_by_name("tiny", "mock")
named: weft.AsyncLM = weft.load_model_by_name("tiny", "numpy", {})
Half(weft.load("tiny").text)
model.walk_cach([1])
"""
