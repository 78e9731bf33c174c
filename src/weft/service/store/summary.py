"""What a list says of a loom; read without the database, as commands at a server do."""

from __future__ import annotations

from typing import NamedTuple


class LoomSummary(NamedTuple):
    """What a list says of a loom. model: what to load to grow it; changed: seconds since 1970."""

    id: str
    name: str
    model: str
    engine: str
    prompt: str
    created: str
    changed: float
    n_nodes: int
    rev: int
    is_removed: bool = False
