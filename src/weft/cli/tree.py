"""`weft tree`: the loom, with the numbers of its nodes."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from . import advice, objects, options
from .export import can_draw
from .failures import guarded
from .kept import Kept, opened
from .out import Out, counted
from .picture import Picture
from .report import below_root


@guarded
def tree(
    loom: options.OptionalLoom = None,
    named: options.Loom = None,
    top: Annotated[
        int, typer.Option("--top", help="Draw so many children of a node, best scores first.")
    ] = 0,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Draw a loom with the numbers of its nodes.

    They are the numbers that grow, read, next, rm and export take.
    """
    if loom is not None and named is not None and loom != named:
        raise ConfigError(f"two looms are named: {loom} and {named}; one is drawn")
    kept = opened(loom or named)
    if as_json:
        objects.write(as_object(kept))
        kept.try_note()
        return
    out = Out.of(sys.stdout)
    path = frozenset(each.id for each in kept.at.path[1:])
    out.lines(Picture(out, below_root(kept), path=path, top=max(top, 0)).lines(kept.loom))
    out.line()
    out.facts(facts_of(kept))
    kept.try_note()
    advise(kept)


def facts_of(kept: Kept) -> str:
    """Return what a loom holds, in one line."""
    nodes = list(kept.loom.walk())
    held = sum(len(node.tokens) for node in nodes)
    depth: dict[str, int] = {}
    unshared = 0
    for node in nodes:
        above = depth[node.parent.id] if node.parent is not None else 0
        depth[node.id] = above + len(node.tokens)
        if not node.children:
            unshared += depth[node.id]
    model = kept.shelf.summary(kept.name).model
    n_leaves = kept.loom.count_leaves()
    return (
        f"{kept.name} · {counted(len(nodes) - 1, 'node')}, {counted(n_leaves, 'path')} · "
        f"{counted(held, 'token')} ({unshared} unshared) · {model}"
    )


def as_object(kept: Kept) -> dict[str, Any]:
    """Return the loom for --json: its nodes in order, parents first."""
    numbers = kept.numbers()
    return {
        "loom": kept.name,
        "model": kept.shelf.summary(kept.name).model,
        "prompt": kept.loom.user_prompt,
        "chat_template_used": kept.loom.chat_template_used,
        "at": numbers[kept.at.id],
        "nodes": [objects.node_object(node, numbers) for node in kept.loom.walk()],
    }


def advise(kept: Kept) -> None:
    """Suggest what to do with the tree."""
    numbers = kept.numbers()
    leaves = kept.loom.leaves
    at = kept.at if kept.at is not kept.loom else leaves[0]
    begin = (at.parent or kept.loom) if at.terminal else at
    commands = [["weft", "grow", str(numbers[begin.id]), "-n", "4"]]
    if at is not kept.loom:
        commands.append(["weft", "read", str(numbers[at.id])])
    advice.suggest(
        *commands, ["weft", "export", f"{kept.name}.{'html' if can_draw('.html') else 'md'}"]
    )
