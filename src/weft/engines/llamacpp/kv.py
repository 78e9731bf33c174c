"""KV fragments in llama.cpp sequences. A fork changes the sequences of cells, copies no KV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelMismatch, Unsupported
from ..base import Fragment, Fragments, Usage
from ..gguf import TYPES
from .leases import PathFragment
from .pool import ContextPool, Need, shard_of
from .state import BlockShape, Bytes, StateError, StateLayer, read_state, write_state
from .transfer import move, put_state, take_state

_NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def kv_dtype(type_k: str, type_v: str) -> str:
    """Return the name of the KV's type, such as "float16".

    If the types of keys and values differ, both names are returned: "float16/q8_0".
    """
    names = [_NAMES.get(each, each) for each in (type_k, type_v)]
    return "/".join(dict.fromkeys(names))


class SequenceFragments(Fragments):
    """Fragments whose KV is in the cells of llama.cpp contexts.

    pool: the contexts. blocks: layout of llama.cpp's serialized KV, set by
    `detect_layout`; empty if the layout is unknown, and KV cannot be exported then.
    """

    def __init__(self, pool: ContextPool, *, n_kv_heads: int, window: int, dtype: str) -> None:
        """Create an empty set of fragments.

        Args:
            pool: the contexts that hold the cells.
            n_kv_heads: number of KV heads, for exported arrays.
            window: length of the sliding window in tokens; 0 for none.
            dtype: the KV's type as `kv_dtype` returns it; exported KV carries it.
        """
        self.pool = pool
        self.blocks: list[BlockShape] = []
        self._n_kv_heads = n_kv_heads
        self._window = window
        self._dtype = dtype

    @property
    def layers(self) -> list[tuple[StateLayer, StateLayer | None]]:
        """Types and sizes of the keys and values of each layer, over all of llama.cpp's caches.

        The values are None for a layer that stores none.
        """
        return [
            (keys, block.values[i] if i < len(block.values) else None)
            for block in self.blocks
            for i, keys in enumerate(block.keys)
        ]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot (one token) over all layers; 0 if the layout is unknown."""
        return sum(k.row_bytes + (v.row_bytes if v else 0) for k, v in self.layers)

    def detect_layout(self, data: Bytes) -> None:
        """Set `blocks` from the serialized KV of one cell.

        `blocks` stays empty if the format is unknown.
        """
        for n_values in (None, 0):
            try:
                self.blocks = [block[0] for block in read_state(data, n_values)]
                return
            except StateError:
                continue

    def new(self, parent: Fragment | None) -> PathFragment:
        """Return a fragment without slots. It gets a sequence when it is first written to."""
        return PathFragment(None if parent is None else _as_path_fragment(parent))

    def split(self, fragment: Fragment, at: int) -> PathFragment:
        """Cut before slot `at`; return the new upper part. The cache does not change."""
        if not 0 < at < fragment.length:
            raise ValueError(f"cannot split a fragment of {fragment.length} slots at {at}")
        own = _as_path_fragment(fragment)
        return shard_of(own).split(own, at)

    def join(self, upper: Fragment, lower: Fragment) -> None:
        """Merge `upper` into its child `lower`. The cache does not change."""
        above = _as_path_fragment(upper)
        shard_of(above).join(above, _as_path_fragment(lower))

    def attach(self, fragment: Fragment, parent: Fragment | None) -> None:
        """Move a fragment, with all below it, to another parent; see `Leases.attach`.

        Raises: KVFull if the parent is in another context that cannot hold the KV.
        """
        own = _as_path_fragment(fragment)
        above = None if parent is None else _as_path_fragment(parent)
        if own.strand is None:
            own.parent = above
        elif above is None or above.strand is None or shard_of(above) is shard_of(own):
            shard_of(own).attach(own, above)
        else:
            move(self.pool, own, above, shard_of(above))

    def trim(self, fragment: Fragment, length: int) -> None:
        """Remove the slots from `length` on."""
        if not 0 <= length <= fragment.length:
            raise ValueError(f"cannot trim a fragment of {fragment.length} slots to {length}")
        own = _as_path_fragment(fragment)
        if own.strand is not None:
            shard = shard_of(own)
            n = own.length - length
            shard.trim_leaf(own, length)
            shard.slots -= n
        own.length = length

    def settle(self, fragment: Fragment) -> None:
        """Do nothing: a fragment has no spare room to release."""

    def free(self, fragment: Fragment) -> None:
        """Remove the fragment's slots from its sequences."""
        own = _as_path_fragment(fragment)
        if own.strand is not None:
            shard = shard_of(own)
            shard.drop(own)
            shard.slots -= own.length
        own.length = 0

    def usage(self) -> Usage:
        """Return the cells in use and the bytes of the full cache."""
        return Usage(self.pool.slots, self.pool.slots * self.slot_bytes)

    # Out and in -----------------------------------------------------------------------------------

    def export(self, fragment: Fragment) -> dict[str, NDArray[Any]]:
        """Return a fragment's KV; see `Fragments.export`.

        Quantised KV is exported as bytes: uint8 [1, length, bytes of a slot].

        Raises:
            Unsupported: llama.cpp serializes this model's KV in an unknown format, or
                incompletely.
            KVFull: no lease is free.
        """
        own = _as_path_fragment(fragment)
        self._check_exportable()
        keys: list[list[Bytes]] = [[] for _ in self.layers]
        values: list[list[Bytes]] = [[] for _ in self.layers]
        for start, end in self._pieces(own.start, own.end):
            state = take_state(own, start, end)
            self._collect_state(state, (start, end), keys, values)
        data: dict[str, NDArray[Any]] = {}
        for index, (of_keys, of_values) in enumerate(self.layers):
            data[f"k.{index}"] = self._exported_array(keys[index], of_keys)
            data[f"v.{index}"] = self._exported_array(values[index], of_values)
        data["dtype"] = np.array(self._dtype)
        return data

    def load(self, data: dict[str, NDArray[Any]], parent: Fragment | None) -> PathFragment:
        """Write exported KV into the cache; see `Fragments.load`.

        Raises:
            ModelMismatch: the arrays are not of this model.
            KVFull: there are not enough free cells.
        """
        self._check_exportable()
        length, keys, values = self._check_exported(data)
        above = None if parent is None else _as_path_fragment(parent)
        fragment = PathFragment(above)
        if length == 0:
            return fragment
        start = fragment.start
        shard = self.pool.choose() if above is None else shard_of(above)
        self.pool.reserve({shard: Need(shard.slots + length, shard.slots + length)})
        shard.insert(fragment, above, start, growing=False)
        try:
            for first, last in self._pieces(start, start + length):
                here = slice(first - start, last - start)
                state = self._serialize_slots(keys, values, here, first)
                put_state(fragment, state, first, last)
        except BaseException:
            shard.drop(fragment)
            raise
        fragment.length = length
        shard.slots += length
        return fragment

    def _check_exportable(self) -> None:
        """Raise Unsupported if the layout of this model's serialized KV is unknown."""
        if not self.blocks:
            raise Unsupported(
                "the KV of this model cannot be exported (offload, save, export): llama.cpp keeps"
                " it in a form that Weft does not know"
            )

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield parts [start, end) of a range of positions, none longer than the sliding window.

        llama.cpp serializes only the cells in the window of a sequence's last position.
        """
        while start < end:
            last = end if not self._window else min(end, (start // self._window + 1) * self._window)
            yield start, last
            start = last

    def _collect_state(
        self,
        state: Bytes,
        span: tuple[int, int],
        keys: list[list[Bytes]],
        values: list[list[Bytes]],
    ) -> None:
        """Parse serialized KV and append its arrays to `keys` and `values`, one list per layer.

        span: positions that it must contain. Raises: Unsupported if it has others.
        """
        index = 0
        blocks = read_state(state, None if self.blocks[0].values else 0)
        for shape, positions, some_keys, some_values in blocks:
            if positions != list(range(*span)) or shape not in self.blocks:
                raise Unsupported("llama.cpp did not give all of this KV; it cannot be exported")
            for i in range(len(shape.keys)):
                keys[index].append(some_keys[i])
                if shape.values:
                    values[index].append(some_values[i])
                index += 1

    def _exported_array(self, pieces: list[Bytes], shape: StateLayer | None) -> NDArray[Any]:
        """Join one layer's pieces into an array [heads, slots, D] for `export`.

        shape: of the layer's keys or values; None if it stores no values.
        """
        if shape is None:
            n = sum(map(len, pieces))
            return np.empty((self._n_kv_heads, n, 0), np.uint8)
        heads, dtype = self._export_format(shape)
        if len(pieces) == 1:
            rows = pieces[0]
        else:
            rows = np.concatenate([np.empty((0, shape.row_bytes), np.uint8), *pieces])
        split = np.ascontiguousarray(rows).view(dtype).reshape(len(rows), heads, -1)
        return np.ascontiguousarray(split.transpose(1, 0, 2))

    def _export_format(self, shape: StateLayer) -> tuple[int, Any]:
        """Return (heads, dtype) of a slot's exported keys or values.

        Types that NumPy lacks, and sizes that the KV heads do not divide, export as one head.
        """
        name = TYPES.get(shape.type, ("", 0, 0))[0]
        dtype = np.dtype(_NUMPY.get(name, np.uint8))
        n = shape.row_bytes // dtype.itemsize
        divides = name in _NUMPY and n % self._n_kv_heads == 0
        return (self._n_kv_heads if divides else 1), dtype

    def _check_exported(
        self, data: dict[str, NDArray[Any]]
    ) -> tuple[int, list[Bytes], list[Bytes]]:
        """Check exported KV against this model; return its length, keys and values.

        Keys and values are one uint8 array [length, row bytes] per layer.
        Raises: ModelMismatch.
        """
        mark = str(data.get("dtype", ""))
        if mark != self._dtype:
            raise ModelMismatch(f"the exported KV is {mark or 'of no dtype'}, not {self._dtype}")
        rows_by_kind: dict[str, list[Bytes]] = {"k": [], "v": []}
        lengths = set()
        wanted = {f"{kind}.{i}" for i in range(len(self.layers)) for kind in "kv"}
        if wanted != {name for name in data if name.startswith(("k.", "v."))}:
            raise ModelMismatch("the exported KV has other layers than this model")
        for index, shapes in enumerate(self.layers):
            for kind, shape in zip("kv", shapes, strict=True):
                array = np.asarray(data[f"{kind}.{index}"])
                heads, dtype = (
                    (array.shape[0], array.dtype) if shape is None else self._export_format(shape)
                )
                row = 0 if shape is None else shape.row_bytes
                fits = array.ndim == 3 and array.shape[0] == heads and array.dtype == dtype
                if not fits or heads * array.shape[2] * dtype.itemsize != row:
                    raise ModelMismatch(
                        f"{kind}.{index} of the exported KV is {array.dtype} {list(array.shape)},"
                        f" which is not this model's: {dtype} of {heads} heads, {row} bytes a slot"
                    )
                lengths.add(array.shape[1])
                rows = np.ascontiguousarray(array.transpose(1, 0, 2)).reshape(array.shape[1], -1)
                rows_by_kind[kind].append(rows.view(np.uint8).reshape(len(rows), row))
        if len(lengths) != 1:
            raise ModelMismatch("the exported KV has layers of different lengths; it is broken")
        return lengths.pop(), rows_by_kind["k"], rows_by_kind["v"]

    def _serialize_slots(
        self, keys: list[Bytes], values: list[Bytes], here: slice, start: int
    ) -> Bytes:
        """Serialize some slots in llama.cpp's format.

        Args:
            keys: of each layer, uint8 [slots, row bytes].
            values: likewise.
            here: the slots to serialize.
            start: position of the first of them.
        """
        of_keys, of_values, index = [], [], 0
        for block in self.blocks:
            last = index + len(block.keys)
            of_keys.append([each[here] for each in keys[index:last]])
            of_values.append([each[here] for each in values[index:last]] if block.values else [])
            index = last
        return write_state(self.blocks, start, of_keys, of_values)


def _as_path_fragment(fragment: Fragment) -> PathFragment:
    """Return the fragment as one of this engine."""
    assert isinstance(fragment, PathFragment)
    return fragment
