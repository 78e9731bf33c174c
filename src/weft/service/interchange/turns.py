"""A path as the turns of a chat; chat messages as JSON, a line a path."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ...loom import Heddle, Loom
from ...loom.loom import MESSAGES
from .scope import Scope
from .selection import Selection
from .user_text import user_text_of

ROLE = "role"  # in a node's meta: whose message of a chat its text is
# Of an imported message, what stands beside role and content and belongs to it.
MESSAGE_FIELDS = ("name", "tool_calls", "tool_call_id")

Message = dict[str, Any]


def messages_of(path: Sequence[Heddle]) -> list[Message]:
    """Return a path, from the root on, as chat messages.

    What is said at a node with a role is a message of its own; other text is the assistant's, and a
    prompt without a chat template the user's.
    """
    found = _prompt_messages(path[0])
    for node in path[1:]:
        user_text, role = user_text_of(node), node.meta.get(ROLE)
        if user_text is not None:
            found.append({"role": "user", "content": user_text})
        elif isinstance(role, str):
            found.append(_message(node, role))
        elif found and found[-1]["role"] == "assistant":
            found[-1] = {**found[-1], "content": (found[-1]["content"] or "") + node.text}
        else:
            found.append({"role": "assistant", "content": node.text})
    return found


def _prompt_messages(root: Heddle) -> list[Message]:
    role = root.meta.get(ROLE)
    if isinstance(role, str):
        return [_message(root, role)]
    if isinstance(root, Loom) and root.chat_template_used:
        noted = root.meta.get(MESSAGES)
        return list(noted) if noted else [{"role": "user", "content": root.user_prompt}]
    # As it was typed: a model's begin token is no part of what somebody says.
    text = (root.user_prompt if isinstance(root, Loom) else "") or root.text
    return [{"role": "user", "content": text}] if text else []


def _message(node: Heddle, role: str) -> Message:
    imported = node.meta.get("imported")
    fields = imported if isinstance(imported, dict) else {}
    more = {name: fields[name] for name in MESSAGE_FIELDS if name in fields}
    content = None if not node.text and "tool_calls" in more else node.text
    return {"role": role, "content": content, **more}


def path_ends(part: Selection) -> list[Heddle]:
    """Return where the paths of a part end: its node, or the leaves below it, in order."""
    return [part.node] if part.scope is Scope.PATH else part.node.leaves


def message_lines(part: Selection) -> Iterator[str]:
    """Yield a JSON object a path: {"messages": […]}. Paths that say the same are one line."""
    seen = set()
    for end in path_ends(part):
        line = json.dumps({"messages": messages_of(end.path)}, ensure_ascii=False)
        if line not in seen:
            seen.add(line)
            yield line + "\n"
