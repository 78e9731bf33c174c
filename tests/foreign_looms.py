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

# By the name that it is recognised as.
FILES: dict[str, Any] = {
    "n8loom": N8LOOM,
    "nested": NESTED,
    "python-loom": PYTHON_LOOM,
    "loomsidian": LOOMSIDIAN,
    "basemode": BASEMODE,
    "conversations": CONVERSATION,
    "chat": CHAT,
}
