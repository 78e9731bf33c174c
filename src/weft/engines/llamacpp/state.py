"""Parse and write llama.cpp's serialization of a sequence's KV.

It has one block for each cache of the context (models with a sliding window have two)::

    u32 1 │ u32 cells │ cell: i32 position, u32 1, i32 sequence … │ u32 is V transposed │ u32 layers
    │ layer: i32 type, u64 row bytes, rows …              (keys, then values where not transposed)
    │ layer: i32 type, u32 value bytes, u32 columns, columns …                  (values transposed)

Cells are in the order of the cache. Data of any other form raises `StateError`; every byte must
belong to a field.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Buffer = bytes | Bytes
_CELL = np.dtype([("position", "<i4"), ("n_sequences", "<u4"), ("sequence", "<i4")])


@dataclass(frozen=True, slots=True)
class StateLayer:
    """Keys or values of one layer. type: number of the GGML type; row_bytes: bytes of a slot."""

    type: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The layers of one cache.

    keys: one entry per layer. values: likewise; empty if the cache stores no values.
    item_bytes: bytes of one number if the values are transposed; else 0.
    """

    keys: tuple[StateLayer, ...]
    values: tuple[StateLayer, ...]
    item_bytes: int


class StateError(ValueError):
    """The bytes do not have the layout that the module describes."""


class _Cursor:
    """Reads numbers and arrays from bytes, in order. Raises StateError at the end of the bytes."""

    def __init__(self, data: Buffer) -> None:
        self.data = data.data if isinstance(data, np.ndarray) else memoryview(data)
        self.at = 0

    def read(self, code: str) -> Any:
        """Read one number; `code`: its code in the `struct` module."""
        try:
            (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        except struct.error as error:
            raise StateError("it ends early") from error
        self.at += struct.calcsize(f"<{code}")
        return value

    def read_array(self, *shape: int) -> Bytes:
        """Read the next bytes as a uint8 array of this shape."""
        n_bytes = int(np.prod(shape))
        if n_bytes > len(self.data) - self.at:
            raise StateError("it ends early")
        array = np.frombuffer(self.data, np.uint8, n_bytes, self.at).reshape(shape)
        self.at += n_bytes
        return array


# (shape, positions of the cells, keys per layer, values per layer)
Block = tuple[BlockShape, list[int], list[Bytes], list[Bytes]]


def read_state(data: Buffer, n_values: int | None = None) -> list[Block]:
    """Parse the KV of one sequence, as llama.cpp serializes it.

    Args:
        data: bytes that `Context.take_state` returned.
        n_values: number of layers that store values; None if all layers do, 0 if the cache has
            keys only.

    Returns: one tuple `(shape, positions, keys, values)` for each cache of the context.

        shape: row sizes and types of the cache's layers.
        positions: of the cells, ascending.
        keys, values: uint8 [cells, row bytes] for each layer, cells in the order of `positions`.
            They are views of `data` if its cells have this order and its values are not transposed.

    Raises:
        StateError: the bytes do not have the layout that the module describes.
    """
    cursor, blocks = _Cursor(data), []
    while cursor.at < len(data):
        blocks.append(_read_block(cursor, n_values))
    return blocks


def _read_block(cursor: _Cursor, n_values: int | None) -> Block:
    """Parse the block of one cache. n_values: see `read_state`."""
    if cursor.read("I") != 1:
        raise StateError("it has more than one stream")
    n = cursor.read("I")
    cells = cursor.read_array(n, _CELL.itemsize).view(_CELL)[:, 0]
    if not n or (cells["n_sequences"] != 1).any():
        raise StateError("its cells have more than a position")
    is_transposed, n_layers = cursor.read("I"), cursor.read("I")
    if is_transposed > 1 or not 0 < n_layers < 1 << 16:
        raise StateError("it has no layers")
    positions = cells["position"]
    order: Any = slice(None)  # a view, no copy
    if (positions[1:] < positions[:-1]).any():
        order = np.argsort(positions)
    key_shapes, keys, value_shapes, values, item = [], [], [], [], 0
    for _ in range(n_layers):
        shape = StateLayer(cursor.read("i"), cursor.read("Q"))
        key_shapes.append(shape)
        keys.append(cursor.read_array(n, shape.row_bytes)[order])
    for _ in range(n_layers if n_values is None else n_values):
        kind = cursor.read("i")
        if is_transposed:
            item, columns = cursor.read("I"), cursor.read("I")
            array = (
                cursor.read_array(columns, n, item).transpose(1, 0, 2).reshape(n, columns * item)
            )
        else:
            array = cursor.read_array(n, cursor.read("Q"))
        value_shapes.append(StateLayer(kind, array.shape[1]))
        values.append(array[order])
    shape_of_block = BlockShape(tuple(key_shapes), tuple(value_shapes), item)
    return shape_of_block, positions[order].tolist(), keys, values


def sorted_state(data: bytes) -> tuple[bytes, int]:
    """Sort the cells of a serialized context by position.

    Cells may belong to several sequences. Cost: copies the KV.

    Args:
        data: output of `llama_state_get_data`: the architecture's name, then a block per cache.

    Returns:
        The sorted data, and the number of cells in the largest cache.

    Raises:
        StateError: the layout is unknown.
    """
    cursor = _Cursor(data)
    n_name = cursor.read("I")
    cursor.at += n_name
    parts, max_cells = [data[: cursor.at]], 0
    while cursor.at < len(data):
        block, n = _sorted_block(cursor)
        parts, max_cells = parts + block, max(max_cells, n)
    return b"".join(parts), max_cells


def _sorted_block(cursor: _Cursor) -> tuple[list[bytes], int]:
    """Read one cache's block; return its bytes, sorted by position, and its number of cells."""
    if cursor.read("I") != 1:
        raise StateError("it has more than one stream")
    n = cursor.read("I")
    parts = [struct.pack("<II", 1, n)]
    if not n:
        return parts, 0
    cells, positions = [], []
    for _ in range(n):
        start = cursor.at
        positions.append(cursor.read("i"))
        n_sequences = cursor.read("I")
        cursor.at += 4 * n_sequences
        cells.append(bytes(cursor.data[start : cursor.at]))
    order = np.argsort(positions, kind="stable")
    is_transposed, n_layers = cursor.read("I"), cursor.read("I")
    if is_transposed or not 0 < n_layers < 1 << 16:
        raise StateError("its values are transposed, or it has no layers")
    parts += [cells[i] for i in order]
    parts.append(struct.pack("<II", 0, n_layers))
    for _ in range(2 * n_layers):  # keys, then values
        kind, row_bytes = cursor.read("i"), cursor.read("Q")
        parts.append(struct.pack("<iQ", kind, row_bytes))
        parts.append(cursor.read_array(n, row_bytes)[order].tobytes())
    return parts, n


def n_cells_of(data: Buffer) -> int:
    """Return the number of cells in a sequence's serialized KV (in its first cache)."""
    cursor = _Cursor(data)
    cursor.read("I")
    n_cells: int = cursor.read("I")
    return n_cells


def write_state(
    shapes: list[BlockShape], start: int, keys: list[list[Bytes]], values: list[list[Bytes]]
) -> Bytes:
    """Serialize the KV of a sequence for `Context.put_state`.

    Args:
        shapes: of each cache.
        start: position of the first cell; the others follow without gaps.
        keys: for each cache and layer, uint8 [cells, row bytes].
        values: likewise; an empty list for a cache without values.
    """
    parts: list[Buffer] = []
    for shape, some_keys, some_values in zip(shapes, keys, values, strict=True):
        n = len(some_keys[0])
        cells = np.zeros(n, _CELL)
        cells["position"], cells["n_sequences"] = np.arange(start, start + n), 1
        parts += [struct.pack("<II", 1, n), cells.tobytes()]
        parts.append(struct.pack("<II", bool(shape.item_bytes), len(shape.keys)))
        for layer, array in zip(shape.keys, some_keys, strict=True):
            parts += [struct.pack("<iQ", layer.type, layer.row_bytes), array]
        for layer, array in zip(shape.values, some_values, strict=True):
            if shape.item_bytes:
                columns = layer.row_bytes // shape.item_bytes
                parts.append(struct.pack("<iII", layer.type, shape.item_bytes, columns))
                array = array.reshape(n, columns, shape.item_bytes).transpose(1, 0, 2)
            else:
                parts.append(struct.pack("<iQ", layer.type, layer.row_bytes))
            parts.append(array)
    return _joined(parts)


def _joined(parts: list[Buffer]) -> Bytes:
    """Copy parts, which are bytes or arrays of bytes, into one array."""
    sizes = [part.size if isinstance(part, np.ndarray) else len(part) for part in parts]
    data, at = np.empty(sum(sizes), np.uint8), 0
    for part, size in zip(parts, sizes, strict=True):
        array = part if isinstance(part, np.ndarray) else np.frombuffer(part, np.uint8)
        data[at : at + size].reshape(array.shape)[...] = array
        at += size
    return data
