"""Models that the torch engine loads, models that it rejects, and the reasons."""

from __future__ import annotations

import copy
import gc
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cases import one_in  # noqa: E402
from families import (  # noqa: E402
    IDS,
    IMAGE_FAMILIES,
    N_VOCAB,
    build,
    build_reader,
    plain_logits,
    stepped,
)
from weft.engines.base import Row  # noqa: E402
from weft.engines.checkpoint import open_checkpoint  # noqa: E402
from weft.engines.torch import TorchEngine  # noqa: E402
from weft.engines.torch.model import fingerprint_of  # noqa: E402
from weft.errors import (  # noqa: E402
    ConfigError,
    ContextOverflow,
    ForwardError,
    ModelLoadError,
    Unsupported,
)

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def _config(kind: str, **changes: Any) -> Any:
    small = {"vocab_size": N_VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    return transformers.CONFIG_MAPPING[kind](**(small | changes))


def _causal(kind: str, **changes: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(_config(kind, **changes)).eval()


def test_folder_gives_the_logits_of_its_model(folder: Path) -> None:
    recorded: list[tuple[Any, ...]] = []
    engine = TorchEngine.load(folder, progress=lambda *args: recorded.append(args))
    ids = [5, 9, 40, 7]
    got = engine.forward([Row((), ids, 0, None, (3,))]).logits(0)
    want = plain_logits(build("llama"), ids)[-1]
    assert float((torch.from_numpy(got) - want).abs().max()) < 1e-4
    assert [s[0] for s in recorded] == ["load", "load"]


@pytest.mark.parametrize("name", one_in(2, IMAGE_FAMILIES))
def test_decoder_of_a_model_that_reads_images_continues_text(name: str, tmp_path: Path) -> None:
    """From a folder and handed over; Transformers has no causal class for these."""
    model = build_reader(name)
    model.save_pretrained(tmp_path)
    want = plain_logits(model, IDS)
    engines = [TorchEngine.load(tmp_path), TorchEngine.adopt(model)]
    for engine in engines:
        assert isinstance(engine, TorchEngine)
        assert float((torch.from_numpy(stepped(engine)) - want).abs().max()) < 1e-5
    assert engines[0].info.fingerprint == engines[1].info.fingerprint


def test_weights_stored_by_column_give_the_same_logits(folder: Path) -> None:
    loaded, plain = TorchEngine.load(folder).model, build("llama")
    looked_up = loaded.get_input_embeddings().weight
    assert looked_up.is_contiguous()
    linear = [m.weight for m in loaded.modules() if isinstance(m, torch.nn.Linear)]
    assert {weight.stride(0) for weight in linear} == {1}
    assert len(linear) == 3 * 7 + 1  # of each layer, and the output
    for name, weight in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_loaded_model_and_its_copies_can_be_saved(folder: Path, tmp_path: Path) -> None:
    """Its weights lie by column, those of one input in one piece."""
    model = TorchEngine.load(folder).model
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.layers[0].self_attn.k_proj.weight.mul_(2)
    for saved in (model, copied):
        saved.save_pretrained(tmp_path / "again")
        actual = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        for name, weight in saved.state_dict().items():
            assert torch.equal(actual.state_dict()[name], weight), name
    assert TorchEngine.load(tmp_path / "again").info.dtype == "float32"


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_converted_model_raises_until_it_is_converted_back(name: str) -> None:
    """One with rotary frequencies has rounded those: see test_torch_model_guard."""
    model = build(name)
    engine = TorchEngine.adopt(model)
    mark = engine.weights_version()
    model.half()
    with pytest.raises(ForwardError, match=r"torch\.float32 on cpu .* torch\.float16 on cpu now"):
        engine.forward([Row((), [3, 4], 0, None, (1,))])
    model.float()
    assert engine.weights_version() != mark  # of numbers with fewer digits
    got = engine.forward([Row((), [3, 4], 0, None, (1,))]).logits(0)
    want = plain_logits(model, [3, 4])[-1]
    assert float((torch.from_numpy(got) - want).abs().max()) < 1e-4


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system lists no mappings")
def test_copied_weights_are_in_memory_once(folder: Path) -> None:
    engine = TorchEngine.load(folder)
    gc.collect()
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert engine.model.get_input_embeddings().weight.shape[0] == N_VOCAB


def test_output_layer_that_is_the_embedding_too_stays_by_row(tmp_path: Path) -> None:
    model = _causal("llama", tie_word_embeddings=True, intermediate_size=64)
    model.save_pretrained(tmp_path)
    head = TorchEngine.load(tmp_path).model.get_output_embeddings()
    assert head.weight.is_contiguous()


def test_adopted_model_keeps_its_weights_in_place() -> None:
    model = build("llama")
    before = {name: (w.data_ptr(), w.stride()) for name, w in model.state_dict().items()}
    TorchEngine.adopt(model)
    assert before == {name: (w.data_ptr(), w.stride()) for name, w in model.state_dict().items()}


def test_info_describes_the_loaded_model(folder: Path) -> None:
    info = TorchEngine.load(folder).info
    assert (info.name, info.model, info.dtype, info.device) == ("torch", "model", "float32", "cpu")
    assert (info.n_layers, info.n_vocab, info.context_length) == (3, N_VOCAB, 256)
    assert info.kv_bytes_per_token == 3 * 2 * 2 * 8 * 4  # layers, K and V, heads, head size, bytes
    assert (info.kv, info.async_scheduling) == ("addressable", False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bfloat16_halves_the_kv(folder: Path, dtype: str) -> None:
    info = TorchEngine.load(folder, dtype=dtype, device="cpu").info
    assert info.dtype == dtype
    assert info.kv_bytes_per_token == 96 * (4 if dtype == "float32" else 2)


def test_auto_dtype_is_the_checkpoints(tmp_path: Path) -> None:
    build("llama", torch.bfloat16).save_pretrained(tmp_path)
    assert TorchEngine.load(tmp_path).info.dtype == "bfloat16"


@pytest.mark.filterwarnings("ignore")  # PyTorch: this way to quantise is old
def test_packed_weights_name_a_model_too() -> None:
    def packed(seed: int) -> torch.nn.Module:
        return torch.ao.quantization.quantize_dynamic(build("llama", seed=seed), {torch.nn.Linear})

    one, repeated, other = packed(0), packed(0), packed(0)
    up = other.model.layers[2].mlp.up_proj
    up.set_weight_bias(packed(1).model.layers[2].mlp.up_proj.weight(), None)
    assert fingerprint_of(one) == fingerprint_of(repeated) != fingerprint_of(other)


def test_handed_over_model_has_the_fingerprint_of_its_folder(folder: Path) -> None:
    print_of_folder = TorchEngine.load(folder).info.fingerprint
    assert TorchEngine.adopt(build("llama")).info.fingerprint == print_of_folder
    assert TorchEngine.adopt(build("llama", seed=1)).info.fingerprint != print_of_folder


@pytest.mark.parametrize("name", ["mixtral", "cohere"])
def test_model_read_from_its_folder_has_that_folders_fingerprint(name: str, tmp_path: Path) -> None:
    """Whatever Transformers calls and joins its weights once they are read: experts, tied ones."""
    build(name).save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert fingerprint_of(read) == open_checkpoint(tmp_path).fingerprint()


def test_n_ctx_bounds_the_path(folder: Path) -> None:
    assert TorchEngine.load(folder, n_ctx=40).info.context_length == 40
    for wrong in (0, 257):
        with pytest.raises(ConfigError, match="1 to 256"):
            TorchEngine.load(folder, n_ctx=wrong)


@pytest.mark.parametrize("name", ["llama", "mistral", "mamba"])
@pytest.mark.parametrize("n_ctx", [1, 3])
def test_context_may_be_shorter_than_the_paths_of_the_load_check(name: str, n_ctx: int) -> None:
    model = build(name)
    engine = TorchEngine.adopt(model, n_ctx=n_ctx)
    assert engine.info.context_length == n_ctx
    ids = [5, 9, 40, 7][:n_ctx]
    got = engine.forward([Row((), ids, 0, None, (n_ctx - 1,))]).logits(0)
    assert float((torch.from_numpy(got) - plain_logits(model, ids)[-1]).abs().max()) < 1e-4
    with pytest.raises(ContextOverflow, match=f"longer than the context of {n_ctx}"):
        engine.forward([Row((), [5] * (n_ctx + 1), 0, None, ())])


def test_wrong_arguments_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'float32'"):
        TorchEngine.load(folder, dtype="int8")
    with pytest.raises(ConfigError, match="device"):
        TorchEngine.load(folder, device="abacus")
    with pytest.raises(ConfigError, match="PreTrainedModel"):
        TorchEngine.adopt(torch.nn.Linear(2, 2))


def test_broken_folders_raise_model_load_error(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    full = weights.read_bytes()
    with pytest.raises(ModelLoadError):
        TorchEngine.load(tmp_path / "nowhere")
    weights.write_bytes(full[: len(full) // 2])
    with pytest.raises(ModelLoadError, match="truncated"):
        TorchEngine.load(folder)
    weights.unlink()
    with pytest.raises(ModelLoadError, match="safetensors"):
        TorchEngine.load(folder)
    weights.write_bytes(full)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ModelLoadError, match="lacks"):
        TorchEngine.load(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**31 - 1}))
    with pytest.raises(ModelLoadError, match=r"config\.json says 2147483647 layers"):
        TorchEngine.load(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "abacus"}))
    with pytest.raises(ModelLoadError, match="abacus"):
        TorchEngine.load(folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("away", ["disk", "meta"])
def test_model_spread_by_device_map_raises_and_names_the_map(
    folder: Path, tmp_path: Path, away: str
) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    parts = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    places = {**dict.fromkeys([*parts, "model.rotary_emb"], "cpu"), "model.layers.2": away}
    if away == "disk":
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, device_map=places, offload_folder=tmp_path / "off"
        )
        shown = "disk: model.layers.2"
    else:
        model = build("llama")
        model.model.layers[2].to("meta")
        shown = r"meta: model.layers.2.*and \d more"
    with pytest.raises(Unsupported, match=rf"device_map spreads it \(.*{shown}.*vllm"):
        TorchEngine.adopt(model)
    full = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"})
    ids = [5, 9, 40, 7]
    got = TorchEngine.adopt(full).forward([Row((), ids, 0, None, (3,))]).logits(0)
    assert float((torch.from_numpy(got) - plain_logits(full, ids)[-1]).abs().max()) < 1e-4


def test_weights_that_give_nan_raise() -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(ModelLoadError, match="not finite"):
        TorchEngine.adopt(model)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("bert", {"num_attention_heads": 4, "intermediate_size": 32}),
        ("xlnet", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    ],
)
def test_models_with_logits_that_depend_on_later_tokens_raise(
    kind: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(Unsupported, match="later tokens"):
        TorchEngine.adopt(_causal(kind, **changes))


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoder_models_raise(kind: str, tmp_path: Path) -> None:
    small = {"d_model": 32, "num_layers": 1, "encoder_layers": 1, "decoder_layers": 1}
    model = transformers.AutoModelForSeq2SeqLM.from_config(_config(kind, **small))
    with pytest.raises(Unsupported, match="encoder-decoder"):
        TorchEngine.adopt(model)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="encoder-decoder"):
        TorchEngine.load(tmp_path)


def test_handed_over_model_is_what_its_class_is(tmp_path: Path) -> None:
    """Its config may say what its checkpoint was, or nothing."""
    small = {"num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2}
    transformers.BertForMaskedLM(_config("bert", **small)).save_pretrained(tmp_path)
    as_decoder = transformers.BertLMHeadModel.from_pretrained(tmp_path, is_decoder=True).eval()
    assert as_decoder.config.architectures == ["BertForMaskedLM"]
    of_text = transformers.Emu3ForCausalLM(build_reader("emu3").config.text_config).eval()
    assert of_text.config.architectures is None
    for model in (as_decoder, of_text):
        engine = TorchEngine.adopt(model)
        assert (
            float((torch.from_numpy(stepped(engine)) - plain_logits(model, IDS)).abs().max()) < 1e-4
        )


def test_folder_of_a_decoder_by_any_name_is_loaded(tmp_path: Path) -> None:
    small = {"num_attention_heads": 4, "intermediate_size": 48, "is_decoder": True}
    model = _causal("bert-generation", **small)
    model.save_pretrained(tmp_path)
    assert model.config.architectures == ["BertGenerationDecoder"]
    engine = TorchEngine.load(tmp_path)
    assert float((torch.from_numpy(stepped(engine)) - plain_logits(model, IDS)).abs().max()) < 1e-4


def test_context_is_as_long_as_the_table_of_positions() -> None:
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    whisper = transformers.WhisperForCausalLM(
        _config("whisper", d_model=32, max_target_positions=24, **_ENDS, **sizes)
    ).eval()
    padded = {"num_attention_heads": 4, "intermediate_size": 48, "is_decoder": True}
    roberta = _causal("roberta", max_position_embeddings=26, pad_token_id=1, **padded)
    for model in (whisper, roberta):
        engine = TorchEngine.adopt(model)
        assert engine.info.context_length == 24
        ids = [5 + i % 90 for i in range(25)]
        got = engine.forward([Row((), ids[:24], 0, None, (23,))]).logits(0)
        want = plain_logits(model, ids[:24])[-1]
        assert float((torch.from_numpy(got) - want).abs().max()) < 1e-4
        with pytest.raises(ContextOverflow):
            engine.forward([Row((), ids, 0, None, ())])


def test_models_without_a_language_model_head_raise(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="head"):
        TorchEngine.adopt(build("llama").model)
    config = _config("bert", num_attention_heads=4)
    config.architectures = ["BertForMaskedLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(Unsupported, match="BertForMaskedLM"):
        TorchEngine.load(tmp_path)


def test_model_with_unknown_attention_is_recomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check tree finds what no list could: here the model's own attention scales its keys."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def other(module: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(module, query, key * 1.5, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", other)
    model = build("llama")
    model.set_attn_implementation("eager")
    engine = TorchEngine.adopt(model)
    assert engine.info.kv == "hidden"
    assert "differ" in engine.info.extra["no_prefix_caching"]
    ids = [5, 9, 40, 7]
    got = engine.forward([Row((), ids, 0, None, (3,))]).logits(0)
    assert float((torch.from_numpy(got) - plain_logits(model, ids)[-1]).abs().max()) < 1e-4


class _Unsaid:
    """A configuration without its sliding window, as an attention reads it that does not say it."""

    sliding_window = None

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["config"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Unsaid:
        return _Unsaid(copy.deepcopy(self.config, memo))


def test_model_with_a_window_only_in_its_mask_is_recomputed() -> None:
    """It is wider than the check tree is deep, so that no logits of that tree show it."""
    model = build("mistral")
    model.config.sliding_window = 40
    for layer in model.model.layers:
        layer.self_attn.config = _Unsaid(model.config)
    engine = TorchEngine.adopt(model)
    assert engine.info.kv == "hidden"
    assert "its mask hides earlier tokens" in engine.info.extra["no_prefix_caching"]
    ids = [(i * i * 5 + 11 * i + 3) % N_VOCAB for i in range(60)]
    got = engine.forward([Row((), ids, 0, None, (59,))]).logits(0)
    assert float((torch.from_numpy(got) - plain_logits(model, ids)[-1]).abs().max()) < 1e-4


def test_closing_twice_is_harmless(folder: Path) -> None:
    engine = TorchEngine.load(folder)
    engine.forward([Row((), [3, 4], 0, engine.fragments.new(None))])
    engine.close()
    engine.close()
    assert engine.fragments.usage() == (0, 0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch.compile's own
def test_wrapped_model_raises_and_names_the_attribute() -> None:
    model = build("llama")
    for wrapped in (torch.nn.DataParallel(model), torch.compile(model)):
        with pytest.raises(ConfigError, match=r"_orig_mod, of DataParallel its module"):
            TorchEngine.adopt(wrapped)
    assert isinstance(TorchEngine.adopt(torch.compile(model)._orig_mod), TorchEngine)
