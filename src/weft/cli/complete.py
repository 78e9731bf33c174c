"""What the shell offers on Tab: models, looms, nodes. Silent where there is nothing."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from ..errors import WeftError
from ..viz.escape import visible

_LABEL = 40


def models(incomplete: str) -> list[str]:
    """Return the models here that begin so; folders are the shell's own business."""
    from .screen import cached_models

    return [name for name in ("tiny", *cached_models()) if name.startswith(incomplete)]


def looms(incomplete: str) -> list[tuple[str, str]]:
    """Return the looms that begin so, with their prompts."""
    return [pair for pair in _looms() if pair[0].startswith(incomplete)]


def nodes(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the numbers of the loom's last tree that begin so, with the nodes' texts."""
    try:
        found = list(_nodes(context.params.get("loom")))
    except WeftError:
        return []
    return [pair for pair in found if pair[0].startswith(incomplete)]


def looms_and_nodes(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return both."""
    return looms(incomplete) + nodes(context, incomplete)


def _looms() -> Iterator[tuple[str, str]]:
    from .shelf import Shelf

    shelf = Shelf()
    try:
        names = shelf.names()
    except WeftError:
        return
    for name in filter(str.isprintable, names):
        try:
            yield name, _line(shelf.summary(name).prompt)
        except WeftError:
            yield name, "broken"


def _nodes(loom: str | None) -> Iterator[tuple[str, str]]:
    from .kept import Kept
    from .picture import label_of
    from .shelf import Shelf

    shelf = Shelf()
    kept = Kept.open(shelf, loom or shelf.own() or shelf.anybodys())
    here = {node.id: node for node in kept.loom.walk()}
    for number, node_id in enumerate(kept.numbering.ids):
        if node_id in here:
            yield str(number), _line(label_of(here[node_id]))


def _line(text: str) -> str:
    line = visible(" ".join(text.split()))
    return line if len(line) <= _LABEL else f"{line[: _LABEL - 1]}…"
