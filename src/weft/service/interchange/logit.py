"""The importer of trees whose nodes are single tokens, as Logitloom saves them."""

from __future__ import annotations

from typing import Any

from ..._core.atomic_files import shown
from ...errors import FormatError
from .fields import list_of, record_of, text_of, without
from .sketch import Knot, Sketch

_VERSION = "isLogitLoomTreeVersion"
_READS = "logit-loom-tree-v1"
_SETTINGS = "the settings of the model were left out"


def is_logitloom(data: object) -> bool:
    """Whether this is a token tree of Logitloom."""
    return isinstance(data, dict) and _VERSION in data


def logitloom(data: Any) -> list[Sketch]:
    """Read a token tree; each token is a node below an empty prompt, its figures are in `meta`.

    Settings are left out: addresses and keys of servers are in them.
    """
    if data[_VERSION] != _READS:
        raise FormatError(f"the file has version {shown(data[_VERSION])}; Weft reads {_READS}")
    sketch = Sketch()
    sketch.add(Knot(""))
    stack: list[tuple[Any, int]] = [
        (root, 0) for root in reversed(list_of(data, "roots", "the file"))
    ]
    while stack:
        given, parent = stack.pop()
        where = f"token {len(sketch.knots)}"
        token = record_of(given, where)
        name = "text" if "text" in token else "token"
        imported = without(token, (name, "children"))
        index = sketch.add(Knot(text_of(token, name, where), parent, imported=imported))
        stack.extend((child, index) for child in reversed(list_of(token, "children", where)))
    sketch.imported = without(data, (_VERSION, "roots", "modelSettings"))
    if data.get("modelSettings"):
        sketch.notes[_SETTINGS] += 1
    return [sketch]
