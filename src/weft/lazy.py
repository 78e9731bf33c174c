"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`.

    homes: the names that it has, by the module of the package they stand in; by "", modules
    themselves. Type checkers and editors do not see them: import them once more where only those
    look.
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = import_module(f".{modules[name] or name}", package)
        value = getattr(found, name) if modules[name] else found
        setattr(sys.modules[package], name, value)  # it is looked up once
        return value

    return get
