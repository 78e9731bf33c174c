"""Looms on disk: files, and rows of a database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .change import Change
    from .file import VERSION, load, save
    from .library import Library, TerminalState
    from .log import Operation
    from .records import NodeRecord
    from .search import Hit
    from .stored_loom import StoredLoom
    from .summary import LoomSummary

__all__ = [
    "VERSION",
    "Change",
    "TerminalState",
    "Hit",
    "StoredLoom",
    "Library",
    "LoomSummary",
    "NodeRecord",
    "Operation",
    "load",
    "save",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "file": "VERSION load save",
        "summary": "LoomSummary",
        "search": "Hit",
        "change": "Change",
        "stored_loom": "StoredLoom",
        "library": "TerminalState Library",
        "log": "Operation",
        "records": "NodeRecord",
    },
)
