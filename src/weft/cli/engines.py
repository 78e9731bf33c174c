"""The engines of `weft doctor`: which are here, what the others need, and what each can do."""

from __future__ import annotations

from importlib.metadata import packages_distributions
from importlib.util import find_spec
from typing import Any

from ..engines import engine_class, install_hint, plugins
from ..engines.capabilities import OWN, ROWS, cells
from ..errors import EngineUnavailable
from ..viz.terminal import TerminalWriter
from . import start_screen

# Too long for a table's cells.
_IN_WORDS = ("fork", "grammar", "devices", "families", "quantised", "several_gpus")


_ASKED = ("llamacpp",)  # for their back ends: built for several kinds, and quick to import


def versions(name: str) -> dict[str, str] | None:
    """Return the versions of an engine's packages; None where one is not there. Imports none."""
    packages = OWN[name].packages
    if any(find_spec(package) is None for package in packages):
        return None
    found = packages_distributions()
    return {each: start_screen.installed(found.get(each, [each])[0]) for each in packages}


def backends(name: str) -> str:
    """Return what an engine's installed library runs on; "" where nobody asks."""
    if name not in _ASKED or versions(name) is None:
        return ""
    try:
        return engine_class(name).backends()
    except Exception as error:  # a library that is there and broken
        return f"cannot be loaded: {error}"


def engines_object() -> dict[str, Any]:
    """Return what is here for --json: an engine's packages, or None, and what it can do."""
    return {
        name: {
            "packages": versions(name),
            "backends": backends(name) or None,
            **{field: getattr(capabilities, field) for _, field in ROWS},
        }
        for name, capabilities in OWN.items()
    }


def plugin_problems() -> dict[str, str | None]:
    """Return the engines of other packages, each with what is wrong with it."""
    found: dict[str, str | None] = {}
    for name in plugins():
        try:
            engine_class(name)
            found[name] = None
        except EngineUnavailable as error:
            found[name] = str(error)
    return found


def show(out: TerminalWriter) -> None:
    """Write a line an engine, and the table of what they can do."""
    title = "engines"
    for name, capabilities in OWN.items():
        there = versions(name)
        if there is None:
            need = install_hint(name)
            _line(out, title, ("- ", "yellow"), f"{name}: {capabilities.takes}; {need}")
        else:
            which = ", ".join(f"{package} {version}" for package, version in there.items())
            _line(out, title, ("✓ ", "green"), f"{name}: {capabilities.takes} ({which})")
            if found := backends(name):
                _line(out, "", f"  its back ends: {found}")
        title = ""
    for name, problem in plugin_problems().items():
        mark = ("- ", "yellow") if problem else ("✓ ", "green")
        _line(out, "", mark, problem or f"{name}, of another package: --engine {name}")
    for at, line in enumerate(table()):
        _line(out, "can" if not at else "", line)
    width = max(map(len, OWN))
    for name, capabilities in OWN.items():
        said = [f"{title}: {words}" for title, field in ROWS if field in _IN_WORDS
                if (words := cells(field, {name: capabilities})[0])]  # fmt: skip
        out.block(f"{'':<9}{name:<{width}}", " · ".join(said))


def table() -> list[str]:
    """Return the table as lines, an engine a column, without what is said in words."""
    short = [row for row in ROWS if row[1] not in _IN_WORDS]
    first = max(len(title) for title, _ in short)
    widths = [
        max(len(name), *(len(cells(field, {name: each})[0]) for _, field in short))
        for name, each in OWN.items()
    ]
    lines = [_row("", list(OWN), first, widths)]
    return lines + [_row(title, cells(field, OWN), first, widths) for title, field in short]


def _row(title: str, found: list[str], first: int, widths: list[int]) -> str:
    padded = [f"{cell:<{width}}" for cell, width in zip(found, widths, strict=True)]
    return f"{title:<{first}}  {' '.join(padded)}".rstrip()


def _line(out: TerminalWriter, title: str, *parts: str | tuple[str, str]) -> None:
    out.line((f"{title:<9}", "bold"), *parts)
