"""Names that are loaded when first used: a package's own, and doors to what is built above.

A handle has methods for what lies above it: a tree draws and saves itself, a result shows itself in
a notebook, an LM loads a model. Such a method calls up by a name of the table `DOORS` and by
nothing else (`doors.show(node)` in a node calls `viz.text.show`), so no package imports one that
imports it, not even inside a function (`python -m tools.house --check`), and who replaces a drawing
or a format finds here all that calls it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..compat.genlm import BACKENDS as BACKENDS
    from ..loading import load as load
    from ..loom.generate import agenerate as agenerate
    from ..loom.generate import generate as generate
    from ..service.store import file
    from ..service.store.file import NO_MODEL as NO_MODEL
    from ..viz.graph import to_dot as to_dot
    from ..viz.graph import to_mermaid as to_mermaid
    from ..viz.html import to_html as to_html
    from ..viz.live import watch as watch
    from ..viz.notebook import branches_card as branches_card
    from ..viz.notebook import distribution_card as distribution_card
    from ..viz.notebook import plain as plain
    from ..viz.notebook import stats_card as stats_card
    from ..viz.notebook import text_score_card as text_score_card
    from ..viz.notebook import token_prob_card as token_prob_card
    from ..viz.notebook import tree as tree
    from ..viz.text import draw as draw
    from ..viz.text import show as show

    open_loom, save_loom = file.load, file.save

# The name here, the module, and the name there.
DOORS = {
    "BACKENDS": ("compat.genlm", "BACKENDS"),  # `load_model_by_name`
    "load": ("loading", "load"),  # `LM.of`
    "agenerate": ("loom.generate", "agenerate"),  # `LM.agenerate`
    "generate": ("loom.generate", "generate"),  # `LM.generate`
    "NO_MODEL": ("service.store.file", "NO_MODEL"),  # `Loom(None, text)`
    "open_loom": ("service.store.file", "load"),
    "save_loom": ("service.store.file", "save"),
    "to_dot": ("viz.graph", "to_dot"),
    "to_mermaid": ("viz.graph", "to_mermaid"),
    "to_html": ("viz.html", "to_html"),
    "watch": ("viz.live", "watch"),  # `grow` in a notebook
    "branches_card": ("viz.notebook", "branches_card"),
    "distribution_card": ("viz.notebook", "distribution_card"),
    "plain": ("viz.notebook", "plain"),
    "stats_card": ("viz.notebook", "stats_card"),
    "text_score_card": ("viz.notebook", "text_score_card"),
    "token_prob_card": ("viz.notebook", "token_prob_card"),
    "tree": ("viz.notebook", "tree"),
    "draw": ("viz.text", "draw"),
    "show": ("viz.text", "show"),
}


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`.

    homes: the names that it has, by the module of the package they stand in; by "", modules
    themselves. Type checkers and editors do not see them: import them once more where only those
    look.
    """
    table = {name: (module, name) for module, names in homes.items() for name in names.split()}
    return _from_table(package, package, table)


def _from_table(
    module: str, package: str, table: Mapping[str, tuple[str, str]]
) -> Callable[[str], Any]:
    """Return a module's `__getattr__`; table: name here → module of the package, name there."""

    def get(name: str) -> Any:
        if name not in table:
            from .remedies import unknown_name  # for errors alone

            raise AttributeError(unknown_name(module, name))
        home, there = table[name]
        found = import_module(f".{home or there}", package)
        value = getattr(found, there) if home else found
        setattr(sys.modules[module], name, value)  # it is looked up once
        return value

    return get


__getattr__ = _from_table(__name__, "weft", DOORS)
