"""Import and export: looms in the formats of other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..._core.lazy import lazy_getattr

__all__ = [
    "EXPORTERS",
    "IMPORTERS",
    "ImportReport",
    "Knot",
    "ImportLimits",
    "Note",
    "Scope",
    "Sketch",
    "export",
    "linked",
    "messages_of",
    "read",
    "recognise",
    "write",
]

if TYPE_CHECKING:
    from .exporters import EXPORTERS, export, write
    from .import_tree import ImportLimits, Knot, Note, Sketch, linked
    from .importers import IMPORTERS, ImportReport, read, recognise
    from .scope import Scope
    from .turns import messages_of

__getattr__ = lazy_getattr(
    __name__,
    {
        "exporters": "EXPORTERS export write",
        "importers": "IMPORTERS ImportReport read recognise",
        "scope": "Scope",
        "import_tree": "Knot ImportLimits Note Sketch linked",
        "turns": "messages_of",
    },
)
