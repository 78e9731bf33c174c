"""Load time and memory of the llamacpp engine: contexts that grow, vocabularies, imports."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="gguf is not installed")

import weft
from recipe.export_gguf import export_gguf
from shallow import TINY, shallow_gguf
from small_gguf import windowed
from weft.engines.base import Row, Span
from weft.engines.gguf import read_gguf
from weft.engines.llamacpp import LlamaCppEngine
from weft.engines.llamacpp import settings as settings_module
from weft.engines.llamacpp import vocabulary as vocabulary_module
from weft.errors import KVFull, ModelLoadError

pytestmark = pytest.mark.llamacpp


@pytest.fixture
def small_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "_FIRST_SLOTS", 256)
    monkeypatch.setattr(settings_module, "_FIRST_LEASES", 2)


@pytest.fixture(scope="module")
def windowed_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    export_gguf(TINY, folder / "f32.gguf", "f32")
    return windowed(folder / "windowed.gguf", folder / "f32.gguf")


@pytest.fixture(params=["plain", "windowed"])
def file(request: pytest.FixtureRequest) -> Path:
    is_plain = request.param == "plain"
    return shallow_gguf() if is_plain else request.getfixturevalue("windowed_file")


def logits_of_tree(engine: LlamaCppEngine, n_branches: int, n_tokens: int) -> list[np.ndarray]:
    """Return the logits of branches below one prompt, each of its own row per step."""
    prompt = engine.fragments.new(None)
    ids = [(7 * i + 3) % 1000 + 5 for i in range(100)]
    engine.forward([Row((), ids, 0, prompt, ())])
    path = (Span(prompt, 100),)
    branches = [engine.fragments.new(prompt) for _ in range(n_branches)]
    logits = []
    for step in range(n_tokens):
        rows = [
            Row(path, [10 + step + i], 100 + step, branch, (0,))
            for i, branch in enumerate(branches)
        ]
        output = engine.forward(rows)
        logits += [output.logits(i) for i in range(n_branches)]
    for branch in branches:
        engine.fragments.free(branch)
    engine.fragments.free(prompt)
    return logits


@pytest.mark.usefixtures("small_start")
def test_context_that_grows_gives_the_logits_of_a_large_one(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = LlamaCppEngine.load(file, dtype="float32", n_threads=1)
    context = grown._pool.shards[0].context
    n_cells, n_leases = context.n_cells, context.n_leases
    assert grown.info.kv_slots == 1 << 15
    logits = logits_of_tree(grown, 24, 40)
    assert (context.n_cells, context.n_leases) > (n_cells, n_leases)
    assert grown.fragments.usage().slots == 0
    grown.close()
    large = LlamaCppEngine.load(file, dtype="float32", n_threads=1, kv_bytes=1 << 26)
    wanted = logits_of_tree(large, 24, 40)
    assert large._pool.n_cells >= large.info.kv_slots
    large.close()
    for got, want in zip(logits, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.usefixtures("small_start")
def test_answer_of_the_last_step_survives_growth() -> None:
    engine = LlamaCppEngine.load(shallow_gguf(), dtype="float32", n_threads=1)
    before = engine._pool.n_cells
    prompt = engine.fragments.new(None)
    output = engine.forward([Row((), [5, 6, 7], 0, prompt, (2,))])
    copy = output.logits(0)
    data = engine.fragments.export(prompt)
    for name in ("k", "v"):
        for layer in range(engine.info.n_layers):
            data[f"{name}.{layer}"] = np.tile(data[f"{name}.{layer}"], (1, 600, 1))
    engine.fragments.load(data, None)
    assert engine._pool.n_cells > before
    np.testing.assert_array_equal(output.logits(0), copy)
    engine.close()


@pytest.mark.usefixtures("small_start")
def test_growth_ends_at_the_requested_number_of_leases() -> None:
    engine = LlamaCppEngine.load(shallow_gguf(), n_threads=1, n_seq_max=4)
    ids = [(3 * i + 5) % 500 for i in range(500)]
    prompt = engine.fragments.new(None)
    engine.forward([Row((), ids, 0, prompt, ())])
    path = (Span(prompt, 500),)
    for _ in range(12):
        engine.forward([Row(path, ids, 500, engine.fragments.new(prompt), ())])
    (shard,) = engine._pool.shards
    assert shard.context.n_leases == shard.n_leases == 12
    with pytest.raises(KVFull, match="12 sequences"):
        engine.forward([Row(path, ids, 500, engine.fragments.new(prompt), ())])
    assert engine.fragments.usage().slots == 500 * 13
    engine.close()


@pytest.mark.usefixtures("small_start")
def test_growth_without_memory_raises_kv_full(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LlamaCppEngine.load(shallow_gguf(), n_threads=1)
    monkeypatch.setattr(settings_module, "available_bytes", lambda: 1000)
    prompt = engine.fragments.new(None)
    engine.forward([Row((), list(range(5, 305)), 0, prompt, ())])
    with pytest.raises(KVFull, match="1000 are free"):
        engine.forward([Row((), list(range(5, 1005)), 0, engine.fragments.new(None), ())])
    assert engine.fragments.usage().slots == 300
    monkeypatch.undo()
    engine.forward([Row((), list(range(5, 1005)), 0, engine.fragments.new(None), ())])
    engine.close()


def test_first_context_without_memory_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "available_bytes", lambda: 1000)
    with pytest.raises(ModelLoadError, match="1000 are free"):
        LlamaCppEngine.load(shallow_gguf(), n_threads=1)


@pytest.mark.usefixtures("small_start")
def test_idle_prompts_are_offloaded_and_loaded_with_equal_logprobs() -> None:
    prompts = [[300 + n] * 300 for n in range(4)]
    options = {"n_threads": 1}
    with weft.load(shallow_gguf(), dtype="float32", n_ctx=400, engine_options=options) as lm:
        ask = weft.AsyncLM(lm)
        first = [ask.next_token_logprobs_sync(prompt) for prompt in prompts]
        assert lm.stats().offloaded_bytes > 0
        lm.scheduler.logits_cache.clear()
        prefilled = lm.scheduler.counters.prefilled
        for prompt, logprobs in zip(prompts, first, strict=True):
            np.testing.assert_allclose(ask.next_token_logprobs_sync(prompt), logprobs, atol=1e-4)
        assert lm.scheduler.counters.prefilled == prefilled


def test_loom_grows_past_the_first_context() -> None:
    with weft.load(shallow_gguf(), engine_options={"n_threads": 1}) as lm:
        texts = [
            node.text
            for node in weft.Loom(lm, "Once upon a time", template=False).grow(
                n=40, max_tokens=24, seed=3, temperature=1.0
            )
        ]
    with weft.load(shallow_gguf(), kv_budget="64MiB", engine_options={"n_threads": 1}) as lm:
        nodes = weft.Loom(lm, "Once upon a time", template=False).grow(
            n=40, max_tokens=24, seed=3, temperature=1.0
        )
        assert [node.text for node in nodes] == texts


def test_bytes_of_tokens_longer_than_the_buffer_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    header = read_gguf(shallow_gguf())
    pieces = vocabulary_module.read_tokenizer(header).vocab_bytes
    monkeypatch.setattr(vocabulary_module, "_PIECE_BYTES", 2)
    assert vocabulary_module.read_tokenizer(header).vocab_bytes == pieces
    assert max(map(len, pieces)) > 2


def test_every_spelling_leads_to_the_first_token_of_that_spelling() -> None:
    codec = vocabulary_module.read_tokenizer(read_gguf(shallow_gguf()))._codec
    spellings = [codec.spelling(token) for token in range(len(codec))]
    assert [codec.id_of(text) for text in spellings] == [spellings.index(t) for t in spellings]


def test_loading_a_gguf_file_imports_no_torch() -> None:
    code = (
        "import sys, weft; lm = weft.load(sys.argv[1], engine_options={'n_threads': 1});"
        "weft.Loom(lm, 'Hello').grow(n=2, max_tokens=2, show=False);"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(shallow_gguf())]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("kind", "n_rows", "n_notes"), [("q8_0", 16, 1), ("q8_0", 15, 0), ("f16", 16, 0)]
)
def test_many_branches_of_quantised_weights_are_noted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, n_rows: int, n_notes: int
) -> None:
    export_gguf(TINY, tmp_path / "model.gguf", kind)
    engine = LlamaCppEngine.load(tmp_path / "model.gguf", n_threads=1)
    with caplog.at_level(logging.WARNING, logger="weft.engines.llamacpp"):
        for _ in range(2):
            engine.forward([Row((), [5 + i], 0, None, (0,)) for i in range(n_rows)])
    notes = [each for each in caplog.records if 'engine="torch"' in each.getMessage()]
    assert len(notes) == n_notes
    engine.close()


def test_metadata_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "weft.engines.llamacpp")
    weft.load(shallow_gguf(), engine="llamacpp").close()
    assert sum("loaded meta data" in message for message in caplog.messages) == 1
