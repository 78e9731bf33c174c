"""GGUF files as checkpoints: Transformers' names and layouts, weights dequantised one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelLoadError, Unsupported
from ..checkpoint import Checkpoint, Tensor
from .families import FAMILIES, family_of, tensor_names, transformers_config
from .header import GGUF, TYPES, GGUFTensor

_NUMBERS = {"f32": "<f4", "f16": "<f2"}


class GGUFCheckpoint(Checkpoint):
    """Weights of a GGUF file of a known family, with the interface of a folder's checkpoint.

    Args:
        header: checked by `read_gguf`.

    Raises:
        Unsupported: another family, or a tensor that the family does not have.
    """

    def __init__(self, header: GGUF) -> None:
        if family_of(header) is None:
            raise Unsupported(
                f"{header.file.name} is a {header.architecture} model; supported families are"
                f" {', '.join(FAMILIES)}, without experts"
            )
        self.header = header
        self._family = FAMILIES[header.architecture]
        self._names = tensor_names(header)
        self._mapped: dict[Path, NDArray[np.uint8]] = {}
        tensors = {ours: _tensor_entry(header.tensors[name]) for ours, name in self._names.items()}
        super().__init__(header.file, transformers_config(header), tensors)

    def read(self, name: str, shape: tuple[int, ...] | None = None) -> NDArray[np.float32]:
        """Dequantise one tensor to a new float32 array; see `Checkpoint.read`."""
        if name not in self.tensors:
            raise ModelLoadError(
                f"{self.folder} has no tensor for {name!r}; the file is incomplete: download it"
                " again"
            )
        stored = self.tensors[name].shape
        if shape is not None and stored != shape:
            raise ModelLoadError(
                f"{self.folder}: tensor {self._names[name]!r} has shape {list(stored)}, but the"
                f" file's header requires {list(shape)}; download it again"
            )
        values = np.empty(math.prod(stored), np.float32)
        for start, piece in self.pieces(name):
            values[start : start + piece.size] = piece
        values = values.reshape(stored)
        return values[order] if (order := self.row_order(name)) is not None else values

    def pieces(self, name: str) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yield a tensor's values in pieces: (flat position of the first one, values).

        Rows are in the file's order; `row_order` maps them to Transformers' order.
        """
        tensor = self.header.tensors[self._names[name]]
        offset = np.float32(self._family.norm_offset if name.endswith("norm.weight") else 0.0)
        raw, n_values = self._bytes(tensor), math.prod(tensor.shape)
        for start in range(0, n_values, _PIECE):
            size = min(_PIECE, n_values - start)
            begin, n_bytes = (n * tensor.n_bytes // n_values for n in (start, size))
            values = _dequantised(raw[begin : begin + n_bytes], tensor)
            yield start, values - offset if offset else values

    def row_order(self, name: str) -> NDArray[np.int64] | None:
        """Return the file's row for each row of the tensor; None if the order is the same.

        Heads of Q and K are stored in pairs (x0, y0, x1, y1, …) in some families; Transformers has
        halves (x0, x1, …, y0, y1, …).
        """
        if not (self._family.is_permuted and ("q_proj" in name or "k_proj" in name)):
            return None
        rows = np.arange(self.tensors[name].shape[0])
        return rows.reshape(-1, self.config["head_dim"] // 2, 2).swapaxes(1, 2).reshape(-1)

    def fingerprint(self) -> str:
        """Return a fingerprint of the weights, independent of the file name.

        Cost: reads one page per tensor.
        """
        return self.header.fingerprint("dequantised")

    def _bytes(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        """Map the tensor's bytes into memory."""
        if tensor.file not in self._mapped:
            self._mapped[tensor.file] = np.memmap(tensor.file, np.uint8, "r")
        return self._mapped[tensor.file][tensor.begin : tensor.begin + tensor.n_bytes]


def _tensor_entry(tensor: GGUFTensor) -> Tensor:
    """Return a GGUF tensor's location as a `Tensor`, with the shape outermost first."""
    shape = tuple(reversed(tensor.shape))
    return Tensor(tensor.file, tensor.type, shape, tensor.begin, tensor.begin + tensor.n_bytes)


# Values per dequantisation call; a multiple of every block size. gguf makes several copies of
# them, and is fastest while the copies fit into the processor's cache.
_PIECE = 1 << 17


def _dequantised(raw: NDArray[np.uint8], tensor: GGUFTensor) -> NDArray[np.float32]:
    """Convert stored blocks to float32 values, in the tensor's shape."""
    if tensor.type in _NUMBERS:
        return raw.view(_NUMBERS[tensor.type]).astype(np.float32)
    if tensor.type == "bf16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    # NOTE: imported here: it takes 0.2 s, and unquantised files do not need it.
    import gguf

    number = next(number for number, (name, *_) in TYPES.items() if name == tensor.type)
    try:
        values: NDArray[np.float32] = gguf.quants.dequantize(
            raw[None], gguf.GGMLQuantizationType(number)
        )
    except (NotImplementedError, ValueError) as error:
        raise Unsupported(
            f"{tensor.file.name} has weights of the type {tensor.type}, which the installed package"
            ' gguf does not read; run: pip install --upgrade gguf, or use engine="llamacpp"'
        ) from error
    return values[0]
