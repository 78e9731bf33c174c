"""Importers of trees whose nodes name their parents.

They return each tree of a file as a `Sketch`: a tree of texts, from which `import_tree` builds a
loom.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..._core.atomic_files import repr_short
from ...errors import FormatError
from .fields import (
    Json,
    id_of,
    parent_of,
    rating_of,
    record_of,
    text_of,
    without,
)
from .import_tree import Entry, Knot, Note, Sketch, linked

_MARK = "bookmark"
_SETTINGS = Note("setting of the plugin was left out", "settings of the plugin were left out")


def is_loomsidian(data: object) -> bool:
    """Return True for the `data.json` of Loomsidian, a plugin of Obsidian, or its export of a note.

    The first has a `state` with an entry for each note. An entry has `nodes`, and the id of the
    `current` one; an export of a note is such an entry.
    """
    state = data.get("state") if isinstance(data, dict) else None
    if not isinstance(state, dict) or not state:
        return _is_note(data)
    return all(isinstance(each, dict) and "nodes" in each for each in state.values())


def _is_note(data: object) -> bool:
    if not isinstance(data, dict) or "current" not in data:
        return False
    nodes = data.get("nodes")
    return isinstance(nodes, dict) and all(
        isinstance(node, dict) and "parentId" in node for node in nodes.values()
    )


def loomsidian(data: Any) -> list[Sketch]:
    """Read Loomsidian's `data.json`, or its export of a note: one tree for each note.

    The plugin's settings, which include API keys, are left out.

    data: JSON that `is_loomsidian` accepts. Raises: FormatError if it is broken.
    """
    if "state" not in data:
        return [_loomsidian_note(data, "")]
    sketches = [_loomsidian_note(state, note) for note, state in data["state"].items()]
    if len(data) > 1:
        sketches[0].notes[_SETTINGS] += len(data) - 1
    return sketches


def _loomsidian_note(state: Json, title: str) -> Sketch:
    where = f"the note {repr_short(title)}"
    entries = list(_loomsidian_entries(state["nodes"], where))
    at = state.get("current")
    sketch = linked(entries, at=at if isinstance(at, str) else None, title=title)
    sketch.imported = without(state, ("nodes", "current"))
    return sketch


def _loomsidian_entries(nodes: object, where: str) -> Iterator[Entry]:
    for node_id, node in _pairs(nodes, where):
        read = ("id", "text", "parentId", "bookmarked")
        mark = _MARK if node.get("bookmarked") is True else None
        knot = Knot(
            text_of(node, "text", node_id),
            bookmark=mark,
            imported={"id": node_id, **without(node, read)},
        )
        yield Entry(node_id, parent_of(node.get("parentId"), node_id), knot)


def _pairs(nodes: object, where: str) -> Iterator[tuple[str, Json]]:
    """Yield (id, node) for the nodes of a note.

    Args:
        nodes: an object {id: node}, a list of nodes with ids, or a list of [id, node].
        where: name of the note, for errors.

    Raises: FormatError for anything else.
    """
    if isinstance(nodes, dict):
        yield from (
            (key, record_of(node, f"node {repr_short(key)}")) for key, node in nodes.items()
        )
        return
    if not isinstance(nodes, list):
        raise FormatError(
            f"'nodes' of {where} is {repr_short(nodes)}; an object or a list belongs there"
        )
    for index, item in enumerate(nodes):
        name = f"node {index} of {where}"
        if isinstance(item, list) and len(item) == 2:
            yield id_of(item[0], name), record_of(item[1], name)
        else:
            node = record_of(item, name)
            yield id_of(node.get("id"), name), node


def is_basemode(data: object) -> bool:
    """Return True for the export of the program basemode-loom.

    It has a list of `nodes` with `parent_id` and `root_id`.
    """
    nodes = data.get("nodes") if isinstance(data, dict) else None
    first = nodes[0] if isinstance(nodes, list) and nodes else None
    return isinstance(first, dict) and "parent_id" in first and "root_id" in first


def basemode(data: Any) -> list[Sketch]:
    """Read the export of basemode-loom: one tree.

    data: JSON that `is_basemode` accepts. Raises: FormatError if it is broken.
    """
    entries = []
    for index, given in enumerate(data["nodes"]):
        node = record_of(given, f"node {index}")
        node_id = id_of(node.get("id"), f"node {index}")
        metadata = node.get("metadata")
        noted: Json = metadata if isinstance(metadata, dict) else {}
        knot = Knot(
            text_of(node, "text", node_id),
            score=rating_of(noted.get("rating")),
            bookmark=_MARK if noted.get("bookmarked") is True else None,
            imported=without(node, ("text", "parent_id", "root_id")),
        )
        entries.append(Entry(node_id, parent_of(node.get("parent_id"), node_id), knot))
    sketch = linked(entries)
    sketch.imported = without(data, ("nodes",))
    return [sketch]
