"""The keys of the page, read from the one table that its listener, help and palette read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).parents[1] / "page" / "src" / "state" / "keys.ts"
BEGIN, END = "<!-- keys -->\n", "<!-- end of keys -->\n"
_LIST = r"\[((?:'[^']*'(?:, )?)*)\]"
_ROW = re.compile(
    r"\{ id: '([^']+)', group: '(\w+)', label: '([^']+)'"
    rf"(?:, tree: {_LIST})?(?:, text: {_LIST})?"
)
_KEY = re.compile(r"'([^']+)'")
_SHOWN = {
    "Mod": "Ctrl",
    "ArrowLeft": "←",
    "ArrowRight": "→",
    "ArrowUp": "↑",
    "ArrowDown": "↓",
    "Escape": "Esc",
    "Delete": "Del",
    "ContextMenu": "Menu",
}


class PageKey(NamedTuple):
    """A command of the page. tree, text: its keys in the tree, and in text fields."""

    id: str
    group: str
    label: str
    tree: list[str]
    text: list[str]


def page_keys() -> list[PageKey]:
    """Return the commands of the page, in the order of its table."""
    rows = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if (match := _ROW.search(line)) is not None:
            name, group, label, tree, text = match.groups(default="")
            rows.append(PageKey(name, group, label, _KEY.findall(tree), _KEY.findall(text)))
    return rows


def keys_table() -> str:
    """Return the table of keys in Markdown; commands without keys are in the palette alone."""
    lines = ["| what | in the tree | where you type |", "| --- | --- | --- |"]
    group = ""
    for row in page_keys():
        if not (row.tree or row.text):
            continue
        if row.group != group:
            group = row.group
            lines.append(f"| **{group}** | | |")
        lines.append(f"| {row.label} | {_shown(row.tree)} | {_shown(row.text)} |")
    return "\n".join(lines) + "\n"


def with_keys(page: str) -> str:
    """Return a page with the table between its marks as it is now."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{keys_table()}\n{END}{tail}"


def _shown(keys: list[str]) -> str:
    return " or ".join(map(_key, keys))


def _key(key: str) -> str:
    if len(key) == 1 and key.isupper():
        return f"`Shift+{key}`"
    parts = [key] if len(key) == 1 else [part for part in key.split("+") if part]
    named = [
        _SHOWN.get(part, part.upper() if len(part) == 1 and len(parts) > 1 else part)
        for part in parts
    ]
    text = "+".join(named)
    return f"`` {text} ``" if "`" in text else f"`{text}`".replace("|", "\\|")
