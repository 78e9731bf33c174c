"""Pictures of reasoning trees: text, HTML, Graphviz, Mermaid, and what notebooks show."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["draw", "show", "to_dot", "to_html", "to_mermaid"]

if TYPE_CHECKING:
    from .graph import to_dot, to_mermaid
    from .html import to_html
    from .text import draw, show

_HOME = {
    "draw": "text",
    "show": "text",
    "to_dot": "graph",
    "to_html": "html",
    "to_mermaid": "graph",
}


def __getattr__(name: str) -> Any:
    # Loaded when first used: who wants `escape` alone needs no loom.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
