"""Embeddings equal the model's own library's hidden states, pooled."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fakes import HiddenFake, Wrapped
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.base import Engine, Row
from weft.engines.numpy import NumpyEngine
from weft.errors import ConfigError, ContextOverflow, StaleHandle, Unsupported
from weft.lm.lm import LM

TINY = Path(__file__).parents[2] / "src" / "weft" / "data" / "tiny"
TEXTS = ["The cat sat on the mat.", "A dog!", "The cat sat on the mat.", "x", "Numbers: 1 2 3"]


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.from_folder(TINY)


@pytest.fixture(scope="module")
def numpy_engine() -> Iterator[Engine]:
    engine = NumpyEngine.load(TINY)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["numpy", "torch"])
def engine(request: pytest.FixtureRequest, numpy_engine: Engine) -> Iterator[Engine]:
    if request.param == "numpy":
        yield numpy_engine
        return
    pytest.importorskip("torch", reason="torch is not installed")
    from weft.engines.torch import TorchEngine

    loaded = TorchEngine.load(TINY, dtype="float32")
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def states(text: Tokenizer) -> list[np.ndarray]:
    """The oracle: `hidden_states[-1]` of each text, [T, E]."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    with torch.no_grad():
        return [
            model(torch.tensor([text.encode(one)]), output_hidden_states=True)
            .hidden_states[-1][0]
            .numpy()
            for one in TEXTS
        ]


@pytest.mark.parametrize("n_batch", [512, 9, 3])
def test_vectors_equal_the_librarys_hidden_states(
    engine: Engine, text: Tokenizer, states: list[np.ndarray], n_batch: int
) -> None:
    lm = LM(engine, text, n_batch=n_batch)
    pools: dict[str, Any] = {"mean": lambda s: s.mean(0), "cls": lambda s: s[0]}
    pools["last"] = lambda s: s[-1]
    for pooling, pool in pools.items():
        want = np.stack([pool(state) for state in states])
        result = lm.embed(TEXTS, pooling=pooling, normalize=False)  # type: ignore[arg-type]
        assert result.dtype == np.float32
        assert result.shape == (len(TEXTS), lm.info.n_embd)
        np.testing.assert_allclose(result, want, atol=1e-4)
        want /= np.linalg.norm(want, axis=1, keepdims=True)
        np.testing.assert_allclose(lm.embed(TEXTS, pooling=pooling), want, atol=1e-4)  # type: ignore[arg-type]
    assert lm.stats().kv_tokens == 0
    assert engine.fragments is not None
    assert engine.fragments.usage().slots == 0
    lm.tree.check()


def test_equal_texts_have_equal_vectors(engine: Engine, text: Tokenizer) -> None:
    vectors = LM(engine, text).embed(TEXTS)
    assert vectors[0] @ vectors[2] > 0.99
    assert vectors[0] @ vectors[1] < 0.99
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_embed_of_empty_list_returns_empty(engine: Engine, text: Tokenizer) -> None:
    lm = LM(engine, text)
    assert lm.embed([]).shape == (0, lm.info.n_embd)


def test_token_ids_are_embedded_as_their_text(numpy_engine: Engine, text: Tokenizer) -> None:
    lm = LM(numpy_engine, text)
    ids = [lm.tokenize(each) for each in TEXTS]
    np.testing.assert_array_equal(lm.embed(ids), lm.embed(TEXTS))
    for wrong in ([1, -2], [1, 10**9], [1, "a"]):
        with pytest.raises(ConfigError, match="token id"):
            lm.embed([wrong])  # type: ignore[list-item]


def test_values_that_cannot_be_embedded_raise(numpy_engine: Engine, text: Tokenizer) -> None:
    lm = LM(numpy_engine, text, n_ctx=8)
    for wrong in ([""], ["a", ""], [3]):
        with pytest.raises(ConfigError, match="give a text that is not empty"):
            lm.embed(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="allowed is a list of texts"):
        lm.embed("a text")
    with pytest.raises(ConfigError, match="allowed are mean, cls, last"):
        lm.embed(["a"], pooling="max")  # type: ignore[arg-type]
    with pytest.raises(ContextOverflow, match="the context is 8"):
        lm.embed(["one two three four five six seven eight nine"])


@pytest.mark.parametrize("texts", [["a"], []])
def test_embed_of_a_closed_lm_raises(texts: list[str], text: Tokenizer) -> None:
    with LM(NumpyEngine.load(TINY), text) as lm:
        pass
    with pytest.raises(StaleHandle, match="this LM is closed; load it again"):
        lm.embed(texts)


def test_lm_that_is_closed_meanwhile_embeds_no_further(
    text: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = LM(NumpyEngine.load(TINY), text)
    tokenize = lm.tokenize

    def closing(given: str) -> list[int]:
        ids = tokenize(given)
        lm.close()
        return ids

    monkeypatch.setattr(lm, "tokenize", closing)
    with pytest.raises(StaleHandle, match="this LM is closed; load it again"):
        lm.embed(["a"])


def test_embed_of_an_engine_without_hidden_states_raises(
    numpy_engine: Engine, text: Tokenizer
) -> None:
    with pytest.raises(Unsupported, match="gives no hidden states"):
        LM(HiddenFake(numpy_engine), text).embed(["a"])


class Owned(Wrapped):
    """Notes who calls it."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner, same_thread_only=True)
        self.threads: set[int] = set()

    def hidden_states(self, rows: Sequence[Row]) -> list[np.ndarray]:
        self.threads.add(threading.get_ident())
        return self.inner.hidden_states(rows)


def test_owner_threads_engine_is_called_from_its_thread(
    numpy_engine: Engine, text: Tokenizer
) -> None:
    engine = Owned(numpy_engine)
    lm = LM(engine, text, n_batch=8)
    lm.embed(TEXTS)
    lm.close()
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads
