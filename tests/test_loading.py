"""`weft.load`: names, folders and loaded objects in, an LM or a clear error out."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

import weft
import weft.engines as registry
from loopback_hub import Repo, point_at, serve
from weft._core.installation import install_hint
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.stub import StubEngine
from weft.errors import (
    ConfigError,
    EngineError,
    EngineUnavailable,
    ModelLoadError,
    StaleHandle,
    Unsupported,
    WeftError,
)
from weft.lm.lm import LM
from weft.loading import parse_bytes

TINY = Path(str(files("weft") / "data" / "tiny"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    shutil.copytree(TINY, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def text() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


def test_load_without_arguments_gives_the_embedded_model() -> None:
    with weft.load() as lm:
        assert lm.info.name == "numpy"
        assert (lm.n_ctx, lm.info.n_vocab) == (2048, 2048)
        assert lm.defaults == weft.SamplingParams()
        assert lm.detokenize(lm.tokenize("Hi there!", add_bos=False)) == "Hi there!"
        assert lm.is_stop_token(lm.eog_token)
        assert lm.token_to_text(lm.eog_token) == "<|end|>"
        assert lm.format_chat([{"role": "user", "content": "Hi"}]).endswith("<|assistant|>")
        assert "numpy on cpu" in repr(lm)


@pytest.mark.parametrize("name", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def test_folder_loads_by_path_with_any_engine(folder: Path, name: str) -> None:
    with weft.load(folder, engine=name, dtype="float32", n_ctx=100) as lm:
        assert (lm.info.name, lm.n_ctx) == (name, 100)


@pytest.mark.torch
def test_folder_is_loaded_by_torch_if_installed(folder: Path) -> None:
    with weft.load(str(folder)) as lm:
        assert (lm.info.name, lm.info.dtype) == ("torch", "bfloat16")


@pytest.mark.torch
def test_loaded_model_has_one_lm_that_is_collected_after_close() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TINY)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    one, two = weft.load(model, tokenizer), weft.LM.from_model(model, tokenizer)
    assert one is two is weft.LM.from_model(one)
    assert one.model is model
    assert one.tokenizer is tokenizer
    gone = weakref.ref(one)
    one.close()
    assert weft.load(model, tokenizer) is not two
    del one, two
    gc.collect()
    assert gone() is None


@pytest.mark.torch
def test_option_without_effect_on_a_loaded_model_is_rejected() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY)
    with pytest.raises(ConfigError, match=r"needs its tokenizer: weft.load\(model, tokenizer\)"):
        weft.load(model)
    for given in ({"device": "cpu"}, {"dtype": "float32"}, {"engine": "numpy"}, {"revision": "x"}):
        with pytest.raises(ConfigError, match="already loaded model"):
            weft.load(model, object(), **given)


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ({"engine": "nosuch"}, ConfigError, "no engine is called 'nosuch'.*numpy"),
        ({"n_ctx": 0}, ConfigError, "n_ctx"),
        ({"n_ctx": 9999}, ConfigError, "2048"),
        ({"n_batch": 0}, ConfigError, "n_batch is 0"),
        ({"n_batch": True}, ConfigError, "n_batch is True"),
        ({"n_seq_max": -1}, ConfigError, "n_seq_max is -1"),
        ({"kv_budget": "much"}, ConfigError, '"auto", bytes from 1 on, or a size like "4GiB"$'),
        ({"kv_budget": 0}, ConfigError, "kv_budget is 0; allowed are .*from 1 on"),
        ({"kv_budget": -5}, ConfigError, "kv_budget is -5; allowed are .*from 1 on"),
        ({"row_cache": 0}, ConfigError, "row_cache is 0; allowed are .*from 1 on"),
        ({"offload": 0}, ConfigError, "offload is 0; .* bytes from 1 on, .*; None, or leaving it"),
        ({"kv_budget": 100}, ConfigError, "but one token takes 8192 bytes"),
        ({"device": "cuda"}, ConfigError, "numpy engine runs on the CPU"),
        ({"dtype": "int8"}, (ConfigError, Unsupported), "int8"),
        ({"engine_options": {"flash": 1}}, ConfigError, "no option 'flash'; it has:"),
        ({"revision": "main"}, ConfigError, "revision"),
    ],
)
def test_invalid_argument_is_rejected_by_name(
    given: dict[str, object], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        weft.load("tiny", **given)  # type: ignore[arg-type]


class Plain(StubEngine):
    """An engine whose `load` takes nothing but the folder."""

    @classmethod
    def load(cls, folder: Path) -> Plain:  # type: ignore[override]
        return cls(n_vocab=2048, context_length=100)


class Taking(StubEngine):
    """An engine whose `load` takes whatever is given."""

    @classmethod
    def load(cls, *folder: Path, **options: Any) -> Taking:
        engine = cls(n_vocab=2048)
        engine.info = replace(engine.info, extra=options)
        return engine


class Handmade(StubEngine):
    """An engine without a `load` of its own."""


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        EntryPoint(each.__name__.lower(), f"{__name__}:{each.__name__}", "weft.engines")
        for each in (Plain, Taking, Handmade)
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))


@pytest.mark.usefixtures("plugins")
def test_engine_gets_only_the_options_that_it_has() -> None:
    with weft.load("tiny", engine="plain", n_ctx=50, progress=print) as lm:
        assert (lm.info.name, lm.info.model, lm.n_ctx) == ("stub", "tiny", 50)
    for given in ({"device": "cuda"}, {"dtype": "int8"}, {"engine_options": {"flash": None}}):
        with pytest.raises(ConfigError, match="plain engine has no option.*it has no options"):
            weft.load("tiny", engine="plain", **given)
    with weft.load("tiny", engine="taking", device="d", engine_options={"flash": 1}) as lm:
        assert (lm.info.extra["device"], lm.info.extra["flash"]) == ("d", 1)
    with pytest.raises(Unsupported, match=r"Handmade does not load.*weft\.LM"):
        weft.load("tiny", engine="handmade")


def test_engine_object_is_rejected_by_load_and_accepted_by_LM(text: Tokenizer) -> None:
    engine = StubEngine(n_vocab=2048)
    for call in (
        lambda: weft.load("tiny", engine=engine),  # type: ignore[arg-type]
        lambda: weft.load(engine, text),
    ):
        with pytest.raises(ConfigError, match=r"goes to weft\.LM\(engine, tokenizer\)"):
            call()
    backend = Backend.from_file(str(TINY / "tokenizer.json"))
    with LM(engine, backend) as lm:
        assert lm.tokenizer is backend
        assert lm.tokenize("Hi there!") == text.encode("Hi there!")
    with pytest.raises(Unsupported, match="tokenizer of type NoneType"):
        LM(engine, None)


def test_error_of_a_broken_folder_names_the_broken_file(folder: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ModelLoadError), match="nowhere"):
        weft.load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        weft.load(tmp_path, engine="numpy")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match="truncated|bytes"):
        weft.load(folder, engine="numpy")
    weights.unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        weft.load(folder, engine="numpy")
    weights.write_bytes(data)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="generation_config"):
        weft.load(folder, engine="numpy")


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_unsupported_sampling_rules_are_logged_once_at_load(
    folder: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    if engine == "torch":
        pytest.importorskip("torch")
    rules = {"no_repeat_ngram_size": 2, "temperature": 0.3, "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **rules}))
    with caplog.at_level("WARNING", logger="weft"), weft.load(folder, engine=engine) as lm:
        assert lm.defaults.temperature == 0.3
        assert lm.defaults.repetition_penalty == 1.1
    warnings = [each.getMessage() for each in caplog.records if "generation_config" in each.message]
    assert len(warnings) == 1
    assert "no_repeat_ngram_size" in warnings[0]


def test_tokenizer_of_another_model_is_rejected(folder: Path, text: Tokenizer) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1000}))
    with pytest.raises(ModelLoadError, match="wrong tokenizer"):
        weft.load(folder, engine="numpy")
    with pytest.raises(ConfigError, match="token id 99 is outside the vocabulary"):
        weft.LM(StubEngine(n_vocab=64), text).place([1, 99])


def test_closed_lm_raises_stale_handle_and_closes_twice() -> None:
    lm = weft.load("tiny")
    place = lm.place([1, 2, 3])
    lm.close()
    lm.close()
    assert lm.closed
    with pytest.raises(StaleHandle, match="closed"):
        lm.place([1])
    from weft._core.sched.work import Extend

    with pytest.raises(StaleHandle, match="closed"):
        lm.submit([Extend(place)])


@pytest.mark.parametrize(
    ("given", "n_bytes"),
    [
        ("4GiB", 4 << 30),
        ("512MB", 512_000_000),
        ("1.5k", 1500),
        (77, 77),
        ("64 mib", 64 << 20),
        (np.int64(77), 77),
    ],
)
def test_parse_bytes_of_sizes_with_and_without_units(given: str | int, n_bytes: int) -> None:
    assert parse_bytes(given) == n_bytes
    assert parse_bytes("auto") is None


def test_row_cache_stays_within_its_budget() -> None:
    n_vocab = weft.load("tiny").info.n_vocab
    with weft.load("tiny", row_cache=3 * 4 * n_vocab) as lm:
        model = weft.AsyncLM(lm)
        rows = [model.next_token_logprobs_sync([1, 2, token]) for token in range(9)]
        stats = lm.stats()
        assert stats.row_budget_bytes == 3 * 4 * n_vocab
        assert 0 < stats.row_bytes <= stats.row_budget_bytes
        repeated = [model.next_token_logprobs_sync([1, 2, token]) for token in range(9)]
        np.testing.assert_allclose(rows, repeated, rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match="row_cache is 'much'"):
        weft.load("tiny", row_cache="much")
    with weft.load("tiny", row_cache="1MiB") as lm:
        assert lm.stats().row_budget_bytes == 1 << 20


def test_row_cache_below_one_row_gives_the_same_tokens() -> None:
    def drawn(**options: object) -> list[list[int]]:
        with weft.load("tiny", **options) as lm:
            root = weft.Branch.create(lm, seed=1)
            root.prefill(list(range(10, 20)))
            branches, store = [root, root.fork(), root.fork()], weft.BranchStore(lm)
            for _ in range(3):
                drafts = store.produce(branches)
                store.commit([(b, each.token) for b, each in zip(branches, drafts, strict=True)])
            return [branch.tokens for branch in branches]

    assert drawn(row_cache=1) == drawn()


def test_kv_over_the_budget_is_offloaded_and_reused() -> None:
    prompts = [list(range(40 * i, 40 * i + 40)) for i in range(1, 9)]
    with weft.load("tiny") as plain:
        size = plain.info.kv_bytes_per_token
        want = [weft.AsyncLM(plain).next_token_logprobs_sync(ids) for ids in prompts]
    n_computed = {}
    for offload in (None, 400 * size):
        with weft.load("tiny", kv_budget=100 * size, offload=offload, row_cache=1) as lm:
            model = weft.AsyncLM(lm)
            for _ in range(2):
                got = [model.next_token_logprobs_sync(ids) for ids in prompts]
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
            stats = lm.stats()
            assert stats.kv_bytes <= 100 * size
            assert stats.offload_budget_bytes == (offload or 0)
            assert 0 < stats.offloaded_bytes <= 400 * size if offload else not stats.offloaded_bytes
            n_computed[offload] = stats.recomputed + stats.prefilled
    n_all = sum(map(len, prompts))
    assert n_computed[None] >= 2 * n_all - 100  # nearly all tokens run twice
    assert n_computed[400 * size] <= n_all + 2 * len(prompts)  # only the queries run


@pytest.mark.parametrize("offload", ["auto", "much", 0, -1, True, 1, 2.0, "9" * 400 + "GiB"])
def test_invalid_offload_is_rejected(offload: object) -> None:
    with pytest.raises(ConfigError, match=r"^offload (is|of) .*"):
        weft.load("tiny", offload=offload)


def test_import_of_weft_imports_no_heavy_package() -> None:
    code = "import sys, weft; print([m for m in sys.modules if m.split('.')[0] in sys.argv[1:]])"
    heavy = ["torch", "transformers", "numpy", "tokenizers", "jinja2", "rich", "typer"]
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", code, *heavy]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "[]"


def test_unknown_name_of_the_package_raises_attribute_error() -> None:
    assert "load" in dir(weft)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        weft.lode  # noqa: B018


@pytest.mark.torch
def test_second_load_of_a_model_with_other_options_is_rejected() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TINY)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with weft.load(model, tokenizer, n_ctx=100) as lm:
        assert weft.load(model, tokenizer, n_ctx=100) is lm
        assert weft.load(model, tokenizer) is lm
        for given in ({"n_ctx": 50}, {"kv_budget": "1GiB"}, {"n_batch": 4}):
            with pytest.raises(ConfigError, match="has an LM already"):
                weft.load(model, tokenizer, **given)
        same = AutoTokenizer.from_pretrained(TINY)
        assert weft.load(model, same) is weft.load(model) is lm
        same.add_special_tokens({"additional_special_tokens": ["<aside>"]})
        chatty = AutoTokenizer.from_pretrained(TINY, chat_template="{{ messages }}")
        for other in (same, chatty):
            with pytest.raises(ConfigError, match=r"with another tokenizer; close that one first"):
                weft.load(model, other)


@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copy_of_an_object_with_a_model_raises_with_advice(attempt: Callable[[Any], Any]) -> None:
    with weft.load("tiny") as lm, weft.Branch.create(lm) as branch:
        branch.prefill([5, 6])
        before = branch.produce()
        for handle, advice in ((lm, "load the model there"), (lm.engine, "load it again where")):
            with pytest.raises(TypeError, match=advice):
                attempt(handle)
        with pytest.raises(TypeError, match=r"fork\(\) it"):
            attempt(branch)
        if attempt is not copy.copy:  # a shallow copy of what has options alone is another
            for face in (weft.AsyncLM(lm), weft.BranchStore(lm)):
                with pytest.raises(TypeError, match="load the model there"):
                    attempt(face)
        assert branch.produce() == before


@pytest.mark.parametrize("model", [None, 5, [1], b"x"])
def test_load_of_no_model_is_rejected(model: object) -> None:
    with pytest.raises(ConfigError, match="allowed are a name, a folder"):
        weft.load(model)


def test_unshared_bytes_count_every_branch() -> None:
    with weft.load("tiny") as lm:
        loom = weft.Loom(lm, weft.samples.game24)
        branches = loom.grow(n=8, temperature=0, max_tokens=9)
        stats = lm.stats()
        n_tokens = len(loom.tokens) + 8  # the last token is drawn, not run
        assert stats.kv_tokens == n_tokens
        assert stats.kv_bytes_unshared == 8 * n_tokens * lm.info.kv_bytes_per_token
        assert len(branches) == 8


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the extra: nothing finds torch."""
    monkeypatch.setattr("weft.loading.find_spec", lambda name: None)


def qwen3(folder: Path) -> Path:
    """Make a folder one of Qwen 3's architecture: heads are normalised, by weights of one."""
    import numpy as np
    from safetensors.numpy import save_file

    from weft.engines.checkpoint import open_checkpoint

    stored = open_checkpoint(folder)
    weights = {name: stored.read(name) for name in stored.tensors}
    config = json.loads((folder / "config.json").read_text())
    own = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config | own))
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        for which in ("q_norm", "k_norm"):
            name = f"model.layers.{layer}.self_attn.{which}.weight"
            weights[name] = np.ones(head, np.float32)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_folder_without_torch_is_loaded_by_numpy_if_supported(folder: Path, no_torch: None) -> None:
    with weft.load(folder) as lm:
        assert lm.info.name == "numpy"
    with weft.load(qwen3(folder)) as lm:
        assert lm.info.name == "numpy"
        assert len(lm.tokenize("Hi")) > 0


def test_model_that_needs_torch_names_the_package_to_install(folder: Path, no_torch: None) -> None:
    (folder / "config.json").write_text(
        '{"architectures": ["GPT2LMHeadModel"], "vocab_size": 2048}'
    )
    with pytest.raises(
        EngineUnavailable, match=r"the NumPy engine has no GPT2LMHeadModel.*\[torch\]"
    ) as caught:
        weft.load(folder)
    assert caught.value.hint == install_hint("torch")


@pytest.mark.parametrize("engine", ["auto", "numpy", "steam"])
def test_unsupported_model_is_rejected_before_download_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_torch: None, engine: str
) -> None:
    with serve() as hub:
        point_at(monkeypatch, hub.url, tmp_path)
        config = b'{"architectures": ["BloomForCausalLM"], "model_type": "bloom"}'
        pushed = {"config.json": config, "model.safetensors": b"w" * 5000}
        hub.add(Repo("maker/model")).push("main", pushed)
        named = {"numpy": "no BloomForCausalLM", "steam": "no engine is called"}
        with pytest.raises(WeftError, match=named.get(engine, "torch")):
            weft.load("maker/model", engine=engine)
        assert not any(each.startswith("GET") and "safetensors" in each for each in hub.requests)
        assert list(tmp_path.glob("models--*/snapshots/*/*")) == []


@pytest.mark.torch
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"architectures": ["T5Model"], "model_type": "t5"}', "encoder-decoder"),
        ('{"model_type": "nobodys"}', "does not know the model in maker/model"),
    ],
)
def test_torch_rejects_a_model_by_its_config_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, message: str
) -> None:
    with serve() as hub:
        point_at(monkeypatch, hub.url, tmp_path)
        pushed = {"config.json": config.encode(), "model.safetensors": b"w" * 5000}
        hub.add(Repo("maker/model")).push("main", pushed)
        with pytest.raises(EngineError, match=message) as caught:
            weft.load("maker/model")
        assert "/tmp" not in str(caught.value)
        assert not any(each.startswith("GET") and "safetensors" in each for each in hub.requests)


def test_hub_model_without_torch_is_loaded_by_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_torch: None
) -> None:
    with serve() as hub:
        point_at(monkeypatch, hub.url, tmp_path)
        pushed = {file.name: file.read_bytes() for file in TINY.iterdir() if file.is_file()}
        hub.add(Repo("maker/model")).push("main", pushed)
        with weft.load("maker/model") as lm:
            assert lm.info.name == "numpy"


@pytest.mark.parametrize("engine", ["numpy", "torch", "mlx"])
def test_mlx_quantised_model_is_rejected_by_other_engines(
    folder: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((folder / "config.json").read_text())
    packed = {"group_size": 64, "bits": 4, "mode": "affine"}
    config |= {"quantization": packed, "quantization_config": packed}
    (folder / "config.json").write_text(json.dumps(config))
    if engine == "mlx":  # not installed
        monkeypatch.setattr("weft.loading.find_spec", lambda name: None)
        with pytest.raises(EngineUnavailable, match=r"mlx-lm has quantised it; run: .*\[mlx\]"):
            weft.load(folder)
        return
    pytest.importorskip(engine)
    with pytest.raises(Unsupported, match=f'the {engine} engine does not .* engine="mlx"'):
        weft.load(folder, engine=engine)


@pytest.mark.parametrize(
    ("engine", "source", "message"),
    [
        ("llamacpp", "tiny", "takes GGUF files; tiny is a model folder, for numpy or torch or mlx"),
        ("llamacpp", str(TINY), "tiny is a model folder"),
        (
            "mlx",
            "x.gguf",
            "models of mlx-lm; x.gguf is a GGUF file, for llamacpp or numpy or torch",
        ),
        ("vllm", "x.gguf", "x.gguf is a GGUF file"),
        ("remote", "tiny", "the remote engine takes addresses of .*; tiny is a model folder"),
        ("torch", "http://127.0.0.1:9/v1", "is the address of a server, for remote"),
    ],
)
def test_source_of_another_engine_is_rejected_naming_that_engine(
    engine: str, source: str, message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        weft.load(source, engine=engine)


@pytest.mark.parametrize("options", ["x", ["threads"], 3, {1: 2}])
def test_engine_options_of_another_type_are_rejected(options: Any) -> None:
    with pytest.raises(ConfigError, match="engine_options is .*; allowed are options by their"):
        weft.load("tiny", engine_options=options)


def test_only_an_unknown_name_hints_at_weft_models(folder: Path) -> None:
    for name in ("./nowhere", "nowhere.gguf", "nowhere"):
        with pytest.raises(WeftError) as caught:
            weft.load(name)
        assert "weft models" in caught.value.hint
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelLoadError) as broken:
        weft.load(folder)
    assert "weft models" not in broken.value.hint


@pytest.mark.parametrize(("engine", "source"), [("vllm", "tiny"), ("remote", "http://127.0.0.1:1")])
def test_offload_is_rejected_before_an_engine_without_it_starts(
    monkeypatch: pytest.MonkeyPatch, engine: str, source: str
) -> None:
    def start(name: str) -> Any:
        raise AssertionError("it was started")

    monkeypatch.setattr("weft.loading.engine_class", start)
    with pytest.raises(Unsupported, match=f"the {engine} engine keeps its KV .* no effect"):
        weft.load(source, engine=engine, offload="1MiB")


def test_chat_template_replaces_the_models_own(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    chat = [{"role": "user", "content": "Hello"}]
    for given in (template, file, str(file)):
        with weft.load("tiny", chat_template=given) as lm:
            assert lm.format_chat(chat) == "[user] Hello\n"
            assert lm.tokenizer.chat_template == template
    with weft.load("tiny") as lm:
        assert lm.format_chat(chat) != "[user] Hello\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "allowed are a file and the text"),
        (5, "allowed are a file and the text"),
        ("no-such-file.jinja", "no-such-file.jinja"),
        ("{% for m in messages %}", "no template in its line"),
    ],
)
def test_invalid_chat_template_is_rejected(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        weft.load("tiny", chat_template=given)


def test_chat_template_for_a_server_or_a_loaded_model_is_rejected() -> None:
    for source in ("http://127.0.0.1:9/v1", object()):
        with pytest.raises(ConfigError, match="chat_template=.* has no effect"):
            weft.load(source, chat_template="{{ messages }}")
