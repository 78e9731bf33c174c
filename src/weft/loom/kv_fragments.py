"""Copies of KV as arrays: fragments of nodes, and the layers of full paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .node import lm_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .._core.kv.place import Place
    from ..lm.lm import LM
    from .node import HeddleState


ADAPTER = "adapter"  # key in the marks: name of the LoRA adapter that computed the KV


class KVFrag(tuple[Any, Any]):
    """Keys and values of consecutive tokens in one layer: arrays [1, n_kv_heads, T, head_dim].

    The arrays are NumPy's, or MLX's in the model's dtype for the mlx engine. A fragment is valid
    only at its own position and after its own prefix, because rotary positions are part of the
    keys.

    Attributes:
        token_ids: the tokens that the arrays belong to.
        start: the position on the path where they begin.
        marks: what the engine stores in addition to the arrays, by name.
    """

    token_ids: tuple[int, ...]
    start: int
    marks: Mapping[str, Any]

    def __new__(
        cls,
        keys: Any,
        values: Any,
        token_ids: Sequence[int] = (),
        start: int = 0,
        marks: Mapping[str, Any] | None = None,
    ) -> KVFrag:
        """Create a fragment from the arrays of one layer.

        Args:
            keys, values: arrays [1, n_kv_heads, T, head_dim].
            token_ids: the T tokens.
            start: position of the first token on its path.
            marks: what the engine stores in addition to the arrays, by name. None: nothing.
        """
        frag = super().__new__(cls, (keys, values))
        frag.token_ids, frag.start, frag.marks = tuple(token_ids), start, marks or {}
        return frag

    @property
    def keys(self) -> Any:
        """The array [1, n_kv_heads, T, head_dim]."""
        return self[0]

    @property
    def values(self) -> Any:
        """The array [1, n_kv_heads, T, head_dim]."""
        return self[1]

    def __repr__(self) -> str:
        return f"KVFrag(keys {self[0].shape}, values {self[1].shape}, start {self.start})"


class ExportedKV(NamedTuple):
    """The KV of a full path, copied from the engine.

    layers: for each layer (keys, values), arrays [n_kv_heads, T, head_dim].
    marks: what the engine stores in addition to the arrays, by name.
    """

    layers: list[tuple[NDArray[Any], NDArray[Any]]]
    marks: dict[str, Any]


def export(lm: LM, place: Place) -> ExportedKV:
    """Return a copy of the KV of the path to `place`; missing KV is computed.

    bfloat16 is returned as float32, because NumPy has no bfloat16.
    """
    arrays = lm.kv.export(place)
    names: list[tuple[str, str]] = []
    while f"k.{len(names)}" in arrays:
        names.append((f"k.{len(names)}", f"v.{len(names)}"))
    own = {name for pair in names for name in pair}
    marks = {name: value for name, value in arrays.items() if name not in own}
    if place.namespace is not None:
        marks[ADAPTER] = lm.adapters.name_of(place.namespace)
    layers = [
        (_to_float32(arrays[key], marks, key), _to_float32(arrays[value], marks, value))
        for key, value in names
    ]
    return ExportedKV(layers, marks)


def load(
    lm: LM,
    ids: Sequence[int],
    layers: Sequence[tuple[NDArray[Any], NDArray[Any]]],
    marks: Mapping[str, Any],
) -> Place:
    """Insert the KV of a full path into the token tree; return the place after its tokens.

    Args:
        lm: the LM.
        ids: token ids of the path.
        layers, marks: as `export` returns them.
    """
    arrays = dict(marks)
    for i, (keys, values) in enumerate(layers):
        arrays[f"k.{i}"] = _to_bfloat16(keys, marks, f"k.{i}")
        arrays[f"v.{i}"] = _to_bfloat16(values, marks, f"v.{i}")
    return lm.kv.insert(ids, arrays, adapter=arrays.pop(ADAPTER, None))


def fragments(node: HeddleState) -> list[KVFrag]:
    """Return a copy of the KV of the node's own tokens, one fragment per layer.

    Cost: a copy of the full path's KV.
    """
    lm, place, tokens = lm_of(node), node.place, node.tokens
    if not place.depth:
        return []
    start = place.depth - len(tokens)
    exported, to_array = export(lm, place), lm.engine.library_array
    return [
        KVFrag(
            to_array(keys[None, :, start:]),
            to_array(values[None, :, start:]),
            tokens,
            start,
            exported.marks,
        )
        for keys, values in exported.layers
    ]


def _is_bfloat16(marks: Mapping[str, Any], name: str) -> bool:
    """Return True if the engine's array of this name is bfloat16, stored as uint16 bits."""
    of_keys, _, of_values = str(marks.get(f"{name}.dtype", marks.get("dtype"))).partition("/")
    return (of_values if of_values and name.startswith("v") else of_keys) == "bfloat16"


def _to_float32(array: NDArray[Any], marks: Mapping[str, Any], name: str) -> NDArray[Any]:
    """Return a bfloat16 array (uint16 bits) as float32; other arrays unchanged."""
    if not _is_bfloat16(marks, name):
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(array: NDArray[Any], marks: Mapping[str, Any], name: str) -> NDArray[Any]:
    """Return a float32 array as bfloat16 (uint16 bits) if the engine's array is; else unchanged."""
    if not _is_bfloat16(marks, name):
        return array
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    # Round to nearest even; values that came from bfloat16 are unchanged.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
