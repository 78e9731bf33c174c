"""Drawings of loom trees: text, HTML, Graphviz, Mermaid, and notebook output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._core.lazy import lazy_getattr

__all__ = ["draw", "show", "to_dot", "to_html", "to_mermaid"]

if TYPE_CHECKING:
    from .graph import to_dot, to_mermaid
    from .html import to_html
    from .text import draw, show

__getattr__ = lazy_getattr(
    __name__, {"graph": "to_dot to_mermaid", "html": "to_html", "text": "draw show"}
)
