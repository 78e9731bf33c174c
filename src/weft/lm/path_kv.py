"""`lm.kv`: the KV of paths, on the device, on the host and as files.

A file is safetensors. Its metadata identifies the model and the tokens:

- metadata: format "weft.kv", version, model, fingerprint, token_ids (JSON), namespace (JSON), marks
  (JSON: texts that the engine adds), crc32 (of all arrays)
- tensors: "k.{layer}" and "v.{layer}", [n_kv_heads, n_tokens, head_dim]
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

from .._core import atomic_files
from .._core.atomic_files import PARSE_ERRORS, parse_json
from .._core.kv.pins import PinHold
from .._core.kv.place import Cursor, Node, Place
from .._core.kv.tree import is_evictable
from .._core.sched.work import Extend
from .._core.validation import check_int
from ..errors import ConfigError, FormatError, KVFull, ModelMismatch, StaleHandle, Unsupported

if TYPE_CHECKING:
    from .lm import LM

T = TypeVar("T")


@runtime_checkable
class HasPlace(Protocol):
    """An object with a place in the token tree, such as a `Heddle`."""

    @property
    def place(self) -> Place:
        """The place after the object's last token."""
        ...


@runtime_checkable
class HasTip(Protocol):
    """An object with a place that is expensive to read, such as a `Branch`.

    `tip` returns the place without that cost, and without changing anything.
    """

    def tip(self) -> Place:
        """Return the place after the object's last token, for reading only."""
        ...


Path = Sequence[int] | Place | HasPlace


class KvSizes(NamedTuple):
    """Numbers of a path's tokens: with KV on the device, and with KV on the host only."""

    device: int
    host: int


class Pin:
    """A path whose KV is not evicted until `unpin`; create it with `lm.kv.pin`.

    A path may have several pins; its KV is evictable after the last of them. It is a context
    manager; garbage collection also unpins it. It pins tokens: edits of the node or branch do not
    move it.

    Attributes:
        place: the end of the path.
    """

    def __init__(self, lm: LM, place: Place) -> None:
        """Internal: users call `PathKV.pin`."""
        self._lm = lm
        self.place = place
        self._hold: PinHold | None = None

    @property
    def is_pinned(self) -> bool:
        """False after `unpin`, after the LM is closed, and after the path's adapter is removed."""
        hold = self._hold
        return hold is not None and not self._lm.closed and hold in self._lm.tree.pins

    def try_take(self) -> bool:
        """Pin the path if there is room for its KV; return True on success. Internal.

        The caller must hold the driver's lock, so that no step runs.
        """
        tree, name = self._lm.tree, self.place.namespace
        if self._lm.closed:
            raise StaleHandle("this LM is closed; load it again")
        if name is not None and name in self._lm.scheduler.dropped_namespaces:
            raise StaleHandle(self._lm.scheduler.dropped_namespaces[name])
        self._hold = tree.pin_for(self.place, self)
        if self._hold is None:  # sessions that nothing runs in may hold the room
            self._lm.scheduler.sequences.close_idle()
            self._hold = tree.pin_for(self.place, self)
        return self._hold is not None

    def unpin(self) -> None:
        """Allow eviction of the path's KV. Further calls do nothing.

        The KV stays until its room is needed.
        """
        hold, self._hold = self._hold, None
        if hold is not None and not self._lm.closed:
            with suppress(StaleHandle):  # another thread closed the LM
                self._lm.driver.exclusive(lambda: self._lm.tree.unpin_for(hold))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unpin()

    def __repr__(self) -> str:
        state = "pinned" if self.is_pinned else "not pinned any more"
        return f"<Pin of {self.place.depth} tokens, {state}>"


class PathKV:
    """Control over the KV of single paths: size, pin, offload, copy, trim, export, save, load.

    Get it as `lm.kv`. A path is a sequence of token ids, a `Place`, or a handle with a place, such
    as a `Heddle`. KV is a cache of tokens: no method changes a path's tokens, and missing KV is
    computed when it is used. All methods raise `Unsupported` on engines with hidden KV.
    """

    def __init__(self, lm: LM) -> None:
        self._lm = lm

    def size(self, path: Path) -> int:
        """Return how many tokens of the path have KV on the device. Cost: O(nodes)."""
        return self.sizes(path).device

    def sizes(self, path: Path) -> KvSizes:
        """Return how many tokens of the path have KV on the device, and on the host only.

        KV on the host is copied back when it is used. KV of a step in flight does not count.

        Cost: O(nodes).
        """
        place = self._place(path.tip() if isinstance(path, HasTip) else path)
        with self._lm.scheduler.lock:
            return self._sizes(place)

    def pin(self, path: Path) -> Pin:
        """Compute missing KV of the path, and keep it on the device until `Pin.unpin`.

        Pinned KV counts towards the KV budget and `n_seq_max`. `clear_cache` and weight changes
        clear pinned KV, but not its reserved room; it is pinned again when it is computed again. If
        running work occupies the room, the call queues like any prompt.

        Raises:
            KVFull: the KV cannot fit in addition to other pins.
            ConfigError: the path is empty.
            StaleHandle: the LM is closed, or the adapter was removed.
        """
        place = self._place(path)
        while (pin := self.try_pin(place)) is None:
            self._compute(place)  # in the queue, for its turn; it says if there will never be room
        try:
            self._compute(place)
        except BaseException:
            pin.unpin()
            raise
        return pin

    async def apin(self, path: Path) -> Pin:
        """The async form of `pin`, for a running event loop."""
        place = self._place(path)
        while (pin := await asyncio.to_thread(self.try_pin, place)) is None:
            await self._acompute(place)
        try:
            await self._acompute(place)
        except BaseException:
            del pin  # unpins it without waiting
            raise
        return pin

    def try_pin(self, path: Path) -> Pin | None:
        """Pin a path without computing KV; return None if its room is pinned or in use.

        Room for missing KV is reserved, which may evict other KV. The KV is pinned once it is
        computed.

        Raises: as `pin`, except KVFull.
        """
        pin = Pin(self._lm, self._place(path).fork())
        if not pin.place.depth:
            raise ConfigError("the path is empty: it has no KV to pin")
        return pin if self._lm.driver.exclusive(pin.try_take) else None

    def offload(self, path: Path, *, start: int = 0) -> int:
        """Move the path's KV after its first `start` tokens to host memory.

        The KV is copied back when it is used. KV that other paths share, that is pinned, or that
        running work uses, stays on the device. The host budget is `offload=` of `weft.load`.

        Returns: how many of these tokens have KV on the host only.

        Raises:
            Unsupported: the LM was loaded without `offload`.
            KVFull: the KV exceeds the host budget.
            ConfigError: `start` is not on the path.

        Cost: a copy of the KV.
        """
        place = self._place(path)
        start = check_int("start", start, 0, place.depth)
        if not self._lm.tree.host.capacity:
            raise Unsupported(
                "this model keeps no KV on the host: it was loaded without offload",
                hint="load it with offload=BYTES, or let go of the KV: it is computed again",
            )
        return self._lm.driver.exclusive(lambda: self._offload(place, start))

    def copy(self, path: Path) -> Place:
        """Return a new `Place` for the same path; no KV is copied. Cost: O(1)."""
        return self._place(path).fork()

    def trim(self, path: Path, length: int) -> Place:
        """Drop the path's KV after its first `length` tokens; return the place there.

        KV that other paths share, that is pinned, or that running work uses, stays. Tokens and
        handles stay valid.

        Raises: ConfigError for a length that is not on the path.
        """
        place = self._place(path)
        length = check_int("length", length, 0, place.depth)
        return self._lm.driver.exclusive(lambda: self._trim(place, length))

    def to_bytes(self, path: Path) -> bytes:
        """Return a path and its KV as one safetensors file; compute missing KV.

        Raises:
            ConfigError: the path is empty.
            Unsupported: the engine's exported KV cannot be loaded again.

        Cost: two copies of the path's KV on the host.
        """
        place = self._place(path)
        arrays = self.export(place)
        name = self._lm.adapters.name_of(place.namespace)
        mark = self._lm.fingerprint(name)
        info = self._lm.info
        saved = SavedPath(mark, info.model, place.ids(), name, arrays)
        if not saved.fits(info.n_layers, info.kv_bytes_per_token):
            raise Unsupported(
                f"the {info.name} engine exports KV in a form of its own, which no file holds;"
                " Fragments.export describes what a file needs"
            )
        return pack(saved)

    def save(self, path: Path, file: str | os.PathLike[str]) -> None:
        """Write a path and its KV to a file, atomically; `load` reads it. Computes missing KV.

        Raises: StoreError if the file cannot be written.
        """
        atomic_files.write(file, self.to_bytes(path))

    def load(self, source: bytes | str | os.PathLike[str]) -> Place:
        """Insert saved KV into the tree and return the place after its tokens.

        Args:
            source: the bytes of `to_bytes`, or a file of `save`.

        Raises:
            FormatError: this is no such file, or it is broken.
            ModelMismatch: another model, adapter or dtype computed it.
            KVFull: the KV does not fit, even without other KV.
            ConfigError: the LM has no adapter with the name of the saved path's adapter.
        """
        self._check_addressable()
        if isinstance(source, bytes):
            return self._load(unpack(source))
        data = atomic_files.read(source)
        with atomic_files.with_filename(source):
            return self._load(unpack(data))

    def _load(self, saved: SavedPath) -> Place:
        """Validate a saved path and insert its KV; return the place after its tokens."""
        info = self._lm.info
        check_compatible(self._lm, saved)
        if not saved.fits(info.n_layers, info.kv_bytes_per_token):
            n = len(saved.token_ids)
            raise FormatError(f"the arrays are not the KV of {n} tokens; the file is broken")
        if not all(0 <= token < info.n_vocab for token in saved.token_ids):
            raise FormatError("it holds token ids that its model does not have; save it again")
        place = self._lm.place(saved.token_ids, namespace=saved.namespace)
        return self._insert_or_compute(place, saved.arrays)

    def export(self, path: Path, *, start: int = 0) -> dict[str, Any]:
        """Return the KV of a full path on the host; compute missing KV.

        Args:
            path: the path, at least one token.
            start: number of tokens at the start of the path to leave out.

        Returns: arrays "k.{layer}" and "v.{layer}", [n_kv_heads, n_tokens, head_dim], in the
        engine's dtype. bfloat16 is stored as uint16 bits; "dtype" then says so.

        Raises: ConfigError for the empty path.

        Cost: a copy of the returned KV.
        """
        place = self._place(path)
        start = check_int("start", start, 0, max(place.depth - 1, 0))
        return self._call_when_resident(place, lambda cursor: self._export(cursor, start))

    def insert(
        self, ids: Sequence[int], arrays: Mapping[str, Any], *, adapter: str | None = None
    ) -> Place:
        """Insert the KV of token ids into the token tree; return the place after the ids.

        The KV must come from `export` of the same model.

        If running work occupies the room, the call queues like a prompt, and the KV is computed.

        Args:
            ids: token ids of the full path.
            arrays: as `export` returns them, for all of `ids`.
            adapter: the name of the LoRA adapter that computed the KV; None: the base model.

        Raises: KVFull if the KV does not fit, even without other KV; ConfigError if the lengths of
        ids and arrays differ.
        """
        return self._insert_or_compute(self._lm.place(ids, namespace=adapter), arrays)

    def try_fill(self, path: Path, arrays: Mapping[str, Any], *, start: int) -> bool:
        """Insert the KV of a path's tokens from `start` on, where the path lacks it.

        Computes and evicts nothing. Returns True if the path then has all of its KV, and False if
        KV before `start` is missing or there is no room.

        Args:
            path: the path.
            arrays: as `export` returns them, for the tokens from `start` on.
            start: number of tokens before the KV.

        Raises: ConfigError if the lengths differ.
        """
        place = self._place(path)
        slice_exported(arrays, 0, place.depth - start)
        return self._lm.driver.exclusive(lambda: self._try_fill(place, arrays, start))

    def engine_cache(self, path: Path) -> Any:
        """Return a copy of the path's KV as the cache object that the engine's library uses.

        Pass it to the loaded model itself; for Transformers it is a DynamicCache. Missing KV is
        computed.

        Raises: Unsupported if the library has no such object.
        """
        make = getattr(self._lm.engine, "prefix_cache", None)
        if make is None:
            raise Unsupported(
                f"the {self._lm.info.name} engine's library has no cache object of its own"
            )
        place = self._place(path)
        return self._call_when_resident(place, lambda cursor: make(self._lm.tree.path(cursor)))

    def _place(self, path: Path) -> Place:
        """Return the place of a path given in any allowed form; raise ConfigError for others."""
        self._check_addressable()
        if isinstance(path, HasPlace):
            path = path.place
        if not isinstance(path, Place):
            if isinstance(path, str | bytes) or not isinstance(path, Sequence):
                raise ConfigError(
                    f"a {type(path).__name__} is no path; allowed are token ids, a Place, or a"
                    " handle such as a Heddle"
                )
            return self._lm.place(path)
        if path.holds is not self._lm.tree.holds:
            raise ConfigError("this path belongs to another LM; give its token ids instead")
        return path

    def _sizes(self, place: Place) -> KvSizes:
        """Count the path's tokens with KV on the device, and on the host only."""
        cursor, device = self._lm.tree.find(place), self._lm.scheduler.sequences.n_cached(place)
        depth, host = cursor.depth, 0
        for node in self._lm.tree.up(cursor):
            host += max(depth - max(node.start, device), 0) if node.host is not None else 0
            depth = node.start
        return KvSizes(device, host)

    def _nodes_after(self, place: Place, start: int) -> list[Node]:
        """Return the tree nodes of the path's tokens after the first `start`, last node first."""
        tree = self._lm.tree
        self._lm.scheduler.sequences.close_idle()  # theirs goes into the tree
        tree.cut(tree.place(place.at(start)))
        return [n for n in tree.up(tree.cut(tree.place(place))) if n.start >= start]

    def _trim(self, place: Place, length: int) -> Place:
        """Drop unused KV after the first `length` tokens; return the place there."""
        tree, start = self._lm.tree, place.at(length)
        for node in self._nodes_after(place, length):
            tree.host.free(node)
            if is_evictable(node):
                tree.drop(node)
        return start

    def _offload(self, place: Place, start: int) -> int:
        """Move unused KV after the first `start` tokens to the host.

        Returns: how many tokens then have KV on the host only.
        """
        tree = self._lm.tree
        nodes = self._nodes_after(place, start)
        n = sum(len(node.tokens) for node in nodes)
        if n > tree.host.capacity:
            raise KVFull(
                f"the KV of {n} tokens does not fit on the host, which has room for"
                f" {tree.host.capacity} of them",
                needed=n,
                capacity=tree.host.capacity,
                hint="load the model with more for offload, or move less of the path"
                " (docs/troubleshooting.md#out-of-memory)",
            )
        for node in nodes:
            if is_evictable(node):
                tree.drop(node, offload=True)
        return sum(len(node.tokens) for node in nodes if node.host is not None)

    def _compute(self, place: Place) -> None:
        """Compute the path's missing KV."""
        self._lm.drive(tickets := self._lm.submit([Extend(place)]))
        tickets[0].result()

    async def _acompute(self, place: Place) -> None:
        """Async version of `_compute`."""
        tickets = await self._lm.asubmit([Extend(place)])
        await self._lm.adrive(tickets)
        tickets[0].result()

    def _insert_or_compute(self, place: Place, arrays: Mapping[str, Any]) -> Place:
        """Insert the path's KV; if running work occupies its room, queue its computation."""
        slice_exported(arrays, 0, place.depth)
        if not self._lm.driver.exclusive(lambda: self._insert(place, arrays)):
            self._compute(place)
        return place

    def _call_when_resident(self, place: Place, function: Callable[[Cursor], T]) -> T:
        """Compute the path's missing KV, then return `function(cursor)`, called between two steps.

        The path's KV is on the device during the call.
        """
        self._check_addressable()
        while True:
            self._compute(place)
            result = self._lm.driver.exclusive(lambda: self._call_if_resident(place, function))
            if result is not None:
                return result[0]

    def _call_if_resident(self, place: Place, function: Callable[[Cursor], T]) -> tuple[T] | None:
        """Return (function(cursor),) if the path's last token has KV on the device, else None."""
        cursor = self._lm.tree.place(place)
        return (function(cursor),) if cursor.node.resident else None

    def _export(self, cursor: Cursor, start: int) -> dict[str, Any]:
        """Copy the KV of a path's tokens from `start` on to the host; see `export`."""
        fragments = self._lm.tree.fragments
        assert fragments is not None
        parts, end = [], 0
        for span in self._lm.tree.path(cursor):
            end += span.length
            if end > start:
                data, length = fragments.export(span.fragment), span.length
                first = max(start - (end - length), 0)
                parts.append((_cut_exported(data, first, length), length - first))
        return join_exported(parts)

    def _try_fill(self, place: Place, arrays: Mapping[str, Any], start: int) -> bool:
        """Insert the missing KV of a path from exported arrays; see `try_fill`."""
        tree = self._lm.tree
        fragments, budget = tree.fragments, tree.budget
        assert fragments is not None
        cursor = tree.pin(tree.cut(tree.place(place)))
        try:
            missing = [node for node in tree.up(cursor) if not node.resident]
            if not missing:
                return True
            first, parent_node = missing[-1].start, missing[-1].parent
            if first < start or budget.is_exceeded:
                return False
            parent = parent_node.fragment if parent_node is not None else None
            data = _cut_exported(arrays, first - start, place.depth - start)
            tree.fill(cursor, first, fragments.load(data, parent))
            return True
        finally:
            tree.unpin(cursor)

    def _insert(self, place: Place, arrays: Mapping[str, Any]) -> bool:
        """Insert the parts of exported KV that the path lacks; compute nothing.

        arrays: the KV of the full path, as `export` returns it.

        Returns: False if running work occupies the room that the KV needs; nothing is inserted
        then.
        """
        self._check_addressable()
        tree = self._lm.tree
        fragments, budget = tree.fragments, tree.budget
        assert fragments is not None
        if budget.capacity is not None and place.depth > budget.capacity:
            raise KVFull(
                f"{place.depth} slots do not fit in the KV budget of {budget.capacity}",
                needed=place.depth,
                capacity=budget.capacity,
            )
        cursor = tree.pin(tree.cut(tree.place(place)))
        try:
            if budget.unevictable > (budget.capacity or budget.unevictable) or not tree.make_room():
                return False
            missing = [node for node in tree.up(cursor) if not node.resident]
            if missing:
                start = missing[-1].start
                parent_node = missing[-1].parent
                data = slice_exported(arrays, start, cursor.depth)
                parent = parent_node.fragment if parent_node is not None else None
                tree.fill(cursor, start, fragments.load(data, parent))
            return True
        finally:
            tree.unpin(cursor)

    def _check_addressable(self) -> None:
        """Raise Unsupported for an engine that hides its KV."""
        if self._lm.tree.fragments is None:
            raise Unsupported(f"the {self._lm.info.name} engine keeps its KV to itself")


def join_exported(parts: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any]:
    """Concatenate exported KV of consecutive parts of one path.

    parts: (arrays, length) in path order; the first `length` tokens of the arrays are used.
    """
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


def _cut_exported(arrays: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """Return the exported KV of the tokens from `start` to before `end`."""
    return {
        name: array[:, start:end] if name.startswith(("k.", "v.")) else array
        for name, array in arrays.items()
    }


def slice_exported(arrays: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """Like `_cut_exported`, for the exported KV of a full path.

    Raises: ConfigError unless the path has `end` tokens.
    """
    for name, array in arrays.items():
        if name.startswith(("k.", "v.")):
            if array.shape[1] != end:
                raise ConfigError(
                    f"{name} has {array.shape[1]} slots, but the path has {end} tokens"
                )
    return _cut_exported(arrays, start, end)


def check_compatible(lm: LM, saved: SavedPath) -> None:
    """Raise ModelMismatch if another model, adapter or dtype computed the KV of a file."""
    info, base = lm.info, saved.fingerprint
    if saved.namespace is not None:
        base = base.rpartition("+")[0]
    if base != lm.fingerprint():
        raise ModelMismatch(
            f"this KV was saved by {saved.model}, and {info.model} has other weights; load it"
            " with the model that computed it, or prefill the tokens again"
        )
    if saved.fingerprint != lm.fingerprint(saved.namespace):
        raise ModelMismatch(
            f"this KV was computed with another LoRA adapter named {saved.namespace!r}; add that"
            " one, or prefill the tokens again"
        )
    if saved.dtype not in ("", info.dtype):
        raise ModelMismatch(
            f"this KV is {saved.dtype}, and the KV of {info.model} is {info.dtype} here; load"
            " the model with the dtype that it was saved in, or prefill the tokens again"
        )


FORMAT = "weft.kv"
VERSION = 1


class SavedPath(NamedTuple):
    """The content of a KV file: the tokens of one path, their KV, and the model's identity."""

    fingerprint: str  # of the weights of the model and of the adapter
    model: str  # name of the model, for messages
    token_ids: list[int]  # tokens of the path
    namespace: str | None  # name of the LoRA adapter; None: the base model
    arrays: Mapping[str, Any]  # as `PathKV.export` returns them

    @property
    def dtype(self) -> str:
        """The dtype as the engine names it; "" if unknown."""
        return str(self.arrays.get("dtype", ""))

    def fits(self, n_layers: int, slot_bytes: int) -> bool:
        """Return True if the arrays have the shapes of these tokens' KV in a model.

        Args:
            n_layers: number of the model's layers.
            slot_bytes: bytes of the KV of one token in all layers.
        """
        kv = {name: a for name, a in self.arrays.items() if name.startswith(("k.", "v."))}
        wanted = {f"{kind}.{layer}" for kind in "kv" for layer in range(n_layers)}
        n = len(self.token_ids)
        shaped = kv.keys() == wanted and all(a.ndim == 3 and a.shape[1] == n for a in kv.values())
        return shaped and sum(a.nbytes for a in kv.values()) == n * slot_bytes


def pack(saved: SavedPath, format: str = FORMAT, **more: str) -> bytes:
    """Serialize a path's KV as the bytes of a safetensors file, with the model's identity.

    Args:
        saved: the path and its KV.
        format: name of the file's format. Files with several paths use another one.
        more: further metadata.
    """
    from safetensors.numpy import save

    arrays = {n: a for n, a in saved.arrays.items() if n.startswith(("k.", "v."))}
    marks = {name: str(value) for name, value in saved.arrays.items() if name not in arrays}
    metadata = {
        "format": format,
        "version": str(VERSION),
        "model": saved.model,
        "fingerprint": saved.fingerprint,
        "token_ids": json.dumps([int(token) for token in saved.token_ids]),
        "namespace": json.dumps(saved.namespace),
        "marks": json.dumps(marks),
        "crc32": str(_checksum(arrays)),
        **more,
    }
    return bytes(save(arrays, metadata))


def unpack(data: bytes) -> SavedPath:
    """Parse a KV file of one path, as `pack` writes it.

    Raises: FormatError if the data is no such file, is broken, or has a newer version.
    """
    return unpack_all(data, FORMAT)[0]


def unpack_all(data: bytes, format: str) -> tuple[SavedPath, dict[str, str]]:
    """Parse a KV file that `pack` wrote; return its content and its metadata.

    format: the format name that the file must have.

    Raises: FormatError if the data is no such file, is broken, or has a newer version.
    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load

    metadata = _metadata(data, format)
    try:
        arrays: dict[str, Any] = load(data)
        token_ids = parse_json(metadata["token_ids"])
        namespace = parse_json(metadata["namespace"])
        marks = parse_json(metadata["marks"])
        checksum = int(metadata["crc32"])
        fingerprint, model = str(metadata["fingerprint"]), str(metadata["model"])
    except (SafetensorError, *PARSE_ERRORS) as error:
        raise FormatError(f"this saved KV is broken: {error}; save it again") from error
    if checksum != _checksum(arrays):
        raise FormatError("this saved KV is broken: its checksum differs; save it again")
    is_ids = isinstance(token_ids, list) and all(type(token) is int for token in token_ids)
    is_marks = isinstance(marks, dict) and all(isinstance(each, str) for each in marks.values())
    if not (is_ids and is_marks and isinstance(namespace, str | None)):
        raise FormatError("this saved KV is broken: its metadata is not as written; save it again")
    arrays |= {name: np.array(value) for name, value in marks.items()}
    return SavedPath(fingerprint, model, token_ids, namespace, arrays), metadata


def _metadata(data: bytes, format: str) -> dict[str, str]:
    """Return the metadata of a KV file from its bytes.

    safetensors can read metadata only from files on disk, so this function parses the header.

    Raises: FormatError if the bytes are no file of this format.
    """
    try:
        (length,) = struct.unpack_from("<Q", data)
        metadata = parse_json(data[8 : 8 + length])["__metadata__"]
        is_ours, version = metadata["format"] == format, int(metadata["version"])
    except (struct.error, *PARSE_ERRORS) as error:
        raise FormatError("this is no saved KV, or it is torn; save it again") from error
    if not is_ours or version < 1:
        raise FormatError(f'this is no saved KV: its format is not "{format}"')
    if version > VERSION:
        raise FormatError(
            f"the KV has format version {version}; this Weft reads up to {VERSION}. Update Weft",
            hint="Update Weft.",
        )
    return dict(metadata)


def _checksum(arrays: Mapping[str, Any]) -> int:
    """Return the CRC-32 of all arrays, in order of their names."""
    import numpy as np

    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(np.ascontiguousarray(arrays[name]).data, total)
    return total
