"""Model text made harmless: what is not visible is written out, what is markup is escaped."""

from __future__ import annotations

import html
import unicodedata

# Joiners that emoji and some scripts need; they move nothing.
_JOINERS = "\u200c\u200d"


def visible(text: str, *, keep: str = "") -> str:
    r"""Return the text with controls, bidi marks and lone surrogates written out as \x1b.

    keep: characters that stay although they are controls (line ends, tabs).
    """
    if text.isprintable():
        return text
    return "".join(c if shows(c) or c in keep else _written(c) for c in text)


def one_line(text: str, *, mark: str = "⏎") -> str:
    """Return the text on one line, harmless, with a mark for each line end within."""
    return visible(text.strip("\n").replace("\n", mark))


def as_html(text: str) -> str:
    """Return the text for HTML, as content or in a quoted attribute; line ends and tabs stay."""
    return html.escape(visible(text, keep="\n\t"), quote=True)


def cut(text: str, length: int) -> str:
    """Return the first characters of the text, with a mark where some are left out."""
    return text if len(text) <= length else text[: max(length - 1, 0)].rstrip() + "…"


def shows(c: str) -> bool:
    """Whether a character only shows itself: nothing that a terminal or a page would obey."""
    return c.isprintable() or c in _JOINERS or unicodedata.category(c) == "Zs"


def _written(c: str) -> str:
    return ascii(c)[1:-1]
