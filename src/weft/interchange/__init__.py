"""Looms that leave for other programs' formats, and come in from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..doors import lazily

__all__ = [
    "EXPORTERS",
    "Scope",
    "export",
    "write",
]

if TYPE_CHECKING:
    from .exporters import EXPORTERS, export, write
    from .scope import Scope

__getattr__ = lazily(
    __name__,
    {
        "exporters": "EXPORTERS export write",
        "scope": "Scope",
    },
)
