"""Linear weights as oneDNN reads them: the same numbers, and whatever reads weights goes on."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.pytorch_utils import Conv1D  # noqa: E402

from cases import one_in  # noqa: E402
from families import (  # noqa: E402
    FUSED,
    IDS,
    IMAGE_FAMILIES,
    build,
    build_reader,
    plain_logits,
    stepped,
)
from weft.engines.base import Row  # noqa: E402
from weft.engines.torch import TorchEngine, weight_layout  # noqa: E402
from weft.engines.torch.model import fingerprint_of  # noqa: E402
from weft.engines.torch.weights import experts as packed_experts  # noqa: E402
from weft.engines.torch.weights import packed as packing  # noqa: E402
from weft.engines.torch.weights.experts import PackedExperts, pack_experts  # noqa: E402
from weft.engines.torch.weights.packed import PackedLinear  # noqa: E402
from weft.engines.torch.weights.upcast import is_upcast  # noqa: E402
from weft.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.torch

MUCH = {torch.float32: 2e-4, torch.bfloat16: 0.15}


def packed(model) -> list[PackedLinear]:
    return [module for module in model.modules() if isinstance(module, PackedLinear)]


def is_stored_once(layer: PackedLinear) -> bool:
    """Return True if a layer has its weight packed only, or uses it unpacked."""
    stored = layer._parameters.get("weight")
    return stored is None or stored.data_ptr() == layer._packed.data_ptr()


@pytest.fixture(autouse=True)
def packs_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack float32 weights on every CPU, also where the engine would not."""
    for module in (packed_experts, packing, weight_layout):
        monkeypatch.setattr(module, "is_unpacked", is_upcast)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_logits_equal_those_of_the_model(name: str, dtype, tmp_path: Path) -> None:
    model = build(name, dtype)
    model.save_pretrained(tmp_path)
    loaded = TorchEngine.load(tmp_path, packed_weights=True)
    handed = TorchEngine.adopt(model, packed_weights=True)
    want = plain_logits(model, IDS).numpy()
    for engine in (loaded, handed):
        assert len(packed(engine.model)) == 3 * 7 + 1
        np.testing.assert_allclose(stepped(engine), want, atol=MUCH[dtype])
        got = plain_logits(engine.model, IDS).numpy() if engine is loaded else want
        np.testing.assert_allclose(got, want, atol=MUCH[dtype])  # by the modules


# What of the linear layers of a model stays as it is: Mamba multiplies with a weight by itself, and
# text does not go through what reads images.
STAYS = {
    "gemma2": 0,
    "gpt2": 0,
    "gpt_neox": 0,
    "deepseek_v3": 0,
    "mamba": 4,
    "lfm2": 0,
    "mistral3": 10,
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in STAYS), ("gemma2", torch.bfloat16)],
)
def test_layers_that_run_for_text_are_packed_in_every_family(
    name: str, dtype, tmp_path: Path
) -> None:
    model = (build_reader(name) if name in IMAGE_FAMILIES else build(name)).to(dtype)
    model.save_pretrained(tmp_path)
    n_linear = sum(isinstance(module, torch.nn.Linear | Conv1D) for module in model.modules())
    engines = [TorchEngine.load(tmp_path), TorchEngine.adopt(model, packed_weights=True)]
    want = plain_logits(model, IDS).numpy()
    for engine in engines:
        assert len(packed(engine.model)) == n_linear - STAYS[name]
        row = Row((), IDS, 0, None, tuple(range(len(IDS))))
        got = engine.forward([row])
        rows = np.stack([got.logits(i) for i in range(len(IDS))])
        np.testing.assert_allclose(rows, want, atol=MUCH[dtype])
    assert not packed(model)
    assert engines[0].info.fingerprint == engines[1].info.fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_of_any_number_of_rows_is_the_product(dtype) -> None:
    """Few rows are filled up to more; none, rows of several axes and such as lie apart are not."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 12, generator=generator), torch.randn(24, generator=generator)
    stored = packing.packed(weight.to(dtype))
    for shape in [
        (12,),
        (0, 12),
        *((n, 12) for n in range(1, 8)),
        (1, 3, 12),
        (2, 0, 12),
        (2, 2, 2, 12),
    ]:
        x = torch.randn(*shape, 2, generator=generator)[..., 0].to(dtype)
        got = packing.product(x, stored, bias.to(dtype))
        want = torch.nn.functional.linear(
            x.float(), weight.to(dtype).float(), bias.to(dtype).float()
        )
        torch.testing.assert_close(got.float(), want, atol=MUCH[dtype], rtol=0)
        assert got.shape == want.shape


def test_layers_with_hooks_or_two_parents_are_not_packed(tmp_path: Path) -> None:
    model = build("gemma2")
    layers = model.model.layers
    layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: out * 2)
    layers[1].mlp.up_proj = layers[2].mlp.up_proj
    copied = TorchEngine.adopt(model, packed_weights=True).model
    stay = [name for name, m in copied.named_modules(remove_duplicate=False) if _is_as_it_was(m)]
    assert stay == [f"model.layers.{i}.mlp.up_proj" for i in range(3)]
    np.testing.assert_allclose(plain_logits(copied, IDS), plain_logits(model, IDS), atol=2e-4)


def _is_as_it_was(module) -> bool:
    return type(module) is torch.nn.Linear


def test_model_that_fails_on_a_first_forward_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("gemma2")
    linear = [module for module in model.modules() if _is_as_it_was(module)]
    with monkeypatch.context() as patch:
        patch.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
        assert not weight_layout.pack(model, keep=True)
    assert all(map(_is_as_it_was, linear))


def test_loaded_weights_are_packed_if_that_is_faster(folder: Path, tmp_path: Path) -> None:
    """In bfloat16 always; small ones in float32 by column, too."""
    small = TorchEngine.load(folder).model
    assert {layer.weight.stride(0) for layer in packed(small)} == {1}
    assert len(packed(small)) == 3 * 7 + 1
    for dtype in ("float32", "bfloat16"):
        assert not packed(TorchEngine.load(folder, dtype=dtype, packed_weights=False).model)
    model = TorchEngine.load(folder, dtype="bfloat16").model
    assert len(packed(model)) == 3 * 7 + 1
    assert all(map(is_stored_once, packed(model)))
    wide = build("llama").config
    wide.intermediate_size = (1 << 19) // wide.hidden_size
    type(build("llama"))(wide).save_pretrained(tmp_path / "wide")
    model = TorchEngine.load(tmp_path / "wide").model
    assert len(packed(model)) == 3 * 7 + 1
    assert not any("proj" in name for name, _ in model.named_parameters())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system lists no mapped files")
def test_model_that_is_packed_holds_no_page_of_its_file(folder: Path) -> None:
    engine = TorchEngine.load(folder, packed_weights=True)
    assert packed(engine.model)
    assert str(folder) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("n", [1, 15, 16, 40])
def test_small_model_computes_the_same_at_few_rows_and_at_many(n: int, folder: Path) -> None:
    engine = TorchEngine.load(folder)
    ids = [(7 * i + i * i) % 120 for i in range(n)]
    want = plain_logits(build("llama"), ids).numpy()
    output = engine.forward([Row((), ids, 0, None, tuple(range(n)))])
    got = np.stack([output.logits(i) for i in range(n)])
    np.testing.assert_allclose(got, want, atol=2e-4)
    with torch.no_grad():
        engine.model.model.layers[1].mlp.gate_proj.weight.mul_(1.5)
    output = engine.forward([Row((), ids, 0, None, (n - 1,))]).logits(0)
    assert np.abs(output - want[-1]).max() > 0.01
    want = plain_logits(engine.model, ids)[-1].numpy()
    np.testing.assert_allclose(output, want, atol=2e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_packed_weights_give_the_same_logits(name: str, tmp_path: Path, dtype: str) -> None:
    build(name).save_pretrained(tmp_path)
    model = TorchEngine.load(tmp_path, dtype=dtype, packed_weights=True).model
    plain = build(name).to(getattr(torch, dtype))
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, weight in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name
    assert fingerprint_of(model) == fingerprint_of(plain)
    layer = packed(model)[0]
    if layer._parameters.get("weight") is None:  # a copy, which would be written to in vain
        with torch.no_grad(), pytest.raises(RuntimeError, match="[Ii]nference tensor"):
            layer.weight.mul_(2)


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
def test_packed_model_and_its_copies_can_be_saved(name: str, tmp_path: Path) -> None:
    first = build("gpt2" if name == "gpt2" else "llama")
    if name == "tied":
        first.config.tie_word_embeddings = True
        first = type(first)(first.config).eval()
    first.save_pretrained(tmp_path / "model")
    model = TorchEngine.load(tmp_path / "model", packed_weights=True).model
    for saved in (model, copy.deepcopy(model)):
        saved.save_pretrained(tmp_path / "again")
        actual = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        for key, weight in first.state_dict().items():
            assert torch.equal(actual.state_dict()[key], weight), key
    repeated = TorchEngine.adopt(copy.deepcopy(model))
    np.testing.assert_allclose(stepped(repeated), plain_logits(first, IDS).numpy(), atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_weights_loaded_into_packed_layers_are_used(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    engine = TorchEngine.load(tmp_path, packed_weights=True)
    other = build(name, seed=1)
    twin = copy.deepcopy(engine.model)
    mark = engine.weights_version()
    assert not any(engine.model.load_state_dict(other.state_dict()))
    assert engine.weights_version() != mark
    np.testing.assert_allclose(stepped(engine), plain_logits(other, IDS).numpy(), atol=2e-4)
    want = plain_logits(build(name), IDS).numpy()
    np.testing.assert_allclose(plain_logits(twin, IDS).numpy(), want, atol=2e-4)


def test_tied_output_layer_is_packed_and_the_embedding_stays(tmp_path: Path, caplog) -> None:
    config = build("llama").config
    config.tie_word_embeddings = True
    model = type(build("llama"))(config).eval()
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "weft.engines.torch"):
        engine = TorchEngine.load(tmp_path, packed_weights=True)
    assert "in memory twice" in caplog.text
    head = engine.model.get_output_embeddings()
    assert isinstance(head, PackedLinear)
    assert head.weight is engine.model.get_input_embeddings().weight
    np.testing.assert_allclose(stepped(engine), plain_logits(model, IDS).numpy(), atol=2e-4)
    with torch.no_grad():
        for owner in (model, engine.model):
            owner.get_input_embeddings().weight.mul_(1.5)
    np.testing.assert_allclose(stepped(engine), plain_logits(model, IDS).numpy(), atol=3e-4)


def test_adopted_weights_are_packed_on_request_and_logged(caplog) -> None:
    model = build("llama")
    with caplog.at_level(logging.INFO, "weft.engines.torch"):
        assert not packed(TorchEngine.adopt(model).model)
        assert "in memory twice" not in caplog.text
        engine = TorchEngine.adopt(model, packed_weights=True)
        assert "in memory twice" in caplog.text
    assert packed(engine.model)
    assert not packed(model)


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_weights_written_by_the_owner_are_used(name: str) -> None:
    model = build(name)
    engine = TorchEngine.adopt(model, packed_weights=True)
    stepped(engine)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.7)
    np.testing.assert_allclose(stepped(engine), plain_logits(model, IDS).numpy(), atol=2e-4)
    for weight in model.parameters():
        weight.data.mul_(1.5)  # PyTorch does not count it
    engine.clear_caches()
    np.testing.assert_allclose(stepped(engine), plain_logits(model, IDS).numpy(), atol=2e-4)
    other = build(name, seed=1)
    for weight, new in zip(model.parameters(), other.parameters(), strict=True):
        weight.data = new.data
    np.testing.assert_allclose(stepped(engine), plain_logits(other, IDS).numpy(), atol=2e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_adapter_is_added_to_packed_layers(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
    given = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets)
    wrapped = peft.get_peft_model(build("llama").eval(), given)
    for key, weight in wrapped.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(weight, std=0.2)
    wrapped.save_pretrained(tmp_path / "law", save_embedding_layers=False)
    engine = TorchEngine.load(folder, packed_weights=True)
    alone = engine.forward([Row((), IDS, 0, None, (11,))]).logits(0)
    engine.add_adapter("law", tmp_path / "law")
    got = engine.forward([Row((), IDS, 0, None, (11,), adapter="law")]).logits(0)
    np.testing.assert_allclose(got, plain_logits(wrapped, IDS)[-1].numpy(), atol=3e-4)
    after = engine.forward([Row((), IDS, 0, None, (11,))]).logits(0)
    np.testing.assert_array_equal(after, alone)


def test_packed_weights_without_effect_raise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "has_products", lambda dtype: False)
    with pytest.raises(ConfigError, match="packed_weights has no effect on"):
        TorchEngine.adopt(build("llama"), packed_weights=True)
    with pytest.raises(ConfigError, match="packed_weights has no effect on"):
        TorchEngine.load(folder, packed_weights=True)
    TorchEngine.load(folder, packed_weights=False)


def test_other_values_raise(folder: Path) -> None:
    for given in ("yes", 1):
        with pytest.raises(
            ConfigError, match="packed_weights is .* allowed are None, True and False"
        ):
            TorchEngine.load(folder, packed_weights=given)
        with pytest.raises(
            ConfigError, match="packed_weights is .* allowed are None, True and False"
        ):
            TorchEngine.adopt(build("llama"), packed_weights=given)


def test_all_faces_take_the_option(folder: Path) -> None:
    import weft

    words = transformers.PreTrainedTokenizerFast(tokenizer_object=_words())
    words.save_pretrained(folder)
    for source, given in ((folder, ()), (build("llama"), (words,))):
        options = {"packed_weights": True}
        lm = weft.load(source, *given, engine="torch", engine_options=options)
        assert packed(lm.engine.model)
        plain = plain_logits(build("llama"), IDS)[-1].log_softmax(-1).numpy()
        got = weft.AsyncLM(lm, as_torch=False).next_token_logprobs_sync(IDS)
        np.testing.assert_allclose(got, plain, atol=2e-4)
        lm.clear_cache()
        lm.close()


def _words():
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.BPE({chr(40 + i): i for i in range(80)}, []))
    backend.decoder = decoders.ByteLevel()
    return backend


@pytest.mark.parametrize("fault", ["wrong", "gone"])
def test_wrong_or_missing_products_leave_weights_unpacked(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(*args):
        if fault == "gone":
            raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute")
        return 1.1 * own(*args)

    own = packing.product
    monkeypatch.setattr(packing, "product", product)
    assert not packed(TorchEngine.load(folder, dtype="bfloat16").model)


# Experts ---------------------------------------------------------------------------------------

# They differ in how Transformers declares their experts: plain, with biases and transposed, with an
# expert for all tokens, and in a model without KV of its tokens.
MIXTURES = ["mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"]


def mixtures(model) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


@pytest.mark.parametrize("name", one_in(2, MIXTURES))
def test_experts_are_packed_and_give_what_they_gave(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    n_mixtures = sum("Experts" in type(module).__name__ for module in model.modules())
    want = plain_logits(model, IDS).numpy()
    for engine in (
        TorchEngine.load(tmp_path, packed_weights=True),
        TorchEngine.adopt(model, packed_weights=True),
    ):
        assert len(mixtures(engine.model)) == n_mixtures > 0
        output = engine.forward([Row((), IDS, 0, None, tuple(range(len(IDS))))])
        got = np.stack([output.logits(i) for i in range(len(IDS))])
        np.testing.assert_allclose(got, want, atol=2e-4)
        if engine.fragments is not None:
            np.testing.assert_allclose(stepped(engine), want, atol=2e-4)
    assert not mixtures(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_packed_experts_give_the_same_logits_and_load_weights(
    name: str, dtype, tmp_path: Path
) -> None:
    first, other = build(name, dtype), build(name, dtype, seed=1)
    first.save_pretrained(tmp_path / "model")
    model = TorchEngine.load(tmp_path / "model", packed_weights=True).model
    stacks = [n for n, _ in model.named_parameters() if "experts" in n and "bias" not in n]
    assert bool(stacks) == is_upcast(dtype)  # packed stacks are no parameters
    twin = copy.deepcopy(model)
    for key, weight in first.state_dict().items():
        assert torch.equal(model.state_dict()[key], weight), key
    assert fingerprint_of(model) == fingerprint_of(first)
    model.save_pretrained(tmp_path / "again")
    repeated = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    for key, weight in first.state_dict().items():
        assert torch.equal(repeated.state_dict()[key], weight), key
    assert not any(model.load_state_dict(other.state_dict()))
    for key, weight in other.state_dict().items():
        assert torch.equal(model.state_dict()[key], weight), key
    if dtype == torch.float32:  # else a last bit may choose another expert
        for stored, known in ((model, other), (twin, first)):
            np.testing.assert_allclose(
                plain_logits(stored, IDS), plain_logits(known, IDS), atol=2e-4
            )


def test_experts_written_by_the_owner_are_used() -> None:
    model = build("mixtral")
    engine = TorchEngine.adopt(model, packed_weights=True)
    experts = model.model.layers[1].mlp.experts
    with torch.no_grad():
        experts.down_proj.mul_(1.5)
    np.testing.assert_allclose(stepped(engine), plain_logits(model, IDS).numpy(), atol=2e-4)
    experts.gate_up_proj.data.mul_(0.5)  # PyTorch does not count it
    engine.clear_caches()
    np.testing.assert_allclose(stepped(engine), plain_logits(model, IDS).numpy(), atol=2e-4)


def test_token_without_an_expert_gets_nothing_of_it() -> None:
    """Ids from the number of experts on stand for experts that are elsewhere."""
    experts = build("mixtral").model.layers[0].mlp.experts
    n = experts.num_experts
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    chosen, shares = torch.tensor([[0, n], [n, n], [3, 1]]), torch.full((3, 2), 0.5)
    with torch.inference_mode():
        zeroed = shares.masked_fill(chosen == n, 0)
        want = experts(rows, chosen.clamp(max=n - 1), zeroed)
        assert pack_experts(experts, keep=False)[0] == 1
        got = experts(rows, chosen, shares)
        assert experts(rows[:0], chosen[:0], shares[:0]).shape == (0, 32)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert not got[1].any()


def test_experts_that_others_run_or_watch_stay() -> None:
    model = build("mixtral")
    model.model.layers[0].mlp.experts.register_forward_hook(lambda *_: None)
    assert len(mixtures(TorchEngine.adopt(model, packed_weights=True).model)) == 2
    chosen = build("mixtral")
    chosen.set_experts_implementation("batched_mm")
    assert not mixtures(TorchEngine.adopt(chosen, packed_weights=True).model)


def test_experts_with_wrong_packed_results_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral")
    right = packed_experts.product
    monkeypatch.setattr(packed_experts, "product", lambda *given: right(*given) * 1.01)
    assert pack_experts(model, keep=False) == (0, 0)
    assert not mixtures(model)


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("n_rows", [1, 2])
def test_product_of_few_rows_equals_the_plain_product_padded_or_not(
    is_padded: bool, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = torch.nn.Linear(96, 64)
    packed_layer = packing.pack_layer(layer, keep=False, few=0)
    monkeypatch.setattr(packing, "_pads", {(torch.float32, n_rows): is_padded})
    x = torch.randn(n_rows, 96)
    with torch.inference_mode():
        torch.testing.assert_close(packed_layer(x), layer(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("padded_s", "is_worth"), [(1.0, True), (1.2, False)])
def test_products_of_all_shapes_decide_about_padding(
    padded_s: float, is_worth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large layer that loses nothing by filling does not outweigh the small ones."""
    layers = [packing.pack_layer(torch.nn.Linear(32, n), keep=False, few=0) for n in (64, 32, 32)]
    now, own = [0.0], packing._product

    def product(x, weight, bias):
        is_large, is_padded = len(weight) == 64, len(x) == 4
        now[0] += (1.0 if is_large else padded_s) if is_padded else 1.0
        return own(x, weight, bias)

    monkeypatch.setattr(packing, "_pads", {})
    monkeypatch.setattr(packing, "_product", product)
    monkeypatch.setattr(packing.time, "perf_counter", lambda: now[0])
    packing.time_padding(layers)
    assert packing._pads == {(torch.float32, 1): is_worth, (torch.float32, 2): is_worth}


def test_padding_is_timed_once_for_one_row_and_two(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []
    monkeypatch.setattr(packing, "_pads", {})
    monkeypatch.setattr(
        packing, "_is_padding_faster", lambda weights, n_rows: timed.append(n_rows) or False
    )
    layer = packing.pack_layer(torch.nn.Linear(96, 64), keep=False, few=0)
    for _ in range(2):
        packing.time_padding([layer])
    assert timed == [1, 2]
    assert packing._pads == {(torch.float32, 1): False, (torch.float32, 2): False}
