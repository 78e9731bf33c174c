"""`install`: programs that import genlm-backend run on Weft without changes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType

from ...errors import ConfigError

PACKAGE = "genlm.backend"
_HERE = __name__.rpartition(".")[0]
# Module of genlm-backend → Weft's module with its names. Its packages map to this package.
MODULES = {
    PACKAGE: _HERE,
    **{f"{PACKAGE}.{name}": _HERE for name in ("llm", "tokenization", "trie")},
    **{f"{PACKAGE}.llm.{name}": _HERE for name in ("base", "hf", "vllm")},
    f"{PACKAGE}.llm.mlx": f"{_HERE}.mlx",
    **{f"{PACKAGE}.tokenization.{name}": f"{_HERE}.vocab" for name in ("bytes", "token", "vocab")},
    **{f"{PACKAGE}.trie.{name}": f"{_HERE}.tries" for name in ("async_impl", "base", "parallel")},
    f"{PACKAGE}.cache": f"{_HERE}.cache",
}
# Packages that bind names of genlm-backend when they are imported.
CLIENTS = ("genlm.control", "genlm.bytes")


def install(*, replace: bool = False) -> None:
    """Replace genlm-backend: `import genlm.backend` returns Weft's modules in this process.

    genlm-control, genlm-bytes and other programs then run on Weft without a change to them. Call it
    before importing these. Further calls do nothing.

    Args:
        replace: hide an installed genlm-backend in this process.

    Raises: ConfigError if genlm-backend is installed and `replace` is False, or if it or a client
    of it has been imported already.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    bound = [name for name in (*CLIENTS, PACKAGE) if name in sys.modules]
    if bound:
        raise ConfigError(
            f"{bound[0]} is imported already, with genlm-backend's own names; call"
            " weft.compat.genlm.install() before that"
        )
    has_genlm = find_spec("genlm") is not None
    if not replace and has_genlm and find_spec(PACKAGE) is not None:
        raise ConfigError(
            "genlm-backend is installed, and would be hidden; install(replace=True) does so in"
            " this process"
        )
    if not has_genlm:  # a namespace package without a folder
        sys.modules["genlm"] = ModuleType("genlm")
        sys.modules["genlm"].__path__ = []
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Import finder for genlm-backend's module names; Python asks it before searching sys.path."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec if the module is one of `MODULES`, else None."""
        return spec_from_loader(fullname, _Alias()) if fullname in MODULES else None


class _Alias(Loader):
    """Import loader that puts Weft's module into sys.modules under genlm-backend's name."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the new, empty module in sys.modules by Weft's module."""
        # An import returns the entry of sys.modules after loading.
        sys.modules[module.__name__] = import_module(MODULES[module.__name__])
