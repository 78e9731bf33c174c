"""Summaries of looms. Importable without the database packages, for clients of a server."""

from __future__ import annotations

from typing import NamedTuple


class LoomSummary(NamedTuple):
    """A loom's name, model and size, as lists show them. Reading it does not open the tree."""

    id: str
    name: str
    model: str  # source of the model that grows it
    engine: str  # "" means automatic
    prompt: str
    created: str  # ISO 8601
    changed: float  # seconds since 1970
    n_nodes: int
    rev: int
    is_removed: bool = False
    title: str = ""  # as typed; "" means none
