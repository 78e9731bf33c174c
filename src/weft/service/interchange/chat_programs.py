"""Importers of chats of SillyTavern, Open WebUI and text-generation-webui.

They return each tree of a file as a `Sketch`: a tree of texts, from which `import_tree` builds a
loom. Alternative answers become siblings.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..._core.atomic_files import repr_short
from ...errors import FormatError
from .chats import content_text
from .fields import Json, list_of, parent_of, record_of, text_of, without
from .import_tree import Entry, Knot, Note, Sketch, linked

_HIDDEN = Note(
    "message that SillyTavern hides from the model was left out",
    "messages that SillyTavern hides from the model were left out",
)
_OPENING = "<|BEGIN-VISIBLE-CHAT|>"  # text-generation-webui's stand-in for "no user message"


def is_sillytavern(data: object) -> bool:
    """Return True for a chat of SillyTavern: a list of messages with the text in `mes`.

    The first line of the file is a header, in which other programs leave fields out.
    """
    if not isinstance(data, list) or not all(isinstance(line, dict) for line in data):
        return False
    header = data[0] if data else {}
    is_named = "chat_metadata" in header or {"user_name", "character_name"} <= header.keys()
    return any("mes" in line and "is_user" in line for line in data[:2]) or (
        is_named and all("mes" in line for line in data[1:])
    )


def sillytavern(data: Any) -> list[Sketch]:
    """Read a chat of SillyTavern: one tree. The swipes of a message are siblings.

    data: JSON lines that `is_sillytavern` accepts. Raises: FormatError if they are broken.
    """
    header: Json = {} if "mes" in data[0] else data[0]
    messages = data if not header else data[1:]
    sketch = Sketch()
    sketch.add(Knot(""))
    sketch.imported = without(header, ())
    names = Counter[str]()
    for index, message in enumerate(messages):
        where = f"message {index}"
        record_of(message, where)
        extra = message.get("extra")
        kind = extra.get("type") if isinstance(extra, dict) else None
        if message.get("is_system") is True and kind != "narrator":
            sketch.notes[_HIDDEN] += 1
            continue
        role = "user" if message.get("is_user") is True else "assistant"
        role = "system" if kind == "narrator" else role
        if role == "assistant":
            names[text_of(message, "name", where)] += 1
        sketch.at = _add_swipes(sketch, message, role, where)
    sketch.title = next((name for name, _ in names.most_common(1)), "")
    return [sketch]


def _add_swipes(sketch: Sketch, message: Json, role: str, where: str) -> int:
    """Add a message and its alternatives below the current one; return the selected one."""
    text = _message_text(message.get("mes"), where)
    swipes = [_message_text(swipe, where) for swipe in list_of(message, "swipes", where)]
    swipe_id = message.get("swipe_id")
    chosen = swipe_id if isinstance(swipe_id, int) else -1
    if 0 <= chosen < len(swipes):
        swipes[chosen] = text  # `mes` has the edits of the selected swipe
    else:
        swipes, chosen = [text, *(each for each in swipes if each != text)], 0
    more = without(message, ("mes", "swipes", "swipe_id", "swipe_info", "is_user"))
    parent, selected = sketch.at, sketch.at
    for index, swipe in enumerate(swipes):
        imported = more if index == chosen else without({"name": message.get("name")}, ())
        knot = sketch.add(Knot(swipe, parent, role=role, imported=imported))
        selected = knot if index == chosen else selected
    return selected


def _message_text(value: object, where: str) -> str:
    # Exports of other sites have an object here.
    text = value.get("message") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise FormatError(f"the text of {where} is {repr_short(value)}; a text belongs there")
    return text


def is_open_webui(data: object) -> bool:
    """Return True for an export of Open WebUI: chats with a `history` of `messages`.

    A list of such chats is accepted too; only its first one is checked.
    """
    first = data[0] if isinstance(data, list) and data else data
    history = _open_webui_chat(first).get("history")
    return isinstance(history, dict) and isinstance(history.get("messages"), dict)


def _open_webui_chat(record: object) -> Json:
    if not isinstance(record, dict):
        return {}
    chat = record.get("chat")
    return chat if isinstance(chat, dict) else record


def open_webui(data: Any) -> list[Sketch]:
    """Read an export of Open WebUI: one tree for each chat.

    data: JSON that `is_open_webui` accepts. Raises: FormatError if it is broken.
    """
    return [
        _open_webui_tree(record_of(record, f"chat {index}"), f"chat {index}")
        for index, record in enumerate(data if isinstance(data, list) else [data])
    ]


def _open_webui_tree(record: Json, where: str) -> Sketch:
    chat = _open_webui_chat(record)
    history = record_of(chat.get("history"), f"'history' of {where}")
    messages = record_of(history.get("messages"), f"'messages' of {where}")
    notes = Counter[Note]()
    entries = [
        Entry(
            message_id,
            parent_of(message.get("parentId"), message_id),
            _open_webui_knot(message, message_id, notes),
        )
        for message_id, message in (
            (key, record_of(value, f"message {repr_short(key)}")) for key, value in messages.items()
        )
    ]
    ranks = _ranks(messages)
    entries.sort(key=lambda entry: ranks.get(entry.id, 0))
    system = _system_prompt(chat)
    if system:
        top = f"{where}: system"
        entries = [entry._replace(parent=entry.parent or top) for entry in entries]
        entries.insert(0, Entry(top, None, Knot(system, role="system")))
    at = history.get("currentId")
    title = text_of(chat, "title", where) or text_of(record, "title", where)
    sketch = linked(entries, at=at if isinstance(at, str) else None, title=title)
    sketch.imported = {
        **without(record, ("chat", "title", "history", "messages")),
        **without(chat, ("history", "messages", "title")),
    }
    sketch.notes += notes
    return sketch


def _ranks(messages: Json) -> dict[str, int]:
    """Return the position of each message among its siblings, by id."""
    return {
        child: rank
        for key, message in messages.items()
        for rank, child in enumerate(list_of(message, "childrenIds", key))
        if isinstance(child, str)
    }


def _open_webui_knot(message: Json, message_id: str, notes: Counter[Note]) -> Knot:
    text = content_text(message.get("content"), message_id, notes)
    role = message.get("role")
    read = ("id", "parentId", "childrenIds", "role", "content")
    imported = {"id": message_id, **without(message, read)}
    return Knot(text, role=role if isinstance(role, str) else None, imported=imported)


def _system_prompt(chat: Json) -> str:
    params = chat.get("params")
    system = params.get("system") if isinstance(params, dict) else chat.get("system")
    return system if isinstance(system, str) else ""


def is_textgen(data: object) -> bool:
    """Return True for a chat history of text-generation-webui: pairs in `internal`."""
    pairs = data.get("internal") if isinstance(data, dict) else None
    return isinstance(pairs, list) and all(isinstance(each, list) for each in pairs)


def textgen(data: Any) -> list[Sketch]:
    """Read a chat history of text-generation-webui: one tree.

    Earlier versions of an answer become its siblings.

    data: JSON that `is_textgen` accepts. Raises: FormatError if it is broken.
    """
    sketch = Sketch()
    sketch.add(Knot(""))
    metadata = data.get("metadata")
    notes: Json = metadata if isinstance(metadata, dict) else {}
    for index, pair in enumerate(data["internal"]):
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise FormatError(
                f"pair {index} is {repr_short(pair)}; the texts of a user and an answer belong"
            )
        question, answer = pair
        if question not in ("", _OPENING):
            sketch.at = sketch.add(Knot(question, sketch.at, role="user"))
        if answer:
            sketch.at = _add_versions(sketch, answer, notes.get(f"assistant_{index}"), index)
    sketch.imported = without(data, ("internal", "visible"))
    return [sketch]


def _add_versions(sketch: Sketch, answer: str, metadata: object, index: int) -> int:
    """Add an answer with its other versions below the current node; return the answer's index."""
    noted: Json = metadata if isinstance(metadata, dict) else {}
    texts = [
        text_of(record_of(each, f"version {number} of answer {index}"), "content", "a version")
        for number, each in enumerate(list_of(noted, "versions", f"answer {index}"))
    ]
    if answer not in texts:
        texts.append(answer)
    added = {
        text: sketch.add(Knot(text, sketch.at, role="assistant")) for text in dict.fromkeys(texts)
    }
    return added[answer]
