"""Full logits and greedy texts of the real models, against their own libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import weft
from contract.helpers import logits_at
from models.conftest import Load
from real_models import GEMMA3_GGUF, SMOLLM2_GGUF, real_model
from weft import Loom

PROMPTS = {
    "smollm2": "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "gemma3": "Paris is the capital of France. Rome is the capital of",
}
N_GREEDY = 16
# Transformers reads the metadata of the file three times: 47 CPU seconds.
gemma_is_slow_to_read = pytest.mark.timeout(1200)


def prompt_ids(lm: weft.LM, model: str) -> list[int]:
    return lm.text.encode(PROMPTS[model], special=True)


def log_softmax(logits: NDArray[Any]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def path_logits(lm: weft.LM, ids: list[int]) -> NDArray[np.float32]:
    """Return the logits after each token of a path; each step continues the KV of the last one."""
    return np.stack([logits_at(lm, ids[: n + 1]) for n in range(len(ids))])


def assert_equals_transformers(lm: weft.LM, ids: list[int], model: Any) -> None:
    """Compare the logits at all positions of a path with those of the library's forward pass."""
    import torch

    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(path_logits(lm, ids), expected, atol=2e-3)


def assert_greedy_equals_generate(lm: weft.LM, ids: list[int], model: Any) -> list[int]:
    """Compare a greedy run with `generate`; return its tokens."""
    import torch

    output = model.generate(torch.tensor([ids]), max_new_tokens=N_GREEDY, do_sample=False)
    expected = output[0, len(ids) :].tolist()
    grown = Loom(lm, ids).grow(n=1, temperature=0.0, max_tokens=N_GREEDY, show=False)
    tokens = grown[0].tokens
    assert tokens
    assert tokens[: len(expected)] == expected[: len(tokens)]
    return tokens


@pytest.mark.parametrize(
    "name",
    [
        "smollm2-torch",
        "smollm2-numpy",
        "smollm2-mlx",
        "smollm2-gguf-torch",
        "smollm2-gguf-numpy",
    ],
)
def test_logits_equal_those_of_transformers_from_the_folder(
    name: str, load_real: Load, transformers_model: Any
) -> None:
    lm = load_real(name)
    assert_equals_transformers(lm, prompt_ids(lm, "smollm2"), transformers_model)


@gemma_is_slow_to_read
def test_logits_of_gemma_equal_those_of_transformers_from_the_file(
    load_real: Load, transformers_gemma: Any
) -> None:
    lm = load_real("gemma3-torch")
    assert_equals_transformers(lm, prompt_ids(lm, "gemma3"), transformers_gemma)


@pytest.mark.parametrize("name", ["smollm2-torch", "smollm2-numpy", "smollm2-mlx"])
def test_greedy_tokens_of_a_folder_equal_those_of_generate(
    name: str, load_real: Load, transformers_model: Any
) -> None:
    lm = load_real(name)
    tokens = assert_greedy_equals_generate(lm, prompt_ids(lm, "smollm2"), transformers_model)
    assert "Rome" in lm.text.decode(tokens)


@gemma_is_slow_to_read
def test_greedy_tokens_of_gemma_equal_those_of_generate(
    load_real: Load, transformers_gemma: Any
) -> None:
    lm = load_real("gemma3-torch")
    tokens = assert_greedy_equals_generate(lm, prompt_ids(lm, "gemma3"), transformers_gemma)
    assert "Italy" in lm.text.decode(tokens)


@pytest.fixture(scope="session", params=["smollm2", "gemma3"])
def library(request: pytest.FixtureRequest) -> Any:
    """The model's name, and the GGUF file as llama-cpp-python loads it, one row a token."""
    llama_cpp = pytest.importorskip("llama_cpp")
    file = real_model({"smollm2": SMOLLM2_GGUF, "gemma3": GEMMA3_GGUF}[request.param])
    llama = llama_cpp.Llama(
        str(file),
        n_ctx=512,
        logits_all=True,
        verbose=False,
        flash_attn=False,
        n_threads=1,
        n_threads_batch=1,
    )
    yield request.param, llama
    llama.close()


def library_logits(llama: Any, ids: list[int]) -> NDArray[np.float32]:
    llama.reset()
    llama.eval(ids)
    return np.array(llama.scores[len(ids) - 1])


def test_logits_of_the_llamacpp_engine_equal_those_of_llama_cpp(
    library: tuple[str, Any], load_real: Load
) -> None:
    name, llama = library
    lm = load_real(f"{name}-llamacpp-plain")
    ids = prompt_ids(lm, name)
    lm.clear_cache()  # the prompt in one batch, as in llama.cpp
    np.testing.assert_allclose(logits_at(lm, ids), library_logits(llama, ids), atol=1e-6)


def test_greedy_tokens_of_the_llamacpp_engine_equal_those_of_llama_cpp(
    library: tuple[str, Any], load_real: Load
) -> None:
    name, llama = library
    lm = load_real(f"{name}-llamacpp-plain")
    ids = prompt_ids(lm, name)
    lm.clear_cache()
    expected = [int(library_logits(llama, ids).argmax())]
    for _ in range(5):
        llama.eval(expected[-1:])
        expected.append(int(llama.scores[llama.n_tokens - 1].argmax()))
    node = Loom(lm, ids).grow(n=1, temperature=0.0, max_tokens=6, show=False)[0]
    assert node.tokens == expected[: len(node.tokens)]


@pytest.mark.parametrize("name", ["smollm2-gguf-torch", "smollm2-gguf-numpy", "gemma3-torch"])
def test_dequantised_logits_are_near_those_of_llama_cpp(name: str, load_real: Load) -> None:
    """llama.cpp rounds activations to eight bits; the mean of all log-probabilities stays near."""
    lm, model = load_real(name), name.partition("-")[0]
    other = load_real(f"{model}-llamacpp")
    ids = prompt_ids(lm, model)
    assert ids == prompt_ids(other, model)
    mine, theirs = log_softmax(logits_at(lm, ids)), log_softmax(logits_at(other, ids))
    assert int(mine.argmax()) == int(theirs.argmax())
    likely = theirs > -8.0
    assert np.abs(mine - theirs)[likely].mean() < 0.5
