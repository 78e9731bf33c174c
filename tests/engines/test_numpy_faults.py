"""Failed forwards change nothing; unsupported features raise an error that names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_reference import CONFIG, PlainLlama, random_tensors, write_folder
from weft.engines.base import Row, ScoreSpan, Span
from weft.engines.numpy import NumpyEngine, model
from weft.errors import ConfigError, ForwardError, ModelLoadError, Unsupported


@pytest.fixture
def plain(tmp_path: Path) -> PlainLlama:
    return write_folder(tmp_path)


@pytest.fixture
def engine(plain: PlainLlama, tmp_path: Path) -> NumpyEngine:
    return NumpyEngine.load(tmp_path)


def bad_row(engine: NumpyEngine, kind: str) -> Row:
    root = engine.fragments.new(None)
    engine.forward([Row((), [1, 2, 3], 0, root)])
    path = (Span(root, 3),)
    dest = engine.fragments.new(root)
    return {
        "id too large": lambda: Row(path, [61], 3, dest),
        "id negative": lambda: Row(path, [5, -1], 3, dest),
        "no tokens": lambda: Row(path, [], 3, dest),
        "position": lambda: Row(path, [5], 4, dest),
        "span too long": lambda: Row((Span(root, 4),), [5], 4, dest),
        "context": lambda: Row(path, [5] * 510, 3, dest),
        "logits_at": lambda: Row(path, [5], 3, dest, (1,)),
        "score range": lambda: Row(path, [5, 6], 3, dest, (), (ScoreSpan(1, (5, 6)),)),
        "score id": lambda: Row(path, [5, 6], 3, dest, (), (ScoreSpan(0, (5, 99)),)),
    }[kind]()


KINDS = [
    "id too large",
    "id negative",
    "no tokens",
    "position",
    "span too long",
    "context",
    "logits_at",
    "score range",
    "score id",
]


@pytest.mark.parametrize("kind", KINDS)
def test_bad_row_fails_the_call_and_changes_no_length(engine: NumpyEngine, kind: str) -> None:
    bad = bad_row(engine, kind)
    good = [engine.fragments.new(None), engine.fragments.new(None)]
    n_slots = engine.fragments.usage().slots
    with pytest.raises(ForwardError):
        engine.forward([Row((), [4], 0, good[0]), bad, Row((), [4, 5], 0, good[1])])
    assert engine.fragments.usage().slots == n_slots
    assert [fragment.length for fragment in (*good, bad.kv_out) if fragment] == [0, 0, 0]
    for fragment in (*good, bad.kv_out, bad.prefix[0].fragment):
        assert fragment is not None
        engine.fragments.free(fragment)
    assert engine.fragments.usage() == (0, 0)


def test_step_that_raises_in_the_middle_can_be_repeated(
    engine: NumpyEngine, plain: PlainLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the plan of the step before is in use."""
    tails = [engine.fragments.new(None) for _ in range(3)]
    rows = [Row((), [i], 0, tail, (0,)) for i, tail in enumerate(tails)]
    for step in range(6):
        for i, row in enumerate(rows):
            row.tokens, row.position = [i + step], step
        with monkeypatch.context() as patch:
            patch.setattr(model, "_mlp", _fail)
            with pytest.raises(MemoryError):
                engine.forward(rows)
        assert [tail.length for tail in tails] == [step] * 3
        output = engine.forward(rows)
        for i in range(3):
            expected = plain([i + k for k in range(step + 1)])[-1]
            np.testing.assert_allclose(output.logits(i), expected, atol=1e-4)


def _fail(*_: Any) -> None:
    raise MemoryError


def test_unknown_adapter_is_unsupported(engine: NumpyEngine) -> None:
    with pytest.raises(Unsupported, match="adapters"):
        engine.forward([Row((), [1], 0, None, adapter="poet")])


def test_last_position_can_be_used(engine: NumpyEngine) -> None:
    root = engine.fragments.new(None)
    engine.forward([Row((), [1] * 511, 0, root)])
    row = Row((), [1], 511, root, (0,))
    assert np.isfinite(engine.forward([row]).logits(0)).all()
    row.position = 512
    with pytest.raises(ForwardError, match="512"):
        engine.forward([row])


def test_closed_engine_raises_forward_error(engine: NumpyEngine) -> None:
    engine.close()
    engine.close()
    assert engine.fragments.usage() == (0, 0)
    with pytest.raises(ForwardError, match="closed"):
        engine.forward([Row((), [1], 0)])


def test_n_ctx_shortens_the_context(plain: PlainLlama, tmp_path: Path) -> None:
    assert NumpyEngine.load(tmp_path, n_ctx=64).info.context_length == 64
    for n_ctx in (0, 513):
        with pytest.raises(ConfigError, match="1 to 512"):
            NumpyEngine.load(tmp_path, n_ctx=n_ctx)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_other_dtypes_are_unsupported(plain: PlainLlama, tmp_path: Path, dtype: str) -> None:
    assert NumpyEngine.load(tmp_path, dtype="float32").info.dtype == "float32"
    with pytest.raises(Unsupported, match=dtype):
        NumpyEngine.load(tmp_path, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None, "model_type": "rwkv"}, "rwkv"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"sliding_window": 16, "architectures": ["MistralForCausalLM"]}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"head_dim": 7}, "odd head dimension"),
    ],
)
def test_unsupported_config_raises_and_names_the_torch_engine(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    write_folder(tmp_path, change, tensors=random_tensors(CONFIG))
    with pytest.raises(Unsupported, match=named) as caught:
        NumpyEngine.load(tmp_path)
    assert 'engine="torch"' in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"vocab_size": 60}, "embed_tokens"),
        ({"tie_word_embeddings": False}, "lm_head"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"mlp_bias": True}, "gate_proj.bias"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor"),
    ],
)
def test_config_and_weights_that_disagree_raise(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    write_folder(tmp_path, change, tensors=random_tensors(CONFIG))
    with pytest.raises(ModelLoadError, match=named):
        NumpyEngine.load(tmp_path)
