"""Pictures of reasoning trees."""

from .text import as_html, draw, show

__all__ = ["as_html", "draw", "show"]
