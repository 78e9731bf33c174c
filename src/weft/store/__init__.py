"""Looms on disk: as files, and as rows of a database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..doors import lazily

if TYPE_CHECKING:
    from .file import VERSION, load, save
    from .find import Hit
    from .kept import Change, KeptLoom
    from .library import Drawn, Library, LoomRow
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

__getattr__ = lazily(
    __name__,
    {
        "file": "VERSION load save",
        "find": "Hit",
        "kept": "Change KeptLoom",
        "library": "Drawn Library LoomRow",
        "log": "Operation",
        "records": "NodeRow",
    },
)
