"""`weft export`: a path, a subtree or the whole tree as a file; the suffix says how."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import files
from ..errors import ConfigError, EngineError, ModelMismatch, StoreError
from ..viz.out import Out, write_object
from ..viz.outline import counted
from ..viz.text import called, draw, folded
from . import advice, options
from .failures import guarded
from .kept import Kept, opened, with_model, written
from .options import Tint, complete_nodes

if TYPE_CHECKING:
    from ..loom import Heddle


class Scope(StrEnum):
    """How much to write."""

    PATH = "path"
    SUBTREE = "subtree"
    TREE = "tree"


# What a file of this kind is mostly wanted for.
DEFAULTS = {
    ".txt": Scope.PATH,
    ".md": Scope.PATH,
    ".json": Scope.TREE,
    ".dot": Scope.TREE,
    ".mmd": Scope.TREE,
    ".html": Scope.TREE,
}
_INDENT = 10  # levels of a list that are indented: deeper ones would run out of the page


@guarded
def export(
    path: Annotated[
        Path, typer.Argument(help=f"Where to write; one of {' '.join(DEFAULTS)}.", dir_okay=True)
    ],
    scope: Annotated[
        Scope | None,
        typer.Option(
            "--scope",
            help="path: prompt to node; subtree: that and all below; tree: the whole loom.",
            show_default="path for .txt and .md, else tree",
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            help="The path's end, or the subtree's top.",
            autocompletion=complete_nodes,
            show_default="the node last read or grown",
        ),
    ] = None,
    loom: options.Loom = None,
    color: options.Color = None,
    top: Annotated[
        int, typer.Option("--top", help="In .html, so many alternatives a token; asks the model.")
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Write over a file.")] = False,
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Write a path, a subtree or the whole tree to a file.

    The suffix says how: .txt .md .json .dot .mmd .html. It is of the loom drawn last in this
    terminal.
    """
    suffix = path.suffix.lower()
    if suffix not in DEFAULTS:
        raise ConfigError(f"{path.name} ends in none of {' '.join(DEFAULTS)}")
    chosen = scope or DEFAULTS[suffix]
    if node is not None and chosen is Scope.TREE:
        raise ConfigError("--node has no meaning for the whole tree", hint="add --scope subtree")
    if (top or color) and suffix != ".html":
        raise ConfigError(f"--top and --color are for .html, not {suffix}")
    refuse_place(path, force=force)
    with ExitStack() as stack:
        kept = opened_for(suffix, loom, stack)
        at = kept.node(node) if chosen is not Scope.TREE else kept.loom
        number = kept.number(at)
        order(kept)
        cut(at, chosen)
        if suffix == ".html":
            write_page(kept, at, chosen, path, tint=color or Tint.PROB, top=top)
        else:
            WRITERS[suffix](kept, at, chosen, path)
    if as_json:
        told = {"file": str(path), "loom": kept.name, "scope": chosen.value, "node": number}
        write_object(told)
    else:
        tell_written(kept, chosen, path, number)


def tell_written(kept: Kept, scope: Scope, path: Path, number: int) -> None:
    """Say what was written."""
    what = {
        Scope.PATH: f"the path to node {number}",
        Scope.SUBTREE: f"node {number}, the path to it and all below it",
        Scope.TREE: f"the whole tree, {counted(kept.loom.count_children() - 1, 'node')}",
    }[scope]
    Out.of(sys.stdout).line(f"wrote {path}: {what}")
    advice.suggest(["weft", "tree"], ["weft", "ls"])


def refuse_place(path: Path, *, force: bool) -> None:
    """Refuse a place that cannot be written, or that holds a file already."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}; make it first")
    if path.exists() and not force:
        raise StoreError(f"{path} is there already", hint="--force writes over it")


def opened_for(suffix: str, loom: str | None, stack: ExitStack) -> Kept:
    """Open the loom; for a page with its model, whose tokenizer tells the tokens apart."""
    if suffix == ".html":
        try:
            return stack.enter_context(with_model(loom, None, "auto", "auto"))[1]
        except (EngineError, ModelMismatch) as error:
            note = f"without its model the page shows no tokens apart: {error}"
            Out.of(sys.stderr).line((note, "yellow"))
    return opened(loom)


def order(kept: Kept) -> None:
    """Put children in the order of their numbers, as drawn. The loom in memory is changed."""
    numbers = kept.numbers()
    for node in list(kept.loom.walk()):
        # Sorting moves none to another node.
        node.children.sort(key=lambda child: numbers[child.id])


def cut(node: Heddle, scope: Scope) -> None:
    """Leave of an opened loom what is in the scope. The loom in memory is changed."""
    if scope is Scope.TREE:
        return
    path = node.path
    for above, below in zip(path, path[1:], strict=False):
        for child in list(above.children):
            if child is not below:
                child.remove()
    if scope is Scope.PATH:
        node.to_leaf()


def write_text(kept: Kept, node: Heddle, scope: Scope, path: Path) -> None:
    """Write the path's text as it is, or a drawing of the tree."""
    if scope is Scope.PATH:
        files.write(path, path_text(kept, node).rstrip("\n") + "\n")
        return
    files.write(path, "".join(f"{line}\n" for line in draw(kept.loom, node=called)))


def path_text(kept: Kept, node: Heddle) -> str:
    """Return prompt and path as one text; a chat's prompt stands apart."""
    loom = kept.loom
    if not loom.chat_template_used:
        return (loom.user_prompt or loom.text) + written(node.path[1:])
    return f"> {loom.user_prompt}\n\n{written(node.path[1:]).lstrip()}"


def write_markdown(kept: Kept, node: Heddle, scope: Scope, path: Path) -> None:
    """Write front matter with model and seeds, then the text, or the tree as a nested list."""
    made = [each.params.seed for each in kept.loom.walk() if each.params is not None]
    seeds = sorted({seed for seed in made if seed is not None})
    model = kept.shelf.summary(kept.name).model
    head = ["---", f"loom: {kept.name}", f"model: {Path(model).name if '/' in model else model}"]
    if seeds:
        head.append(f"seeds: [{', '.join(map(str, seeds))}]")
    lines = [*head, f"created: {kept.loom.created}", "---", ""]
    if scope is Scope.PATH:
        lines += [f"> {row}".rstrip() for row in (kept.loom.user_prompt or "").split("\n")]
        lines += ["", written(node.path[1:]).strip("\n")]
    else:
        lines += listed(kept.loom)
    files.write(path, "\n".join(lines).rstrip() + "\n")


def listed(root: Heddle) -> list[str]:
    """Return a tree as a nested list of Markdown; leaves with equal texts are one item, ×n."""
    lines: list[str] = []
    stack = [([root], 0)]
    while stack:
        equal, depth = stack.pop()
        indent = "  " * min(depth, _INDENT)
        rows = escaped(called(equal[0]).strip()).split("\n")
        rows[-1] += f" (×{len(equal)})" if len(equal) > 1 else ""
        lines += [f"{indent}- {rows[0]}", *(f"{indent}  {row}" for row in rows[1:])]
        below = folded(equal[0].children, called, None)
        stack += [(each, depth + 1) for each in reversed(below)]
    return lines


def escaped(text: str) -> str:
    """Return text that a list item of Markdown shows as it is."""
    rows = []
    for row in text.split("\n"):
        marked = "".join(f"\\{c}" if c in "\\`*_[]<>#|" else c for c in row)
        rows.append(f"\\{marked}" if marked[:1] in ("-", "+") else marked)
    return "\n".join(rows)


def write_json(kept: Kept, node: Heddle, scope: Scope, path: Path) -> None:
    """Write a loom that `Loom.open` and `weft tree FILE` read; a folder's place is left out."""
    model = kept.loom.meta.get("model")
    if isinstance(model, str) and Path(model).is_absolute():
        del kept.loom.meta["model"]
    kept.loom.save(path)


def write_picture(kept: Kept, node: Heddle, scope: Scope, path: Path) -> None:
    """Write a graph that other programs draw."""
    from ..viz import to_dot, to_mermaid

    draw = to_dot if path.suffix.lower() == ".dot" else to_mermaid
    files.write(path, draw(node if scope is Scope.SUBTREE else kept.loom))


def write_page(kept: Kept, node: Heddle, scope: Scope, path: Path, *, tint: Tint, top: int) -> None:
    """Write a page that needs nothing else, with the numbers that `weft tree` shows.

    The path to where the reader stands is marked.
    """
    from ..viz import to_html

    root = node if scope is Scope.SUBTREE else kept.loom
    named = {Tint.PROB: "probability", Tint.ENTROPY: "entropy"}[tint]
    files.write(path, to_html(root, tint=named, top=top, mark=kept.at, numbers=kept.numbers()))


Writer = Callable[[Kept, "Heddle", Scope, Path], None]
WRITERS: dict[str, Writer] = {
    ".txt": write_text,
    ".md": write_markdown,
    ".json": write_json,
    ".dot": write_picture,
    ".mmd": write_picture,
}
