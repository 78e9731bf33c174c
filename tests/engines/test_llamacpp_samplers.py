"""DRY, XTC and top-nσ compared with llama.cpp's own samplers, on the same logits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from llama_cpp import llama_cpp as C

from shallow import shallow_gguf
from weft._core.sampling.dry import DryHistory, SequenceBreakers
from weft._core.sampling.params import DRY_BREAKERS, SamplingParams
from weft._core.sampling.sampler import probabilities
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.gguf import read_gguf
from weft.engines.llamacpp.library import load_model
from weft.engines.llamacpp.vocabulary import read_tokenizer

pytestmark = pytest.mark.llamacpp

ALL_CHOICES = 0.9999999  # a probability of 1 that llama.cpp's float32 comparison also passes


@pytest.fixture(scope="module")
def vocabulary() -> Iterator[tuple[Any, Tokenizer]]:
    model = load_model(shallow_gguf(), vocab_only=True)
    yield C.llama_model_get_vocab(model.pointer), read_tokenizer(read_gguf(shallow_gguf()))
    del model


def remaining(sampler: Any, logits: np.ndarray) -> dict[int, float]:
    """Return the logits that a sampler of llama.cpp leaves, by token; frees the sampler."""
    data = (C.llama_token_data * len(logits))(
        *(C.llama_token_data(token, value, 0.0) for token, value in enumerate(logits.tolist()))
    )
    candidates = C.llama_token_data_array(data, len(logits), -1, False)
    C.llama_sampler_apply(sampler, ctypes.byref(candidates))
    C.llama_sampler_free(sampler)
    left = ((candidates.data[i].id, candidates.data[i].logit) for i in range(candidates.size))
    return {token: logit for token, logit in left if logit > -np.inf}


def rows(n: int) -> np.ndarray:
    random = np.random.default_rng(0)
    return (random.standard_normal((n, 300)) * random.uniform(0.3, 4, (n, 1))).astype(np.float32)


@pytest.mark.parametrize("n_sigma", [0.5, 1.0, 1.7, 3.0])
def test_top_n_sigma_keeps_llama_cpps_tokens(n_sigma: float) -> None:
    for logits in rows(20):
        theirs = remaining(C.llama_sampler_init_top_n_sigma(n_sigma), logits)
        ours = probabilities(logits, SamplingParams(top_n_sigma=n_sigma))
        assert set(np.flatnonzero(ours).tolist()) == set(theirs)


@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.1, 0.3, 0.6])
def test_xtc_drops_llama_cpps_tokens(threshold: float) -> None:
    for logits in rows(20):
        theirs = remaining(C.llama_sampler_init_xtc(ALL_CHOICES, threshold, 0, 1), logits)
        params = SamplingParams(xtc_probability=1.0, xtc_threshold=threshold)
        assert set(np.flatnonzero(probabilities(logits, params)).tolist()) == set(theirs)


@pytest.mark.parametrize(
    ("breakers", "options"),
    [
        (DRY_BREAKERS, {}),
        ((), {"dry_allowed_length": 1, "dry_base": 1.2}),
        (("\n", " the", "user:"), {"dry_penalty_last_n": 40}),
    ],
)
def test_dry_subtracts_llama_cpps_penalties(
    vocabulary: tuple[Any, Tokenizer], breakers: Sequence[str], options: dict[str, Any]
) -> None:
    """Texts with repetitions and breakers, at each of their tokens."""
    vocab, text = vocabulary
    params = SamplingParams(dry_multiplier=0.8, dry_sequence_breakers=breakers, **options)
    ours = SequenceBreakers.from_texts(breakers, text.vocab_bytes, text.continuation)
    words = ctypes.c_char_p * len(breakers)
    prompt = "the cat sat on the mat: the cat sat on the mat.\nuser: the cat sat on the mat,"
    ids = text.encode(prompt * 2, add_bos=False)
    n_penalised = 0
    for n in range(2, len(ids)):
        sampler = C.llama_sampler_init_dry(
            vocab,
            params.dry_multiplier,
            params.dry_base,
            params.dry_allowed_length,
            params.dry_penalty_last_n or len(ids),
            words(*(word.encode() for word in breakers)),
            len(breakers),
        )
        for token in ids[:n]:
            C.llama_sampler_accept(sampler, token)
        theirs = remaining(sampler, np.zeros(len(text), dtype=np.float32))
        history = DryHistory(params, ours)
        history.add(ids[:n])
        tokens, penalties = history.penalties()
        expected = {token: -value for token, value in theirs.items() if value}
        assert dict(zip(tokens.tolist(), penalties.tolist(), strict=True)) == pytest.approx(
            expected, rel=1e-5
        )
        n_penalised += len(tokens)
    assert n_penalised > 5
