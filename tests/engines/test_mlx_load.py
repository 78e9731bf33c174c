"""Loading with the mlx engine: supported models, errors, and no side effects for the caller."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

import mlx_lm  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.models import base, llama  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

import weft  # noqa: E402
from mlx_families import N_VOCAB, build, plain_logits  # noqa: E402
from shallow import shallow  # noqa: E402
from weft.engines.base import Row  # noqa: E402
from weft.engines.mlx import MlxEngine  # noqa: E402
from weft.engines.mlx.hook import ATTENTION  # noqa: E402
from weft.engines.numpy import NumpyEngine  # noqa: E402
from weft.errors import (  # noqa: E402
    ConfigError,
    ContextOverflow,
    EngineUnavailable,
    ForwardError,
    ModelLoadError,
    Unsupported,
)

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model in 4 bits, by mlx-lm's own converter."""
    folder = tmp_path_factory.mktemp("mlx") / "4bit"
    with redirect_stdout(sys.stderr):
        mlx_lm.convert(str(shallow()), str(folder), quantize=True, q_bits=4, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def lm() -> Iterator[weft.LM]:
    with weft.load(str(shallow()), engine="mlx", dtype="float32") as lm:
        yield lm


def test_loaded_float32_weights_are_column_major_on_cpu(lm: weft.LM) -> None:
    model, plain = lm.engine.model, mlx_lm.load(str(shallow()))[0]
    plain.set_dtype(mx.float32)
    matrices = {name: array for name, array in tree_flatten(model.parameters()) if array.ndim == 2}
    on_cpu = mx.default_device().type == mx.cpu
    for name, array in tree_flatten(plain.parameters()):
        if name in matrices:
            assert mx.array_equal(matrices[name], array), name
            rows, _ = memoryview(matrices[name]).strides or (0, 0)
            is_column_major = "embed" not in name or lm.engine.model.args.tie_word_embeddings
            assert (rows == 4) is (on_cpu and is_column_major), name
    bf16 = MlxEngine.load(shallow(), dtype="bfloat16")
    head = bf16.model.model.layers[0].mlp.up_proj.weight
    assert memoryview(head).strides == (2 * head.shape[1], 2)
    bf16.close()


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


# What it loads


def greedy(lm: weft.LM, prompts: list[str], max_tokens: int) -> list[list[int]]:
    looms = [weft.Loom(lm, prompt) for prompt in prompts]
    return [loom.grow(temperature=0, max_tokens=max_tokens)[0].tokens for loom in looms]


PROMPTS = [
    f"{verb} {what} {n}."
    for n in (3, 24)
    for verb in ("Tell me a story about", "Count", "What is", "Add one to", "Write")
    for what in ("a fox and", "the number", "two owls,", "numbers up to", "a word and")
]


@pytest.mark.parametrize("n", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_greedy_texts_are_those_of_the_numpy_engine(n: int) -> None:
    assert len(PROMPTS) == 50
    result = []
    for name in ("numpy", "mlx"):
        with weft.load("tiny", engine=name, dtype="float32") as lm:
            assert lm.info.name == name
            result.append(greedy(lm, PROMPTS[:: 50 // n], 16))
    assert result[0] == result[1]


def test_quantised_weights_run_as_the_library_runs_them(quantised: Path) -> None:
    model, tokenizer = mlx_lm.load(str(quantised))[:2]
    with weft.load(model, tokenizer) as lm:
        (node,) = weft.Loom(lm, weft.samples.greeting).grow(temperature=0, max_tokens=6)
        ids = node.get_prefix_tokens()
        want = plain_logits(model, ids)
        assert node.tokens == [int(row.argmax()) for row in want[-7:-1]]
    with weft.load(str(quantised), engine="mlx") as repeated:
        assert repeated.info.fingerprint == lm.info.fingerprint
        assert repeated.info.model == "4bit"


def test_engine_is_chosen_by_the_content_of_a_folder(
    quantised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft import loading

    assert loading.choose_engine(quantised, quantised) == "mlx"
    monkeypatch.setattr(loading.sys, "platform", "darwin")
    monkeypatch.setattr(loading.platform, "machine", lambda: "arm64")
    assert loading.choose_engine(shallow(), shallow()) == "mlx"
    monkeypatch.setattr(loading, "find_spec", lambda name: None if "mlx" in name else name)
    assert loading.choose_engine(shallow(), shallow()) == "torch"
    with pytest.raises(EngineUnavailable, match=r"mlx-lm has quantised it; run: .*\[mlx\]"):
        loading.choose_engine(quantised, quantised)


def test_kv_of_the_same_weights_is_loaded_from_other_engines(lm: weft.LM) -> None:
    ids = lm.tokenize("The owl saw the moon.")
    saved = lm.kv.to_bytes(ids)
    with weft.LM(NumpyEngine.load(shallow()), lm.text) as other:
        assert other.info.fingerprint == lm.info.fingerprint
        place = other.kv.load(saved)
        assert other.kv.size(place) == len(ids)
        for layer in range(2):
            np.testing.assert_allclose(
                other.kv.export(ids)[f"k.{layer}"], lm.kv.export(ids)[f"k.{layer}"], atol=1e-4
            )
        mine = lm.kv.load(other.kv.to_bytes(ids))
        assert mine.depth == len(ids)


def test_loaded_model_has_the_fingerprint_of_its_folder(lm: weft.LM) -> None:
    model, tokenizer = mlx_lm.load(str(shallow()))[:2]
    with weft.load(model, tokenizer) as other:
        assert other.info.fingerprint == lm.info.fingerprint
        assert other.info.dtype == "bfloat16"
        assert weft.load(model, tokenizer) is other
        assert other.text.stop_ids == lm.text.stop_ids


def test_lazy_weights_are_computed_by_their_owner() -> None:
    model, tokenizer = mlx_lm.load(str(shallow()), lazy=True)[:2]
    model.set_dtype(mx.float32)
    with weft.load(model, tokenizer) as lm:
        assert len(weft.Loom(lm, "Hi").grow(max_tokens=3, temperature=0)[0].tokens) == 3


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_broken_files_are_named(tmp_path: Path, name: str) -> None:
    folder = copy_of(shallow(), tmp_path)
    full = (folder / name).read_bytes()
    (folder / name).write_bytes(full[: len(full) // 2])
    with pytest.raises(ModelLoadError, match=name.partition(".")[0]):
        weft.load(str(folder), engine="mlx")
    (folder / name).unlink()
    with pytest.raises(ModelLoadError):
        weft.load(str(folder), engine="mlx")


def changed(folder: Path, **values: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


@pytest.mark.parametrize("kind", ["nobodys_model", "../llama", "", None, 7])
def test_models_that_the_library_lacks_raise(tmp_path: Path, kind: Any) -> None:
    folder = changed(copy_of(shallow(), tmp_path), model_type=kind)
    with pytest.raises((Unsupported, ModelLoadError), match="mlx"):
        weft.load(str(folder), engine="mlx")


@pytest.mark.parametrize(
    "values", [{"num_attention_heads": 7}, {"hidden_size": 128}, {"num_hidden_layers": 3}]
)
def test_weights_of_another_shape_raise(tmp_path: Path, values: dict[str, int]) -> None:
    folder = changed(copy_of(shallow(), tmp_path), **values)
    with pytest.raises(ModelLoadError, match="model"):
        weft.load(str(folder), engine="mlx")


def test_weights_that_give_nan_raise_and_name_the_page() -> None:
    model = build("llama")
    model.model.norm.weight = mx.full(model.model.norm.weight.shape, float("nan"))
    with pytest.raises(ModelLoadError, match="not finite") as raised:
        MlxEngine.adopt(model)
    assert "docs/troubleshooting.md#nonsense-output" in raised.value.hint


def test_options_out_of_range_raise() -> None:
    for options in ({"device": "cuda"}, {"dtype": "int8"}, {"n_ctx": 0}, {"n_ctx": 10**6}):
        with pytest.raises(ConfigError):
            weft.load(str(shallow()), engine="mlx", **options)
    with pytest.raises(ConfigError, match="no option"):
        weft.load(str(shallow()), engine="mlx", engine_options={"threads": 2})
    with pytest.raises(ConfigError, match="not a model of MLX"):
        MlxEngine.adopt("llama")
    model, _ = mlx_lm.load(str(shallow()))[:2]
    with pytest.raises(ConfigError, match="tokenizer"):
        weft.load(model)
    with pytest.raises(ConfigError, match="no effect"):
        weft.load(model, "tokenizer", engine="torch")


def test_rows_outside_the_model_raise() -> None:
    engine = MlxEngine.adopt(build("llama"), n_ctx=8)
    assert engine.info.context_length == 8
    with pytest.raises(ContextOverflow):
        engine.forward([Row((), [1] * 9, 0)])
    for wrong in (-1, N_VOCAB):
        with pytest.raises(ConfigError, match="token ids"):
            engine.forward([Row((), [1, wrong], 0)])
    engine.close()
    engine.close()
    with pytest.raises(ForwardError, match="closed"):
        engine.forward([Row((), [1], 0)])


# What it changes of the library


def test_attention_over_other_caches_is_the_librarys_own(lm: weft.LM) -> None:
    """The one function that is replaced hands every other call on as it came."""
    replaced = getattr(llama, ATTENTION)
    assert replaced.weft_original is getattr(base, ATTENTION)
    q, k = mx.random.normal((1, 4, 3, 8)), mx.random.normal((1, 2, 5, 8))
    for cache in (None, make_prompt_cache(build("llama"))[0]):
        for how in ({"cache": cache, "scale": 0.5, "mask": None}, {"cache": cache, "scale": 2.0}):
            want = getattr(base, ATTENTION)(q, k, k, **{"mask": None, **how})
            assert mx.array_equal(replaced(q, k, k, **{"mask": None, **how}), want)
    assert mx.array_equal(
        replaced(q, k, k, None, 0.5, None), replaced(q, k, k, None, 0.5, mask=None)
    )


def test_every_family_calls_the_function_by_the_known_names() -> None:
    """A new mlx-lm that calls it otherwise fails here, and not in a user's model."""
    import ast
    import importlib.util

    spec = importlib.util.find_spec("mlx_lm.models")
    assert spec is not None
    calls = 0
    for file in Path(spec.submodule_search_locations[0]).glob("*.py"):  # type: ignore[index]
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == ATTENTION:
                names = ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]
                given = [*names[: len(node.args)], *(each.arg for each in node.keywords)]
                assert set(given) - {"mask", "sinks"} == set(names[:5]), file
                assert set(given) <= set(names), file
                calls += 1
    assert calls > 80


def program(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )


def test_process_may_exit_in_any_state_and_keeps_its_limits() -> None:
    """MLX aborts where a thread that ran it ends late; and mlx-lm lowers the limit of files."""
    done = program(
        f"""
        import resource, threading
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        import weft
        lm = weft.load({str(shallow())!r}, engine="mlx")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
        loom = weft.Loom(lm, "Hi")
        loom.grow(n=3, max_tokens=4)
        threading.Thread(target=lambda: loom.grow(n=8, max_tokens=200), daemon=True).start()
        print("ends")
        """
    )
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr


@pytest.mark.slow
def test_forked_process_raises_forward_error() -> None:
    done = program(
        f"""
        import os, weft
        lm = weft.load({str(shallow())!r}, engine="mlx")
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        else:
            try:
                weft.Loom(lm, "Hi").grow(max_tokens=2)
            except weft.WeftError as error:
                print(error, flush=True)
            os._exit(0)
        """
    )
    assert "spawn" in done.stdout, done.stderr


# Many at once


def test_threads_loops_and_the_owner_use_one_model_together() -> None:
    model, tokenizer = mlx_lm.load(str(shallow()))[:2]
    ids = tokenizer.encode("The owl saw the moon.")
    result: list[Any] = []
    with weft.load(model, tokenizer) as lm:
        want = greedy(lm, ["Hi", "Tell me a story."], 8)
        known = plain_logits(model, ids)[-1]

        def texts() -> None:
            result.append(greedy(lm, ["Hi", "Tell me a story."], 8) == want)

        def loop() -> None:
            faced = weft.AsyncLM(lm)

            async def main() -> None:
                await asyncio.gather(*(faced.next_token_logprobs(ids[:n]) for n in (1, 3, 5)))

            asyncio.run(main())
            result.append(True)

        def plainly() -> None:
            for _ in range(5):
                own = mx.array([ids])
                logits = np.array(model(own)[0, -1].astype(mx.float32))
                result.append(bool(np.abs(logits - known).max() < 1e-5))

        threads = [threading.Thread(target=each) for each in (texts, texts, loop, loop, plainly)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert result == [True] * 9


def test_close_during_a_step_ends_running_work() -> None:
    lm = weft.load(str(shallow()), engine="mlx")
    caught: list[BaseException] = []

    def run() -> None:
        try:
            weft.Loom(lm, "Hi").grow(n=4, max_tokens=1000)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not lm.stats().decoded and thread.is_alive():
        pass
    lm.close()
    thread.join()
    assert not thread.is_alive()
    assert all(isinstance(error, weft.WeftError) for error in caught)
    lm.close()


def test_collected_lm_frees_its_memory() -> None:
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    lm = weft.load(str(shallow()), engine="mlx")
    loom = weft.Loom(lm, "Hi")
    loom.grow(n=3, max_tokens=4)
    gone = weakref.ref(lm.engine)
    del lm, loom
    while gone() is not None:  # its thread may be in the middle of a turn
        gc.collect()
        time.sleep(0.05)
    assert mx.get_active_memory() <= before + 4096


def test_live_branches_hold_the_prompt_once() -> None:
    """The memory that MLX reports, without weights and the logits of the prompt."""
    with weft.load(str(shallow()), engine="mlx", dtype="float32") as lm:
        ids = [(i * 7) % 900 + 20 for i in range(300)]
        loom = weft.Loom(lm, ids)
        loom.grow(n=2, max_tokens=2)
        kept_alive = mx.get_active_memory()
        mx.reset_peak_memory()
        loom.grow(n=24, max_tokens=4, temperature=1.0, seed=1)
        grown = mx.get_peak_memory() - kept_alive
        assert grown < 24 * 300 * lm.info.kv_bytes_per_token / 2
