"""One growing call of the command, from the wish to the `next:` line."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ConfigError, Terminal
from . import advice, objects, report
from .failures import INTERRUPTED
from .heat import Tint
from .lanes import Printer, Silent
from .out import Out

if TYPE_CHECKING:
    from ..lm import LM
    from ..loom import Heddle
    from .kept import Kept


@dataclass(frozen=True, slots=True)
class Wish:
    """What to grow and how to show it.

    as_text: the texts alone. stays: keys follow, in the same process.
    """

    n: int
    sampling: dict[str, Any]
    tint: Tint | None = None
    keep: bool = True
    as_json: bool = False
    as_text: bool = False
    stays: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.stays and self.as_json:
            raise ConfigError("-i and --json exclude each other: keys need a screen")

    def with_settings_of(self, node: Heddle) -> Wish:
        """Return the wish with how the node was grown, for what was not asked for."""
        return replace(self, sampling={**settings_of(node), **self.sampling})


def settings_of(node: Heddle) -> dict[str, Any]:
    """Return how a node was grown, or the nearest before it, or what was grown from it."""
    near = [*reversed(node.path), *node.children]
    params = next((each.params for each in near if each.params is not None), None)
    if params is None:
        return {}
    # Another seed, or the same branches would come again.
    left_out = ("n", "seed", "constraint")
    return {name: value for name, value in params.keywords().items() if name not in left_out}


def grow_and_report(lm: LM, kept: Kept, node: Heddle, wish: Wish) -> None:
    """Grow, keep, show, suggest; with `stays`, go on by keys. Leaves with 130 on Ctrl-C."""
    out = Out.of(sys.stdout)
    made, done = grown(out, lm, kept, node, wish)
    is_kept = wish.keep and kept.try_save()
    if wish.as_json:
        objects.write(as_object(lm, kept, made, is_kept=is_kept))
    else:
        if wish.as_text:
            report.show_cost(Out.of(sys.stderr), lm, kept, is_kept=is_kept)
        else:
            report.show(out, lm, kept, made, wish.tint, is_kept=is_kept)
        if done:
            advice.warn_if_poor(str(kept.loom.meta.get("model", "")), made)
    if wish.stays:
        from .interactive import converse

        converse(out, lm, kept, wish)
    elif done and not wish.as_json:
        if is_kept:
            advice.after_growth(kept, made)
        else:
            advice.after_unkept(lm, kept.loom)
    if not done and not wish.stays:
        Out.of(sys.stderr).line("interrupted: the branches are as far as they came")
        raise typer.Exit(INTERRUPTED)


def grown(out: Out, lm: LM, kept: Kept, node: Heddle, wish: Wish) -> tuple[list[Heddle], bool]:
    """Grow at a node, watched; a node that has ended is told by its number."""
    shown = Silent() if wish.as_json else Printer(out, wish.n, first=None) if wish.as_text else None
    try:
        return report.grow(out, lm, kept, node, wish.n, wish.sampling, shown, force=wish.force)
    except Terminal:
        number, up = kept.number(node), kept.number(node.parent or node)
        raise Terminal(
            f"node {number} has ended: its last token is an end token",
            hint=f'weft grow {number} "…" says something to it, weft grow {up} -n {wish.n} grows '
            "others beside it, --force grows it anyway",
        ) from None


def as_object(lm: LM, kept: Kept, made: list[Heddle], *, is_kept: bool) -> dict[str, Any]:
    """Return the result for --json."""
    told = objects.grown_object(lm, kept.loom, made, kept.numbers() if is_kept else None)
    return {"loom": kept.name if is_kept else None, **told}
