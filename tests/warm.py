"""Objects that are equal in all test programs and are created once.

The embedded model's weights, from its file; its tokenizer; an empty database of looms.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft._core.tokens import tokenizer
from weft._core.tokens.codec import TokenizersCodec
from weft._core.tokens.tokenizer import TokenizerFiles, read_folder
from weft.constraints.base import Compiler
from weft.engines.checkpoint import Checkpoint, open_checkpoint
from weft.engines.hub import resolve
from weft.engines.numpy import engine
from weft.engines.numpy.config import LlamaConfig, parse_config
from weft.engines.numpy.model import Weights, read_weights

# The number of layers of the embedded model that run, if a test ignores its text; None: all.
LAYERS = "WEFT_TESTS_LAYERS"
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def keep_weights() -> None:
    """Read and hash the embedded model's weights only once in this process."""
    engine.read_weights = _read_once
    hash_weights = Checkpoint.fingerprint

    def hash_once(checkpoint: Checkpoint) -> str:
        if checkpoint.folder != resolve("tiny"):
            return hash_weights(checkpoint)
        return embedded_hash()

    @cache
    def embedded_hash() -> str:
        return hash_weights(open_checkpoint(resolve("tiny")))

    Checkpoint.fingerprint = hash_once  # type: ignore[method-assign]


def _read_once(checkpoint: Checkpoint, config: LlamaConfig, **options: Any) -> Weights:
    if checkpoint.folder != resolve("tiny"):
        return read_weights(checkpoint, config, **options)
    weights = embedded()
    if options.get("progress") is not None:
        for index in range(config.n_layers):
            options["progress"]("load", index + 1, config.n_layers, "")
    shown = os.environ.get(LAYERS)
    return weights if shown is None else replace(weights, layers=weights.layers[: int(shown)])


@cache
def embedded() -> Weights:
    """Return the embedded model's weights."""
    checkpoint = open_checkpoint(resolve("tiny"))
    return read_weights(checkpoint, parse_config(checkpoint.config))


def keep_tokenizer() -> None:
    """Read the embedded model's tokenizer, and convert it for llguidance, only once."""
    tokenizer.read_folder = _read_folder_once
    convert = vars(Compiler)["guidance"].func
    converted: dict[tuple[int, frozenset[int]], Any] = {}

    def convert_once(compiler: Compiler) -> Any:
        codec = getattr(compiler.text, "_codec", None)  # None: text pieces of a remote server
        if codec is not embedded_tokenizer().backend:
            return convert(compiler)
        key = (compiler.n_vocab, compiler.stop_ids)
        if key not in converted:
            converted[key] = convert(compiler)
        return converted[key]

    guidance = cached_property(convert_once)
    guidance.__set_name__(Compiler, "guidance")
    Compiler.guidance = guidance  # type: ignore[method-assign]


def _read_folder_once(path: Path) -> TokenizerFiles:
    is_equal = _contents(path) == _contents(resolve("tiny"))
    return embedded_tokenizer() if is_equal else read_folder(path)


def _contents(path: Path) -> list[bytes | None]:
    files = [path / name for name in _TOKENIZER]
    return [file.read_bytes() if file.is_file() else None for file in files]


@cache
def embedded_tokenizer() -> TokenizerFiles:
    """Read the embedded model's tokenizer; a codec is immutable and can be shared."""
    files = read_folder(resolve("tiny"))
    codec = TokenizersCodec(
        files.backend,
        "tokenizer.json",
        specials=files.special_tokens.values(),
        stop_ids=files.stop_ids,
    )
    return replace(files, backend=codec)


def new_home(folder: Path) -> None:
    """Create a WEFT_HOME whose database has empty tables."""
    folder.mkdir()
    new_database(folder / "weft.db")


def new_database(file: Path) -> str:
    """Create a database with empty tables; return its URL."""
    shutil.copy(Path(_empty().name) / "weft.db", file)
    return f"sqlite:///{file}"


@cache
def _empty() -> TemporaryDirectory[str]:
    from weft.service.store import Library

    folder = TemporaryDirectory(prefix="weft-empty-")
    Library(f"sqlite:///{folder.name}/weft.db").close()
    return folder
