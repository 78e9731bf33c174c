"""Writing to terminals, pipes and files: detect what they can show, and escape the rest."""

from __future__ import annotations

import html
import io
import json
import shutil
import sys
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

# Width of output that is not a terminal.
WIDTH = 100
_ASCII = str.maketrans(
    {"·": "|", "…": "...", "█": "#", "⏎": "/", "×": "x", "✓": "+", "├": "|", "└": "`", "│": "|"}
    | {"─": "-", "–": "-", "—": "-", "’": "'", "‘": "'", "“": '"', "”": '"'}
)
Part = str | tuple[str, str]


@dataclass(frozen=True, slots=True)
class TerminalWriter:
    """A writer for an output stream that escapes control characters in text.

    Model output may contain escape sequences that would change the terminal. Only `write` to a file
    or pipe leaves them as they are.

    console: Rich's console for the stream.
    is_live: the stream is a terminal that can redraw lines.
    is_ascii: the stream's encoding lacks box-drawing characters.
    is_terminal: the stream is a terminal, not a file or pipe.
    """

    console: Console
    is_live: bool
    is_ascii: bool
    is_terminal: bool = True

    @classmethod
    def for_stream(cls, file: TextIO) -> TerminalWriter:
        """Create a writer for a stream such as `sys.stdout`; detect its width, colors and encoding.

        NO_COLOR and TERM=dumb are respected.
        """
        is_terminal = file.isatty()
        width = shutil.get_terminal_size((WIDTH, 24)).columns if is_terminal else WIDTH
        console = Console(
            file=file, width=width, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        can_redraw = is_terminal and not console.is_dumb_terminal
        is_ascii = not can_write(file.encoding, "├└│─⏎…×█")
        return cls(console, can_redraw, is_ascii, is_terminal)

    @property
    def width(self) -> int:
        """The terminal's width in columns."""
        return self.console.width

    @property
    def has_colours(self) -> bool:
        """True if the stream shows colors."""
        return self.console.color_system is not None and not self.console.no_color

    def text(self, *parts: Part) -> Text:
        """Build one line of styled text (Rich's `Text`) from parts, without writing it.

        Control characters and characters that the stream cannot encode are escaped.

        parts: strings, or (string, style) with a style of Rich, such as "dim".
        """
        line = Text(no_wrap=True)
        for part in parts:
            content, style = (part, "") if isinstance(part, str) else part
            line.append(self.escape(content), style)
        return line

    def line(self, *parts: Part) -> None:
        """Write one line.

        parts: strings, or (string, style), as for `text`.
        """
        self.console.print(self.text(*parts))

    def write(self, text: str) -> None:
        """Write a text without adding a line end, and flush.

        Control characters are escaped on a terminal. A file or pipe gets the exact text.
        """
        self.console.file.write(self.escape(text) if self.is_terminal else text)
        self.console.file.flush()

    def facts(self, facts: str, style: str = "dim") -> None:
        """Write a line of facts that are separated by " · "; a long line is wrapped at these dots.

        style: a style of Rich.
        """
        line = ""
        for fact in facts.split(" · "):
            if line and cell_len(f"{line} · {fact}") > self.width:
                self.line((line, style))
                line = ""
            line = f"{line} · {fact}" if line else fact
        self.line((line, style))

    def block(self, head: str, text: str | Text) -> None:
        """Write a wrapped text with a heading to the left of its first line.

        The other lines are indented by the heading's width.
        """
        indent = cell_len(head) + 2 if head else 0
        full = Text(self.escape(text)) if isinstance(text, str) else text
        rows = full.wrap(self.console, max(self.width - indent, 8))
        for number, row in enumerate(rows):
            row.rstrip()
            line = Text(no_wrap=True).append(f"{'' if number else head:<{indent}}", "bold cyan")
            self.console.print(line.append_text(row))

    def lines(self, lines: Iterable[Text]) -> None:
        """Write several lines, as `text` returns them."""
        for line in lines:
            self.console.print(line)

    def escape(self, text: str) -> str:
        """Return text with control characters escaped.

        Characters that the stream cannot encode are replaced.
        """
        text = escape_controls(text, keep="\n")
        if not self.is_ascii:
            return text
        # Escape missing characters here, so that the width is measured after escaping.
        encoding = self.console.encoding
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)

    def is_as_typed(self, text: str) -> bool:
        """Return True if the stream shows the text unchanged on one line, ready to copy."""
        return bool(text.strip()) and text.isprintable() and can_write(self.console.encoding, text)

    def fit(self, text: str, room: int) -> str:
        """Return a text shortened to one line of `room` columns.

        Line ends become marks. Of a text with several lines, a short last line is kept.
        """
        # Escape before measuring, because escapes are wider.
        text = self.escape(text.strip("\n"))
        mark, cut = ("/", "...") if self.is_ascii else ("⏎", "…")
        if len(text) <= room and cell_len(flat := text.replace("\n", mark)) <= room:
            return flat
        head, _, last = text.rpartition("\n")
        last = f" {cut} {last}" if head and len(last) < room // 2 else cut
        flat = (head or text)[: 2 * max(room, 1)].replace("\n", mark)
        return set_cell_size(flat, max(room - cell_len(last), 0)).rstrip() + last


def can_write(encoding: str | None, text: str) -> bool:
    """Return True if an encoding (None: UTF-8) can represent all characters of the text."""
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def escape_unencodable(*files: TextIO) -> None:
    """Reconfigure streams to escape characters that their encoding lacks, instead of raising."""
    for file in files:
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="backslashreplace")


def write_object(value: dict[str, Any], file: TextIO | None = None) -> None:
    """Write an object as one line of JSON, to standard output by default.

    On a terminal, control characters become JSON escapes; parsed, the object is the same.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    out = sys.stdout if file is None else file
    if out.isatty() and not text.isprintable():
        text = "".join(c if is_printable(c) else json.dumps(c)[1:-1] for c in text)
    # A lone surrogate is written as JSON's own escape.
    out.write(text.encode("utf-8", "backslashreplace").decode() + "\n")
    out.flush()


# Joiners that emoji and some scripts need; they move nothing.
_JOINERS = "\u200c\u200d"


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Return the text with control characters, bidi marks and lone surrogates as "\x1b" and so on.

    keep: control characters that stay, such as line ends and tabs.
    """
    if text.isprintable():
        return text
    return "".join(c if is_printable(c) or c in keep else _as_escape(c) for c in text)


def one_line(text: str, *, mark: str = "⏎") -> str:
    """Return the text on one line: control characters escaped, line ends replaced by the mark."""
    return escape_controls(text.strip("\n").replace("\n", mark))


def as_html(text: str) -> str:
    """Return the text escaped for HTML content and quoted attributes; line ends and tabs stay."""
    return html.escape(escape_controls(text, keep="\n\t"), quote=True)


def cut(text: str, length: int) -> str:
    """Return the first `length` characters of the text; a longer text ends with "…"."""
    return text if len(text) <= length else text[: max(length - 1, 0)].rstrip() + "…"


def is_printable(c: str) -> bool:
    """Return True if a terminal shows the character as it is, without side effects."""
    return c.isprintable() or c in _JOINERS or unicodedata.category(c) == "Zs"


def _as_escape(c: str) -> str:
    r"""Return a character as an escape sequence, such as "\x1b"."""
    return ascii(c)[1:-1]
