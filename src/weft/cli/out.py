"""What the command writes besides text: JSON; and streams that never fail over a character."""

from __future__ import annotations

import io
import json
import sys
from typing import Any, TextIO

from ..viz.escape import shows


def soften(*files: TextIO) -> None:
    """Let streams write out what their encoding lacks, instead of failing."""
    for file in files:
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="backslashreplace")


def write_object(value: dict[str, Any], file: TextIO | None = None) -> None:
    """Write one object on one line, to standard output if nothing else is said.

    On a terminal, what it would obey is written as JSON's own escapes: the object is the same.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    out = sys.stdout if file is None else file
    if out.isatty() and not text.isprintable():
        text = "".join(c if shows(c) else json.dumps(c)[1:-1] for c in text)
    # A lone surrogate is written as JSON's own escape.
    out.write(text.encode("utf-8", "backslashreplace").decode() + "\n")
    out.flush()
