"""Read-only views of what an LM has cached of a context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..kv.cursor import Cursor, Place, climb, resolve

if TYPE_CHECKING:
    from ..lm import LM


@dataclass(frozen=True, slots=True)
class CacheNode:
    """A place in the tree as it was: tokens of its path, whether it has KV, its cached logits.

    logits: float32 [V], raw, a copy; None if no row is cached there.
    """

    n_tokens: int
    has_kv: bool
    logits: NDArray[np.float32] | None


def walk(lm: LM, place: Place) -> tuple[CacheNode, int, CacheNode | None, int]:
    """See `AsyncLM.walk_cache`."""
    ids = place.ids()

    def look() -> tuple[CacheNode, int, CacheNode | None, int]:
        cursor = lm.tree.match(ids, place.namespace)
        matched = resolve(cursor).depth
        base = resident_depth(cursor, len(ids) - 1)
        past = view(lm, Cursor(cursor.node, base)) if base else None
        return view(lm, cursor), matched, past, base

    return lm.driver.exclusive(look)


def view(lm: LM, cursor: Cursor) -> CacheNode:
    """Return a view of a place."""
    at = resolve(cursor)
    row = lm.scheduler.rows.get(at)
    return CacheNode(at.depth, at.node.fragment is not None, None if row is None else row.copy())


def resident_depth(cursor: Cursor, below: int) -> int:
    """Return how many tokens of the path, `below` at most, have KV without a gap."""
    depth = min(resolve(cursor).depth, below)
    for node in climb(cursor):
        if node.fragment is None:
            depth = min(depth, node.start)
    return depth
