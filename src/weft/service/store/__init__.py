"""Looms on disk: as files, and as rows of a database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.lazy import lazy_getattr

if TYPE_CHECKING:
    from .change import Change
    from .facts import LoomRow
    from .file import VERSION, load, save
    from .find import Hit
    from .kept import KeptLoom
    from .library import Drawn, Library
    from .log import Operation
    from .records import NodeRow

__all__ = [
    "VERSION",
    "Change",
    "Drawn",
    "Hit",
    "KeptLoom",
    "Library",
    "LoomRow",
    "NodeRow",
    "Operation",
    "load",
    "save",
]

__getattr__ = lazy_getattr(
    __name__,
    {
        "file": "VERSION load save",
        "facts": "LoomRow",
        "find": "Hit",
        "change": "Change",
        "kept": "KeptLoom",
        "library": "Drawn Library",
        "log": "Operation",
        "records": "NodeRow",
    },
)
