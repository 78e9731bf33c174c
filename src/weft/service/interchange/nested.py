"""Importers of nested trees: N8Loom's export, and files of socketteer/loom.

socketteer/loom is the Python program named Loom. The importers return each tree of a file as a
`Sketch`: a tree of texts, from which `import_tree` builds a loom.
"""

from __future__ import annotations

import re
from typing import Any

from ..._core.atomic_files import repr_short
from ...errors import FormatError
from .fields import Json, list_of, record_of, text_of, without
from .import_tree import Knot, Sketch

_N8LOOM = ("terminal", "node_id", "display_text")
_READ = ("text", "children", "terminal")
# N8Loom's display text of a prompt with a chat template.
_DISPLAYED = re.compile(r"Prompt: (.*)\n\nResponse:\n\n", re.DOTALL)
# Names of control tokens: <|im_start|>user, <start_of_turn>user, </s>, [INST].
_CONTROL = re.compile(
    r"(<\|(im_start|start|start_header_id)\|>|<start_of_turn>)(system|user|assistant|model)?"
    r"|<\|[^<>|]+\|>|</?(s|bos|eos)>|<end_of_turn>|\[/?INST\]"
)


def is_n8loom(data: object) -> bool:
    """Return True for N8Loom's export: nested nodes with one of N8Loom's own fields."""
    return is_nested(data) and any(name in data for name in _N8LOOM)  # type: ignore[operator]


def n8loom(data: Any) -> list[Sketch]:
    """Read N8Loom's export: one tree.

    Its texts contain the chat template's special tokens, which an import with an LM parses.

    data: JSON that `is_n8loom` accepts. Raises: FormatError if it is broken.
    """
    sketch = _walked(data)
    sketch.special = True
    root = sketch.knots[0]
    displayed = _DISPLAYED.fullmatch(root.display_text or "")
    if displayed is not None:
        sketch.user_prompt, root.display_text = displayed[1], None
    else:
        sketch.title = " ".join(_CONTROL.sub(" ", root.text).split())
    return [sketch]


def is_python_loom(data: object) -> bool:
    """Return True for a file of socketteer/loom: an object whose `root` is a nested node."""
    return isinstance(data, dict) and is_nested(data.get("root"))


def python_loom(data: Any) -> list[Sketch]:
    """Read a file of socketteer/loom: one tree.

    data: JSON that `is_python_loom` accepts. Raises: FormatError if it is broken.
    """
    sketch = _walked(data["root"])
    selected = data.get("selected_node_id")
    if isinstance(selected, str):
        ids = [knot.imported.get("id") for knot in sketch.knots]
        sketch.at = ids.index(selected) if selected in ids else 0
    sketch.imported = without(data, ("root", "selected_node_id"))
    return [sketch]


def is_nested(data: object) -> bool:
    """Return True for a node with text and children.

    Other formats have these too, so this one is checked last.
    """
    return isinstance(data, dict) and isinstance(data.get("text"), str) and "children" in data


def nested(data: Any) -> list[Sketch]:
    """Read nested nodes, as in older files of socketteer/loom: one tree.

    data: JSON that `is_nested` accepts. Raises: FormatError if it is broken.
    """
    return [_walked(data)]


def _walked(root: Json) -> Sketch:
    sketch = Sketch()
    stack: list[tuple[Any, int]] = [(root, -1)]
    while stack:
        given, parent = stack.pop()
        where = f"node {len(sketch.knots)}"
        node = record_of(given, where)
        terminal = node.get("terminal", False)
        if not isinstance(terminal, bool):
            raise FormatError(
                f"'terminal' of {where} is {repr_short(terminal)}; true or false belongs"
            )
        imported = without(node, _READ)
        knot = Knot(text_of(node, "text", where), parent, terminal, imported=imported)
        if isinstance(imported.get("display_text"), str):
            display_text = imported.pop("display_text")
            knot.display_text = None if display_text == knot.text else display_text
        index = sketch.add(knot)
        bookmark = node.get("bookmark")
        if bookmark is True:
            sketch.knots[index].bookmark = "bookmark"
        stack.extend((child, index) for child in reversed(list_of(node, "children", where)))
    return sketch
