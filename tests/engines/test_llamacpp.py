"""The llamacpp engine beyond the laws: other models, options, threads, broken files, closing."""

from __future__ import annotations

import gc
import logging
import random
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

import weft
from recipe.corpus import game24
from recipe.export_gguf import export_gguf
from shallow import TINY, shallow, shallow_gguf
from small_gguf import windowed
from weft import samples
from weft._core.sampling.params import SamplingParams
from weft.engines.base import Row, ScoreSpan, Span
from weft.engines.gguf import read_gguf
from weft.engines.llamacpp import LlamaCppEngine
from weft.engines.llamacpp.step import groups_of
from weft.errors import (
    ConfigError,
    ForwardError,
    KVFull,
    ModelLoadError,
    ModelMismatch,
    Unsupported,
)

pytestmark = pytest.mark.llamacpp

PROMPTS = [
    *samples.ALL.values(),
    *[game24.ask(numbers) for numbers in game24.holdout24()[:20]],
    *[f"What is {7 * i + 3} + {11 * i + 8}?" for i in range(10)],
    *[f"Tell me a story about a {name}." for name in "owl cat bear frog bee hen dog".split()],
    *[f"Can {numbers} make 24?" for numbers in ("1 2 3 4", "5 5 5 1", "8 8 3 3")],
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as GGUF files, a type each."""
    directory = tmp_path_factory.mktemp("gguf")
    for kind in ("f32", "f16", "q8_0"):
        export_gguf(TINY, directory / f"{kind}.gguf", kind)
    windowed(directory / "windowed.gguf", directory / "f32.gguf")
    return directory


def load(path: Path, **options: Any) -> weft.LM:
    options.setdefault("n_threads", 1)
    dtype = options.pop("dtype", "float32")
    return weft.load(path, dtype=dtype, kv_budget=options.pop("kv_budget", "64MiB"),
                     engine_options=options)  # fmt: skip


@pytest.fixture(scope="session")
def lm(folder: Path) -> Iterator[weft.LM]:
    with load(folder / "f32.gguf") as lm:
        yield lm


@pytest.fixture(scope="session")
def reference() -> Iterator[weft.LM]:
    with weft.load("tiny", engine_options={"threads": 1}) as lm:
        yield lm


@pytest.fixture
def engine() -> Iterator[LlamaCppEngine]:
    engine = LlamaCppEngine.load(shallow_gguf(), dtype="float32", n_threads=1, kv_bytes=1 << 21)
    yield engine
    engine.close()


# The same model as elsewhere ------------------------------------------------------------------


def test_greedy_texts_equal_those_of_the_numpy_engine(lm: weft.LM, reference: weft.LM) -> None:
    assert len(set(PROMPTS)) == len(PROMPTS) >= 50
    for prompt in PROMPTS:
        tokens, wanted = (
            weft.Loom(each, prompt).grow(max_tokens=24, temperature=0)[0].tokens
            for each in (lm, reference)
        )
        assert tokens == wanted, prompt


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_load_starts_no_thread_team_before_the_first_call() -> None:
    """With two teams libgomp has more threads than cores and stops spinning at barriers."""
    code = """
import os, sys
from weft._core.sampling.params import SamplingParams  # numpy's own threads start first
from weft.engines.base import Row
from weft.engines.llamacpp import LlamaCppEngine
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
engine = LlamaCppEngine.load(sys.argv[1], n_threads=4, kv_bytes=1 << 21)
loaded = count()
engine.forward([Row((), [3] * 8, 0, None, (7,))])
print(loaded - before, count() - loaded)
"""
    command = [sys.executable, "-c", code, str(shallow_gguf())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "3"]


def test_tokenizer_of_the_file_equals_that_of_the_folder(lm: weft.LM, reference: weft.LM) -> None:
    ours, theirs = lm.text, reference.text
    assert ours.vocab_bytes == theirs.vocab_bytes
    assert ours.special_ids == theirs.special_ids
    assert ours.stop_ids == theirs.stop_ids
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.chat_template == theirs.chat_template
    rng = random.Random(0)
    characters = "abc XYZ 0123 \n\t.,<|user|> éß漢字😀\u200b"
    texts = ["", " ", *PROMPTS, *["".join(rng.choices(characters, k=20)) for _ in range(200)]]
    for text in texts:
        for special in (False, True):
            assert ours.encode(text, special=special) == theirs.encode(text, special=special)
            ids = ours.continuation(text, special=special)
            assert ids == theirs.continuation(text, special=special)
            assert ours.decode(ids) == theirs.decode(ids)
    with pytest.raises(ConfigError, match="no text"):
        ours.encode("\ud800")


def test_constraints_and_embeddings_equal_those_of_the_numpy_engine(
    lm: weft.LM, reference: weft.LM
) -> None:
    texts_of_engines = []
    for model in (lm, reference):
        loom = weft.Loom(model, samples.record)
        texts_of_engines.append(
            loom.grow(max_tokens=40, temperature=0, constraint={"type": "object"})[0].text
        )
    assert texts_of_engines[0] == texts_of_engines[1]
    texts = ["a fox", "What is 37 + 58?"]
    for pooling in ("mean", "cls", "last"):
        vectors, wanted = (e.embed(texts, pooling=pooling) for e in (lm, reference))
        np.testing.assert_allclose(vectors, wanted, atol=1e-4)


def test_embeddings_are_pooled_as_in_the_file(folder: Path, lm: weft.LM) -> None:
    texts = ["a fox", "an owl and a bear"]
    assert lm.info.pooling is None
    np.testing.assert_array_equal(lm.embed(texts), lm.embed(texts, pooling="mean"))
    with load(folder / "windowed.gguf") as other:
        assert other.info.pooling == "last"
        np.testing.assert_array_equal(other.embed(texts), other.embed(texts, pooling="last"))
        assert np.abs(other.embed(texts) - other.embed(texts, pooling="mean")).max() > 0.01


def test_model_is_sampled_with_the_defaults_of_its_file(folder: Path, lm: weft.LM) -> None:
    assert lm.defaults == SamplingParams()
    with load(folder / "windowed.gguf") as other:
        assert (other.defaults.temperature, other.defaults.top_k) == (0.5, 7)


def test_quantised_weights_and_kv_run_and_are_reported(folder: Path) -> None:
    with load(folder / "q8_0.gguf", dtype="auto", type_k="q8_0", type_v="q8_0") as lm:
        assert lm.info.dtype == "q8_0"
        assert lm.info.extra["kv_types"] == ["q8_0", "q8_0"]
        text = weft.Loom(lm, samples.sum).grow(max_tokens=16, temperature=0)[0].text
        assert "95" in text
        data = lm.kv.to_bytes(lm.tokenize("Once upon a time"))
        lm.clear_cache()
        assert lm.kv.size(lm.kv.load(data)) == len(lm.tokenize("Once upon a time"))


@pytest.mark.torch
def test_torch_engine_computes_the_dequantised_file(folder: Path, reference: weft.LM) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    with weft.load(folder / "f32.gguf", engine="torch") as lm:
        assert lm.info.name == "torch"
        assert lm.tokenize("12 <|user|>", special=True) == reference.tokenize(
            "12 <|user|>", special=True
        )
        for prompt in PROMPTS[:3]:
            tokens, wanted = (
                weft.Loom(each, prompt).grow(max_tokens=12, temperature=0)[0].tokens
                for each in (lm, reference)
            )
            assert tokens == wanted


# Windows, many branches, saving ---------------------------------------------------------------


def test_branch_may_start_before_a_sliding_window(folder: Path) -> None:
    """The library writes over cells that have left every window, unless two sequences see them."""
    file = folder / "windowed.gguf"
    engine = LlamaCppEngine.load(file, dtype="float32", n_threads=1, kv_bytes=600 * 1024)
    store, ids = engine.fragments, [random.Random(1).randrange(10, 2000) for _ in range(160)]

    def plain(tokens: list[int]) -> Any:
        return engine.forward([Row((), tokens, 0, None, (len(tokens) - 1,))]).logits(0)

    def after(*path: Span) -> Any:
        at = sum(span.length for span in path)
        return engine.forward([Row(path, [5, 6], at, None, (1,))]).logits(0)

    upper = store.new(None)
    engine.forward([Row((), ids[:80], 0, upper)])
    for _ in range(8):  # the place where the cache is written goes round
        other = store.new(upper)
        engine.forward([Row((Span(upper, 80),), ids[80:], 80, other)])
        store.free(other)
    lower = store.new(upper)
    for at in range(80, 120):
        engine.forward([Row((Span(upper, 80),), [ids[at]], at, lower)])
    for length in (3, 40, 79):
        wanted = plain([*ids[:length], 5, 6])
        np.testing.assert_allclose(after(Span(upper, length)), wanted, atol=0.02)
    wanted = plain([*ids[:120], 5, 6])
    np.testing.assert_allclose(after(Span(upper, 80), Span(lower, 40)), wanted, atol=0.02)
    saved = [store.export(each) for each in (upper, lower)]
    store.free(lower)
    store.free(upper)
    assert store.usage() == (0, 0)
    upper = store.load(saved[0], None)
    lower = store.load(saved[1], upper)
    np.testing.assert_allclose(after(Span(upper, 80), Span(lower, 40)), wanted, atol=0.02)
    engine.close()


def test_more_branches_than_sequences_grow_and_resume(lm: weft.LM) -> None:
    assert lm.info.max_paths is not None
    n = 2 * lm.info.max_paths
    grown = weft.Loom(lm, samples.story).grow(n=n, max_tokens=4, seed=3)
    assert len(grown) == n
    root = weft.Branch.create(lm, temperature=1.0)
    root.prefill(lm.tokenize("Once upon a time"))
    branches = [root.fork() for _ in range(n)]
    for number, branch in enumerate(branches):
        branch.reseed_sampler(number)
        branch.commit(branch.produce().token)
    repeated = root.fork()
    repeated.reseed_sampler(0)
    repeated.commit(repeated.produce().token)
    assert repeated.perplexity == branches[0].perplexity
    np.testing.assert_allclose(repeated.logits, branches[0].logits, atol=1e-4)


def test_saved_tree_and_branch_are_loaded_equal(lm: weft.LM, tmp_path: Path) -> None:
    loom = weft.Loom(lm, samples.game24)
    texts = [node.text for node in loom.grow(n=2, max_tokens=8, seed=1)]
    loom.save(tmp_path / "a.loom.json")
    opened = weft.Loom.open(tmp_path / "a.loom.json", lm=lm)
    assert [node.text for node in opened.children] == texts
    branch = weft.Branch.create(lm)
    branch.prefill(lm.tokenize("Once upon a"))
    branch.save(tmp_path / "b.branch")
    loaded = weft.Branch.load(lm, tmp_path / "b.branch")
    np.testing.assert_allclose(loaded.logits, branch.logits, atol=1e-4)


def test_kv_of_another_type_raises_and_names_both(folder: Path) -> None:
    kinds = {
        "float32": {},
        "float16": {"dtype": "float16"},
        "q4_0": {"dtype": "auto", "type_k": "q4_0", "type_v": "q4_0"},
        "q4_0/iq4_nl": {"dtype": "auto", "type_k": "q4_0", "type_v": "iq4_nl"},  # the same size
    }
    marks, saved = set(), {}
    for name, options in kinds.items():
        with load(folder / "f32.gguf", **options) as lm:
            assert lm.info.dtype == name
            marks.add(lm.info.fingerprint)
            saved[name] = lm.kv.to_bytes([300, 301, 302])
    assert len(marks) == 1
    with load(folder / "f32.gguf", **kinds["q4_0"]) as lm:
        for name in saved.keys() - {"q4_0"}:
            with pytest.raises(ModelMismatch, match=f"this KV is {name}, .* is q4_0 here"):
                lm.kv.load(saved[name])
        assert lm.kv.size(lm.kv.load(saved["q4_0"])) == 3
    with load(folder / "f16.gguf") as lm:  # other weights
        assert lm.info.fingerprint not in marks


# Batches --------------------------------------------------------------------------------------


def test_rows_of_any_length_and_number_are_cut_into_batches(engine: LlamaCppEngine) -> None:
    ids = [random.Random(2).randrange(6, 2000) for _ in range(700)]
    span = ScoreSpan(0, tuple(ids[1:] + [7]), 2)
    complete = engine.forward([Row((), ids, 0, None, (0, 699), (span,))])
    store = engine.fragments
    fragment = store.new(None)
    for at in range(0, 700, 100):
        engine.forward([Row((), ids[at : at + 100], at, fragment)])
    last = engine.forward([Row((Span(fragment, 699),), ids[699:], 699, None, (0,))]).logits(0)
    np.testing.assert_allclose(complete.logits(1), last, atol=1e-4)
    ((score,),) = complete.scores()
    assert score.logprobs.shape == (700,)
    rows = [Row((Span(fragment, n),), [5], n, None, (0,)) for n in range(1, 601)]
    many = engine.forward(rows)
    for n in (1, 300, 600):
        one = engine.forward([Row((Span(fragment, n),), [5], n, None, (0,))]).logits(0)
        np.testing.assert_allclose(many.logits(n - 1), one, atol=1e-4)
    store.free(fragment)


def one_token(position: int, n: int) -> list[Row]:
    return [Row((), [5], position, None, (0,)) for _ in range(n)]


def test_rows_of_separate_paths_run_below_the_size_of_tiles() -> None:
    assert list(map(len, groups_of(one_token(100, 63), 6_300))) == [63]
    assert list(map(len, groups_of(one_token(100, 64), 6_400))) == [32, 32]
    assert list(map(len, groups_of(one_token(100, 200), 20_000))) == [50] * 4


def test_rows_of_separate_paths_run_apart_from_prompts() -> None:
    prompt = Row((), [5] * 100, 0, None, ())
    assert groups_of([prompt, *one_token(100, 8)], 2_000) == [list(range(1, 9)), [0]]


def test_rows_with_long_shared_paths_run_in_one_batch() -> None:
    assert groups_of(one_token(1_030, 64), 1_000 + 64 * 30) == [list(range(64))]


def test_70_separate_paths_have_the_logits_of_each_alone() -> None:
    engine = LlamaCppEngine.load(shallow_gguf(), flash_attention=True, n_threads=1)
    store = engine.fragments
    paths = [[300 + n, 5, 6, 7] for n in range(70)]
    fragments = [store.new(None) for _ in paths]
    engine.forward([Row((), p, 0, f) for p, f in zip(paths, fragments, strict=True)])
    ends = [Row((), [8], 4, f, (0,)) for f in fragments]
    together = engine.forward(ends)
    for n, path in enumerate(paths):
        alone = engine.forward([Row((), [*path, 8], 0, None, (4,))]).logits(0)
        np.testing.assert_allclose(together.logits(n), alone, atol=0.02)
    engine.close()


def test_logits_do_not_change_after_later_forwards(engine: LlamaCppEngine) -> None:
    first = engine.forward([Row((), [5, 6, 7], 0, None, (2,))])
    repeated = engine.forward([Row((), [5, 6, 7], 0, None, (2,))]).logits(0)
    engine.forward([Row((), [9, 9, 9], 0, None, (0, 1, 2))])
    np.testing.assert_array_equal(first.logits(0), repeated)
    engine.close()
    np.testing.assert_array_equal(first.logits(0), repeated)


def test_step_that_does_not_fit_raises_and_leaves_no_cell(engine: LlamaCppEngine) -> None:
    store = engine.fragments
    assert engine.info.kv_slots is not None
    fragment = store.new(None)
    engine.forward([Row((), [5] * 1000, 0, fragment)])
    others = [store.new(fragment) for _ in range(4)]
    path = (Span(fragment, 1000),)
    with pytest.raises(KVFull):
        engine.forward([Row(path, [5] * 500, 1000, each) for each in others])
    with pytest.raises(ForwardError, match="two rows"):
        engine.forward([Row(path, [5], 1000, others[0]) for _ in range(2)])
    assert store.usage().slots == 1000
    assert store.pool.shards[0].n_leased == 1
    store.free(fragment)


# Opening and closing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype is 'float8'"),
        ({"type_k": "q3_k"}, "type_k is 'q3_k'"),
        ({"type_v": "q8_0"}, "needs flash attention"),
        ({"n_ctx": 4096}, "n_ctx is 4096"),
        ({"kv_bytes": 1 << 60}, "kv_budget is 1152921504606846976 bytes"),
        ({"n_threads": 0}, "n_threads is 0"),
        ({"n_gpu_layers": -3}, "n_gpu_layers is -3"),
        ({"device": "cuda:7"}, "device is 'cuda:7'"),
        ({"load_mode": "fast"}, "load_mode is 'fast'"),
        ({"tensor_split": [1.0, 2.0]}, "tensor_split is"),
        ({"tensor_split": [1, "a"]}, "a share of tensor_split is 'a'"),
        ({"tensor_split": "ab"}, "tensor_split is 'ab'"),
        ({"repack": "no"}, "repack is 'no'; allowed are True and False"),
        ({"check_tensors": 1}, "check_tensors is 1"),
        ({"main_gpu": 3}, "main_gpu is 3"),
        ({"flash_attention": "yes"}, "flash_attention is 'yes'"),
    ],
)
def test_options_out_of_range_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LlamaCppEngine.load(shallow_gguf(), **{"dtype": "float32", **options})


def test_error_of_progress_stops_the_loading() -> None:
    heard: list[int] = []

    def progress(phase: str, done: int, total: int, note: str) -> None:
        heard.append(done)
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LlamaCppEngine.load(shallow_gguf(), n_threads=1, kv_bytes=1 << 20, progress=progress)
    assert heard


def test_n_seq_max_limits_the_branches() -> None:
    with weft.load(shallow_gguf(), n_seq_max=3, engine_options={"n_threads": 1}) as lm:
        assert lm.info.max_paths == lm.tree.budget.max_paths == 3
        assert len(weft.Loom(lm, samples.story).grow(n=12, max_tokens=3, seed=1)) == 12


def test_unknown_option_raises_and_is_named() -> None:
    with pytest.raises(ConfigError, match="no option 'n_gpu'"):
        weft.load(shallow_gguf(), engine_options={"n_gpu": 1})


def test_collected_engine_is_freed_and_a_closed_one_forgets_fragments(
    engine: LlamaCppEngine,
) -> None:
    other = LlamaCppEngine.load(shallow_gguf(), n_threads=1, kv_bytes=1 << 20)
    fragment = other.fragments.new(None)
    other.forward([Row((), [5, 6], 0, fragment)])
    finalizer = other._model._finalizer  # type: ignore[union-attr]
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    fragment = engine.fragments.new(None)
    engine.forward([Row((), [5, 6], 0, fragment)])
    store = engine.fragments
    engine.close()
    store.free(fragment)  # as a tree does that is closed later
    assert not finalizer.alive


def test_result_of_a_collected_engine_keeps_its_logits_and_then_frees_them() -> None:
    code = """
import gc, sys
import numpy as np
from weft.engines.base import Row
from weft.engines.llamacpp import LlamaCppEngine
engine = LlamaCppEngine.load(sys.argv[1], n_threads=1, kv_bytes=1 << 20)
output = engine.forward([Row((), [5, 6, 7], 0, None, (2,))])
logits = output.logits(0)
finalizers = [engine._pool.shards[0].context._handle._finalizer, engine._model._finalizer]
del engine
gc.collect()
np.testing.assert_array_equal(output.logits(0), logits)
print([finalizer.alive for finalizer in finalizers])
del output
gc.collect()
print([finalizer.alive for finalizer in finalizers])
"""
    command = [sys.executable, "-c", code, str(shallow_gguf())]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[True, True]", "[False, False]"]


def test_usage_after_close_is_zero_before_and_after_fragments_are_freed() -> None:
    engine = LlamaCppEngine.load(shallow_gguf(), n_threads=1)
    store = engine.fragments
    freed, trimmed = store.new(None), store.new(None)
    for fragment in (freed, trimmed):
        engine.forward([Row((), [5, 6, 7], 0, fragment)])
    engine.close()
    assert store.usage().slots == 0
    store.free(freed)
    store.trim(trimmed, 1)
    assert store.usage().slots == 0


@pytest.mark.parametrize("parent", ["root", "fragment"])
def test_load_into_a_closed_engine_raises(parent: str) -> None:
    engine = LlamaCppEngine.load(shallow_gguf(), n_threads=1)
    store = engine.fragments
    fragments = [store.new(None) for _ in range(20)]  # enough for another context
    for fragment in fragments:
        engine.forward([Row((), [5] * 60, 0, fragment)])
    data = store.export(fragments[0])
    engine.close()
    with pytest.raises(ForwardError, match="closed"):
        store.load(data, fragments[0] if parent == "fragment" else None)


def test_tokenizer_outlives_the_engine() -> None:
    with load(shallow_gguf()) as lm:
        text, ids = lm.text, lm.tokenize("hello")
    assert text.encode("hello") == ids
    assert text.decode(ids[1:]) == "hello"


def test_messages_of_the_library_are_logged_and_not_printed(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="weft.engines.llamacpp"):
        LlamaCppEngine.load(shallow_gguf(), n_threads=1, kv_bytes=1 << 20).close()
    assert capfd.readouterr() == ("", "")
    assert caplog.records


# Broken files ---------------------------------------------------------------------------------

Spoil = Callable[[bytearray], None]


def _put(data: bytearray, key: bytes, value: bytes, skip: int = 4) -> None:
    """Write a value over that of a key; a value's type stands before it."""
    at = data.index(key) + len(key) + skip
    data[at : at + len(value)] = value


SPOILT: dict[str, tuple[Spoil, str]] = {
    "empty": (lambda d: d.clear(), "does not begin with GGUF"),
    "something else": (lambda d: d.__setitem__(slice(0, 4), b"PK\3\4"), "does not begin with GGUF"),
    "a version to come": (lambda d: d.__setitem__(slice(4, 8), b"\x09\0\0\0"), "version 9"),
    "half": (lambda d: d.__delitem__(slice(len(d) // 2, None)), "truncated"),
    "a part of the header": (lambda d: d.__delitem__(slice(200, None)), "truncated"),
    "the last byte": (lambda d: d.__delitem__(slice(len(d) - 1, None)), "truncated"),
    "counts": (lambda d: d.__setitem__(slice(8, 16), b"\xff" * 8), "truncated"),
    "layers": (lambda d: _put(d, b"llama.block_count", b"\xff\xff\0\0"), "block_count is 65535"),
    "heads": (lambda d: _put(d, b"attention.head_count", b"\3\0\0\0"), "cannot share"),
    "no heads": (lambda d: _put(d, b"attention.head_count_kv", b"\0\0\0\0"), "llama.cpp cannot|no"),
    "width": (lambda d: _put(d, b"llama.embedding_length", b"\1\1\0\0"), "token_embd.weight is"),
    "rotation": (lambda d: _put(d, b"rope.dimension_count", b"\1\1\0\0"), "cannot rotate"),
    "epsilon": (lambda d: _put(d, b"rms_epsilon", struct.pack("<f", -1)), "epsilon is -1"),
    "an end token": (lambda d: _put(d, b"eos_token_id", b"\0\0\1\0"), "it has 2048 tokens"),
    "a token twice": (lambda d: _put(d, b"<|pad|>", b"<|bos|>", -7), "two tokens of the same"),
    "family": (
        lambda d: _put(d, b"general.architecture", b"nosuc", 12),
        "cannot load|not a readable GGUF",
    ),
    "a family of llama.cpp's": (
        lambda d: d.__setitem__(slice(None), bytes(d).replace(b"llama", b"nosuc")),
        "unknown model architecture",
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_broken_file_raises_and_is_named(what: str, tmp_path: Path) -> None:
    spoil, message = SPOILT[what]
    data = bytearray(shallow_gguf().read_bytes())
    spoil(data)
    file = tmp_path / "broken.gguf"
    file.write_bytes(data)
    with pytest.raises((ModelLoadError, Unsupported), match=message) as raised:
        LlamaCppEngine.load(file, n_threads=1, kv_bytes=1 << 20)
    assert "broken.gguf" in str(raised.value)


def test_metadata_of_a_file_is_logged_at_debug_level_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "weft.engines.llamacpp")
    LlamaCppEngine.load(shallow_gguf(), n_threads=1, kv_bytes=1 << 20).close()
    levels = {each.levelname for each in caplog.records if "llama" in each.message}
    assert levels == {"DEBUG"}


CHILD = """
import random, sys
from pathlib import Path
from weft.engines.base import Row
from weft.engines.llamacpp import LlamaCppEngine
from weft.engines.llamacpp.step import groups_of
from weft.errors import WeftError
data, folder, end = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), int(sys.argv[3])
for seed in range(int(sys.argv[4]), int(sys.argv[5])):
    rng, spoilt = random.Random(seed), bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        spoilt[rng.randrange(end)] = rng.choice([0, 1, 2, 127, 255, rng.randrange(256)])
    file = folder / "spoilt.gguf"
    file.write_bytes(spoilt)
    print(seed, flush=True)
    try:
        engine = LlamaCppEngine.load(file, n_threads=1, kv_bytes=1 << 20)
        ids = engine.tokenizer().encode("Hello wörld <|user|> 12 漢", special=True)
        engine.tokenizer().vocab_bytes
        engine.forward([Row((), ids or [0], 0, None, (0,))])
        engine.close()
    except WeftError:
        pass
"""


@pytest.mark.parametrize(
    ("first", "last"), [(0, 60), pytest.param(60, 2000, marks=pytest.mark.slow)]
)
def test_header_with_wrong_bytes_never_ends_the_process(
    first: int, last: int, tmp_path: Path
) -> None:
    file = shallow_gguf()
    end = min(tensor.begin for tensor in read_gguf(file).tensors.values())
    given = [str(file), str(tmp_path), str(end), str(first), str(last)]
    done = subprocess.run([sys.executable, "-c", CHILD, *given], capture_output=True, text=True)
    seeds = done.stdout.split()
    assert done.returncode == 0, (seeds[-1:], done.stderr[-2000:])


def test_file_that_is_no_language_model_raises_and_is_named(tmp_path: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "a.gguf", "clip")
    writer.add_tensor("v.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(Unsupported, match="no language model"):
        weft.load(tmp_path / "a.gguf")
    with pytest.raises(ModelLoadError, match="there is no file"):
        weft.load(tmp_path / "b.gguf")
    with pytest.raises(Unsupported, match="is a GGUF file, for llamacpp or numpy or torch"):
        weft.load(shallow_gguf(), engine="mlx")


def test_folder_that_is_no_gguf_file_raises() -> None:
    with pytest.raises(Unsupported, match="is a model folder, for numpy or torch"):
        weft.load(shallow(), engine="llamacpp")
