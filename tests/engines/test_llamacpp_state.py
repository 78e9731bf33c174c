"""llama.cpp's state of a sequence is parsed and written, without llama.cpp."""

from __future__ import annotations

import struct

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from weft.engines.llamacpp.state import (
    BlockShape,
    Bytes,
    StateError,
    StateLayer,
    read_state,
    write_state,
)

pytestmark = pytest.mark.llamacpp

N, KEY, VALUE, ITEM = 5, 8, 12, 4  # cells, and bytes of a key, a value and one number of that


def layers(seed: int, size: int) -> list[Bytes]:
    """Rows of two layers, in the order of positions."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (N, size), np.uint8) for _ in range(2)]


def shape_of(item_bytes: int) -> BlockShape:
    return BlockShape((StateLayer(1, KEY),) * 2, (StateLayer(1, VALUE),) * 2, item_bytes)


def library_state(order: list[int], keys: list[Bytes], values: list[Bytes], item: int) -> bytes:
    """Return the state that the library writes if cell i has position 7 + order[i]."""
    parts = [struct.pack("<II", 1, N)]
    parts += [struct.pack("<iIi", 7 + at, 1, 0) for at in order]
    parts.append(struct.pack("<II", bool(item), 2))
    for key in keys:
        parts += [struct.pack("<iQ", 1, KEY), key[order].tobytes()]
    for value in values:
        if item:
            parts.append(struct.pack("<iII", 1, item, VALUE // item))
            parts.append(value[order].reshape(N, -1, item).transpose(1, 0, 2).tobytes())
        else:
            parts += [struct.pack("<iQ", 1, VALUE), value[order].tobytes()]
    return b"".join(parts)


@pytest.mark.parametrize("item", [0, ITEM])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [3, 0, 4, 1, 2]])
def test_state_is_read_in_the_order_of_positions(order: list[int], item: int) -> None:
    keys, values = layers(0, KEY), layers(1, VALUE)
    ((shape, positions, read_keys, read_values),) = read_state(
        library_state(order, keys, values, item)
    )
    assert shape == shape_of(item)
    assert positions == [7, 8, 9, 10, 11]
    for array, want in zip([*read_keys, *read_values], [*keys, *values], strict=True):
        np.testing.assert_array_equal(array, want)


def test_keys_of_ordered_cells_are_views_of_the_state() -> None:
    state = library_state([0, 1, 2, 3, 4], layers(0, KEY), layers(1, VALUE), 0)
    data = np.frombuffer(state, np.uint8)
    ((_, _, keys, values),) = read_state(data)
    assert all(np.shares_memory(array, data) for array in [*keys, *values])


@pytest.mark.parametrize("item", [0, ITEM])
def test_written_state_equals_that_of_the_library_for_ordered_cells(item: int) -> None:
    keys, values = layers(0, KEY), layers(1, VALUE)
    written = write_state([shape_of(item)] * 2, 7, [keys] * 2, [values] * 2)
    assert bytes(written) == library_state([0, 1, 2, 3, 4], keys, values, item) * 2
    assert len(read_state(written)) == 2


@pytest.mark.parametrize("n_left", [3, 11, 40, 90])
def test_state_that_ends_early_raises(n_left: int) -> None:
    state = library_state([0, 1, 2, 3, 4], layers(0, KEY), layers(1, VALUE), 0)
    with pytest.raises(StateError, match="ends early"):
        read_state(state[:n_left])


def test_cells_of_two_streams_or_two_sequences_raise() -> None:
    state = library_state([0, 1, 2, 3, 4], layers(0, KEY), layers(1, VALUE), 0)
    with pytest.raises(StateError, match="more than one stream"):
        read_state(struct.pack("<I", 2) + state[4:])
    with pytest.raises(StateError, match="more than a position"):
        read_state(state[:12] + struct.pack("<I", 2) + state[16:])
