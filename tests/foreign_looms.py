"""Files of other programs, written by hand after what is known of their fields: one small tree.

Each says the same: a prompt "Once", below it " upon" (with " a time" below it) and " more".
"""

from __future__ import annotations

from typing import Any

TREE = ("Once", ((" upon", ((" a time", ()),)), (" more", ())))

N8LOOM = {
    "text": "Once",
    "terminal": False,
    "children": [
        {
            "text": " upon",
            "terminal": False,
            "children": [{"text": " a time", "terminal": True, "children": []}],
        },
        {"text": " more", "terminal": False, "children": []},
    ],
}
NESTED = {
    "text": "Once",
    "children": [
        {"text": " upon", "children": [{"text": " a time", "children": []}]},
        {"text": " more", "children": []},
    ],
}
PYTHON_LOOM = {
    "root": {
        "id": "r",
        "text": "Once",
        "children": [
            {
                "id": "a",
                "text": " upon",
                "bookmark": True,
                "tags": ["liked"],
                "chapter_id": "c1",
                "children": [{"id": "aa", "text": " a time", "children": []}],
            },
            {"id": "b", "text": " more", "children": [], "meta": {"source": "AI"}},
        ],
    },
    "chapters": {"c1": {"title": "One"}},
    "memories": {},
    "selected_node_id": "aa",
}


def _sidian_nodes() -> dict[str, Any]:
    return {
        "u-1": {"text": "Once", "parentId": None, "unread": False, "lastVisited": 17},
        "u-2": {"text": " upon", "parentId": "u-1", "bookmarked": True, "collapsed": True},
        "u-4": {"text": " a time", "parentId": "u-2", "author": "genai"},
        "u-3": {"text": " more", "parentId": "u-1"},
    }


LOOMSIDIAN = {
    "openaiApiKey": "sk-not-to-be-kept",
    "state": {"notes/fox.md": {"current": "u-4", "hoisted": ["u-2"], "nodes": _sidian_nodes()}},
}
BASEMODE = {
    "version": 1,
    "nodes": [
        {"id": "r", "parent_id": None, "root_id": "r", "text": "Once", "metadata": {}},
        {
            "id": "a",
            "parent_id": "r",
            "root_id": "r",
            "text": " upon",
            "model": "base",
            "metadata": {"bookmarked": True, "rating": 4},
        },
        {"id": "aa", "parent_id": "a", "root_id": "r", "text": " a time", "metadata": {}},
        {"id": "b", "parent_id": "r", "root_id": "r", "text": " more", "metadata": {}},
    ],
}


def _mapped(parent: str | None, children: list[str], role: str, text: str) -> dict[str, Any]:
    message = {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}}
    return {"parent": parent, "children": children, "message": message}


CONVERSATION = {
    "title": "Fox",
    "current_node": "aa",
    "mapping": {
        "top": {"parent": None, "children": ["s"], "message": None},
        "s": _mapped("top", ["r"], "system", ""),
        "r": _mapped("s", ["a", "b"], "user", "Once"),
        "b": _mapped("r", [], "assistant", " more"),
        "a": _mapped("r", ["aa"], "assistant", " upon"),
        "aa": _mapped("a", [], "user", " a time"),
    },
}
CHAT = [
    {
        "messages": [
            {"role": "user", "content": "Once"},
            {"role": "assistant", "content": " upon"},
            {"role": "user", "content": [{"type": "text", "text": " a time"}]},
        ]
    },
    {"messages": [{"role": "user", "content": "Once"}, {"role": "assistant", "content": " more"}]},
]

# The plugin's Export writes the state of one note: `NoteState` in its common.ts (MIT).
LOOMSIDIAN_NOTE = {
    "current": "u-4",
    "hoisted": ["u-2"],
    "searchTerm": "",
    "nodes": _sidian_nodes(),
    "generating": None,
}


def _webui(parent: str | None, children: list[str], role: str, text: str) -> dict[str, Any]:
    return {"parentId": parent, "childrenIds": children, "role": role, "content": text}


# Open WebUI's "Export chat" as the design notes of a chat converter describe it: a list of records
# whose `chat` has a `history` of messages by id.
OPEN_WEBUI = [
    {
        "id": "c-1",
        "user_id": "u",
        "title": "Fox",
        "chat": {
            "title": "Fox",
            "models": ["llama"],
            "history": {
                "currentId": "aa",
                "messages": {
                    "r": _webui(None, ["a", "b"], "user", "Once"),
                    "b": _webui("r", [], "assistant", " more"),
                    "a": {**_webui("r", ["aa"], "assistant", " upon"), "model": "llama"},
                    "aa": _webui("a", [], "user", " a time"),
                },
            },
            "messages": [],
            "tags": ["story"],
        },
        "updated_at": 1787938848,
    }
]
# Lines of a SillyTavern chat, after public descriptions of the format and samples in the tests of
# programs that read it: a header, then a message a line, alternatives in `swipes`.
SILLYTAVERN = [
    {
        "user_name": "You",
        "character_name": "Fox",
        "create_date": "2026-10-05 @09h 30m 00s",
        "chat_metadata": {"integrity": "x", "tags": ["story"]},
    },
    {"name": "You", "is_user": True, "is_system": False, "send_date": "a", "mes": "Once"},
    {
        "name": "Fox",
        "is_user": False,
        "is_system": False,
        "send_date": "b",
        "mes": " upon",
        "swipe_id": 0,
        "swipes": [" upon", " more"],
        "swipe_info": [{"gen_started": "a"}, {}],
        "extra": {"model": "llama"},
    },
    {"name": "You", "is_user": True, "is_system": False, "send_date": "c", "mes": " a time"},
]
# A history of text-generation-webui, as the description of its pull request 7004 prints one.
TEXTGEN = {
    "internal": [["Once", " upon"], [" a time", ""]],
    "visible": [["Once", " upon"], [" a time", ""]],
    "metadata": {
        "user_0": {"timestamp": "May 20, 2025 14:30"},
        "assistant_0": {
            "timestamp": "May 20, 2025 14:31",
            "versions": [
                {"content": " upon", "visible_content": " upon", "timestamp": "a"},
                {"content": " more", "visible_content": " more", "timestamp": "b"},
            ],
            "current_version_index": 0,
        },
    },
}
# A session of mikupad: its pieces, and fields that its README names (memory, author's note). The
# spelling of the fields is that of sessions in the tests of programs that read them.
MIKUPAD = {
    "name": "Fox",
    "prompt": [
        {"type": "user", "content": "Once"},
        {"content": " upon", "prob": 0.5, "completion_probabilities": [{"content": " upon"}]},
        {"content": " a time"},
        {"type": "user", "content": " there"},
    ],
    "memoryTokens": {"contextOrder": "{memText}{prompt}", "prefix": "", "text": "A", "suffix": ""},
    "authorNoteTokens": {"prefix": "[", "text": "Write short.", "suffix": "]"},
    "authorNoteDepth": 3,
    "contextLength": 8192,
    "endpointAPIKey": "sk-not-to-be-kept",
}

# By the name that it is recognised as.
FILES: dict[str, Any] = {
    "n8loom": N8LOOM,
    "nested": NESTED,
    "python-loom": PYTHON_LOOM,
    "loomsidian": LOOMSIDIAN,
    "basemode": BASEMODE,
    "conversations": CONVERSATION,
    "chat": CHAT,
    "open-webui": OPEN_WEBUI,
    "sillytavern": SILLYTAVERN,
    "textgen": TEXTGEN,
}
CHATS = ("conversations", "chat", "open-webui", "sillytavern", "textgen")  # with roles
