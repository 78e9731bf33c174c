"""`lm.kv`: the KV of whole paths, on the device and on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ConfigError, KVFull, Unsupported
from .kv.cursor import Cursor, Place
from .sched.work import Extend

if TYPE_CHECKING:
    from .lm import LM

T = TypeVar("T")


class PathKV:
    """What may be done with the KV of a path by hand; get it as `lm.kv`.

    Needs an engine whose KV is addressable: `Unsupported` on hidden engines.
    """

    def __init__(self, lm: LM) -> None:
        self._lm = lm

    def export(self, place: Place) -> dict[str, Any]:
        """Return the KV of a whole path on the host, computing what is missing.

        Arrays "k.{layer}" and "v.{layer}", [n_kv_heads, place.depth, head_dim] in the engine's
        dtype (bfloat16 as its uint16 bits, then "dtype" says so). Raises: ConfigError for the
        empty path.
        Cost: a copy of the path's KV.
        """
        return self._with_resident(place, self._export)

    def insert(self, ids: Sequence[int], arrays: Mapping[str, Any]) -> Place:
        """Put KV from `export` of the same model into the tree as that of `ids`; hold the place.

        Raises: KVFull when it does not fit; ConfigError when the lengths differ.
        """
        place = self._lm.place(ids)
        self._lm.driver.exclusive(lambda: self._insert(place, arrays))
        return place

    def engine_cache(self, place: Place) -> Any:
        """Return the engine library's own cache object for a path, which its own model accepts.

        Raises: Unsupported where the engine's library has none.
        """
        make = getattr(self._lm.engine, "prefix_cache", None)
        if make is None:
            raise Unsupported(
                f"the {self._lm.info.name} engine's library has no cache object of its own"
            )
        return self._with_resident(place, lambda cursor: make(self._lm.tree.path(cursor)))

    def _with_resident(self, place: Place, use: Callable[[Cursor], T]) -> T:
        """Call `use` between steps, with the path's KV on the device."""
        self._refuse_hidden()
        lm = self._lm
        while True:
            lm.drive(lm.submit([Extend(place)]))
            found = lm.driver.exclusive(lambda: self._try_use(place, use))
            if found is not None:
                return found[0]

    def _try_use(self, place: Place, use: Callable[[Cursor], T]) -> tuple[T] | None:
        cursor = self._lm.tree.place(place)
        return (use(cursor),) if cursor.node.resident else None

    def _export(self, cursor: Cursor) -> dict[str, Any]:
        fragments = self._lm.tree.fragments
        assert fragments is not None
        spans = self._lm.tree.path(cursor)
        return join_exported([(fragments.export(span.fragment), span.length) for span in spans])

    def _insert(self, place: Place, arrays: Mapping[str, Any]) -> None:
        self._refuse_hidden()
        tree = self._lm.tree
        fragments, room = tree.fragments, tree.room
        assert fragments is not None
        cursor = tree.pin(tree.cut(tree.place(place)))
        try:
            if room.must > (room.capacity or room.must) or not tree.make_room():
                raise KVFull(
                    f"{place.depth} slots do not fit in the KV budget of {room.capacity}",
                    needed=place.depth,
                    capacity=room.capacity or 0,
                )
            missing = [node for node in tree.up(cursor) if not node.resident]
            if missing:
                start = missing[-1].start
                above = missing[-1].parent
                data = slice_exported(arrays, start, cursor.depth)
                parent = above.fragment if above is not None else None
                tree.fill(cursor, start, fragments.load(data, parent))
        finally:
            tree.unpin(cursor)

    def _refuse_hidden(self) -> None:
        if self._lm.tree.fragments is None:
            raise Unsupported(f"the {self._lm.info.name} engine keeps its KV to itself")


def join_exported(parts: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any]:
    """Put exported fragments of one path together, the first `length` slots of each."""
    import numpy as np

    if not parts:
        raise ConfigError("the path is empty: it has no KV")
    first = parts[0][0]
    return {
        name: np.concatenate([part[name][:, :length] for part, length in parts], axis=1)
        if name.startswith(("k.", "v."))
        else first[name]
        for name in first
    }


def slice_exported(arrays: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """Return slots [start, end) of a path's exported KV; refuses arrays of another length."""
    out = dict(arrays)
    for name, array in arrays.items():
        if name.startswith(("k.", "v.")):
            if array.shape[1] != end:
                raise ConfigError(
                    f"{name} has {array.shape[1]} slots, but the path has {end} tokens"
                )
            out[name] = array[:, start:end]
    return out
