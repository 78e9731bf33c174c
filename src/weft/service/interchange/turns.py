"""A path as chat messages, and as a JSON line per path."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ...loom import Heddle, Loom
from ...loom.loom import MESSAGES
from .scope import Scope
from .selection import Selection
from .user_text import user_text_of

ROLE = "role"  # key in a node's meta: the role of a chat message
# Further fields of an imported message.
MESSAGE_FIELDS = ("name", "tool_calls", "tool_call_id")

Message = dict[str, Any]


def messages_of(path: Sequence[Heddle]) -> list[Message]:
    """Return a path as chat messages: dicts with "role" and "content".

    path: the nodes from the root on.

    A node with a role, or with a user text, is a message of its own. Other text belongs to the
    assistant, and a prompt without a chat template to the user.
    """
    messages = _prompt_messages(path[0])
    for node in path[1:]:
        user_text, role = user_text_of(node), node.meta.get(ROLE)
        if user_text is not None:
            messages.append(_message(node, role or "user", user_text))
        elif isinstance(role, str):
            messages.append(_message(node, role, node.text))
        elif messages and messages[-1]["role"] == "assistant":
            messages[-1] = {**messages[-1], "content": (messages[-1]["content"] or "") + node.text}
        elif node.text:
            messages.append({"role": "assistant", "content": node.text})
    return messages


def _prompt_messages(root: Heddle) -> list[Message]:
    role = root.meta.get(ROLE)
    if isinstance(role, str):
        return [_message(root, role, root.text)]
    if isinstance(root, Loom) and root.chat_template_used:
        noted = root.meta.get(MESSAGES)
        return list(noted) if noted is not None else [{"role": "user", "content": root.user_prompt}]
    # The user's text, without the model's BOS token.
    text = (root.user_prompt if isinstance(root, Loom) else "") or root.text
    return [{"role": "user", "content": text}] if text else []


def _message(node: Heddle, role: str, text: str) -> Message:
    imported = node.meta.get("imported")
    fields = imported if isinstance(imported, dict) else {}
    more = {name: fields[name] for name in MESSAGE_FIELDS if name in fields}
    content = None if not text and "tool_calls" in more else text
    return {"role": role, "content": content, **more}


def path_ends(part: Selection) -> list[Heddle]:
    """Return the last nodes of the paths in a selection, in order.

    These are its node for a path, else the leaves.
    """
    return [part.node] if part.scope is Scope.PATH else part.node.leaves


def message_lines(part: Selection) -> Iterator[str]:
    """Yield JSON lines, {"messages": […]} for each path. Equal paths give one line."""
    lines = set()
    for end in path_ends(part):
        line = json.dumps({"messages": messages_of(end.path)}, ensure_ascii=False)
        if line not in lines:
            lines.add(line)
            yield line + "\n"
