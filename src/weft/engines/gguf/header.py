"""GGUF files: the header, and checks that the file matches it.

    magic · version · counts │ key, type, value … │ name, shape, type, offset … │ padding │ data

Libraries that read such files end the process on some broken ones. Each file is therefore checked
here first: it must be complete, and its numbers must fit together. Tensor data is not read.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..._core.atomic_files import error_reason, repr_short
from ...errors import ModelLoadError, Unsupported

# GGML's tensor types: number → name, values in a block, bytes of a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
}
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # of llama.cpp
_NONE = 0xFFFFFFFF  # a token id that stands for no token
_SAMPLE = 64
_BYTE = 6  # a token's type
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GGUFTensor(NamedTuple):
    """Position of a tensor: bytes begin … begin + n_bytes - 1 of `file`.

    Args:
        file: file that contains the tensor.
        type: name of the GGML type.
        shape: dimensions, innermost first.
        begin: position of the first byte.
        n_bytes: size in bytes.
    """

    file: Path
    type: str
    shape: tuple[int, ...]
    begin: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class GGUF:
    """The header of one model, which may be in several files.

    Attributes:
        file: the first file.
        values: metadata of the first file.
        tensors: tensors of all files.
    """

    file: Path
    values: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """The file's name of the model family, such as "llama"."""
        return str(self.values["general.architecture"])

    def of_model(self, key: str, default: Any = None) -> Any:
        """Return a value whose key has the family's name as prefix, such as "block_count"."""
        return self.values.get(f"{self.architecture}.{key}", default)

    def fingerprint(self, *more: str) -> str:
        """Return a fingerprint of the weights, independent of the file name. Cost: one page per
        tensor.

        Args:
            more: further values that the computation depends on.
        """
        digest = hashlib.sha256(repr(more).encode())
        names = sorted(key for key in self.values if key.startswith(f"{self.architecture}."))
        digest.update(json.dumps([[key, self.values[key]] for key in names]).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name}{tensor.type}{tensor.shape}".encode())
            for piece in _samples(tensor):
                digest.update(piece)
        return digest.hexdigest()


def read_gguf(file: Path) -> GGUF:
    """Read and check a model's header. Pass the first file of a split model.

    Raises:
        ModelLoadError: a file is missing, not GGUF, truncated, or its numbers do not fit together.
        Unsupported: an unknown version of the format, or a part of a split model.
    """
    header = read_header(file)
    n_files = header.values.get("split.count", 1)
    if not _is_int(n_files, 0, 99999):
        raise _broken_file(file, f"split.count is {repr_short(n_files)}")
    tensors = dict(header.tensors)
    if n_files > 1:
        for part in _other_files(file, n_files):
            tensors |= read_header(part).tensors
    model = GGUF(file, header.values, tensors)
    check_model(model)
    return model


def check_model(header: GGUF) -> None:
    """Check that a header describes a language model whose numbers fit together.

    Raises:
        ModelLoadError, Unsupported: as `read_gguf`.
    """
    values, file = header.values, header.file
    name = values.get("general.architecture")
    if not isinstance(name, str) or not name.isprintable() or not name:
        raise _broken_file(
            file, f"general.architecture is {repr_short(name)}; it must be a printable name"
        )
    if values.get("general.type", "model") not in ("model", ""):
        raise Unsupported(f"{file} is a {values['general.type']}, not a model")
    if name == "clip" or "token_embd.weight" not in header.tensors:
        raise Unsupported(f"{file} is no language model: it has no token embeddings ({name})")
    n_layers = _checked_int(header, "block_count", 1, _MAX_LAYERS)
    n_embd = _checked_int(header, "embedding_length", 1, 1 << 24)
    _checked_int(header, "context_length", 1, 1 << 30)
    n_vocab = _check_vocabulary(header, n_embd)
    _check_heads(header, n_layers, n_embd)
    _checked_int(header, "vocab_size", 1, 1 << 24, default=n_vocab)
    n_experts = _checked_int(header, "expert_count", 0, _MAX_EXPERTS, default=0)
    n_used = _checked_int(header, "expert_used_count", 0, _MAX_EXPERTS, default=0)
    if n_used > n_experts or (n_used == 0) != (n_experts == 0):
        raise _broken_file(file, f"it uses {n_used} of {n_experts} experts")
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise _broken_file(file, f"{key} is {value}")
        if key.endswith("epsilon") and not (isinstance(value, float) and value >= 0):
            raise _broken_file(file, f"{key} is {repr_short(value)}; allowed are numbers from 0 on")


def _check_heads(header: GGUF, n_layers: int, n_embd: int) -> None:
    """Raise ModelLoadError if head counts and sizes do not fit the embedding or each other."""
    file = header.file
    if header.of_model("attention.head_count") is None:
        return  # a model without attention
    heads = _per_layer(header, "attention.head_count", n_layers)
    kv_heads = _per_layer(header, "attention.head_count_kv", n_layers, default=heads)
    for of_all, of_kv in zip(heads, kv_heads, strict=True):
        if of_kv and of_all % of_kv:
            raise _broken_file(file, f"{of_all} heads cannot share {of_kv} key-value heads")
    n_heads = max(heads)
    if n_heads == 0:
        return
    if header.of_model("attention.key_length") is None and n_embd % n_heads:
        raise _broken_file(file, f"an embedding of {n_embd} has no {n_heads} heads of equal size")
    size = _checked_int(header, "attention.key_length", 1, 1 << 16, default=n_embd // n_heads)
    _checked_int(header, "attention.value_length", 1, 1 << 16, default=size)
    rotary = _checked_int(header, "rope.dimension_count", 0, 1 << 16, default=size)
    if header.of_model("attention.kv_lora_rank") is None and (rotary > size or rotary % 2):
        raise _broken_file(file, f"heads of size {size} cannot rotate {rotary} dimensions")


def _check_vocabulary(header: GGUF, n_embd: int) -> int:
    """Check the tokenizer's lists and the embedding; return the vocabulary size."""
    values, file = header.values, header.file
    rows = header.tensors["token_embd.weight"].shape
    if len(rows) != 2 or rows[0] != n_embd:
        raise _broken_file(file, f"token_embd.weight is {list(rows)}, of an embedding of {n_embd}")
    kind = values.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return rows[1]
    tokens = values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise _broken_file(file, "its tokenizer has no tokens")
    if len(tokens) != rows[1]:
        raise _broken_file(file, f"it has {len(tokens)} tokens and {rows[1]} embeddings")
    for key in ("scores", "token_type"):
        entries = values.get(f"tokenizer.ggml.{key}")
        if entries is not None and (not isinstance(entries, list) or len(entries) != len(tokens)):
            raise _broken_file(file, f"tokenizer.ggml.{key} has not one entry per token")
    texts = [text for token in tokens if (text := token.partition("\0")[0])]  # as C reads them
    if len(set(texts)) != len(texts):
        raise _broken_file(file, "it has two tokens of the same text")
    for key, value in values.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            if not _is_int(value, 0, len(tokens) - 1) and value != _NONE:
                raise _broken_file(
                    file, f"{key} is {repr_short(value)}; it has {len(tokens)} tokens"
                )
    for name in ("bos", "eos", "sep"):
        if values.get(f"tokenizer.ggml.add_{name}_token"):
            key = {"sep": "seperator"}.get(name, name)  # as the format spells it
            if values.get(f"tokenizer.ggml.{key}_token_id") == _NONE:
                raise _broken_file(file, f"it adds a {name} token to texts, but has none")
    _check_bytes(header, kind, tokens)
    return len(tokens)


def _check_bytes(header: GGUF, kind: object, tokens: list[str]) -> None:
    """Check the tokens for single bytes.

    Args:
        kind: type of the tokenizer. "gpt2" must have no byte tokens. "llama" must have a token for
            every byte: <0xNN>, or the character itself.
        tokens: spellings. Byte tokens must be spelled <0xNN> in every kind of tokenizer.

    Raises:
        ModelLoadError: a check fails.
    """
    types = header.values.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    of_bytes = [token for token, kind_of in zip(tokens, types, strict=True) if kind_of == _BYTE]
    if kind == "gpt2" and of_bytes:
        raise _broken_file(header.file, "its byte-level tokenizer has tokens for bytes")
    if not all(_BYTE_TOKEN.fullmatch(token) for token in of_bytes):
        raise _broken_file(header.file, "it has an invalid token for a byte")
    if kind == "llama":
        texts = set(tokens)
        missing = [b for b in range(256) if f"<0x{b:02X}>" not in texts and chr(b) not in texts]
        if missing:
            raise _broken_file(header.file, f"its tokenizer cannot write the byte {missing[0]}")


def _checked_int(header: GGUF, key: str, low: int, high: int, default: int | None = None) -> int:
    """Return the integer at `<architecture>.<key>`, the largest one if it is a list per layer.

    Args:
        low, high: range of allowed values, both included. In a list, 0 is allowed too.
        default: the value if the key is missing; None: the key is required.

    Raises:
        ModelLoadError: the value is not an integer in this range.
    """
    value = header.of_model(key, default)
    if isinstance(value, list) and value:  # some families have one value per layer
        invalid = [each for each in value if not _is_int(each, 0, high)]
        value = invalid[0] if invalid else max(value)
    if not _is_int(value, low, high):
        raise _broken_file(
            header.file,
            f"{header.architecture}.{key} is {repr_short(value)}; allowed are {low} to {high}",
        )
    number: int = value
    return number


def _per_layer(
    header: GGUF, key: str, n_layers: int, default: Sequence[int] | None = None
) -> Sequence[int]:
    """Return the integers at `<architecture>.<key>`, one per layer or more.

    default: the value if the key is missing; None: the key is required. A single integer in the
    header counts for all layers.

    Raises: ModelLoadError for fewer values than layers, and for values that are not in 0 … 65536.
    """
    value = header.of_model(key, default)
    values = value if isinstance(value, list) else [value] * n_layers
    if len(values) < n_layers or not all(_is_int(each, 0, 1 << 16) for each in values):
        raise _broken_file(header.file, f"{header.architecture}.{key} is {repr_short(value)}")
    return values


def _is_int(value: object, low: int, high: int) -> bool:
    """Return True for an integer from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _other_files(file: Path, n_files: int) -> Iterator[Path]:
    """Yield the other files of a split model. Raise if one is missing."""
    match = _SPLIT.search(file.name)
    if match is None or int(match[1]) != 1 or int(match[2]) != n_files:
        raise Unsupported(
            f"{file} is a part of a model in {n_files} files; pass the first one with its original"
            f" name: …-00001-of-{n_files:05}.gguf"
        )
    for number in range(2, n_files + 1):
        part = file.with_name(f"{file.name[: match.start()]}-{number:05}-of-{n_files:05}.gguf")
        if not part.is_file():
            raise ModelLoadError(f"{file} needs {part.name} in the same folder; it does not exist")
        yield part


# One file -------------------------------------------------------------------------------------


def read_header(file: Path) -> GGUF:
    """Read the header of one file, which may contain only a vocabulary. Does not check it.

    Raises:
        ModelLoadError, Unsupported: as `read_gguf`.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise _broken_file(file, "it does not begin with GGUF")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(file, data, size).read()
    except OSError as error:
        raise ModelLoadError(f"cannot read {file}: {error_reason(error)}") from error
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise _truncated(file, size) from error


class _Reader:
    """Parses a header; every read advances `at`, the position in `data`."""

    def __init__(self, file: Path, data: mmap.mmap, size: int) -> None:
        self.file = file
        self.data = data
        self.size = size
        self.at = 4

    def read(self) -> GGUF:
        """Parse the full header."""
        version = self._read_struct("I")
        if version not in _VERSIONS:
            swapped = " (written for machines of the other byte order)" if version > 0xFFFF else ""
            raise Unsupported(f"{self.file} is GGUF version {version}{swapped}; 2 and 3 are read")
        n_tensors, n_values = self._read_count(24), self._read_count(12)
        values: dict[str, Any] = {}
        for _ in range(n_values):
            key = self._read_string()
            if key in values:
                raise _broken_file(self.file, f"it has the key {key!r:.60} twice")
            values[key] = self._read_value(self._read_struct("I"))
        align = values.get("general.alignment", 32)
        if not _is_int(align, 8, 1 << 20) or align & (align - 1):
            raise _broken_file(self.file, f"general.alignment is {repr_short(align)}")
        infos = [self._read_tensor_info() for _ in range(n_tensors)]
        start = -(-self.at // align) * align
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise _broken_file(self.file, f"it has the tensor {name!r:.60} twice")
            tensors[name] = self._locate_tensor(name, shape, kind, start + offset)
        return GGUF(self.file, values, tensors)

    def _locate_tensor(
        self, name: str, shape: tuple[int, ...], kind: int, begin: int
    ) -> GGUFTensor:
        """Return the tensor that starts at byte `begin`. kind: number of its GGML type."""
        label, in_block, block_bytes = TYPES.get(kind, (f"type {kind}", 1, 0))
        count = math.prod(shape)
        if shape[0] % in_block:
            raise _broken_file(
                self.file, f"rows of {shape[0]} are not full blocks of {label} ({name})"
            )
        n_bytes = count // in_block * block_bytes
        if begin + n_bytes > self.size:
            raise _truncated(self.file, self.size, begin + n_bytes)
        return GGUFTensor(self.file, label, shape, begin, n_bytes)

    def _read_tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the name, shape, type and data offset of one tensor."""
        name = self._read_string()
        n_dimensions = self._read_struct("I")
        if not 1 <= n_dimensions <= _MAX_DIMENSIONS:
            raise _broken_file(self.file, f"{name!r:.60} has {n_dimensions} dimensions")
        shape = tuple(self._read_struct("Q") for _ in range(n_dimensions))
        if not all(0 < each < 1 << 40 for each in shape):
            raise _broken_file(self.file, f"{name!r:.60} has the shape {list(shape)}")
        return name, shape, self._read_struct("I"), self._read_struct("Q")

    def _read_value(self, kind: int) -> Any:
        """Read a metadata value. kind: number of its GGUF type."""
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            inner = self._read_struct("I")
            if inner == _STRING:
                return self._read_strings(self._read_count(8))
            code = self._struct_code(inner)
            count = self._read_count(struct.calcsize(code))
            numbers = list(struct.unpack_from(f"<{count}{code}", self.data, self.at))
            self.at += count * struct.calcsize(code)
            return numbers
        return self._read_struct(self._struct_code(kind))

    def _struct_code(self, kind: int) -> str:
        """Return the `struct` code of a GGUF value type."""
        if kind not in _NUMBERS:
            raise _broken_file(self.file, f"it has a value of the unknown type {kind}")
        return _NUMBERS[kind]

    def _read_string(self) -> str:
        """Read a length and a UTF-8 string."""
        length = self._read_count(1)
        raw = self.data[self.at : self.at + length]
        self.at += length
        return raw.decode("utf-8", "surrogateescape")

    def _read_strings(self, count: int) -> list[str]:
        """Read consecutive strings in one loop: a vocabulary has hundreds of thousands."""
        data, size, at = self.data, self.size, self.at
        strings = []
        for _ in range(count):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > size or start > size:
                raise _truncated(self.file, size)
            strings.append(data[start:at].decode("utf-8", "surrogateescape"))
        self.at = at
        return strings

    def _read_count(self, min_bytes: int) -> int:
        """Read the number of following items, each of at least `min_bytes` bytes."""
        count = self._read_struct("Q")
        if count * min_bytes > self.size - self.at:
            raise _truncated(self.file, self.size)
        return count

    def _read_struct(self, code: str) -> Any:
        """Read one number with a code of the `struct` module."""
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(code)
        return value


def _samples(tensor: GGUFTensor) -> Iterator[bytes]:
    """Yield up to `_SAMPLE` bytes from the start, the middle and the end of a tensor."""
    with tensor.file.open("rb") as stream:
        for begin in (0, (tensor.n_bytes - _SAMPLE) // 2, tensor.n_bytes - _SAMPLE):
            stream.seek(tensor.begin + max(0, begin))
            yield stream.read(min(_SAMPLE, tensor.n_bytes))


def _broken_file(file: Path, why: str) -> ModelLoadError:
    """Return the error for a file that violates the format. why: the violation."""
    return ModelLoadError(f"{file} is not a readable GGUF model: {why}; download it again")


def _truncated(file: Path, size: int, needed: int | None = None) -> ModelLoadError:
    """Return the error for a file shorter than its header requires: `needed` bytes."""
    expected = "is longer" if needed is None else f"requires {needed} or more"
    return ModelLoadError(
        f"{file} is truncated or broken: it has {size} bytes, and its header {expected};"
        " download it again"
    )
