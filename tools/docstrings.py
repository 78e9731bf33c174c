"""Reads the house's docstrings for the site: `a, b: …` under Args stands for two arguments."""

from __future__ import annotations

import re
from typing import Any

import griffe

_GROUP = re.compile(r"^(\s*)(\w+)((?:, \w+)+): (.*)$")


class Grouped(griffe.Extension):
    """Gives each argument of a group an entry of its own; the later ones point to the first."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object before anything parses it."""
        if obj.docstring is not None:
            obj.docstring.value = ungrouped(obj.docstring.value)


def ungrouped(docstring: str) -> str:
    """Return the docstring with the groups of its Args section taken apart."""
    lines: list[str] = []
    waiting: list[str] = []
    inside, depth = False, 0
    for line in docstring.splitlines():
        indent = len(line) - len(line.lstrip())
        if waiting and indent <= depth:
            lines += waiting
            waiting = []
        if not line.startswith(" ") and line.strip():
            inside = line.strip() == "Args:"
        match = _GROUP.match(line) if inside else None
        if match:
            first, others = match[2], match[3].split(", ")[1:]
            depth = indent
            line = f"{match[1]}{first}: {match[4]}"
            waiting = [f"{match[1]}{other}: see `{first}`." for other in others]
        lines.append(line)
    return "\n".join(lines + waiting)
