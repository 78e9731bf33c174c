"""The API pages document every public name, and have examples with their output."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = [
    "weft",
    "weft.asynclm",
    "weft.branch",
    "weft.compat.genlm",
    "weft.compat.n8loom",
    "weft.constraints",
    "weft.loom",
    "weft.rollouts",
    "weft.search",
    "weft.service.client",
    "weft.service.interchange",
    "weft.service.scale",
    "weft.service.server",
    "weft.service.store",
    "weft.viz",
]
# `::: name` and its options.
DIRECTIVE = re.compile(r"^::: (\S+)\n((?:    .*\n)*)", re.MULTILINE)
MEMBERS = re.compile(r"members:((?:\n\s+- \w+)+| \[[^\]]+\])")


NEED_RAY = {"weft.service.scale.app"}


def documented_names() -> set[str]:
    """Return the full names on the API pages. A module without a list has all its definitions."""
    names = set()
    for page in (DOCS / "api").glob("*.md"):
        for name, options in DIRECTIVE.findall(page.read_text(encoding="utf-8") + "\n"):
            names.add(name)
            if members := MEMBERS.search(options):
                names |= {f"{name}.{member}" for member in re.findall(r"\w+", members[1])}
            elif name not in NEED_RAY and isinstance(pkgutil.resolve_name(name), ModuleType):
                names |= {f"{name}.{member}" for member in definitions(name)}
    return names


def definitions(module: str) -> list[str]:
    values = vars(pkgutil.resolve_name(module))
    return [name for name in values if getattr(values[name], "__module__", "") == module]


def test_every_name_on_an_api_page_exists() -> None:
    for name in documented_names() - NEED_RAY:
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_of_a_package_is_on_an_api_page(package: str) -> None:
    """A name counts under any path that leads to its object; errors are on their own page."""
    names = documented_names()
    objects = {id(pkgutil.resolve_name(name)) for name in names - NEED_RAY}
    errors = (DOCS / "errors.md").read_text(encoding="utf-8")
    public = pkgutil.resolve_name(package)
    missing = [
        name
        for name in public.__all__
        if f"{package}.{name}" not in names
        and id(getattr(public, name)) not in objects
        and not re.search(rf"^\W+{name}\b", errors, re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("page", sorted((DOCS / "api").glob("*.md")), ids=lambda page: page.stem)
def test_api_page_has_an_example_with_its_output(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.search(r"^```python\n[^`]+```\n\n```text\n.+\n", text, re.MULTILINE)


def functions(value: object, name: str) -> Iterator[tuple[str, Any]]:
    """Yield a public function, or the public methods and properties of a class, with names."""
    members = vars(value) if inspect.isclass(value) else {}
    for path, member in {name: value, **{f"{name}.{key}": members[key] for key in members}}.items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        if inspect.isfunction(function) and not path.rpartition(".")[2].startswith("_"):
            yield path, function


def test_every_documented_function_and_method_has_a_docstring() -> None:
    """The site leaves out a member without one; a docstring of a base class does not count."""
    missing = [
        path
        for name in sorted(documented_names() - NEED_RAY)
        for path, function in functions(pkgutil.resolve_name(name), name)
        if not function.__doc__
    ]
    assert missing == []
