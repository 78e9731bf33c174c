"""Model folders in Transformers' format: validation, tensors and the fingerprint of the weights.

Only headers are read until a tensor is read, so that broken folders are rejected at once. Every
engine that loads from such a folder uses the same checks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._core.atomic_files import PARSE_ERRORS, error_reason, parse_json, read_json, repr_short
from .._core.installation import install_hint
from ..errors import ModelLoadError, Unsupported

_INDEX = "model.safetensors.index.json"
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_DTYPES: dict[str, type[np.generic]] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_ESSENTIALS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_SAMPLE = 32
# Names of the context length in configurations, the most common first.
CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "n_ctx",
    "max_target_positions",
    "max_sequence_length",
    "model_max_length",
)


class Tensor(NamedTuple):
    """Location of a stored tensor: bytes begin … end - 1 of `file`, with its dtype and shape.

    `dtype`: name in safetensors, such as "BF16".
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Checkpoint:
    """A model folder opened for reading: config.json, and the location of every tensor in its
    files.

    Create it with `open_checkpoint`. Tensors are read on demand with `read`; `name in checkpoint`
    tests for one.
    """

    def __init__(self, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.folder = folder
        self.config = config
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> NDArray[np.float32]:
        """Read a tensor as a new float32 array.

        Raises:
            ModelLoadError: it is not stored, or not of the expected `shape`.
            Unsupported: it is stored in a format other than float32, float16, bfloat16 or float64.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(
                f"{self.folder} has no tensor {name!r}, which its config.json requires; "
                "the files are of another model or incomplete: download the folder again"
            )
        if shape is not None and tensor.shape != shape:
            raise ModelLoadError(
                f"tensor {name!r} in {tensor.file} has shape {list(tensor.shape)}, but config.json "
                f"requires {list(shape)}; the two are of different models"
            )
        raw = _stored_items(name, tensor, _memory_map(tensor.file))
        return _as_float32(raw, tensor.dtype).reshape(tensor.shape)

    def fingerprint(self) -> str:
        """Return a hash of the model's shape and of samples of its weights, independent of the
        folder.

        Cost: one page per tensor.
        """
        return fingerprint(self.config, self._sampled_tensors())

    def _sampled_tensors(self) -> Iterator[tuple[str, tuple[int, ...], NDArray[np.float32]]]:
        """Yield name, shape and the float32 values at `sample_positions` of every tensor."""
        mapped: dict[Path, NDArray[np.uint8]] = {}
        for name, tensor in self.tensors.items():
            if tensor.file not in mapped:
                mapped[tensor.file] = _memory_map(tensor.file)
            raw = _stored_items(name, tensor, mapped[tensor.file])
            yield name, tensor.shape, _as_float32(raw[sample_positions(raw.size)], tensor.dtype)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read config.json and all safetensors headers of `folder`.

    Raises:
        ModelLoadError: the folder, config.json, the weights or a shard is missing or broken.
    """
    config = read_config(folder)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        tensors.update(_read_header(file))
    _check_index(folder, tensors)
    return Checkpoint(folder, config, tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a model folder.

    Raises:
        ModelLoadError: there is no such folder, no config.json in it, or it is not a JSON object.
    """
    if not folder.is_dir():
        what = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise ModelLoadError(f"{what}; give the path of a model folder")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelLoadError(
            f"{folder} has no config.json; a model folder has config.json, *.safetensors "
            "and tokenizer.json, as Transformers' save_pretrained writes them"
        )
    return _read_json(file)


def is_mlx_quantised(config: Mapping[str, Any]) -> bool:
    """Return True if mlx-lm has quantised the weights; no other library reads them."""
    packed = config.get("quantization")
    return isinstance(packed, dict) and "group_size" in packed


def reject_mlx_quantised(config: Mapping[str, Any], engine: str) -> None:
    """Raise Unsupported if mlx-lm has quantised the weights; for engines other than MLX."""
    if is_mlx_quantised(config):
        raise Unsupported(
            f"mlx-lm has quantised this model, and the {engine} engine does not read it;"
            f' use engine="mlx" ({install_hint("mlx")})'
        )


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the class names in config.json.

    Raises:
        ModelLoadError: the entry is not a list of names.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"config.json: architectures is {repr_short(names)}; it must be names")
    return names


def check_tokenizer(folder: Path, n_vocab: int) -> None:
    """Check that `folder` has a tokenizer whose ids fit a model of `n_vocab` tokens.

    The tokenizer may have fewer ids than the model (padded embeddings). An id that is too large
    means a wrong tokenizer.

    Raises:
        ModelLoadError: the tokenizer is missing or broken, or belongs to a model with more tokens.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelLoadError(
            f"{folder} has no tokenizer (looked for {', '.join(_TOKENIZER_FILES)}); "
            "copy the model's own there, or pass tokenizer="
        )
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    largest = max(_token_ids(file), default=-1)
    if largest < 0:
        raise ModelLoadError(f"{file} has no tokens; copy the model's own tokenizer.json there")
    if largest >= n_vocab:
        raise ModelLoadError(
            f"wrong tokenizer: {file} has token id {largest}, but the model's vocabulary has "
            f"{n_vocab} tokens (ids 0 to {n_vocab - 1}); use the tokenizer of this model"
        )


def fingerprint(
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, tuple[int, ...], NDArray[np.float32]]],
) -> str:
    """Return a SHA-256 of the model's shape and of samples of its weights.

    Args:
        config: content of config.json.
        tensors: name, shape and the float32 values at `sample_positions`, in any order.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps([[key, config.get(key)] for key in _ESSENTIALS]).encode())
    for name, shape, sample in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name}{list(shape)}".encode())
        digest.update(np.ascontiguousarray(sample, dtype="<f4").tobytes())
    return digest.hexdigest()


def sample_positions(size: int) -> NDArray[np.int64]:
    """Return the flat positions that `fingerprint` samples: the first, middle and last 32."""
    if size <= 3 * _SAMPLE:
        return np.arange(size)
    run = np.arange(_SAMPLE)
    return np.concatenate([run, (size - _SAMPLE) // 2 + run, size - _SAMPLE + run])


def _weight_files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files: those of the index, else model.safetensors, else all."""
    index = folder / _INDEX
    if not index.is_file():
        files = sorted(file for file in folder.glob("*.safetensors") if file.is_file())
        if not files:
            raise ModelLoadError(
                f"{folder} has no *.safetensors; weights in other formats are not read: "
                "save them again with Transformers' save_pretrained"
            )
        single = folder / "model.safetensors"
        return [single] if single in files else files
    files = [folder / name for name in sorted(set(_weight_map(index).values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(
            f"{folder} has no {', '.join(missing)}, named in {_INDEX}; download the folder again"
        )
    return files


def _check_index(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelLoadError if the index names a tensor that no file contains."""
    index = folder / _INDEX
    if not index.is_file():
        return
    missing = sorted(set(_weight_map(index)) - set(tensors))
    if missing:
        raise ModelLoadError(
            f"{_INDEX} in {folder} names {len(missing)} tensors that no shard contains, "
            f"for example {missing[0]!r}; download the folder again"
        )


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor, from model.safetensors.index.json."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map; download the folder again")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise ModelLoadError(
                f"{index} has {repr_short(file)} for {name!r}; it must be a file name"
            )
    return weight_map


def _read_header(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file: 8 bytes of header length, a JSON header, then the data."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            n_header = int.from_bytes(stream.read(8), "little")
            if size < 8 or n_header > size - 8:
                raise _truncated(file, size, 8 + n_header)
            raw = stream.read(n_header)
    except OSError as error:
        raise ModelLoadError(f"cannot read {file}: {error_reason(error)}") from error
    try:
        header = parse_json(raw)
        header.pop("__metadata__", None)
        tensors = {name: _tensor_entry(file, 8 + n_header, each) for name, each in header.items()}
    except PARSE_ERRORS as error:
        raise ModelLoadError(f"{file} is not a safetensors file: {error}") from error
    end = max((tensor.end for tensor in tensors.values()), default=0)
    if end > size:
        raise _truncated(file, size, end)
    return tensors


def _tensor_entry(file: Path, base: int, entry: dict[str, Any]) -> Tensor:
    """Convert one entry of a safetensors header to a `Tensor`.

    base: position in the file to which the entry's offsets are relative.
    """
    begin, end = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in (begin, *shape)):
        raise ValueError(f"{repr_short(entry)} is not a valid tensor entry")
    if type(end) is not int or end < begin:
        raise ValueError(f"a tensor ends at {repr_short(end)}, before it begins")
    return Tensor(file, dtype, shape, base + begin, base + end)


def _truncated(file: Path, size: int, needed: int) -> ModelLoadError:
    """Return the error for a file that is shorter than its header requires."""
    return ModelLoadError(
        f"{file} is truncated: it has {size} bytes, and its header promises {needed} or more;"
        " download it again"
    )


def _memory_map(file: Path) -> NDArray[np.uint8]:
    """Map a file into memory, read-only."""
    return np.asarray(np.memmap(file, np.uint8, "r"))


def _stored_items(name: str, tensor: Tensor, mapped: NDArray[np.uint8]) -> NDArray[Any]:
    """Return a view of the stored items, flat, without reading them; bfloat16 as uint16."""
    item_bytes = _ITEM_BYTES.get(tensor.dtype)
    if item_bytes is None:
        raise Unsupported(
            f"tensor {name!r} in {tensor.file} is stored as {tensor.dtype}; "
            f"supported are {', '.join(_ITEM_BYTES)}"
        )
    count = math.prod(tensor.shape)
    if tensor.end - tensor.begin != count * item_bytes:
        raise ModelLoadError(f"{tensor.file}: size and shape of {name!r} do not agree")
    if count == 0:
        return np.empty(0, np.float32)
    dtype = np.dtype(_DTYPES.get(tensor.dtype, np.uint16)).newbyteorder("<")
    return mapped[tensor.begin : tensor.end].view(dtype)


def _as_float32(raw: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Convert stored items, of a safetensors dtype, to float32."""
    if dtype == "BF16":  # bfloat16 is the upper half of a float32
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32)


def _token_ids(file: Path) -> list[int]:
    """Return the ids of the vocabulary without added tokens, which some models have beyond it."""
    model = _read_json(file).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list | None):
        raise ModelLoadError(f"{file} has {repr_short(vocab)} as its vocabulary; download it again")
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab or ())))
    for token_id in ids:
        if type(token_id) is not int:
            raise ModelLoadError(
                f"{file} has {repr_short(token_id)} as a token id; download it again"
            )
    return ids


def _read_json(file: Path) -> dict[str, Any]:
    """Read a file that must contain a JSON object."""
    value = read_json(file, ModelLoadError, "not JSON", nan=True)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{file} is not a JSON object; download it again")
    return value
