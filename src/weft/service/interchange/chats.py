"""Importers of chats: lists of messages, and conversations with branches.

They return each tree of a file as a `Sketch`: a tree of texts, from which `import_tree` builds a
loom.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..._core.atomic_files import repr_short
from ...errors import FormatError
from .fields import Json, list_of, parent_of, record_of, text_of, without
from .import_tree import Entry, Knot, Note, Sketch, linked

_NO_TEXT = Note(
    "message part without text was left out", "message parts without text were left out"
)
_EMPTY = Note("message without text was left out", "messages without text were left out")


def is_conversation(data: object) -> bool:
    """Return True for a conversation with a `mapping` of messages (ChatGPT's export).

    A list of such conversations is accepted too; only its first one is checked.
    """
    first = data[0] if isinstance(data, list) and data else data
    return isinstance(first, dict) and isinstance(first.get("mapping"), dict)


def conversations(data: Any) -> list[Sketch]:
    """Read conversations with branches, as ChatGPT exports them; one tree for each.

    data: JSON that `is_conversation` accepts. Raises: FormatError if it is broken.
    """
    given = data if isinstance(data, list) else [data]
    return [_conversation(each, f"conversation {index}") for index, each in enumerate(given)]


def _conversation(given: object, where: str) -> Sketch:
    data = record_of(given, where)
    mapping = record_of(data.get("mapping"), f"'mapping' of {where}")
    notes = Counter[Note]()
    entries: list[Entry] = []
    ranks: dict[str, int] = {}
    for node_id, value in mapping.items():
        node = record_of(value, f"node {repr_short(node_id)}")
        knot = _mapping_knot(node, node_id, notes)
        entries.append(Entry(node_id, parent_of(node.get("parent"), node_id), knot))
        children = list_of(node, "children", node_id)
        ranks |= {child: rank for rank, child in enumerate(children) if isinstance(child, str)}
    entries.sort(key=lambda entry: ranks.get(entry.id, 0))
    at = data.get("current_node")
    kept = _without_empty(entries, notes)
    at = _nearest_kept(mapping, at if isinstance(at, str) else None, {each.id for each in kept})
    sketch = linked(kept, at=at, title=text_of(data, "title", where))
    sketch.imported = without(data, ("mapping", "current_node", "title"))
    sketch.notes += notes
    return sketch


def _nearest_kept(mapping: Json, at: str | None, kept: set[str]) -> str | None:
    """Return the id of a node, or of its nearest ancestor that is kept; None if there is none."""
    passed = set[str]()
    while at is not None and at not in kept:
        if at not in mapping or at in passed:
            return None
        passed.add(at)
        at = parent_of(mapping[at].get("parent"), at)
    return at


def _mapping_knot(node: Json, node_id: str, notes: Counter[Note]) -> Knot:
    message = node.get("message")
    rest = {"id": node_id, **without(node, ("id", "parent", "children", "message"))}
    if message is None:
        return Knot("", imported=rest)
    message = record_of(message, f"the message of {repr_short(node_id)}")
    author = message.get("author")
    role = message.get("role", author.get("role") if isinstance(author, dict) else None)
    text = content_text(message.get("content"), node_id, notes)
    read = ("id", "role", "content", "author")
    more = without(author, ("role",)) if isinstance(author, dict) else {}
    imported = {**rest, **without(message, read), **({"author": more} if more else {})}
    return Knot(text, role=role if isinstance(role, str) else None, imported=imported)


def _without_empty(entries: list[Entry], notes: Counter[Note]) -> list[Entry]:
    """Return the messages with a text or tool calls.

    A message below an empty one becomes a child of the nearest ancestor with content.

    notes: the number of messages that are left out is added here.
    """
    by_id = {entry.id: entry for entry in entries}
    kept = {entry.id for entry in entries if entry.knot.text or "tool_calls" in entry.knot.imported}
    notes[_EMPTY] += sum(entry.knot.role is not None and entry.id not in kept for entry in entries)
    target_of: dict[str, str | None] = {}

    def nearest(at: str | None) -> str | None:
        passed: list[str] = []
        while at in by_id and at not in kept and at not in target_of and at not in passed:
            passed.append(at)
            at = by_id[at].parent
        target = target_of.get(at, at) if at is not None and at not in passed else None
        target_of.update(dict.fromkeys(passed, target))
        return target

    return [entry._replace(parent=nearest(entry.parent)) for entry in entries if entry.id in kept]


def content_text(content: object, where: str, notes: Counter[Note]) -> str:
    """Return the text of a message.

    Args:
        content: the message's content: a text, or parts, of which the texts are joined. None: "".
        where: name of the message, for errors.
        notes: the number of parts without text is added here.

    Raises: FormatError for other content.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        if isinstance(content.get("text"), str):
            return str(content["text"])
        content = content.get("parts", [])
    if not isinstance(content, list):
        raise FormatError(
            f"the content of {where} is {repr_short(content)}; a text or a list belongs"
        )
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            texts.append(text)
        else:
            notes[_NO_TEXT] += 1
    return "".join(texts)


def is_chat(data: object) -> bool:
    """Return True for chats.

    These are a list of messages with roles, an object with such a list as `messages`, or a list of
    such objects.
    """
    if isinstance(data, dict):
        return _are_messages(data.get("messages"))
    if not isinstance(data, list) or not data:
        return False
    return _are_messages(data) or all(
        isinstance(each, dict) and _are_messages(each.get("messages")) for each in data
    )


def _are_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in value)
    )


def chats(data: Any) -> list[Sketch]:
    """Read chats. Chats with the same first message become paths of one tree.

    data: JSON that `is_chat` accepts. Raises: FormatError if it is broken.
    """
    given = data if isinstance(data, list) and not _are_messages(data) else [data]
    sketches: dict[str, Sketch] = {}
    index_of: dict[tuple[str, int, str], int] = {}  # by tree, parent and content
    for index, chat in enumerate(given):
        where = f"chat {index}"
        messages = chat["messages"] if isinstance(chat, dict) else chat
        notes = Counter[Note]()
        knots = [
            _message_knot(message, f"message {at} of {where}", notes)
            for at, message in enumerate(messages)
        ]
        first = _key(knots[0])
        sketch = sketches.setdefault(first, Sketch())
        sketch.notes += notes
        at = -1
        for knot in knots:
            place = (first, at, _key(knot))
            if place not in index_of:
                knot.parent = at
                index_of[place] = sketch.add(knot)
            at = index_of[place]
        sketch.at = at
        if isinstance(chat, dict):
            sketch.title = sketch.title or text_of(chat, "title", where)
            more = without(chat, ("messages", "title"))
            if more:
                sketch.knots[at].imported.setdefault("chat", more)
    return list(sketches.values())


def _message_knot(message: Json, where: str, notes: Counter[Note]) -> Knot:
    text = content_text(message.get("content"), where, notes)
    imported = without(message, ("role", "content"))
    return Knot(text, role=message["role"], imported=imported)


def _key(knot: Knot) -> str:
    return repr((knot.role, knot.text, knot.imported))
