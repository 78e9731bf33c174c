"""One path's KV as a file: safetensors, whose metadata says which model and tokens it is of.

metadata: format "weft.kv" · version · model · fingerprint · token_ids (JSON) · namespace (JSON)
          · marks (JSON: texts the engine notes beside its arrays) · crc32 (of all arrays)
tensors:  "k.{layer}", "v.{layer}" [n_kv_heads, n_tokens, head_dim]
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import FormatError
from .files import FAULTS, parse_json

FORMAT = "weft.kv"
VERSION = 1


class SavedPath(NamedTuple):
    """What a file holds. arrays: as `PathKV.export` gives them."""

    fingerprint: str
    model: str
    token_ids: list[int]
    namespace: str | None
    arrays: Mapping[str, Any]

    def check_size(self, n_layers: int, slot_bytes: int) -> None:
        """Refuse arrays that are not the KV of these tokens in a model of this shape."""
        kv = {name: a for name, a in self.arrays.items() if name.startswith(("k.", "v."))}
        wanted = {f"{kind}.{layer}" for kind in "kv" for layer in range(n_layers)}
        n = len(self.token_ids)
        fits = kv.keys() == wanted and all(a.ndim == 3 and a.shape[1] == n for a in kv.values())
        if not fits or sum(a.nbytes for a in kv.values()) != n * slot_bytes:
            raise FormatError(f"the arrays are not the KV of {n} tokens; the file is broken")


def pack(saved: SavedPath) -> bytes:
    """Return the file."""
    from safetensors.numpy import save

    arrays = {n: a for n, a in saved.arrays.items() if n.startswith(("k.", "v."))}
    marks = {name: str(value) for name, value in saved.arrays.items() if name not in arrays}
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "model": saved.model,
        "fingerprint": saved.fingerprint,
        "token_ids": json.dumps([int(token) for token in saved.token_ids]),
        "namespace": json.dumps(saved.namespace),
        "marks": json.dumps(marks),
        "crc32": str(_checksum(arrays)),
    }
    return bytes(save(arrays, metadata))


def unpack(data: bytes) -> SavedPath:
    """Read the file. Raises: FormatError when it is none, newer, torn or changed."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load

    metadata = _metadata(data)
    try:
        arrays: dict[str, Any] = load(data)
        token_ids = parse_json(metadata["token_ids"])
        namespace = parse_json(metadata["namespace"])
        marks = parse_json(metadata["marks"])
        checksum = int(metadata["crc32"])
        fingerprint, model = str(metadata["fingerprint"]), str(metadata["model"])
    except (SafetensorError, *FAULTS) as error:
        raise FormatError(f"this saved KV is broken: {error}; save it again") from error
    if checksum != _checksum(arrays):
        raise FormatError("this saved KV is broken: its checksum differs; save it again")
    is_ids = isinstance(token_ids, list) and all(type(token) is int for token in token_ids)
    is_marks = isinstance(marks, dict) and all(isinstance(each, str) for each in marks.values())
    if not (is_ids and is_marks and isinstance(namespace, str | None)):
        raise FormatError("this saved KV is broken: its metadata is not as written; save it again")
    arrays |= {name: np.array(value) for name, value in marks.items()}
    return SavedPath(fingerprint, model, token_ids, namespace, arrays)


def _metadata(data: bytes) -> dict[str, str]:
    """Return the metadata of a file of ours; safetensors reads that from files only."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        metadata = parse_json(data[8 : 8 + length])["__metadata__"]
        is_ours, version = metadata["format"] == FORMAT, int(metadata["version"])
    except (struct.error, *FAULTS) as error:
        raise FormatError("this is no saved KV, or it is torn; save it again") from error
    if not is_ours or version < 1:
        raise FormatError(f'this is no saved KV: its format is not "{FORMAT}"')
    if version > VERSION:
        raise FormatError(
            f"the KV has format version {version}; this Weft reads up to {VERSION}. Update Weft",
            hint="Update Weft.",
        )
    return dict(metadata)


def _checksum(arrays: Mapping[str, Any]) -> int:
    import numpy as np

    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(np.ascontiguousarray(arrays[name]).data, total)
    return total
