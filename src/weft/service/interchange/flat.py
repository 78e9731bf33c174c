"""Importers of trees whose nodes name their parents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..._core.atomic_files import shown
from ...errors import FormatError
from .fields import (
    Json,
    id_of,
    list_of,
    parent_of,
    rating_of,
    record_of,
    text_of,
    without,
)
from .sketch import Entry, Knot, Sketch, linked

_MARK = "bookmark"


def is_loomsidian(data: object) -> bool:
    """Whether this is the plugin's `data.json`: a state a note, each with nodes."""
    state = data.get("state") if isinstance(data, dict) else None
    if not isinstance(state, dict) or not state:
        return False
    return all(isinstance(each, dict) and "nodes" in each for each in state.values())


def loomsidian(data: Any) -> list[Sketch]:
    """Read all notes' trees. The plugin's settings, where API keys are, stay out."""
    sketches = []
    for note, state in data["state"].items():
        where = f"the note {shown(note)}"
        entries = list(_loomsidian_entries(state["nodes"], where))
        at = state.get("current")
        sketch = linked(entries, at=at if isinstance(at, str) else None, title=note)
        sketch.imported = without(state, ("nodes", "current"))
        sketches.append(sketch)
    if len(data) > 1:
        sketches[0].notes["settings of the plugin were left out"] += len(data) - 1
    return sketches


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
    """Yield ids and nodes of an object by id, of a list of nodes, or of a list of pairs."""
    if isinstance(nodes, dict):
        yield from ((key, record_of(node, f"node {shown(key)}")) for key, node in nodes.items())
        return
    if not isinstance(nodes, list):
        raise FormatError(
            f"'nodes' of {where} is {shown(nodes)}; an object or a list belongs there"
        )
    for index, each in enumerate(nodes):
        name = f"node {index} of {where}"
        if isinstance(each, list) and len(each) == 2:
            yield id_of(each[0], name), record_of(each[1], name)
        else:
            node = record_of(each, name)
            yield id_of(node.get("id"), name), node


def is_exoloom(data: object) -> bool:
    """Whether this is Exoloom's export."""
    return isinstance(data, dict) and data.get("loomType") == "Exoloom"


def exoloom(data: Any) -> list[Sketch]:
    """Read Exoloom's export, schema 1; what a lens has pruned is marked, not removed."""
    version = data.get("schemaVersion")
    if version != 1:
        raise FormatError(f"the file has Exoloom's schema {shown(version)}; Weft reads schema 1")
    tree = record_of(data.get("tree"), "'tree'")
    nodes = record_of(tree.get("nodes"), "'nodes' of 'tree'")
    lens = record_of(data.get("lens") or {}, "'lens'")
    marked = _ids(lens, "bookmarks")
    pruned = _ids(lens, "prunedNodes")
    entries = []
    for node_id, given in nodes.items():
        node = record_of(given, f"node {shown(node_id)}")
        read = ("id", "content", "parentId", "childrenIds")
        imported = {"id": node_id, **without(node, read)}
        if node_id in pruned:
            imported["pruned"] = True
        mark = _MARK if node_id in marked else None
        knot = Knot(text_of(node, "content", node_id), bookmark=mark, imported=imported)
        entries.append(Entry(node_id, parent_of(node.get("parentId"), node_id), knot))
    ranks = _ranks(node.get("childrenIds") for node in nodes.values())
    entries.sort(key=lambda entry: ranks.get(entry.id, 0))
    sketch = linked(entries, title=text_of(tree, "title", "'tree'"))
    sketch.imported = {
        **without(data, ("loomType", "schemaVersion", "tree", "lens")),
        **without(tree, ("title", "nodes", "rootNodeId")),
    }
    return [sketch]


def _ids(record: Json, name: str) -> frozenset[str]:
    """Return ids that are given as texts, or as objects that have one."""
    given = list_of(record, name, "the file")
    found = (
        each.get("nodeId", each.get("id")) if isinstance(each, dict) else each for each in given
    )
    return frozenset(each for each in found if isinstance(each, str))


def _ranks(lists: Iterator[Any]) -> dict[str, int]:
    """Return each child's place among its siblings, where the file says so."""
    return {
        str(child): rank
        for children in lists
        if isinstance(children, list)
        for rank, child in enumerate(children)
        if isinstance(child, str | int)
    }


def is_minihf(data: object) -> bool:
    """Whether this is a file of MiniHF's loom: patches in a node store."""
    tree = data.get("loomTree") if isinstance(data, dict) else None
    return isinstance(tree, dict) and isinstance(tree.get("nodeStore"), dict)


def minihf(data: Any) -> list[Sketch]:
    """Read MiniHF's loom."""
    sketch = _patched(data["loomTree"]["nodeStore"])
    sketch.imported = {
        **without(data, ("loomTree",)),
        **without(data["loomTree"], ("nodeStore", "root")),
    }
    return [sketch]


def is_tinyloom(data: object) -> bool:
    """Whether this is a file of tinyloom: nodes by id, each with its parent."""
    nodes = data.get("nodes") if isinstance(data, dict) else None
    if not isinstance(nodes, dict) or not nodes:
        return False
    return all(isinstance(node, dict) and "parent" in node for node in nodes.values())


def tinyloom(data: Any) -> list[Sketch]:
    """Read tinyloom's file."""
    sketch = _patched(data["nodes"])
    sketch.imported = without(data, ("nodes", "root"))
    return [sketch]


_PATCHED = ("id", "parent", "children", "text", "patch", "patches", "rating", "bookmarked")
_REWROTE = "nodes changed what stands before them; what they inserted was taken"


def _patched(nodes: Mapping[str, Any]) -> Sketch:
    entries, notes = [], Counter[str]()
    for key, given in nodes.items():
        node = record_of(given, f"node {shown(key)}")
        node_id = id_of(node.get("id", key), f"node {shown(key)}")
        knot = Knot(
            _inserted(node, node_id, notes),
            score=rating_of(node.get("rating")),
            bookmark=_MARK if node.get("bookmarked") is True else None,
            imported={"id": node_id, **without(node, _PATCHED)},
        )
        entries.append(Entry(node_id, parent_of(node.get("parent"), node_id), knot))
    sketch = linked(entries)
    sketch.notes += notes
    return sketch


def _inserted(node: Json, node_id: str, notes: Counter[str]) -> str:
    """Return a node's text, or what its patches insert: [[0, kept], [1, inserted], [-1, cut]]."""
    if isinstance(node.get("text"), str):
        return str(node["text"])
    name = "patches" if node.get("patches") is not None else "patch"
    parts: list[str] = []
    is_rewritten = False
    for patch in list_of(node, name, node_id):
        for diff in list_of(record_of(patch, f"a patch of {node_id}"), "diffs", node_id):
            if not (isinstance(diff, list) and len(diff) == 2 and isinstance(diff[1], str)):
                raise FormatError(f"a diff of {node_id} is {shown(diff)}; [number, text] belongs")
            is_rewritten |= diff[0] == -1 or (diff[0] == 0 and bool(parts))
            if diff[0] == 1:
                parts.append(diff[1])
    notes[_REWROTE] += int(is_rewritten)
    return "".join(parts)


def is_basemode(data: object) -> bool:
    """Whether this is basemode-loom's export: a list of nodes with parent_id and root_id."""
    first = _first_of(data)
    return first is not None and "parent_id" in first and "root_id" in first


def basemode(data: Any) -> list[Sketch]:
    """Read basemode-loom's export."""

    def made(node: Json, node_id: str) -> Entry:
        metadata = node.get("metadata")
        noted: Json = metadata if isinstance(metadata, dict) else {}
        knot = Knot(
            text_of(node, "text", node_id),
            score=rating_of(noted.get("rating")),
            bookmark=_MARK if noted.get("bookmarked") is True else None,
            imported=without(node, ("text", "parent_id", "root_id")),
        )
        return Entry(node_id, parent_of(node.get("parent_id"), node_id), knot)

    return [_listed(data, made)]


def is_bonsai(data: object) -> bool:
    """Whether this is bonsai's export: a list of nodes with parentIds."""
    first = _first_of(data)
    return first is not None and "parentIds" in first


def bonsai(data: Any) -> list[Sketch]:
    """Read bonsai's export; of several parents the first is the parent."""
    several = 0

    def made(node: Json, node_id: str) -> Entry:
        nonlocal several
        parents = list_of(node, "parentIds", node_id)
        several += len(parents) > 1
        knot = Knot(
            text_of(node, "text", node_id),
            score=rating_of(node.get("rating")),
            bookmark=_MARK if node.get("bookmarked") is True else None,
            imported=without(node, ("text", "parentIds", "bookmarked", "rating")),
        )
        return Entry(node_id, parent_of(parents[0], node_id) if parents else None, knot)

    sketch = _listed(data, made)
    if several:
        sketch.notes["nodes with several parents stand below the first"] += several
    _take_off(sketch)
    return [sketch]


def _take_off(sketch: Sketch) -> None:
    """Where every text begins with its parent's, it is a whole one: leave what it adds."""
    knots = sketch.knots
    below = [(knot, knots[knot.parent].text) for knot in knots[1:]]
    if not below or not all(above and knot.text.startswith(above) for knot, above in below):
        return
    for knot, above in reversed(below):
        knot.text = knot.text[len(above) :]
    sketch.notes["texts were whole ones: what stood before was taken off"] += len(below)


def _first_of(data: object) -> Json | None:
    nodes = data.get("nodes") if isinstance(data, dict) else None
    is_list = isinstance(nodes, list) and bool(nodes) and isinstance(nodes[0], dict)
    return nodes[0] if is_list else None  # type: ignore[index]


def _listed(data: Json, made: Callable[[Json, str], Entry]) -> Sketch:
    entries = []
    for index, given in enumerate(data["nodes"]):
        node = record_of(given, f"node {index}")
        entries.append(made(node, id_of(node.get("id"), f"node {index}")))
    sketch = linked(entries)
    sketch.imported = without(data, ("nodes",))
    return sketch
