"""A part of a loom as plain text and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...loom import Heddle
from ...viz.text import draw, group_equal_leaves, node_label
from .scope import Scope
from .selection import Selection
from .turns import ROLE, messages_of
from .user_text import joined_text

_INDENT = 10  # maximum number of indented levels of a list, to limit its width


def text_lines(part: Selection) -> Iterator[str]:
    """Yield the text of a path; for other scopes, the lines of a drawing of the tree."""
    if part.scope is Scope.PATH:
        yield path_text(part).rstrip("\n") + "\n"
        return
    yield from (f"{line}\n" for line in draw(part.loom, node=node_label))


def path_text(part: Selection) -> str:
    """Return the texts from the root to `part.node` as one readable text, for the "text" export.

    If the prompt used a chat template, it is a separate paragraph that starts with "> ". If nodes
    have chat roles, the text is a list of messages with their roles.
    """
    loom, path = part.loom, part.node.path
    if any(ROLE in node.meta for node in path):
        return "\n\n".join(f"{m['role']}: {m['content'] or ''}" for m in messages_of(path))
    if not loom.chat_template_used:
        return (loom.user_prompt or loom.text) + joined_text(path[1:])
    return f"> {loom.user_prompt}\n\n{joined_text(path[1:]).lstrip()}"


def markdown_file(part: Selection, *, name: str = "") -> Iterator[str]:
    """Yield the text of a Markdown file in one piece: YAML front matter, then path or tree.

    The front matter has the model and the seeds. A tree is a nested list. The prompt of a chat is
    a block quote; other prompts and their continuations are one text.

    name: the loom's name, which the front matter contains; "" for none.
    """
    lines = [*_front_matter(part, name), ""]
    if part.scope is Scope.PATH:
        lines += _path_rows(part)
    else:
        lines += markdown_list(part.loom)
    yield "\n".join(lines).rstrip() + "\n"


def _front_matter(part: Selection, name: str) -> list[str]:
    loom = part.loom
    all_seeds = [each.params.seed for each in loom.walk() if each.params is not None]
    seeds = sorted({seed for seed in all_seeds if seed is not None})
    lines = ["---", *([f"loom: {_scalar(name)}"] if name else []), f"model: {_scalar(model(loom))}"]
    if seeds:
        lines.append(f"seeds: [{', '.join(map(str, seeds))}]")
    return [*lines, f"created: {loom.created}", "---"]


def model(root: Heddle) -> str:
    """Return the name of a loom's model, without the path of its folder."""
    noted = root.meta.get("model")
    if not isinstance(noted, str) or not noted:
        noted = root.saved_by.name if root.lm is None else root.lm.info.model  # type: ignore[attr-defined]
    return Path(noted).name if Path(noted).is_absolute() else noted


def _scalar(text: str) -> str:
    """Return a text as a YAML scalar, quoted if necessary."""
    plain = all(c.isalnum() or c in "-_./@+ " for c in text) and text[:1].isalnum()
    return text if plain and text == text.strip() else json_text(text)


def json_text(text: str) -> str:
    """Return a text in double quotes, valid in JSON and YAML."""
    import json

    return json.dumps(text, ensure_ascii=False)


def _path_rows(part: Selection) -> list[str]:
    path = part.node.path
    if any(ROLE in node.meta for node in path):
        messages = ((m["role"], m["content"] or "") for m in messages_of(path))
        return [row for role, content in messages for row in (f"**{role}**", "", content, "")]
    if not part.loom.chat_template_used:
        return [path_text(part).strip("\n")]
    prompt = part.loom.user_prompt.split("\n")
    return [*(f"> {row}".rstrip() for row in prompt), "", joined_text(path[1:]).strip("\n")]


def markdown_list(root: Heddle) -> list[str]:
    """Return the lines of a tree as a nested Markdown list.

    Leaves of one node with equal texts are one item, with ×n for their number.
    """
    lines: list[str] = []
    stack = [([root], 0)]
    while stack:
        equal, depth = stack.pop()
        indent = "  " * min(depth, _INDENT)
        rows = escape_markdown(node_label(equal[0]).strip()).split("\n")
        rows[-1] += f" (×{len(equal)})" if len(equal) > 1 else ""
        lines += [f"{indent}- {rows[0]}", *(f"{indent}  {row}" for row in rows[1:])]
        below = group_equal_leaves(equal[0].children, node_label, None)
        stack += [(each, depth + 1) for each in reversed(below)]
    return lines


def escape_markdown(text: str) -> str:
    """Return the text escaped for an item of a Markdown list."""
    rows = []
    for row in text.split("\n"):
        marked = "".join(f"\\{c}" if c in "\\`*_[]<>#|" else c for c in row)
        rows.append(f"\\{marked}" if marked[:1] in ("-", "+") else marked)
    return "\n".join(rows)
