"""`weft next`: the likeliest next tokens at a node."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len

from . import advice, objects, options
from .failures import guarded
from .kept import Kept, with_model
from .out import Out
from .picture import label_of

if TYPE_CHECKING:
    from ..lm import LM
    from ..loom import Heddle
    from ..results import Distribution

_BAR = 30


@guarded
def next_(
    node: options.OptionalNode = None,
    top: Annotated[int, typer.Option("--top", help="How many tokens.")] = 10,
    loom: options.Loom = None,
    model: options.OwnModel = None,
    engine: options.Engine = "auto",
    kv_budget: options.KvBudget = "auto",
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Show the likeliest next tokens at a node."""
    with with_model(loom, model, engine, kv_budget) as (lm, kept):
        at = kept.at = kept.node(node)
        found = at.next(top=top)
        if as_json:
            objects.write(as_object(lm, kept, at, found))
            kept.try_note()
            return
        out = Out.of(sys.stdout)
        show_next(out, kept, at, found)
        out.line()
        out.facts(str(lm.stats()))
        kept.try_note()
        number = str(kept.number(at))
        other = other_way(lm, kept, found)
        take = [["weft", "grow", number, *other, "-n", "4"]] if other else []
        advice.suggest(*take, ["weft", "read", number], ["weft", "tree"])


def other_way(lm: LM, kept: Kept, found: Distribution) -> list[str]:
    """Return how to take the second likeliest token, where it is one that can be typed."""
    if len(found) < 2 or found[1].p < 0.01 or lm.is_stop_token(found[1].id):
        return []
    text = found[1].text
    if not Out.of(sys.stderr).is_as_typed(text) or "\ufffd" in text:
        return []
    return ["--raw", text] if kept.loom.chat_template_used else [text]


def show_next(out: Out, kept: Kept, node: Heddle, found: Distribution) -> None:
    """Write the table with its bars."""
    number = kept.number(node)
    head = f"after node {number}: " if number else "after the prompt: "
    out.line((head, "bold"), out.fit(_end_of(node), out.width - len(head) - 1))
    out.line()
    texts = [shown_token(out, each.text) for each in found]
    width = min(max((cell_len(text) for text in texts), default=0), out.width - _BAR - 14)
    for entry, text in zip(found, texts, strict=True):
        text = text if cell_len(text) <= width else out.fit(text, width)
        pad = " " * (width - cell_len(text))
        bar = "█" * round(_BAR * entry.p)
        style = "green" if entry.p >= 0.5 else "yellow" if entry.p >= 0.1 else "dim"
        out.line(
            (f"{entry.rank + 1:>3}  ", "dim"),
            text + pad,
            f"  {percent(entry.p):>7}  ",
            (bar, style),
        )
    out.line()
    rest = max(1.0 - sum(entry.p for entry in found), 0.0)
    out.line((f"raw probabilities, before any filter; all others together {rest:.2%}", "dim"))


def percent(p: float) -> str:
    """Return a probability as people read it."""
    return f"{p:.2%}" if p >= 0.00005 else f"{p:.0e}"


def shown_token(out: Out, text: str) -> str:
    """Return a token's text in quotes, so that its spaces can be seen."""
    shown = repr(text) if text.isprintable() or "\ufffd" not in text else ascii(text)
    return out.shown(shown)


def as_object(lm: LM, kept: Kept, node: Heddle, found: Distribution) -> dict[str, Any]:
    """Return the distribution for --json."""
    return {
        "loom": kept.name,
        "node": kept.number(node),
        "id": node.id,
        "next": [
            {
                "rank": each.rank,
                "id": each.id,
                "text": each.text,
                "bytes": list(each.bytes),
                "p": each.p,
                "logprob": objects.finite(each.logprob),
            }
            for each in found
        ],
        "stats": objects.stats_object(lm),
    }


def _end_of(node: Heddle) -> str:
    text = " ".join(label_of(node).split())
    return text if len(text) <= 60 else f"…{text[-59:]}"
