"""Lazy package attributes (PEP 562): submodules are imported when a name is first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_getattr(package: str, exports: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports its submodules on first use.

    Type checkers and editors do not see these names: repeat them under `if TYPE_CHECKING`.

    Args:
        package: the package's `__name__`.
        exports: submodule → the names it exports, separated by spaces. The key "" lists submodules
            that are exported themselves.
    """
    module_of = {name: module for module, names in exports.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            from .remedies import unknown_name  # needed for errors only

            raise AttributeError(unknown_name(package, name))
        module = import_module(f".{module_of[name] or name}", package)
        value = getattr(module, name) if module_of[name] else module
        setattr(sys.modules[package], name, value)  # later uses do not call __getattr__
        return value

    return get
