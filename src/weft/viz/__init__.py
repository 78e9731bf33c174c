"""Pictures of reasoning trees: text, HTML, Graphviz, Mermaid, and what notebooks show."""

from .dot import to_dot
from .html import to_html
from .mermaid import to_mermaid
from .text import draw, show

__all__ = ["draw", "show", "to_dot", "to_html", "to_mermaid"]
