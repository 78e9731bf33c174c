"""The real models on every engine that runs their files, loaded once for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

import weft
from real_models import GEMMA3_GGUF, SMOLLM2_FOLDER, SMOLLM2_GGUF, real_model

# llama.cpp's own numbers: without flash attention, and with a fixed number of threads.
LIBRARY_NUMBERS = {"flash_attention": False, "n_threads": 1}
# name → (file, engine, the package that the engine needs, options of `weft.load`)
LOADS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "smollm2-torch": (SMOLLM2_FOLDER, "torch", "torch", {"dtype": "float32"}),
    "smollm2-numpy": (SMOLLM2_FOLDER, "numpy", "numpy", {}),
    "smollm2-mlx": (SMOLLM2_FOLDER, "mlx", "mlx_lm", {"dtype": "float32"}),
    "smollm2-gguf-torch": (SMOLLM2_GGUF, "torch", "torch", {"dtype": "float32"}),
    "smollm2-gguf-numpy": (SMOLLM2_GGUF, "numpy", "numpy", {}),
    "smollm2-llamacpp": (SMOLLM2_GGUF, "llamacpp", "llama_cpp", {"n_ctx": 2048}),
    "gemma3-torch": (GEMMA3_GGUF, "torch", "torch", {"dtype": "float32"}),
    "gemma3-llamacpp": (GEMMA3_GGUF, "llamacpp", "llama_cpp", {"n_ctx": 2048}),
}
for _model, _file in {"smollm2": SMOLLM2_GGUF, "gemma3": GEMMA3_GGUF}.items():
    for _kind, _options in {
        "plain": LIBRARY_NUMBERS,
        "reproducible": {"reproducible": True, "n_threads": 1},
    }.items():
        LOADS[f"{_model}-llamacpp-{_kind}"] = (
            _file,
            "llamacpp",
            "llama_cpp",
            {"n_ctx": 512, "engine_options": _options},
        )
Load = Callable[[str], weft.LM]


@pytest.fixture(scope="session")
def load_real() -> Iterator[Load]:
    """Return a function from a name of LOADS to its LM; it skips what is not installed."""
    lms: list[weft.LM] = []

    @cache
    def load(name: str) -> weft.LM:
        file, engine, package, options = LOADS[name]
        path = real_model(file)
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        lms.append(weft.load(path, engine=engine, kv_budget="512MiB", **options))
        return lms[-1]

    yield load
    for lm in lms:
        lm.close()


@pytest.fixture(scope="session")
def transformers_model() -> Any:
    """SmolLM2 as Transformers loads it from its safetensors folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = real_model(SMOLLM2_FOLDER)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def transformers_gemma() -> Any:
    """Gemma 3 as Transformers dequantises it from its GGUF file."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    file = real_model(GEMMA3_GGUF)
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )


@pytest.fixture(scope="session")
def transformers_tokenizer() -> Any:
    """SmolLM2's tokenizer as Transformers loads it."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(real_model(SMOLLM2_FOLDER))


def generate_text(
    model: Any, tokenizer: Any, messages: Sequence[dict[str, str]], n_tokens: int = 12
) -> str:
    """Return the greedy answer of Transformers' `generate` to a chat."""
    prompt = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=n_tokens, do_sample=False)
    text: str = tokenizer.decode(
        output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return text


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/models/" in item.nodeid or item.nodeid.startswith("models/"):
            item.add_marker("models")
