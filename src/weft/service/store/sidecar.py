"""Sidecar files `NAME.kv.safetensors` with the KV of a saved loom.

A block is the KV of one node's own tokens. Its key is a hash of all tokens from the root to the end
of the node. A node that was changed since therefore has another key, and its KV is computed again.
An invalid file, or one of another model, only causes a notice.

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
_BATCH_SIZE = 64  # nodes whose KV is computed in one batch
_log = logging.getLogger(__name__)


class KVLoadResult(NamedTuple):
    """The result of loading a sidecar.

    n_tokens: tokens whose KV was loaded. notice: the problem; "" if all KV was loaded.
    """

    n_tokens: int
    notice: str = ""


class SavedSlots(NamedTuple):
    """The range of KV slots in a file that belongs to one node."""

    start: int
    length: int


def path_for(path: str | os.PathLike[str]) -> Path:
    """Return the path of the sidecar for a loom's file."""
    name = Path(path).name
    stem = name.removesuffix(_LOOM) if name.endswith(_LOOM) else Path(name).stem
    return Path(path).with_name(stem + SUFFIX)


def save(node: Heddle, path: str | os.PathLike[str], *, below: bool = True) -> int:
    """Write the KV of a node's path to a file.

    below: also write the KV of all nodes below it. Missing KV is computed, at least for the last
        token of each leaf.
    Returns the number of tokens whose KV is in the file.
    Raises: Unsupported for engines that cannot export KV; StoreError if the file cannot be written.
    Cost: up to three copies of the KV in host memory.
    """
    lm = lm_of(node)
    _compute(lm, [each for each, _, _ in _nodes_with_keys(node, below)])
    parts: list[tuple[Mapping[str, Any], int]] = []
    blocks: list[tuple[str, int]] = []
    for block_node, key, end in _nodes_with_keys(node, below):
        length = len(block_node.tokens)
        if length:
            parts.append((lm.kv.export(block_node, start=end - length), length))
            blocks.append((key, length))
    if not parts:
        raise ConfigError("there is no KV to save: the path has no tokens")
    adapter = lm.adapters.name_of(node.place.namespace)
    ids = [0] * sum(length for _, length in parts)
    info = lm.info
    saved = SavedPath(lm.fingerprint(adapter), info.model, ids, adapter, join_exported(parts))
    if not saved.fits(info.n_layers, info.kv_bytes_per_token):
        raise Unsupported(
            f"the {info.name} engine exports KV in a form that cannot be saved to a file"
        )
    atomic_files.write(path, pack(saved._replace(token_ids=[]), FORMAT, blocks=json.dumps(blocks)))
    return len(ids)


def _compute(lm: LM, nodes: list[Heddle]) -> None:
    """Compute the missing KV of nodes, a batch of nodes at a time."""
    for first in range(0, len(nodes), _BATCH_SIZE):
        places = [node.place for node in nodes[first : first + _BATCH_SIZE]]
        tickets = lm.submit([Extend(place) for place in places if place.depth])
        lm.drive(tickets)
        for ticket in tickets:
            ticket.result()


def load(loom: Loom, path: str | os.PathLike[str]) -> KVLoadResult:
    """Load the KV of a sidecar into the token tree, up to the KV budget. Nothing is computed.

    Problems with the file are returned as the notice, not raised. Missing KV is computed when it is
    needed. Cost: two copies of the file in host memory.

    path: the sidecar itself; see `path_for`.
    """
    lm = lm_of(loom)
    try:
        lm.kv.size([])  # raises for engines that do not expose their KV
        saved, blocks = _read(atomic_files.read(path))
        if saved.namespace != loom.adapter:
            raise FormatError("it belongs to another LoRA adapter than the loom's")
        check_compatible(lm, saved)
        full = saved._replace(token_ids=[0] * sum(block.length for block in blocks.values()))
        if not full.fits(lm.info.n_layers, lm.info.kv_bytes_per_token):
            raise FormatError("its arrays do not have the shape of its KV")
        return _fill(lm, loom, saved.arrays, blocks)
    except WeftError as error:
        return KVLoadResult(
            0,
            f"{atomic_files.display_path(path)} was not used, so its KV is computed again: {error}",
        )


def try_load(loom: Loom, path: str | os.PathLike[str]) -> str:
    """Load the sidecar of a loom's file, if it exists.

    Returns the notice of `load`, which is also logged; "" without a sidecar or a problem.
    """
    sidecar = path_for(path)
    if not sidecar.exists():
        return ""
    result = load(loom, sidecar)
    if result.notice:
        _log.warning("%s", result.notice)
    return result.notice


def _read(data: bytes) -> tuple[SavedPath, dict[str, SavedSlots]]:
    """Parse and validate a sidecar; return its KV and the slots of each block by key."""
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
    """Load the KV of nodes whose key is in `blocks` into the token tree."""
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
            is_loaded = lm.kv.try_fill(node, own, start=end - block.length)
        except ContextOverflow:  # the path is longer than this model was loaded for
            is_loaded = False
        n_tokens += block.length if is_loaded else 0
        n_missed += not is_loaded
    if not n_missed:
        return KVLoadResult(n_tokens)
    nodes = f"{n_missed} node{'s' if n_missed > 1 else ''}"
    return KVLoadResult(
        n_tokens, f"the KV of {nodes} is not in the file or has no room: computed again"
    )


def _nodes_with_keys(node: Heddle, below: bool) -> Iterator[tuple[Heddle, str, int]]:
    """Yield nodes, parents first, each with the key and the number of tokens of its path.

    below: also yield the nodes below `node`.
    """
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
    """Add a node's tokens to a hash; return their number."""
    tokens = node.tokens
    state.update(b"".join(token.to_bytes(8, "little") for token in tokens))
    return len(tokens)
