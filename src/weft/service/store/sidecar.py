"""KV beside a saved loom: `NAME.kv.safetensors`, found again by model and by tokens.

A block is the KV of one node's own tokens. Its key is a hash of all tokens from the root to its
end, so what was changed, moved or clipped since is not found and is computed again; nothing that is
found can be wrong. A file that is broken, or of another model, is a notice and no more.

metadata: as of a path's file (`pathkv`), with the format's own name; blocks (JSON: [key, length],
          in the order of their slots)
tensors:  "k.{layer}", "v.{layer}" [n_kv_heads, all slots, head_dim]
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._core import atomic_files
from ..._core.sched.work import Extend
from ...errors import ConfigError, ContextOverflow, FormatError, Unsupported, WeftError
from ...lm.path_kv import SavedPath, check_compatible, join_exported, pack, unpack_all
from ...loom import Heddle, Loom
from ...loom.node import lm_of

if TYPE_CHECKING:
    from ...lm.lm import LM

FORMAT = "weft.kv.blocks"
SUFFIX = ".kv.safetensors"
_LOOM = ".loom.json"
_AT_ONCE = 64  # nodes whose KV is computed together
_log = logging.getLogger(__name__)


class KVLoadResult(NamedTuple):
    """What came of a sidecar. n_tokens: whose KV is there now. notice: "" where all came."""

    n_tokens: int
    notice: str = ""


class SavedSlots(NamedTuple):
    """Where a node's KV lies in a file."""

    start: int
    length: int


def path_for(path: str | os.PathLike[str]) -> Path:
    """Return the name of the sidecar of a loom's file."""
    name = Path(path).name
    stem = name.removesuffix(_LOOM) if name.endswith(_LOOM) else Path(name).stem
    return Path(path).with_name(stem + SUFFIX)


def save(node: Heddle, path: str | os.PathLike[str], *, below: bool = True) -> int:
    """Write the KV of the path to a node, and of all below it, to a file; return its tokens.

    What is not there is computed, at least each leaf's last token.
    Raises: Unsupported on engines whose KV no file holds; StoreError when it cannot be written.
    Cost: three copies of the KV on the host, one at a time of most of it.
    """
    lm = lm_of(node)
    _compute(lm, [each for each, _, _ in _nodes_with_keys(node, below)])
    parts: list[tuple[Mapping[str, Any], int]] = []
    blocks: list[tuple[str, int]] = []
    for each, key, end in _nodes_with_keys(node, below):
        length = len(each.tokens)
        if length:
            parts.append((lm.kv.export(each, start=end - length), length))
            blocks.append((key, length))
    if not parts:
        raise ConfigError("there is no KV to save: the path has no tokens")
    adapter = lm.adapters.name_of(node.place.namespace)
    ids = [0] * sum(length for _, length in parts)
    info = lm.info
    saved = SavedPath(lm.fingerprint(adapter), info.model, ids, adapter, join_exported(parts))
    if not saved.fits(info.n_layers, info.kv_bytes_per_token):
        raise Unsupported(
            f"the {info.name} engine exports KV in a form of its own, which no file holds"
        )
    atomic_files.write(path, pack(saved._replace(token_ids=[]), FORMAT, blocks=json.dumps(blocks)))
    return len(ids)


def _compute(lm: LM, nodes: list[Heddle]) -> None:
    """Run what has no KV, many nodes in a step."""
    for first in range(0, len(nodes), _AT_ONCE):
        places = [node.place for node in nodes[first : first + _AT_ONCE]]
        tickets = lm.submit([Extend(place) for place in places if place.depth])
        lm.drive(tickets)
        for ticket in tickets:
            ticket.result()


def load(loom: Loom, path: str | os.PathLike[str]) -> KVLoadResult:
    """Put what a sidecar has of a loom's KV into the token tree; nothing is computed.

    Never raises for the file: what is wrong with it is the notice, and the rest is computed when
    it is used. It stops where the KV budget ends. Cost: two copies of the file on the host.
    """
    lm = lm_of(loom)
    try:
        lm.kv.size([])  # refuses engines that keep their KV to themselves
        saved, blocks = _read(atomic_files.read(path))
        if saved.namespace != loom.adapter:
            raise FormatError("it was made with another LoRA adapter than the loom's")
        check_compatible(lm, saved)
        whole = saved._replace(token_ids=[0] * sum(block.length for block in blocks.values()))
        if not whole.fits(lm.info.n_layers, lm.info.kv_bytes_per_token):
            raise FormatError("its arrays are not the KV that it says")
        return _fill(lm, loom, saved.arrays, blocks)
    except WeftError as error:
        return KVLoadResult(
            0,
            f"{atomic_files.display_path(path)} was not used, so its KV is computed again: {error}",
        )


def try_load(loom: Loom, path: str | os.PathLike[str]) -> str:
    """As `warm`, where there is a sidecar; return the notice, which is logged."""
    sidecar = path_for(path)
    if not sidecar.exists():
        return ""
    found = load(loom, sidecar)
    if found.notice:
        _log.warning("%s", found.notice)
    return found.notice


def _read(data: bytes) -> tuple[SavedPath, dict[str, SavedSlots]]:
    saved, metadata = unpack_all(data, FORMAT)
    blocks: dict[str, SavedSlots] = {}
    start = 0
    try:
        for key, length in atomic_files.parse_json(metadata["blocks"]):
            blocks[str(key)] = SavedSlots(start, atomic_files.parse_int(length, "a block", 1))
            start += length
    except (WeftError, *atomic_files.PARSE_ERRORS) as error:
        raise FormatError(f"this saved KV is broken: {error}; save it again") from error
    return saved, blocks


def _fill(
    lm: LM, loom: Loom, arrays: Mapping[str, Any], blocks: Mapping[str, SavedSlots]
) -> KVLoadResult:
    n_tokens, n_missed = 0, 0
    for node, key, end in _nodes_with_keys(loom, below=True):
        block = blocks.get(key)
        if block is None or block.length > end:
            n_missed += bool(node.tokens)
            continue
        own = {
            name: array[:, block.start : block.start + block.length]
            if name.startswith(("k.", "v."))
            else array
            for name, array in arrays.items()
        }
        try:
            is_there = lm.kv.try_fill(node, own, start=end - block.length)
        except ContextOverflow:  # the path is longer than this model was loaded for
            is_there = False
        n_tokens += block.length if is_there else 0
        n_missed += not is_there
    if not n_missed:
        return KVLoadResult(n_tokens)
    nodes = f"{n_missed} node{'s' if n_missed > 1 else ''}"
    return KVLoadResult(
        n_tokens, f"the KV of {nodes} is not in the file or has no room: computed again"
    )


def _nodes_with_keys(node: Heddle, below: bool) -> Iterator[tuple[Heddle, str, int]]:
    """Yield nodes, parents first, each with the key of its path and the path's length."""
    state, end = hashlib.blake2b(digest_size=16), 0
    path = node.path
    for above in path[:-1]:
        end += _hash_tokens(state, above)
        yield above, state.hexdigest(), end
    stack = [(node, state, end)]
    while stack:
        each, state, end = stack.pop()
        state = state.copy()
        end += _hash_tokens(state, each)
        yield each, state.hexdigest(), end
        if below:
            stack.extend((child, state, end) for child in reversed(each.children))


def _hash_tokens(state: Any, node: Heddle) -> int:
    tokens = node.tokens
    state.update(b"".join(token.to_bytes(8, "little") for token in tokens))
    return len(tokens)
