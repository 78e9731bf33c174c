"""The engine report of `weft doctor`: installed engines, missing packages, capabilities."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from typing import Any

from .._core.installation import install_hint
from ..engines import engine_class, plugins
from ..engines.capabilities import OWN, ROWS, cells
from ..errors import EngineUnavailable
from ..viz.terminal import TerminalWriter
from . import start_screen

# Capabilities that are too long for a table cell.
_LONG_CAPABILITIES = ("fork", "grammar", "devices", "families", "quantised", "several_gpus")


_WITH_BACKENDS = ("llamacpp",)  # built for several back ends, and quick to import


def versions(name: str) -> dict[str, str] | None:
    """Return the versions of the packages that an engine needs, by package name.

    Returns None if a package is missing. Imports none of the packages.
    """
    packages = OWN[name].packages
    if any(find_spec(package) is None for package in packages):
        return None
    return {each: start_screen.installed(_distribution(each)) for each in packages}


@cache
def _distributions() -> Mapping[str, list[str]]:
    """Read which distributions install each package. Cost: reads a file of every distribution."""
    return packages_distributions()


def _distribution(package: str) -> str:
    """Return the name of the distribution of an installed package."""
    return _distributions().get(package, [package])[0]


def backends(name: str) -> str:
    """Return the hardware back ends of an engine's library, such as CUDA, as text.

    Returns "" for engines whose library has only one.
    """
    if name not in _WITH_BACKENDS or versions(name) is None:
        return ""
    try:
        return engine_class(name).backends()
    except Exception as error:  # the library is installed but broken
        return f"cannot be loaded: {error}"


def engines_object() -> dict[str, Any]:
    """Return each engine's packages and capabilities, for `weft doctor --json`.

    The packages are None if one of them is missing.
    """
    return {
        name: {
            "packages": versions(name),
            "backends": backends(name) or None,
            **{field: getattr(capabilities, field) for _, field in ROWS},
        }
        for name, capabilities in OWN.items()
    }


def plugin_problems() -> dict[str, str | None]:
    """Return the engines that plugins add, by name, with their import error.

    The error is None for an engine that can be imported.
    """
    problems: dict[str, str | None] = {}
    for name in plugins():
        try:
            engine_class(name)
            problems[name] = None
        except EngineUnavailable as error:
            problems[name] = str(error)
    return problems


def show(out: TerminalWriter) -> None:
    """Write one line for each engine, and the table of capabilities."""
    title = "engines"
    for name, capabilities in OWN.items():
        packages = versions(name)
        if packages is None:
            need = install_hint(name)
            _line(out, title, ("- ", "yellow"), f"{name}: {capabilities.takes}; {need}")
        else:
            which = ", ".join(f"{package} {version}" for package, version in packages.items())
            _line(out, title, ("✓ ", "green"), f"{name}: {capabilities.takes} ({which})")
            if names := backends(name):
                _line(out, "", f"  its back ends: {names}")
        title = ""
    for name, problem in plugin_problems().items():
        mark = ("- ", "yellow") if problem else ("✓ ", "green")
        _line(out, "", mark, problem or f"{name}, of another package: --engine {name}")
    for index, line in enumerate(table()):
        _line(out, "can" if not index else "", line)
    width = max(map(len, OWN))
    for name, capabilities in OWN.items():
        facts = [f"{title}: {words}" for title, field in ROWS if field in _LONG_CAPABILITIES
                if (words := cells(field, {name: capabilities})[0])]  # fmt: skip
        out.block(f"{'':<9}{name:<{width}}", " · ".join(facts))


def table() -> list[str]:
    """Return the table of capabilities as lines, with one column for each engine.

    Capabilities with long values are left out.
    """
    short = [row for row in ROWS if row[1] not in _LONG_CAPABILITIES]
    first = max(len(title) for title, _ in short)
    widths = [
        max(len(name), *(len(cells(field, {name: each})[0]) for _, field in short))
        for name, each in OWN.items()
    ]
    lines = [_row("", list(OWN), first, widths)]
    return lines + [_row(title, cells(field, OWN), first, widths) for title, field in short]


def _row(title: str, row_cells: list[str], first: int, widths: list[int]) -> str:
    """Return one line of the table. first: width of the first column."""
    padded = [f"{cell:<{width}}" for cell, width in zip(row_cells, widths, strict=True)]
    return f"{title:<{first}}  {' '.join(padded)}".rstrip()


def _line(out: TerminalWriter, title: str, *parts: str | tuple[str, str]) -> None:
    """Write one line about an engine. parts: text or (text, style)."""
    out.line((f"{title:<9}", "bold"), *parts)
