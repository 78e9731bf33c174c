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
EXOLOOM = {
    "loomType": "Exoloom",
    "schemaVersion": 1,
    "tree": {
        "title": "Fox",
        "rootNodeId": "r",
        "nodes": {
            "b": {"content": " more", "authorType": "human", "parentId": "r", "childrenIds": []},
            "r": {"content": "Once", "parentId": None, "childrenIds": ["a", "b"]},
            "a": {
                "content": " upon",
                "authorType": "model",
                "authorName": "base",
                "parentId": "r",
                "childrenIds": ["aa"],
            },
            "aa": {"content": " a time", "parentId": "a", "childrenIds": []},
        },
    },
    "lens": {"bookmarks": ["a"], "prunedNodes": ["b"]},
}
MINIHF = {
    "loomTree": {
        "nodeStore": {
            "1": {"id": "1", "parent": None, "type": "root", "patch": None, "timestamp": 1},
            "2": {"id": "2", "parent": "1", "type": "user", "patch": [{"diffs": [[1, "Once"]]}]},
            "3": {
                "id": "3",
                "parent": "2",
                "type": "base",
                "patch": [{"diffs": [[0, "Once"], [1, " upon"]], "start1": 0}],
                "rating": 1,
            },
            "4": {"id": "4", "parent": "3", "patch": [{"diffs": [[0, "upon"], [1, " a time"]]}]},
            "5": {"id": "5", "parent": "2", "patch": [{"diffs": [[0, "Once"], [1, " more"]]}]},
        }
    }
}
TINYLOOM = {
    "root": 1,
    "nodes": {
        "1": {"id": 1, "parent": None, "type": "root", "text": "Once", "children": [2, 4]},
        "2": {"id": 2, "parent": 1, "patches": [{"diffs": [[0, "Once"], [1, " upon"]]}]},
        "3": {"id": 3, "parent": 2, "patches": [{"diffs": [[1, " a time"]]}], "bookmarked": True},
        "4": {"id": 4, "parent": 1, "patches": [{"diffs": [[1, " more"]]}], "hidden": False},
    },
}
BONSAI = {
    "nodes": [
        {"id": "r", "parentIds": [], "text": "Once", "createdAt": "now"},
        {"id": "a", "parentIds": ["r"], "text": "Once upon", "model": "base"},
        {"id": "aa", "parentIds": ["a"], "text": "Once upon a time"},
        {"id": "b", "parentIds": ["r", "a"], "text": "Once more"},
    ]
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
LOGITLOOM = {
    "isLogitLoomTreeVersion": "logit-loom-tree-v1",
    "modelName": "base",
    "modelSettings": {"apiKey": "sk-not-to-be-kept", "baseUrl": "http://localhost"},
    "roots": [
        {
            "text": "Once",
            "logprob": -0.5,
            "children": [
                {"text": " upon", "logprob": -0.1, "children": [{"text": " a time"}]},
                {"text": " more", "logprob": -2.5, "children": []},
            ],
        }
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
    "exoloom": EXOLOOM,
    "minihf": MINIHF,
    "tinyloom": TINYLOOM,
    "bonsai": BONSAI,
    "basemode": BASEMODE,
    "logitloom": LOGITLOOM,
    "conversations": CONVERSATION,
    "chat": CHAT,
}
