"""Importers of texts that a person writes with a model: mikupad's sessions, and plain text."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any

from ..._core.atomic_files import repr_short
from ...errors import FormatError
from ...loom.author_note import DEPTH
from .fields import Json, record_of, text_of
from .import_tree import Knot, Note, Sketch

TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown")
_SESSION_FIELDS = ("memoryTokens", "authorNoteTokens", "maxPredictTokens", "contextLength")
_CONTEXT_FIELDS = ("memoryTokens", "authorNoteTokens", "authorNoteDepth", "worldInfo")

_SETTINGS = Note("setting of the session was left out", "settings of the session were left out")
_WORLD_INFO = Note(
    "entry of world info is not read by the model",
    "entries of world info are not read by the model",
)

_CONTEXT_ORDER = "{memPrefix}{wiPrefix}{wiText}{wiSuffix}{memText}{memSuffix}{prompt}"
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class PlainText(str):
    """The text of a file that is not JSON."""


def is_text_name(name: str) -> bool:
    """Return True if a file of this name contains plain text."""
    return name.lower().endswith(TEXT_SUFFIXES)


def plain_text(data: str) -> list[Sketch]:
    """Return a text as one tree without branches: its prompt.

    The line break that editors write at the end of a file is removed.

    Raises: FormatError for an empty text.
    """
    text = data.replace("\r\n", "\n").removesuffix("\n")
    if not text:
        raise FormatError("the file is empty")
    sketch = Sketch()
    sketch.add(Knot(text))
    return [sketch]


def is_mikupad(data: object) -> bool:
    """Return True for a session of mikupad: a `prompt` of pieces, and its settings."""
    if not isinstance(data, dict) or not any(name in data for name in _SESSION_FIELDS):
        return False
    pieces = _decoded(data.get("prompt"))
    return isinstance(pieces, list) and all(
        isinstance(piece, dict) and "content" in piece for piece in pieces
    )


def mikupad(data: Any) -> list[Sketch]:
    """Read a session of mikupad: one path, on which typed and generated texts alternate.

    The memory becomes the beginning of the text, and the author's note that of the loom. World info
    is kept in the meta of the root. Settings, which include API keys, and the probabilities of
    tokens are left out.

    data: JSON that `is_mikupad` accepts. Raises: FormatError if it is broken.
    """
    pieces = _decoded(data["prompt"])
    if not isinstance(pieces, list):
        raise FormatError(f"'prompt' is {repr_short(pieces)}; a list of pieces belongs there")
    name = _decoded(data.get("name"))
    sketch = Sketch(name if isinstance(name, str) else "")
    records = [record_of(piece, f"piece {at}") for at, piece in enumerate(pieces)]
    context = _context(data)
    memory = _memory(context)
    parent = sketch.add(Knot(memory)) if memory else -1
    for is_typed, run in groupby(records, key=lambda piece: piece.get("type") == "user"):
        text = "".join(text_of(piece, "content", "a piece") for piece in run)
        imported = {"author": "user" if is_typed else "model"}
        parent = sketch.add(Knot(text, parent, imported=imported))
    sketch.at = max(parent, 0)
    sketch.imported = context
    sketch.author_note = _author_note(context)
    n_settings = len(data.keys() - {"prompt", "name", *_CONTEXT_FIELDS})
    if n_settings:
        sketch.notes[_SETTINGS] += n_settings
    world_info = context.get("worldInfo")
    entries = world_info.get("entries") if isinstance(world_info, dict) else None
    if isinstance(entries, list):
        sketch.notes[_WORLD_INFO] += len(entries)
    return [sketch]


def _context(data: Json) -> Json:
    return {name: _decoded(data[name]) for name in _CONTEXT_FIELDS if name in data}


def _memory(context: Json) -> str:
    """Return the text that the memory puts before the prompt; "" without a memory.

    `contextOrder` is a template of the context. mikupad drops its empty lines.
    """
    memory = context.get("memoryTokens")
    if not isinstance(memory, dict) or not memory.get("text"):
        return ""
    values = {
        f"mem{name.title()}": text_of(memory, name, "memoryTokens")
        for name in ("prefix", "text", "suffix")
    }
    order = text_of(memory, "contextOrder", "memoryTokens") or _CONTEXT_ORDER
    lines = [
        _PLACEHOLDER.sub(lambda match: values.get(match[1], ""), line)
        for line in order.partition("{prompt}")[0].split("\n")
    ]
    return _with_line_breaks("\n".join([*filter(str.strip, lines[:-1]), lines[-1]]))


def _author_note(context: Json) -> Json | None:
    """Return the note of a session; mikupad counts its depth in line breaks, too."""
    parts, depth = context.get("authorNoteTokens"), context.get("authorNoteDepth")
    if not isinstance(parts, dict) or not parts.get("text"):
        return None
    text = "".join(
        text_of(parts, name, "authorNoteTokens") for name in ("prefix", "text", "suffix")
    )
    is_depth = isinstance(depth, int) and not isinstance(depth, bool) and depth >= 0
    return {"text": _with_line_breaks(text), "depth": depth if is_depth else DEPTH}


def _with_line_breaks(text: str) -> str:
    """Return a text with line breaks for the two characters that mikupad replaces by them."""
    return text.replace("\\n", "\n")


def _decoded(value: object) -> object:
    """Return a value of a session; older exports have each value as JSON in a text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
